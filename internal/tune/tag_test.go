// SPDX-License-Identifier: Apache-2.0

package tune_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"sockeye/internal/bpf"
	"sockeye/internal/cgroup"
	"sockeye/internal/sockaddr"
	"sockeye/internal/testenv"
)

// TCP options; the last one is from RFC 6994.
const (
	kindSACKPermitted = 4
	kindTimestamps    = 8
	kindExperimental  = 254
)

// loopbacks has an address of each family.
var loopbacks = []netip.Addr{netip.AddrFrom4([4]byte{127, 0, 0, 1}), netip.IPv6Loopback()}

func domainOf(a netip.Addr) int {
	if a.Is4() {
		return unix.AF_INET
	}
	return unix.AF_INET6
}

// optioned is a segment with its TCP options.
type optioned struct {
	source, target uint16
	flags          uint8
	data           int // bytes
	options        []byte
}

// option returns the first option of a kind with its header, or nil.
func (s *optioned) option(kind byte) []byte {
	for rest := s.options; len(rest) > 0 && rest[0] != 0; {
		length := 1
		if rest[0] != 1 {
			length = int(rest[1])
		}
		if rest[0] == kind {
			return rest[:length]
		}
		rest = rest[length:]
	}
	return nil
}

// tag returns the tag in a segment, or nil.
func (s *optioned) tag() []byte {
	o := s.option(kindExperimental)
	if len(o) < 4 || binary.BigEndian.Uint16(o[2:]) != uint16(bpf.TuneTagExID) {
		return nil
	}
	return o[4:]
}

// seen returns the segments of connections to a port that were sent through lo since the last call. Segments that a
// socket has received are included.
func (w *wire) seen(port uint16) []*optioned {
	w.t.Helper()
	var all []*optioned
	packet := make([]byte, 1<<16+64)
	for {
		n, from, err := unix.Recvfrom(w.fd, packet, unix.MSG_DONTWAIT)
		if errors.Is(err, unix.EAGAIN) {
			return all
		}
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			w.t.Fatal(os.NewSyscallError("recvfrom", err))
		}
		// Each packet is captured a second time when it is received.
		if from.(*unix.SockaddrLinklayer).Pkttype != unix.PACKET_OUTGOING {
			continue
		}
		if s := parseOptions(packet[14:n]); s != nil && (s.source == port || s.target == port) {
			all = append(all, s)
		}
	}
}

func parseOptions(ip []byte) *optioned {
	header, protocol := 40, ip[6]
	if ip[0]>>4 == 4 {
		header, protocol = int(ip[0]&15)*4, ip[9]
	}
	if protocol != unix.IPPROTO_TCP {
		return nil
	}
	tcp := ip[header:]
	length := int(tcp[12]>>4) * 4
	return &optioned{
		source: binary.BigEndian.Uint16(tcp), target: binary.BigEndian.Uint16(tcp[2:]), flags: tcp[13],
		data: len(tcp) - length, options: bytes.Clone(tcp[20:length]),
	}
}

// tagsOf returns the tags of the wanted segments as text, "" for a segment without a tag.
func tagsOf(segments []*optioned, wanted func(s *optioned) bool) []string {
	var tags []string
	for _, s := range segments {
		if wanted(s) {
			tags = append(tags, string(s.tag()))
		}
	}
	return tags
}

func isSYN(s *optioned) bool    { return s.flags&(flagSYN|flagACK) == flagSYN }
func isSYNACK(s *optioned) bool { return s.flags&(flagSYN|flagACK) == flagSYN|flagACK }
func isAny(*optioned) bool      { return true }

// dataTo selects segments with data to a port, dataFrom those from a port.
func dataTo(port uint16) func(*optioned) bool {
	return func(s *optioned) bool { return s.data > 0 && s.target == port }
}

func dataFrom(port uint16) func(*optioned) bool {
	return func(s *optioned) bool { return s.data > 0 && s.source == port }
}

// expectTags checks the tags of the wanted segments.
func expectTags(t testing.TB, what string, segments []*optioned, wanted func(*optioned) bool, want ...string) {
	t.Helper()
	if got := tagsOf(segments, wanted); !slices.Equal(got, want) {
		t.Errorf("%s: tags %q, want %q", what, got, want)
	}
}

// ruleAt returns the name of the rule of a socket, "" for none.
func (k *tuning) ruleAt(fd int) string {
	k.t.Helper()
	connection, err := k.Connection(fd)
	if err != nil {
		k.t.Fatal(err)
	}
	if connection == nil {
		return ""
	}
	rules, err := k.Rules()
	if err != nil {
		k.t.Fatal(err)
	}
	rule := rules[connection.Rule]
	if rule == nil {
		k.t.Fatalf("rule %d is not known", connection.Rule)
	}
	return bpf.Text(rule.Name[:])
}

// expectRule checks the rule of a socket and the priority that it sets.
func (k *tuning) expectRule(what string, fd int, rule string, priority int) {
	k.t.Helper()
	if got := k.ruleAt(fd); got != rule {
		k.t.Errorf("%s: rule %q, want %q", what, got, rule)
	}
	if got := sockopt(k.t, fd, unix.SOL_SOCKET, unix.SO_PRIORITY); got != priority {
		k.t.Errorf("%s: priority %d, want %d", what, got, priority)
	}
}

// exchange sends bytes in both directions, so that the first bytes are acknowledged.
func exchange(t testing.TB, s ends, bytes int) {
	t.Helper()
	transfer(t, s.connected, s.accepted, bytes)
	transfer(t, s.accepted, s.connected, bytes)
}

// clientTags is a policy in which connections to a port carry a tag. Accepted connections with this tag get one rule,
// and those without a tag another. The rules set different priorities.
func clientTags(tag string, port uint16) string {
	return fmt.Sprintf(`tune:
  - {name: client, cgroup: CGROUP, match: {role: connect, port: %d}, tag: %q, set: {syn_rto: 20ms, priority: 1}}
  - {name: tagged, cgroup: CGROUP, match: {role: accept, tag: %[2]q}, set: {priority: 5}}
  - {name: other, cgroup: CGROUP, match: {role: accept}, set: {priority: 4}}
`, port, tag)
}

const longTag = "0123456789abcdef"

func TestTagInSYN(t *testing.T) {
	k := newTuning(t, "")
	// Without this, the first listener would not save its SYNs.
	k.install(clientTags("x", 1))
	for _, addr := range loopbacks {
		domain := domainOf(addr)
		listener, at := listenSocket(t, domain, addr)
		for length := 1; length <= len(longTag); length += tagStep {
			tag := longTag[:length]
			k.install(clientTags(tag, at.Port()))
			before := k.stats("tagged", 0).Tags
			w := watchWire(t, 0)
			s := connectSockets(t, listener, at)
			handshake := w.seen(at.Port())
			expectTags(t, "SYN", handshake, isSYN, tag)
			expectTags(t, "SYN-ACK", handshake, isSYNACK, "")
			for _, p := range handshake {
				if isSYN(p) && (p.option(kindTimestamps) == nil || p.option(kindSACKPermitted) == nil) {
					t.Errorf("the SYN has no timestamps or SACK permitted option: % x", p.options)
				}
			}
			k.expectRule("connected, tag "+tag, s.connected, "client", 1)
			k.expectRule("accepted, tag "+tag, s.accepted, "tagged", 5)
			if tags := k.stats("tagged", 0).Tags - before; tags != 1 {
				t.Errorf("read the tags of %d peers, want 1", tags)
			}
			exchange(t, s, 100)
			sent := w.seen(at.Port())
			expectTags(t, "first data", sent, dataTo(at.Port()), tag)
			expectTags(t, "answer", sent, dataFrom(at.Port()), "")
			exchange(t, s, 100)
			for _, p := range w.seen(at.Port()) {
				if p.tag() != nil {
					t.Errorf("after data was acknowledged: %+v still carries tag %q", p, p.tag())
				}
			}
		}
	}
	if failed := k.failed(); len(failed) > 0 {
		t.Error(failed)
	}
}

// TestTagBytes checks the bytes of the option.
func TestTagBytes(t *testing.T) {
	k := newTuning(t, "")
	listener, at := listenSocket(t, unix.AF_INET, loopbacks[0])
	k.install(strings.ReplaceAll(clientTags("TAG", at.Port()), `"TAG"`, "0x00ff10"))
	w := watchWire(t, 0)
	s := connectSockets(t, listener, at)
	for _, p := range w.seen(at.Port()) {
		if !isSYN(p) {
			continue
		}
		if want := []byte{254, 7, 0x53, 0x4b, 0x00, 0xff, 0x10, 1}; !bytes.HasSuffix(p.options, want) {
			t.Errorf("the SYN's options are % x, want them to end with % x", p.options, want)
		}
	}
	k.expectRule("accepted", s.accepted, "tagged", 5)
}

// TestTagOfOthers connects from peers that send no tag or another one.
func TestTagOfOthers(t *testing.T) {
	k := newTuning(t, "")
	k.install(clientTags("x", 1))
	for _, addr := range loopbacks {
		domain := domainOf(addr)
		_, first := listenSocket(t, domain, addr)
		listener, at := listenSocket(t, domain, addr)
		k.install(clientTags("rack-12", first.Port()))
		s := connectSockets(t, listener, at)
		k.expectRule("connected without a tag", s.connected, "", 0)
		k.expectRule("accepted without a tag", s.accepted, "other", 4)
		for _, tag := range []string{"rack-1", "rack-123", "Rack-12"} {
			k.install(fmt.Sprintf(`tune:
  - {name: client, cgroup: CGROUP, match: {role: connect}, tag: %q}
  - {name: tagged, cgroup: CGROUP, match: {role: accept, tag: rack-12}, set: {priority: 5}}
  - {name: other, cgroup: CGROUP, match: {role: accept}, set: {priority: 4}}
`, tag))
			s := connectSockets(t, listener, at)
			k.expectRule("accepted with tag "+tag, s.accepted, "other", 4)
			exchange(t, s, 10)
			k.expectRule("after data with tag "+tag, s.accepted, "other", 4)
		}
		// A rule without a tag comes first and matches the connection.
		k.install(`tune:
  - {name: client, cgroup: CGROUP, match: {role: connect}, tag: x}
  - {name: first, cgroup: CGROUP, match: {role: accept, remote: ["127.0.0.1", "::1"]}, set: {priority: 3}}
  - {name: tagged, cgroup: CGROUP, match: {role: accept, tag: x}, set: {priority: 5}}
`)
		k.expectRule("rule without a tag before", connectSockets(t, listener, at).accepted, "first", 3)
	}
}

const serverTags = `tune:
  - {name: tagged, cgroup: CGROUP, match: {role: connect, tag: srv}, set: {priority: 5}}
  - {name: client, cgroup: CGROUP, match: {role: connect}, set: {priority: 1, sndbuf: 100KB}}
  - {name: server, cgroup: CGROUP, match: {role: accept}, tag: srv, set: {priority: 4, synack_rto: 20ms}}
`

// TestTagInSYNACK lets the server send the tag, in its SYN-ACK only: the kernel waits as long for the answer to it as
// without a tag.
func TestTagInSYNACK(t *testing.T) {
	k := newTuning(t, strings.Replace(serverTags, ", synack_rto: 20ms", "", 1))
	w := watchWire(t, 0)
	for _, test := range []struct{ listen, connect string }{
		{"127.0.0.1", "127.0.0.1"}, {"::1", "::1"}, {"::", "127.0.0.1"}, {"::", "::1"},
	} {
		t.Log(test)
		addr := netip.MustParseAddr(test.connect)
		listener, at := listenSocket(t, domainOf(netip.MustParseAddr(test.listen)), netip.MustParseAddr(test.listen))
		s := connectSockets(t, listener, netip.AddrPortFrom(addr, at.Port()))
		handshake := w.seen(at.Port())
		expectTags(t, "SYN", handshake, isSYN, "")
		expectTags(t, "SYN-ACK", handshake, isSYNACK, "srv")
		k.expectRule("connected", s.connected, "tagged", 5)
		k.expectRule("accepted", s.accepted, "server", 4)
		// The options that the rule before it has set stay.
		if got := sockopt(t, s.connected, unix.SOL_SOCKET, unix.SO_SNDBUF); got != 200000 {
			t.Errorf("send buffer of %d bytes, want 200000", got)
		}
		// A single byte is data, too.
		transfer(t, s.accepted, s.connected, 1)
		transfer(t, s.connected, s.accepted, 1)
		sent := w.seen(at.Port())
		expectTags(t, "first data", sent, dataFrom(at.Port()), "srv")
		expectTags(t, "answer", sent, dataTo(at.Port()), "")
		transfer(t, s.accepted, s.connected, 1)
		expectTags(t, "later data", w.seen(at.Port()), dataFrom(at.Port()), "")
	}
	if c := k.stats("client", 0); c.Connections != 4 || c.Closed != 4 || c.Established != 0 {
		t.Errorf("rule whose connections moved to another rule: %d connections, %d established, %d closed, want 4, 0, 4", c.Connections, c.Established, c.Closed)
	}
	if c := k.stats("tagged", 0); c.Connections != 4 || c.Established != 4 || c.Closed != 0 || c.Tags != 4 {
		t.Errorf("rule of tags: %d connections, %d established, %d closed, %d tags, want 4, 4, 0, 4", c.Connections, c.Established, c.Closed, c.Tags)
	}
}

// TestTagBothWays uses a server that answers connections with a tag with a tag, and sends none to other peers.
func TestTagBothWays(t *testing.T) {
	k := newTuning(t, "")
	policy := `tune:
  - {name: answered, cgroup: CGROUP, match: {role: connect, tag: srv}, set: {priority: 5}}
  - {name: client, cgroup: CGROUP, match: {role: connect, port: PORT}, tag: cli, set: {priority: 1}}
  - {name: answering, cgroup: CGROUP, match: {role: accept, tag: cli}, tag: srv, set: {priority: 6}}
  - {name: other, cgroup: CGROUP, match: {role: accept}, set: {priority: 4}}
`
	k.install(strings.ReplaceAll(policy, "PORT", "1"))
	w := watchWire(t, 0)
	for i, addr := range loopbacks {
		domain := domainOf(addr)
		listener, at := listenSocket(t, domain, addr)
		quiet, atQuiet := listenSocket(t, domain, addr)
		k.install(strings.ReplaceAll(policy, "PORT", fmt.Sprint(at.Port())))
		s := connectSockets(t, listener, at)
		handshake := w.seen(at.Port())
		expectTags(t, "SYN", handshake, isSYN, "cli")
		expectTags(t, "SYN-ACK", handshake, isSYNACK, "srv")
		k.expectRule("connected", s.connected, "answered", 5)
		k.expectRule("accepted", s.accepted, "answering", 6)
		exchange(t, s, 100)
		sent := w.seen(at.Port())
		if tags := k.stats("answering", 0).Tags; tags != uint64(i+1) {
			t.Errorf("read the tags of %d peers, want %d", tags, i+1)
		}
		// The rule that took over writes no tag.
		expectTags(t, "data of the client", sent, dataTo(at.Port()), "")
		expectTags(t, "data of the server", sent, dataFrom(at.Port()), "srv")

		s = connectSockets(t, quiet, atQuiet)
		exchange(t, s, 100)
		for _, p := range w.seen(atQuiet.Port()) {
			if p.tag() != nil {
				t.Errorf("to a peer without a tag: %+v carries %q", p, p.tag())
			}
		}
		k.expectRule("connected to a port without tags", s.connected, "", 0)
		k.expectRule("accepted at a port without tags", s.accepted, "other", 4)
	}
}

// TestTagOfTrial expects tags on treated connections only.
func TestTagOfTrial(t *testing.T) {
	k := newTuning(t, `tune:
  - {name: client, cgroup: CGROUP, match: {role: connect}, tag: cli, trial: {control: 50%}}
  - {name: server, cgroup: CGROUP, match: {role: accept}, tag: srv, trial: {control: 50%}}
`)
	listener, at := listenSocket(t, unix.AF_INET, loopbacks[0])
	w := watchWire(t, 0)
	arms := make(map[uint8]int)
	want := func(fd int, tag string) string {
		c, err := k.Connection(fd)
		if err != nil || c == nil {
			t.Fatalf("got %v, %v", c, err)
		}
		arms[c.Arm]++
		if c.Arm != 0 {
			return ""
		}
		return tag
	}
	for range 30 {
		s := connectSockets(t, listener, at)
		client, server := want(s.connected, "cli"), want(s.accepted, "srv")
		exchange(t, s, 10)
		sent := w.seen(at.Port())
		expectTags(t, "SYN", sent, isSYN, client)
		expectTags(t, "SYN-ACK", sent, isSYNACK, server)
		expectTags(t, "data of the client", sent, dataTo(at.Port()), client)
		expectTags(t, "data of the server", sent, dataFrom(at.Port()), server)
	}
	if len(arms) != 2 {
		t.Errorf("arms %v, want connections in both", arms)
	}
}

// inCgroup runs f in another cgroup: a socket belongs to the cgroup in which it was created.
func inCgroup(t testing.TB, dir string, f func()) {
	t.Helper()
	move := func(dir string) {
		if err := cgroup.Move(dir, 0); err != nil {
			t.Fatal(err)
		}
	}
	move(dir)
	defer move(testenv.Cgroup())
	f()
}

// TestTagUnaware uses a peer without Sockeye's programs, in either role.
func TestTagUnaware(t *testing.T) {
	tuned := filepath.Join(testenv.Cgroup(), "tagging")
	if err := os.Mkdir(tuned, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.Remove(tuned); err != nil {
			t.Error(err)
		}
	})
	dir := filepath.Join(testenv.BPFFS(t), "tune_test")
	b, err := bpf.OpenTune(bpf.TuneConfig{Dir: dir, Cgroup: tuned})
	if err != nil {
		t.Fatalf("%+v", err)
	}
	t.Cleanup(func() {
		if err := errors.Join(bpf.RemoveTune(dir), b.Close()); err != nil {
			t.Error(err)
		}
	})
	k := &tuning{Tune: b, t: t}
	k.install(`tune:
  - {name: tagged, cgroup: CGROUP, match: {tag: x}, set: {priority: 5}}
  - {name: all, cgroup: CGROUP, tag: "` + longTag + `", set: {priority: 4}}
`)
	w := watchWire(t, 0)
	const much = 5 << 20
	for _, addr := range loopbacks {
		domain := domainOf(addr)
		for _, tunedRole := range []string{"connect", "accept"} {
			t.Log(addr, tunedRole)
			var listener int
			var at netip.AddrPort
			s := ends{connected: -1}
			make := func(f func(), role string) {
				if role == tunedRole {
					inCgroup(t, tuned, f)
				} else {
					f()
				}
			}
			make(func() { listener, at = listenSocket(t, domain, addr) }, "accept")
			make(func() { s = connectSockets(t, listener, at) }, "connect")
			handshake := w.seen(at.Port())
			if tunedRole == "connect" {
				expectTags(t, "SYN", handshake, isSYN, longTag)
				expectTags(t, "SYN-ACK", handshake, isSYNACK, "")
				k.expectRule("tuned", s.connected, "all", 4)
				k.expectRule("not tuned", s.accepted, "", 0)
			} else {
				expectTags(t, "SYN", handshake, isSYN, "")
				expectTags(t, "SYN-ACK", handshake, isSYNACK, longTag)
				k.expectRule("tuned", s.accepted, "all", 4)
				k.expectRule("not tuned", s.connected, "", 0)
			}
			exchange(t, s, much)
			// Every segment of the first flight carries the tag, and no later segment does.
			sent := w.seen(at.Port())
			tagged, wanted := s.connected, dataTo(at.Port())
			if tunedRole == "accept" {
				tagged, wanted = s.accepted, dataFrom(at.Port())
			}
			tags := tagsOf(sent, wanted)
			if tags[0] != longTag || tags[len(tags)-1] != "" {
				t.Errorf("first and last of %d segments with data: tags %q and %q", len(tags), tags[0], tags[len(tags)-1])
			}
			if info := tcpInfo(t, tagged); info.Options&3 != 3 { // timestamps and SACK
				t.Errorf("options %#x", info.Options)
			}
		}
	}
}

// tagOption is the length of the option with a tag of 16 bytes.
const tagOption = 4 + len(longTag)

// noOptions replaces an option of this length with padding.
var noOptions = bytes.Repeat([]byte{1}, tagOption)

// filterPath applies a middlebox on lo to IPv4 segments that carry a tag and have the given flags under mask. The
// segments have timestamps, and SYNs have the other options of Linux; the tag comes after these. The middlebox drops
// the segment, or replaces a tag of 16 bytes with padding if the segment has no data.
func filterPath(t testing.TB, mask, flags uint8, options []byte) {
	t.Helper()
	const (
		tcp  = 14 + 20
		most = tcp + 20 + 12 // offset of what follows the timestamps
		syn  = most + 8      // ... and MSS and window scale
		pass = -1            // TC_ACT_UNSPEC
		drop = 2             // TC_ACT_SHOT

		length = int32(tagOption)
	)
	load := func(offset asm.Instruction, to int32) asm.Instructions {
		return asm.Instructions{
			asm.Mov.Reg(asm.R1, asm.R6),
			offset,
			asm.Mov.Reg(asm.R3, asm.RFP),
			asm.Add.Imm(asm.R3, to),
			asm.Mov.Imm(asm.R4, 1),
			asm.FnSkbLoadBytes.Call(),
			asm.JNE.Imm(asm.R0, 0, "pass"),
		}
	}
	insns := slices.Concat(
		asm.Instructions{asm.Mov.Reg(asm.R6, asm.R1)},
		load(asm.Mov.Imm(asm.R2, tcp+13), -8),
		asm.Instructions{
			asm.LoadMem(asm.R7, asm.RFP, -8, asm.Byte),
			asm.Mov.Imm(asm.R8, most),
			asm.Mov.Reg(asm.R1, asm.R7),
			asm.And.Imm(asm.R1, flagSYN),
			asm.JEq.Imm(asm.R1, 0, "option"),
			asm.Mov.Imm(asm.R8, syn),
			asm.Mov.Reg(asm.R1, asm.R6).WithSymbol("option"),
		},
		load(asm.Mov.Reg(asm.R2, asm.R8), -16),
		asm.Instructions{
			asm.LoadMem(asm.R1, asm.RFP, -16, asm.Byte),
			asm.JNE.Imm(asm.R1, kindExperimental, "pass"),
			asm.And.Imm(asm.R7, int32(mask)),
			asm.JNE.Imm(asm.R7, int32(flags), "pass"),
		},
	)
	if options != nil {
		insns = append(insns,
			asm.LoadMem(asm.R1, asm.R6, 0, asm.Word), // len
			asm.Add.Imm(asm.R8, length),
			asm.JNE.Reg(asm.R1, asm.R8, "pass"),
		)
		for i := range int16(length) {
			insns = append(insns, asm.StoreImm(asm.RFP, i-40, int64(options[i]), asm.Byte))
		}
		insns = append(insns,
			asm.Mov.Reg(asm.R1, asm.R6),
			asm.Mov.Reg(asm.R2, asm.R8),
			asm.Sub.Imm(asm.R2, length),
			asm.Mov.Reg(asm.R3, asm.RFP),
			asm.Add.Imm(asm.R3, -40),
			asm.Mov.Imm(asm.R4, length),
			asm.Mov.Imm(asm.R5, 0), // lo's checksums are not looked at
			asm.FnSkbStoreBytes.Call(),
		)
	} else {
		insns = append(insns, asm.Mov.Imm(asm.R0, drop), asm.Return())
	}
	insns = append(insns, asm.Mov.Imm(asm.R0, pass).WithSymbol("pass"), asm.Return())
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Name: "path", Type: ebpf.SchedCLS, Instructions: insns, License: "GPL"})
	if err != nil {
		t.Fatalf("%+v", err)
	}
	defer p.Close()
	lo, err := netlink.LinkByName("lo")
	check(t, err)
	qdisc := &netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{
		LinkIndex: lo.Attrs().Index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT,
	}}
	if err := netlink.QdiscAdd(qdisc); err == nil {
		// This removes its filters, too.
		t.Cleanup(func() { check(t, netlink.QdiscDel(qdisc)) })
	} else if !errors.Is(err, unix.EEXIST) {
		t.Fatal(err)
	}
	before, err := netlink.FilterList(lo, netlink.HANDLE_MIN_INGRESS)
	check(t, err)
	check(t, netlink.FilterAdd(&netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{
			LinkIndex: lo.Attrs().Index, Parent: netlink.HANDLE_MIN_INGRESS, Protocol: unix.ETH_P_ALL, Priority: uint16(1 + len(before)),
		},
		Fd: p.FD(), Name: "path", DirectAction: true,
	}))
}

// TestTagSYNDropped drops SYNs with a tag: the next SYN has no tag, and the tag is sent with the following segments.
func TestTagSYNDropped(t *testing.T) {
	for _, observe := range []string{"live", "off"} {
		t.Run("observe "+observe, func(t *testing.T) {
			k := newTuning(t, "")
			k.install(clientTags("x", 1))
			listener, at := listenSocket(t, unix.AF_INET, loopbacks[0])
			k.install(strings.ReplaceAll(clientTags(longTag, at.Port()), "name: client,", "name: client, observe: "+observe+","))
			filterPath(t, flagSYN|flagACK, flagSYN, nil)
			w := watchWire(t, 0)
			s := connectSockets(t, listener, at)
			expectTags(t, "SYNs", w.seen(at.Port()), isSYN, longTag, "")
			k.expectRule("accepted", s.accepted, "tagged", 5)
			exchange(t, s, 100)
			expectTags(t, "first data", w.seen(at.Port()), dataTo(at.Port()), longTag)
			exchange(t, s, 1<<20)
		})
	}
}

// TestTagInFirstData drops SYNs with a tag and removes the tag from the first acknowledgement: the first data carries
// it.
func TestTagInFirstData(t *testing.T) {
	k := newTuning(t, "")
	k.install(clientTags("x", 1))
	listener, at := listenSocket(t, unix.AF_INET, loopbacks[0])
	k.install(clientTags(longTag, at.Port()))
	filterPath(t, flagSYN|flagACK, flagSYN, nil)
	filterPath(t, flagSYN|flagACK, flagACK, noOptions)
	s := connectSockets(t, listener, at)
	k.expectRule("accepted", s.accepted, "other", 4)
	transfer(t, s.connected, s.accepted, 100)
	k.expectRule("after the first data", s.accepted, "tagged", 5)
	exchange(t, s, 1<<20)
	if tagged, other := k.stats("tagged", 0), k.stats("other", 0); tagged.Connections != 1 || tagged.Tags != 1 || other.Connections != 1 || other.Closed != 1 {
		t.Errorf("tagged: %d connections, %d tags, want 1, 1; other: %d connections, %d closed, want 1, 1", tagged.Connections, tagged.Tags, other.Connections, other.Closed)
	}
}

// TestTagMalformed sends SYNs with options that are almost a tag: the connection has no tag until its data carries
// one. Linux 6.18 ignores SYNs whose option lengths are inconsistent.
func TestTagMalformed(t *testing.T) {
	k := newTuning(t, "")
	k.install(clientTags("x", 1))
	for name, options := range map[string]string{
		"short":            "\xfe\x02",
		"half a magic":     "\xfe\x03\x53",
		"empty":            "\xfe\x04\x53\x4b",
		"other magic":      "\xfe\x14\x53\x4c" + longTag,
		"swapped magic":    "\xfe\x14\x4b\x53" + longTag,
		"other experiment": "\xfd\x14\x53\x4b" + longTag,
		"after the end":    "\x00\xfe\x14\x53\x4b" + longTag,
	} {
		t.Run(name, func(t *testing.T) {
			k := &tuning{Tune: k.Tune, t: t}
			listener, at := listenSocket(t, unix.AF_INET, loopbacks[0])
			k.install(clientTags(longTag, at.Port()))
			filterPath(t, flagSYN|flagACK, flagSYN, append([]byte(options), noOptions...)[:tagOption])
			filterPath(t, flagSYN|flagACK, flagACK, noOptions)
			s := connectSockets(t, listener, at)
			if saved := savedSYN(t, s.accepted); !bytes.Contains(saved, []byte(options[:2])) {
				t.Errorf("received SYN: % x", saved)
			}
			k.expectRule("accepted", s.accepted, "other", 4)
			exchange(t, s, 100)
			k.expectRule("after the first data", s.accepted, "tagged", 5)
			exchange(t, s, 1<<20)
		})
	}
}

// TestTagDropped drops every segment with a tag: connections still work, whichever side sends first.
func TestTagDropped(t *testing.T) {
	k := newTuning(t, "")
	for name, policy := range map[string]string{
		"client": strings.ReplaceAll(clientTags(longTag, 0), ", port: 0", ""),
		"server": strings.ReplaceAll(serverTags, "srv", longTag),
		"both":   "tune: [{name: all, cgroup: CGROUP, tag: " + longTag + ", set: {syn_rto: 20ms, synack_rto: 20ms}}]",
	} {
		k.install(policy)
		for _, first := range []string{"client", "server"} {
			t.Run(name+" tags, "+first+" first", func(t *testing.T) {
				filterPath(t, 0, 0, nil)
				w := watchWire(t, 0)
				listener, at := listenSocket(t, unix.AF_INET, loopbacks[0])
				s := ends{connected: testenv.TCPSocket(t, unix.AF_INET)}
				if _, err := retry(func() (int, error) { return 0, unix.Connect(s.connected, sockaddr.Of(at)) }); err != nil {
					t.Fatal(os.NewSyscallError("connect", err))
				}
				if !slices.Contains(tagsOf(w.seen(at.Port()), isAny), longTag) {
					t.Error("nothing carried a tag")
				}
				if first == "client" {
					if err := send(s.connected, []byte{1}); err != nil {
						t.Fatal(err)
					}
				}
				s.accepted = acceptSocket(t, listener)
				if first == "client" {
					if err := receive(s.accepted, make([]byte, 1)); err != nil {
						t.Fatal(err)
					}
				}
				transfer(t, s.accepted, s.connected, 1<<20)
				transfer(t, s.connected, s.accepted, 1<<20)
			})
		}
	}
}

// TestTagSYNACKDropped drops SYN-ACKs with a tag: the next SYN-ACK has none, and the first data carries the tag to
// the client.
func TestTagSYNACKDropped(t *testing.T) {
	k := newTuning(t, strings.ReplaceAll(serverTags, "srv", longTag))
	listener, at := listenSocket(t, unix.AF_INET, loopbacks[0])
	filterPath(t, flagSYN|flagACK, flagSYN|flagACK, nil)
	w := watchWire(t, 0)
	s := connectSockets(t, listener, at)
	expectTags(t, "SYN-ACKs", w.seen(at.Port()), isSYNACK, longTag, "")
	k.expectRule("connected", s.connected, "client", 1)
	k.expectRule("accepted", s.accepted, "server", 4)
	exchange(t, s, 100)
	expectTags(t, "first data", w.seen(at.Port()), dataFrom(at.Port()), longTag)
	k.expectRule("after the first data", s.connected, "tagged", 5)
	exchange(t, s, 1<<20)
}

// TestTagOfOldListener uses a listener that was opened before the rules.
func TestTagOfOldListener(t *testing.T) {
	for _, addr := range loopbacks {
		t.Run(addr.String(), func(t *testing.T) {
			k := newTuning(t, "")
			listener, at := listenSocket(t, domainOf(addr), addr)
			k.install(fmt.Sprintf(`tune:
  - {name: client, cgroup: CGROUP, match: {role: connect}, tag: %s}
  - {name: tagged, cgroup: CGROUP, match: {role: accept, tag: %[1]s}, tag: yes, set: {priority: 5}}
  - {name: other, cgroup: CGROUP, match: {role: accept}, tag: no, set: {priority: 4}}
`, longTag))
			w := watchWire(t, 0)
			s := connectSockets(t, listener, at)
			expectTags(t, "SYN-ACK of the old listener", w.seen(at.Port()), isSYNACK, "")
			// The client's first acknowledgement carries its tag, too.
			k.expectRule("accepted by the old listener", s.accepted, "tagged", 5)
			if saved := savedSYN(t, s.accepted); len(saved) > 0 {
				t.Errorf("a SYN was kept: % x", saved)
			}

			live, err := k.Live()
			checkLive(t, err)
			prepared := live.Listen(listener)
			check(t, live.Close())
			if errors.Is(prepared, ebpf.ErrNotSupported) {
				if !strings.HasPrefix(prepared.Error(), "write tags into SYN-ACKs of an open listener: not supported before Linux 6.12: ") {
					t.Errorf("error text %q", prepared)
				}
				lacking(t, "6.12", prepared)
			}
			check(t, prepared)
			s = connectSockets(t, listener, at)
			expectTags(t, "SYN-ACK of the prepared listener", w.seen(at.Port()), isSYNACK, "yes")
			k.expectRule("accepted by the prepared listener", s.accepted, "tagged", 5)
			if saved := savedSYN(t, s.accepted); !bytes.Contains(saved, []byte(longTag)) {
				t.Errorf("the saved SYN has no tag: % x", saved)
			}
			exchange(t, s, 100)
			expectTags(t, "first data", w.seen(at.Port()), dataFrom(at.Port()), "yes")

			if addr.Is4() {
				// Now the listener saves SYNs.
				filterPath(t, flagSYN|flagACK, flagACK, noOptions)
				k.expectRule("accepted without a tag in the acknowledgement", connectSockets(t, listener, at).accepted, "tagged", 5)
			}
		})
	}
}

// savedSYN returns the SYN that the kernel saved for an accepted connection.
func savedSYN(t testing.TB, fd int) []byte {
	t.Helper()
	saved := make([]byte, 512)
	length := uint32(len(saved))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), unix.SOL_TCP, unix.TCP_SAVED_SYN,
		uintptr(unsafe.Pointer(&saved[0])), uintptr(unsafe.Pointer(&length)), 0)
	if errno != 0 {
		t.Fatal(os.NewSyscallError("getsockopt", errno))
	}
	return saved[:length]
}

// TestTagWithCookies uses SYN cookies: the kernel keeps no request that could save the SYN.
func TestTagWithCookies(t *testing.T) {
	sysctl(t, "net/ipv4/tcp_syncookies", "2")
	k := newTuning(t, `tune:
  - {name: answered, cgroup: CGROUP, match: {role: connect, tag: srv}, tag: cli, set: {priority: 5}}
  - {name: client, cgroup: CGROUP, match: {role: connect}, tag: cli, set: {priority: 1}}
  - {name: tagged, cgroup: CGROUP, match: {role: accept, tag: cli}, tag: srv, set: {priority: 6}}
  - {name: other, cgroup: CGROUP, match: {role: accept}, set: {priority: 4, initial_rwnd: 20}}
`)
	w := watchWire(t, 0)
	for _, addr := range loopbacks {
		listener, at := listenSocket(t, domainOf(addr), addr)
		before := netstat(t, "SyncookiesRecv")
		s := connectSockets(t, listener, at)
		if got := netstat(t, "SyncookiesRecv") - before; got != 1 {
			t.Fatalf("%d connections by cookies, want 1", got)
		}
		handshake := w.seen(at.Port())
		expectTags(t, "SYN", handshake, isSYN, "cli")
		expectTags(t, "SYN-ACK", handshake, isSYNACK, "srv")
		k.expectRule("connected", s.connected, "answered", 5)
		k.expectRule("accepted", s.accepted, "tagged", 6)
		exchange(t, s, 1<<20)
	}
}

// netstat reads a counter of TcpExt.
func netstat(t testing.TB, name string) int {
	t.Helper()
	text, err := os.ReadFile("/proc/self/net/netstat")
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for line := range strings.Lines(string(text)) {
		values, ok := strings.CutPrefix(line, "TcpExt: ")
		if !ok {
			continue
		}
		if names == nil {
			names = strings.Fields(values)
			continue
		}
		var n int
		if _, err := fmt.Sscan(strings.Fields(values)[slices.Index(names, name)], &n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	t.Fatalf("no counter %s", name)
	return 0
}
