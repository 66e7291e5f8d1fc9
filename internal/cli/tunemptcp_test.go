// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"sockeye/internal/api"
	"sockeye/internal/fault"
	"sockeye/internal/match"
	"sockeye/internal/netns"
)

// listenAs opens a listener of MPTCP or of TCP.
func listenAs(t testing.TB, multipath bool, address string) net.Listener {
	t.Helper()
	var c net.ListenConfig
	c.SetMultipathTCP(multipath)
	l, err := c.Listen(t.Context(), "tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

// connectTo connects to a listener by MPTCP or TCP.
func connectTo(t testing.TB, multipath bool, l net.Listener) (connected, accepted *net.TCPConn) {
	t.Helper()
	var d net.Dialer
	d.SetMultipathTCP(multipath)
	c, err := d.DialContext(t.Context(), "tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	a, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { a.Close() })
	return c.(*net.TCPConn), a.(*net.TCPConn)
}

// connectMultipath opens an MPTCP connection and sends one byte in each direction: the kernel joins no subflow before
// that.
func connectMultipath(t testing.TB, l net.Listener) (connected, accepted *net.TCPConn) {
	t.Helper()
	c, a := connectTo(t, true, l)
	for _, ends := range [][2]net.Conn{{c, a}, {a, c}} {
		if _, err := ends[0].Write([]byte("x")); err != nil {
			t.Fatal(err)
		}
		if _, err := ends[1].Read(make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
	}
	return c, a
}

// needMultipath skips a test if the kernel has no MPTCP or MPTCP is disabled.
func needMultipath(t testing.TB) {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, unix.IPPROTO_MPTCP)
	if err != nil {
		t.Skipf("kernel: no MPTCP: %v", err)
	}
	unix.Close(fd)
}

// nameOf returns the --socket argument for a connection of this process.
func nameOf(t testing.TB, c *net.TCPConn) string {
	t.Helper()
	raw, err := c.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	name := ""
	if err := raw.Control(func(fd uintptr) { name = fmt.Sprintf("%d:%d", os.Getpid(), fd) }); err != nil {
		t.Fatal(err)
	}
	return name
}

// pathManager sends a command of enum mptcp_pm_cmd (include/uapi/linux/mptcp_pm.h, Linux 6.18) to the kernel's path
// manager in this network namespace.
func pathManager(t testing.TB, command uint8, attributes ...*nl.RtAttr) {
	t.Helper()
	family, err := netlink.GenlFamilyGet("mptcp_pm")
	if err != nil {
		t.Fatal(err)
	}
	r := nl.NewNetlinkRequest(int(family.ID), unix.NLM_F_ACK)
	r.AddData(&nl.Genlmsg{Command: command, Version: 1})
	for _, a := range attributes {
		r.AddData(a)
	}
	if _, err := r.Execute(unix.NETLINK_GENERIC, 0); err != nil {
		t.Fatalf("path manager: command %d: %v", command, err)
	}
}

// joinFrom adds an endpoint from which MPTCP connections of this network namespace are joined.
func joinFrom(t testing.TB, address string) {
	t.Helper()
	const (
		addAddress, flushAddresses, setLimits = 1, 4, 5
		attrAddress, attrSubflows             = 1, 3
		ofFamily, ofIPv4, ofFlags             = 1, 3, 6
		flagSubflow                           = 1 << 1
	)
	number := func(n uint32) []byte { return binary.NativeEndian.AppendUint32(nil, n) }
	pathManager(t, setLimits, nl.NewRtAttr(attrSubflows, number(2)))
	of := nl.NewRtAttr(attrAddress|unix.NLA_F_NESTED, nil)
	of.AddRtAttr(ofFamily, binary.NativeEndian.AppendUint16(nil, unix.AF_INET))
	of.AddRtAttr(ofIPv4, netip.MustParseAddr(address).AsSlice())
	of.AddRtAttr(ofFlags, number(flagSubflow))
	pathManager(t, addAddress, of)
	t.Cleanup(func() { pathManager(t, flushAddresses) })
}

// multipathRules set rcvlowat only where the kernel refuses it: elsewhere the subflow would hold back the data that
// these tests wait for.
const multipathRules = `tune:
  - {name: made, cgroup: CGROUP, match: {role: connect}, set: {sndbuf: 150KB, rcvbuf: 100KB, rcvlowat: 100, congestion: reno, pacing_rate: 2Gbit/s,
      mark: 7, priority: 3, tos: 0x10, initial_cwnd: 40, user_timeout: 5s}}
  - {name: taken, cgroup: CGROUP, match: {role: accept}, set: {sndbuf: 200KB}}
`

// connectElsewhere opens an MPTCP connection to port 1 in a network namespace of its own.
func connectElsewhere(t testing.TB) (fd int) {
	t.Helper()
	at := &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}, Port: 1}
	listener := -1
	err := netns.Thread(func() (err error) {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return err
		}
		lo, err := netlink.LinkByName("lo")
		if err == nil {
			err = netlink.LinkSetUp(lo)
		}
		if err == nil {
			listener, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, unix.IPPROTO_MPTCP)
		}
		if err == nil {
			fd, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, unix.IPPROTO_MPTCP)
		}
		if err == nil {
			err = errors.Join(unix.Bind(listener, at), unix.Listen(listener, 1))
		}
		if err == nil {
			err = unix.Connect(fd, at)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		unix.Close(listener)
		unix.Close(fd)
	})
	return fd
}

// setMark sets SO_MARK, as an application does.
func setMark(t testing.TB, c *net.TCPConn, mark int) {
	t.Helper()
	raw, err := c.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	if err := raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MARK, mark) }); err != nil {
		t.Fatal(err)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// valueOf returns the value of an option of a connection.
func valueOf(t testing.TB, of api.Tuned, option string) api.TuneValue {
	t.Helper()
	i := slices.IndexFunc(of.Values, func(v api.TuneValue) bool { return v.Option == option })
	if i < 0 {
		t.Fatalf("no value of %s in %+v", option, of)
	}
	return of.Values[i]
}

// TestTuneExplainMPTCP explains connections whose subflows are tuned, with an agent in the sandbox of the unit.
func TestTuneExplainMPTCP(t *testing.T) {
	needMultipath(t)
	h := newHost(t, multipathRules)
	// With Pdeathsig, the kernel would kill the agent when the thread of this function exits.
	elsewhere := connectElsewhere(t)
	h.sandbox = h.harden()
	h.start()
	explain := func(name string) api.TuneSocket {
		t.Helper()
		return must[api.TuneSocket](h, "tune", "explain", "--socket", name)
	}
	sees := func(v api.TuneValue, effective, source string, differs bool, note string) {
		t.Helper()
		if v.Effective != effective || v.Source != source || v.Differs != differs || !strings.Contains(v.Note, note) || note == "" && v.Note != "" {
			t.Errorf("%+v, want %q from %q, differs %v, note %q", v, effective, source, differs, note)
		}
	}
	const unread = "it cannot be read of a subflow"

	connected, accepted := connectMultipath(t, listenAs(t, true, "127.0.0.1:0"))
	s := explain(nameOf(t, connected))
	local, remote := connected.LocalAddr().String(), connected.RemoteAddr().String()
	if s.MPTCP != api.MPTCPMultipath || s.Local != local || s.Rule != "" || len(s.Subflows) != 1 {
		t.Fatalf("%+v", s)
	}
	f := s.Subflows[0]
	if f.Local != local || f.Remote != remote || f.Role != "connect" || f.Rule != "made" || !f.Current || f.Arm != "treated" || len(f.Steps) != 1 {
		t.Errorf("%+v", f)
	}
	sees(valueOf(t, f.Tuned, "sndbuf"), "300KB", "SK_MEMINFO_SNDBUF", false, "doubles")
	sees(valueOf(t, f.Tuned, "congestion"), "reno", "INET_DIAG_CONG", false, "")
	sees(valueOf(t, f.Tuned, "pacing_rate"), "2Gbit/s", "TCP_INFO max_pacing_rate", false, "")
	sees(valueOf(t, f.Tuned, "mark"), "7", "INET_DIAG_MARK", false, "")
	sees(valueOf(t, f.Tuned, "priority"), "3", "INET_DIAG_CLASS_ID", false, "")
	sees(valueOf(t, f.Tuned, "tos"), "16", "INET_DIAG_TOS", false, "")
	sees(valueOf(t, f.Tuned, "user_timeout"), "", "not readable", false, unread)
	sees(valueOf(t, f.Tuned, "rcvlowat"), "1B", "SO_RCVLOWAT of the MPTCP socket", true, "EINVAL")
	if v := valueOf(t, f.Tuned, "initial_cwnd"); v.Source != "TCP_INFO snd_cwnd" {
		t.Errorf("%+v", v)
	}
	text := h.sockeye("tune", "explain", "--socket", local+","+remote)
	for _, want := range []string{"MPTCP socket with 1 subflow\n", "\nsubflow " + local + " to " + remote + ", connect: rule made\n", "OPTION", "SK_MEMINFO_SNDBUF"} {
		if text.code != 0 || !strings.Contains(text.out, want) {
			t.Errorf("the table lacks %q: %+v", want, text)
		}
	}
	s = explain(nameOf(t, accepted))
	if len(s.Subflows) != 1 || s.Subflows[0].Rule != "taken" || s.Subflows[0].Role != "accept" || s.Subflows[0].Local != remote {
		t.Errorf("accepted: %+v", s)
	}

	// Options that the application sets apply to the subflows.
	setMark(t, connected, 9)
	s = explain(nameOf(t, connected))
	sees(valueOf(t, s.Subflows[0].Tuned, "mark"), "9", "INET_DIAG_MARK", true, "what the application sets on its socket")

	t.Run("JoinedSubflow", func(t *testing.T) {
		joinFrom(t, "127.0.0.2")
		connected, accepted := connectMultipath(t, listenAs(t, true, "127.0.0.1:0"))
		h.eventually("a second subflow exists", func() bool { return len(explain(nameOf(t, connected)).Subflows) == 2 })
		h.eventually("the peer has a second subflow", func() bool { return len(explain(nameOf(t, accepted)).Subflows) == 2 })
		s := explain(nameOf(t, connected))
		i := slices.IndexFunc(s.Subflows, func(f api.TuneSubflow) bool { return strings.HasPrefix(f.Local, "127.0.0.2:") })
		if i < 0 {
			t.Fatalf("%+v", s)
		}
		for _, f := range s.Subflows {
			if f.Rule != "made" || f.Role != "connect" {
				t.Errorf("%+v", f)
			}
		}
		joined := s.Subflows[i]
		sees(valueOf(t, joined.Tuned, "sndbuf"), "300KB", "SK_MEMINFO_SNDBUF", false, "doubles")
		named := explain(joined.Local + "," + joined.Remote)
		if named.PID != os.Getpid() || named.Local != s.Local || len(named.Subflows) != 2 {
			t.Errorf("explain with the addresses of the second subflow: %+v", named)
		}
		other := explain(joined.Remote + "," + joined.Local)
		if len(other.Subflows) != 2 || other.Subflows[0].Rule != "taken" || other.Subflows[1].Rule != "taken" || other.Local != s.Remote {
			t.Errorf("the other side: %+v", other)
		}
	})
	t.Run("Fallback", func(t *testing.T) {
		connected, accepted := connectMultipath(t, listenAs(t, false, "127.0.0.1:0"))
		s := explain(nameOf(t, connected))
		if s.MPTCP != api.MPTCPFallback || len(s.Subflows) != 1 || s.Subflows[0].Rule != "made" || s.Subflows[0].Local != s.Local {
			t.Fatalf("%+v", s)
		}
		f := s.Subflows[0]
		sees(valueOf(t, f.Tuned, "congestion"), "reno", "TCP_CONGESTION", false, "")
		sees(valueOf(t, f.Tuned, "user_timeout"), "5s", "TCP_USER_TIMEOUT", false, "")
		sees(valueOf(t, f.Tuned, "sndbuf"), "300KB", "SK_MEMINFO_SNDBUF", false, "doubles")
		text := h.sockeye("tune", "explain", "--socket", nameOf(t, connected))
		if !strings.Contains(text.out, "MPTCP socket that fell back to TCP\n") || !strings.Contains(text.out, "connect: rule made\n") {
			t.Errorf("%+v", text)
		}
		// A TCP listener accepts no MPTCP sockets.
		if s := explain(nameOf(t, accepted)); s.MPTCP != "" || s.Rule != "taken" || s.Subflows != nil {
			t.Errorf("accepted: %+v", s)
		}
		// An MPTCP listener accepts a plain TCP socket from a client without MPTCP.
		_, accepted = connectTo(t, false, listenAs(t, true, "127.0.0.1:0"))
		if s := explain(nameOf(t, accepted)); s.MPTCP != "" || s.Rule != "taken" {
			t.Errorf("accepted from TCP: %+v", s)
		}
	})
	t.Run("IPv6", func(t *testing.T) {
		connected, _ := connectMultipath(t, listenAs(t, true, "[::1]:0"))
		s := explain(nameOf(t, connected))
		if len(s.Subflows) != 1 || s.Subflows[0].Rule != "made" || s.Subflows[0].Local != connected.LocalAddr().String() {
			t.Fatalf("%+v", s)
		}
		sees(valueOf(t, s.Subflows[0].Tuned, "tos"), "", "", false, "only on IPv4 sockets")
	})
	t.Run("NoRule", func(t *testing.T) {
		h.write("policy.yaml", strings.Replace(multipathRules, "role: connect", "port: 9", 1))
		if r := h.sockeye("apply"); r.code != 0 {
			t.Fatalf("%+v", r)
		}
		connected, _ := connectMultipath(t, listenAs(t, true, "127.0.0.1:0"))
		s := explain(nameOf(t, connected))
		if len(s.Subflows) != 1 || s.Subflows[0].Rule != "" || s.Subflows[0].Role != "connect" || len(s.Subflows[0].Steps) != 2 {
			t.Fatalf("%+v", s)
		}
		if r := h.sockeye("tune", "explain", "--socket", nameOf(t, connected)); !strings.Contains(r.out, ", connect: no rule\n\nby the rules in force:\n") {
			t.Errorf("%+v", r)
		}
	})
	t.Run("OtherNetns", func(t *testing.T) {
		r := h.sockeye("tune", "explain", "--socket", fmt.Sprintf("%d:%d", os.Getpid(), elsewhere))
		message := fmt.Sprintf("-> 127.0.0.1:1 (descriptor %d of pid %d): enter network namespace of pid %[2]d: operation not permitted\n", elsewhere, os.Getpid())
		if r.code != fault.CodeNotPermitted || !strings.HasPrefix(r.err, "sockeye: read subflows of 127.0.0.1:") || !strings.Contains(r.err, message) || !strings.Contains(r.err, "netns.conf") {
			t.Errorf("%+v", r)
		}
	})
}

// TestTuneExplainSubflows checks the output for an MPTCP connection with a fake agent.
func TestTuneExplainSubflows(t *testing.T) {
	f := newFake(t)
	none := api.Tuned{Values: []api.TuneValue{}, Steps: []match.Step{}}
	s := api.TuneSocket{
		PID: 812, FD: 7, Command: "collector", Local: "10.0.0.1:1790", Remote: "192.0.2.1:40000", Role: "accept", Cgroup: "/lab",
		Tuned: none, MPTCP: api.MPTCPMultipath, Subflows: []api.TuneSubflow{
			{Local: "10.0.0.1:1790", Remote: "192.0.2.1:40000", Role: "accept", Tuned: api.Tuned{
				Rule: "bulk", Current: true, Arm: "treated", Steps: []match.Step{{Rule: "bulk", Matches: true, Why: "all match"}},
				Values: []api.TuneValue{
					{Option: "sndbuf", Requested: "150KB", Effective: "300KB", Source: "SK_MEMINFO_SNDBUF", Note: "the kernel doubles it"},
					{Option: "nodelay", Requested: "true", Source: "not readable", Note: "it cannot be read of a subflow, which has no descriptor"},
				},
			}},
			{Local: "10.0.0.1:1790", Remote: "198.51.100.1:40001", Role: "accept", Tuned: api.Tuned{
				Values: []api.TuneValue{}, Steps: []match.Step{{Rule: "bulk", Why: "198.51.100.1 is in none"}},
			}},
		},
	}
	asks(f, s, "GET /v1/tune/socket fd=7 pid=812", `
10.0.0.1:1790 to 192.0.2.1:40000, accept: descriptor 7 of process 812 (collector)
cgroup /lab, MPTCP socket with 2 subflows

subflow 10.0.0.1:1790 to 192.0.2.1:40000, accept: rule bulk

OPTION  REQUESTED  EFFECTIVE  READ FROM  NOTE
sndbuf  150KB  300KB  SK_MEMINFO_SNDBUF  the kernel doubles it
nodelay  true  -  not readable  it cannot be read of a subflow, which has no descriptor

subflow 10.0.0.1:1790 to 198.51.100.1:40001, accept: no rule

by the rules in force:
RULE  MATCHES  WHY
bulk  no  198.51.100.1 is in none
`, "tune", "explain", "--socket", "812:7")
	s.MPTCP, s.Subflows = api.MPTCPFallback, s.Subflows[1:]
	asks(f, s, "GET /v1/tune/socket fd=7 pid=812", `
10.0.0.1:1790 to 192.0.2.1:40000, accept: descriptor 7 of process 812 (collector)
cgroup /lab, MPTCP socket that fell back to TCP

subflow 10.0.0.1:1790 to 198.51.100.1:40001, accept: no rule

by the rules in force:
RULE  MATCHES  WHY
bulk  no  198.51.100.1 is in none
`, "tune", "explain", "--socket", "812:7")
	s.MPTCP, s.Subflows = api.MPTCPMultipath, nil
	asks(f, s, "GET /v1/tune/socket fd=7 pid=812", `
10.0.0.1:1790 to 192.0.2.1:40000, accept: descriptor 7 of process 812 (collector)
cgroup /lab, MPTCP socket with 0 subflows
`, "tune", "explain", "--socket", "812:7")
}
