// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"testing"
	"time"

	"github.com/cilium/ebpf/ringbuf"
	"golang.org/x/sys/unix"

	"sockeye/internal/bpf/load"
	"sockeye/internal/steer/templates"
)

// randomMessage returns a message of random sets, some of them malformed.
func randomMessage(r *rand.Rand) []byte {
	b := binary.BigEndian.AppendUint16(nil, []uint16{9, 10, 5, 0}[r.IntN(4)])
	header := 16
	if b[1] == 9 {
		header = 20
	}
	b = append(b, make([]byte, header-2)...)
	for range r.IntN(40) {
		id, length := uint16(256+r.IntN(4)), uint16(4+4*r.IntN(20))
		if r.IntN(30) == 0 {
			id = uint16(r.IntN(5))
		}
		body := make([]byte, length-4)
		if r.IntN(40) == 0 {
			length = uint16(r.IntN(1 << 16))
		}
		b = binary.BigEndian.AppendUint16(b, id)
		b = binary.BigEndian.AppendUint16(b, length)
		b = append(b, body...)
	}
	return b[:len(b)-r.IntN(3)]
}

// TestFilterOfMember checks that a filter of a member's own stays, whatever its length: the kernel writes a short one to the buffer of a
// getsockopt(2) for an int.
func TestFilterOfMember(t *testing.T) {
	program, unload, err := LoadTemplateFilter()
	if err != nil {
		t.Fatal(err)
	}
	defer unload()
	path := &Steer{templates: program}
	socket, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer socket.Close()
	has := func(classic, extended bool) {
		t.Helper()
		control(t, socket.(*net.UDPConn), func(fd int) error {
			if c, e, err := ReadFilter(fd); c != classic || e != extended || err != nil {
				return fmt.Errorf("classic %v, extended %v, %w", c, e, err)
			}
			return nil
		})
	}
	for length := 1; length <= 6; length++ {
		own := make([]unix.SockFilter, length)
		for i := range own {
			own[i] = unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: ^uint32(0)}
		}
		control(t, socket.(*net.UDPConn), func(fd int) error {
			has(false, false)
			if err := path.AttachTemplateFilter(fd, false); err != nil {
				return err
			}
			has(false, true)
			if err := unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: uint16(length), Filter: &own[0]}); err != nil {
				return err
			}
			has(true, false)
			for _, known := range []bool{false, true} {
				if err := path.AttachTemplateFilter(fd, known); !errors.Is(err, ErrFiltered) {
					return fmt.Errorf("a filter of %d instructions: %w", length, err)
				}
			}
			if err := DetachFilter(fd); err != nil {
				return err
			}
			has(true, false)
			return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DETACH_FILTER, 0)
		})
	}
}

// TestTemplateFilter compares the socket filter with the reference, and checks what it copies.
func TestTemplateFilter(t *testing.T) {
	spec, err := loadSteerTemplates()
	if err != nil {
		t.Fatal(err)
	}
	collection, err := load.Collection(spec, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer collection.Close()
	program := collection.Programs["steer_copy_templates"]
	reader, err := ringbuf.NewReader(collection.Maps[pinTemplateSets])
	if err != nil {
		t.Fatal(err)
	}
	defer reader.Close()
	next := &TemplateReader{reader: reader}
	path := &Steer{templates: program, lostTemplates: collection.Maps[pinLostTemplates]}
	conns := make(map[bool]*net.UDPConn) // by whether it is IPv6
	receivers := make(map[bool]*net.UDPConn)
	for v6, address := range map[bool]string{false: "127.0.0.1:0", true: "[::1]:0"} {
		to, err := net.ListenPacket("udp", address)
		if err != nil {
			t.Fatal(err)
		}
		defer to.Close()
		from, err := net.Dial("udp", to.LocalAddr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer from.Close()
		receivers[v6], conns[v6] = to.(*net.UDPConn), from.(*net.UDPConn)
		control(t, receivers[v6], func(fd int) error { return path.AttachTemplateFilter(fd, false) })
		control(t, receivers[v6], func(fd int) error {
			if err := path.AttachTemplateFilter(fd, false); !errors.Is(err, ErrFiltered) {
				return fmt.Errorf("a second filter: %w", err)
			}
			return path.AttachTemplateFilter(fd, true)
		})
	}
	buffer := make([]byte, 1<<16)
	run := func(payload []byte, v6 bool, ttl int) {
		t.Helper()
		control(t, conns[v6], func(fd int) error {
			if v6 {
				return unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_UNICAST_HOPS, ttl)
			}
			return unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_TTL, ttl)
		})
		if _, err := conns[v6].Write(payload); err != nil {
			t.Fatal(err)
		}
		if err := receivers[v6].SetReadDeadline(time.Now().Add(10 * time.Second)); err != nil {
			t.Fatal(err)
		}
		if n, err := receivers[v6].Read(buffer); err != nil || !bytes.Equal(buffer[:n], payload) {
			t.Fatalf("%d bytes of %d pass: %v", n, len(payload), err)
		}
	}
	r := rand.New(rand.NewPCG(1, 2))
	copied := 0
	for range 3000 {
		message, v6 := randomMessage(r), r.IntN(2) == 0
		run(message, v6, 64)
		if !templates.HasTemplates(message) {
			continue
		}
		copied++
		if reader.AvailableBytes() == 0 {
			t.Fatalf("not copied: %x", message)
		}
		got, err := next.Next()
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got.Datagram, message) || got.Source != conns[v6].LocalAddr().(*net.UDPAddr).AddrPort() {
			t.Fatalf("copied from %v: %x, want %x", got.Source, got.Datagram, message)
		}
	}
	if copied < 200 {
		t.Errorf("only %d of the messages have templates", copied)
	}
	// A large datagram, the agent's own, and more than the ring can keep.
	large := append(binary.BigEndian.AppendUint16(nil, 10), make([]byte, 14)...)
	large = append(large, 0, 2, 0, 12, 1, 0, 0, 1, 0, 210, 0, 1)
	small := large
	large = append(large, make([]byte, 3000)...)
	run(large, false, 64)
	if got, err := next.Next(); err != nil || !bytes.Equal(got.Datagram, large) {
		t.Errorf("large datagram: %d bytes, %v", len(got.Datagram), err)
	}
	run(small, false, ReplayTTL)
	for range 600 {
		run(small, true, 64)
	}
	if lost, err := path.LostTemplates(); err != nil || lost == 0 || lost > 600 {
		t.Errorf("%d of 600 lost, %v", lost, err)
	}
	if got, err := next.Next(); err != nil || !got.Source.Addr().Is6() {
		t.Errorf("after a replayed datagram: %+v, %v", got, err)
	}
	reader.Close()
	if _, err := next.Next(); !errors.Is(err, os.ErrClosed) {
		t.Errorf("after close: %v", err)
	}
}

// control runs f with the descriptor of a connection.
func control(t *testing.T, c *net.UDPConn, f func(fd int) error) {
	t.Helper()
	raw, err := c.SyscallConn()
	if err == nil {
		err = errors.Join(raw.Control(func(fd uintptr) { err = f(int(fd)) }), err)
	}
	if err != nil {
		t.Fatal(err)
	}
}
