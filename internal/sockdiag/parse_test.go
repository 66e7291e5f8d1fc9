// SPDX-License-Identifier: Apache-2.0

package sockdiag

import (
	"bytes"
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/room"
)

// message returns a struct nlmsghdr followed by a body.
func message(kind, flags uint16, seq uint32, body []byte) []byte {
	b := binary.NativeEndian.AppendUint32(nil, uint32(unix.SizeofNlMsghdr+len(body)))
	b = binary.NativeEndian.AppendUint16(b, kind)
	b = binary.NativeEndian.AppendUint16(b, flags)
	b = binary.NativeEndian.AppendUint32(b, seq)
	b = binary.NativeEndian.AppendUint32(b, 0)
	b = append(b, body...)
	return append(b, make([]byte, -len(b)&3)...)
}

// about returns a reply for a socket with a port.
func about(family uint8, port uint16, attributes ...[]byte) []byte {
	b := make([]byte, sizeofMessage)
	b[0], b[1] = family, uint8(Established)
	binary.BigEndian.PutUint16(b[4:], port)
	for _, a := range attributes {
		b = append(b, a...)
	}
	return b
}

func attr(kind uint16, value []byte) []byte {
	b := binary.NativeEndian.AppendUint16(nil, uint16(unix.SizeofNlAttr+len(value)))
	b = binary.NativeEndian.AppendUint16(b, kind)
	b = append(b, value...)
	return append(b, make([]byte, -len(b)&3)...)
}

// TestForgedReplies sends sockets, and the end of the dump, from another netlink socket before the kernel's reply.
func TestForgedReplies(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	port := uint16(l.Addr().(*net.TCPAddr).Port)
	c, err := Open()
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	var ports []uint16
	dump := func() {
		t.Helper()
		if err := c.Dump(Query{States: AllStates}, func() { ports = nil }, func(s *Socket) { ports = append(ports, s.Local.Port()) }); err != nil {
			t.Fatal(err)
		}
	}
	dump() // binds the socket
	at, err := unix.Getsockname(c.fd)
	if err != nil {
		t.Fatal(err)
	}
	other, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_SOCK_DIAG)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(other)
	const forged = 7
	for _, m := range [][]byte{
		message(unix.SOCK_DIAG_BY_FAMILY, unix.NLM_F_MULTI, c.seq+1, about(unix.AF_INET, forged)), message(unix.NLMSG_DONE, unix.NLM_F_MULTI, c.seq+1, make([]byte, 4)),
	} {
		if err := unix.Sendto(other, m, 0, at); err != nil {
			t.Fatal(err)
		}
	}
	if dump(); !slices.Contains(ports, port) || slices.Contains(ports, forged) {
		t.Errorf("ports %v, want %d and not %d", ports, port, forged)
	}
}

// fakeKernel replies to each request with the next reply, and inserts the sequence number of the request.
func fakeKernel(t *testing.T, answers ...func(family uint8, seq uint32) []byte) *Conn {
	t.Helper()
	ends, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		b := make([]byte, 1000)
		for _, answer := range answers {
			if n, err := unix.Read(ends[1], b); err != nil || n != unix.SizeofNlMsghdr+sizeofRequest {
				return
			}
			if _, err := unix.Write(ends[1], answer(b[unix.SizeofNlMsghdr], binary.NativeEndian.Uint32(b[8:]))); err != nil {
				return
			}
		}
	}()
	c := &Conn{fd: ends[0], buffer: make([]byte, 64<<10), names: make(map[string]string)}
	t.Cleanup(func() {
		c.Close()
		<-done
		unix.Close(ends[1])
	})
	return c
}

// one returns a reply with a socket whose port is n.
func one(n, flags uint16) func(uint8, uint32) []byte {
	return func(family uint8, seq uint32) []byte {
		return append(message(unix.SOCK_DIAG_BY_FAMILY, flags, seq, about(family, n)), message(unix.NLMSG_DONE, flags, seq, make([]byte, 4))...)
	}
}

// TestInterrupted checks that an interrupted dump is repeated, without the results of the previous attempt, and that
// the number of attempts is limited.
func TestInterrupted(t *testing.T) {
	var ports []uint16
	begin := func() { ports = nil }
	visit := func(s *Socket) { ports = append(ports, s.Local.Port()) }
	stale := func(family uint8, seq uint32) []byte {
		return append(message(unix.SOCK_DIAG_BY_FAMILY, 0, seq-1, about(family, 99)), one(4, 0)(family, seq)...)
	}
	c := fakeKernel(t, one(1, 0), one(2, unix.NLM_F_DUMP_INTR), one(3, 0), stale)
	if err := c.Dump(Query{States: AllStates}, begin, visit); err != nil || len(ports) != 2 || ports[0] != 3 || ports[1] != 4 {
		t.Errorf("%v, ports %v", err, ports)
	}
	broken := one(1, unix.NLM_F_DUMP_INTR)
	c = fakeKernel(t, broken, broken, broken)
	if err := c.Dump(Query{}, begin, visit); !errors.Is(err, ErrInterrupted) {
		t.Error(err)
	}
	refuse := func(errno unix.Errno) func(uint8, uint32) []byte {
		return func(_ uint8, seq uint32) []byte {
			return message(unix.NLMSG_ERROR, 0, seq, binary.NativeEndian.AppendUint32(nil, uint32(-int32(errno))))
		}
	}
	if err := fakeKernel(t, refuse(unix.ENOENT)).Dump(Query{}, begin, visit); !errors.Is(err, ErrUnsupported) {
		t.Error(err)
	}
	if err := fakeKernel(t, refuse(unix.EACCES)).Dump(Query{}, begin, visit); !errors.Is(err, unix.EACCES) {
		t.Error(err)
	}
}

// TestAttributes checks shorter and longer attributes of other kernels.
func TestAttributes(t *testing.T) {
	c := &Conn{names: make(map[string]string)}
	var s Socket
	if err := c.parse(about(unix.AF_INET, 7, attr(attrInfo, make([]byte, 104)), attr(attrMemory, make([]byte, 24)), attr(attrCongestion, []byte("bbr\x00")), attr(attrCgroup, []byte{9, 0, 0, 0, 0, 0, 0, 0})), &s); err != nil {
		t.Fatal(err)
	}
	if !s.HasInfo || !s.HasMemory || s.Congestion != "bbr" || s.Cgroup != 9 && s.Cgroup != 9<<56 {
		t.Errorf("%+v", s)
	}
	long := make([]byte, 1000)
	long[0] = 1
	if err := c.parse(about(unix.AF_INET6, 7, attr(attrInfo, long), attr(500, nil), attr(attrMemory, make([]byte, 20))), &s); err != nil || !s.HasInfo || s.Info.State != 1 || s.HasMemory || s.Congestion != "" || s.Cgroup != 0 {
		t.Errorf("%v, %+v", err, s)
	}
	for _, bad := range [][]byte{nil, make([]byte, sizeofMessage-1), about(unix.AF_UNIX, 1), about(unix.AF_INET, 1, []byte{3, 0, 2, 0}), about(unix.AF_INET, 1, []byte{200, 0, 2, 0})} {
		if err := c.parse(bad, &s); err == nil {
			t.Errorf("%d bytes are accepted", len(bad))
		}
	}
}

// TestStorage checks that the value of a map is read from two nested attributes, and that malformed attributes count as
// no value.
func TestStorage(t *testing.T) {
	c := &Conn{names: make(map[string]string)}
	value := []byte{1, 2, 3, 4, 5, 6, 7, 8}
	of := func(value []byte) []byte {
		return attr(attrStorages|unix.NLA_F_NESTED, attr(storageOfMap|unix.NLA_F_NESTED, slices.Concat(attr(2, []byte{9, 0, 0, 0}), attr(4, nil), value)))
	}
	number := binary.NativeEndian.AppendUint32(nil, 7)
	var s Socket
	err := c.parse(about(unix.AF_INET, 7, attr(attrTOS, []byte{16}), attr(attrMark, number), attr(attrClassID, []byte{1, 2}), of(attr(storageValue, value))), &s)
	want := Options{TOS: Option{16, true}, Mark: Option{7, true}}
	if err != nil || !slices.Equal(s.Storage, value) || s.Options != want {
		t.Errorf("%v, %+v", err, s)
	}
	if err := c.parse(about(unix.AF_INET, 7, of([]byte{200, 0, 3, 0})), &s); err != nil || s.Storage != nil || s.Options != (Options{}) {
		t.Errorf("%v, %+v", err, s)
	}
}

// extensions is the offset of idiag_ext in a request.
const extensions = unix.SizeofNlMsghdr + 2

func TestDumpRequest(t *testing.T) {
	const usual = 1<<(attrInfo-1) | 1<<(attrCongestion-1) | 1<<(attrMemory-1)
	b := dumpRequest(1, unix.AF_INET, Query{})
	if len(b) != unix.SizeofNlMsghdr+sizeofRequest || binary.NativeEndian.Uint32(b) != uint32(len(b)) || b[extensions] != usual {
		t.Errorf("%x", b)
	}
	if b = dumpRequest(1, unix.AF_INET, Query{WithoutInfo: true}); b[extensions] != usual&^(1<<(attrInfo-1)) {
		t.Errorf("without TCP_INFO: %x", b)
	}
	b = dumpRequest(1, unix.AF_INET, Query{Options: true, Storage: 7})
	storage := attr(requestStorages, attr(requestStorageMap, binary.NativeEndian.AppendUint32(nil, 7)))
	if !bytes.HasSuffix(b, storage) || binary.NativeEndian.Uint32(b) != uint32(len(b)) || len(b) != unix.SizeofNlMsghdr+sizeofRequest+len(storage) ||
		b[extensions] != usual|1<<(attrTOS-1)|1<<(attrTrafficClass-1) {
		t.Errorf("%x", b)
	}
}

// TestExact checks that the request contains the interface for link-local addresses only.
func TestExact(t *testing.T) {
	const ifindex = unix.SizeofNlMsghdr + 44
	near, far := netip.MustParseAddrPort("[fe80::1]:1"), netip.MustParseAddrPort("[fd00::1]:2")
	if b := exact(1, near, near, 7); len(b) != unix.SizeofNlMsghdr+sizeofRequest || binary.NativeEndian.Uint32(b[ifindex:]) != 7 {
		t.Errorf("link-local: %x", b)
	}
	if b := exact(1, far, far, 7); len(b) != unix.SizeofNlMsghdr+sizeofRequest || binary.NativeEndian.Uint32(b[ifindex:]) != 0 {
		t.Errorf("global: %x", b)
	}
}

func FuzzMessages(f *testing.F) {
	f.Add(one(1, 0)(unix.AF_INET, 1))
	f.Add(message(unix.SOCK_DIAG_BY_FAMILY, 0, 1, about(unix.AF_INET6, 7, attr(attrInfo, make([]byte, 248)), attr(attrMemory, make([]byte, 36)),
		attr(attrCongestion, []byte("cubic\x00")), attr(attrCgroup, make([]byte, 8)), attr(attrStorages, attr(storageOfMap, attr(storageValue, make([]byte, 8)))))))
	f.Add([]byte{1, 0, 0, 0})
	f.Fuzz(func(t *testing.T, b []byte) {
		c := &Conn{seq: 1, names: make(map[string]string)}
		var s Socket
		visited := 0
		_, _, err := c.messages(b, &s, func(s *Socket) {
			visited++
			if !s.Local.Addr().IsValid() || !s.Remote.Addr().IsValid() {
				t.Fatalf("%+v", s)
			}
			v := s.Judge()
			if v.Share > 1 || v.By == "" && Sending.Has(s.State) && s.HasInfo {
				t.Fatalf("%+v of %+v", v, s)
			}
			if v := s.JudgeSince(Look{}, s.Look(time.Unix(1, 0))); v.Share > 1 {
				t.Fatalf("%+v of %+v", v, s)
			}
			if s.HasInfo {
				s.Advise(Settings{}, room.Kernel{}, s.Times(), nil)
			}
		})
		if visited*sizeofMessage > len(b) {
			t.Fatalf("%d sockets in %d bytes (%v)", visited, len(b), err)
		}
	})
}

// TestCodecAllocatesNothing checks that encoding and parsing do not allocate, because the gateway uses both in its
// event loop.
func TestCodecAllocatesNothing(t *testing.T) {
	request := Request{
		Type: unix.SOCK_DIAG_BY_FAMILY, Family: unix.AF_INET6, Protocol: unix.IPPROTO_UDP, Attributes: WithReceiveMemory,
		Source: netip.MustParseAddrPort("[fd00::1]:1"), Destination: netip.MustParseAddrPort("[fd00::2]:2"), Cookie: AnyCookie,
	}
	memory := make([]byte, 36)
	memory[4*unix.SK_MEMINFO_RMEM_ALLOC], memory[4*unix.SK_MEMINFO_RCVBUF] = 3, 7
	answer := message(unix.SOCK_DIAG_BY_FAMILY, 0, 1, about(unix.AF_INET6, 7, attr(attrMemory, memory)))
	var buffer [RequestSize]byte
	if n := testing.AllocsPerRun(100, func() {
		if b := request.Append(buffer[:0]); &b[0] != &buffer[0] || len(b) != RequestSize {
			t.Fatalf("%d bytes", len(b))
		}
		m, rest, err := NextMessage(answer)
		if allocated, limit, ok := m.ReceiveMemory(); err != nil || len(rest) > 0 || !ok || allocated != 3 || limit != 7 {
			t.Fatal(m, allocated, limit, ok, err)
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
