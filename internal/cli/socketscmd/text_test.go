// SPDX-License-Identifier: Apache-2.0

package socketscmd

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"sockeye/internal/cli/clitest"
	"sockeye/internal/cli/command"
	"sockeye/internal/fault"
	"sockeye/internal/sockdiag"
)

// shownSockets has sockets of all kinds.
func shownSockets() *Shown {
	one := func(local, remote string, by sockdiag.Limit, queued, payload int, unsent uint32) socketShown {
		ratio := float64(queued) / float64(max(payload, 1))
		return socketShown{
			Local: local, Remote: remote, State: "established", Cgroup: "/telemetry.slice/nfacctd@0.service", Congestion: "cubic",
			Payload: new(uint32(payload)), Unsent: &unsent, Unread: new(uint32(0)), Queued: &queued, Buffer: new(4194304), Overhead: &ratio,
			Room: &socketRoom{1448000, 1520400}, Path: &socketPath{RTT: 285 * time.Millisecond, MSS: 1448}, LimitedBy: by,
		}
	}
	held := one("192.0.2.1:1790", "198.51.100.7:40000", sockdiag.SendBuffer, 4194304, 4100000, 0)
	held.Share = new(0.87)
	held.Room = &socketRoom{}
	held.Processes = []sockdiag.Process{{PID: 812, FD: 7, Command: "nfacctd"}, {PID: 813, FD: 7, Command: clitest.Hostile}, {PID: 814, FD: 7, Command: "c"}, {PID: 815, FD: 7, Command: "d"}}
	held.Advice = &sockdiag.Advice{Cause: sockdiag.WriteMemory, Detail: "the buffer has the maximum size of net.ipv4.tcp_wmem, 4194304 bytes, at most 118 Mbit/s with an RTT of 285ms",
		Hint: "sysctl -w net.ipv4.tcp_wmem='4096 16384 8388608' doubles the maximum"}
	long := one("[2001:db8:1234:5678:9abc:def0:1234:5678]:40000", "[2001:db8:aaaa:bbbb:cccc:dddd:eeee:ffff]:50000", sockdiag.ReceiveWindow, 67108864, 67000000, 66000000)
	long.State, long.Unread, long.Path.Retransmitted = "close-wait", new(uint32(6291456)), 12
	long.Buffer, long.Room, long.Share = new(67108864), &socketRoom{12345678, 12345678}, new(1.0)
	long.Cgroup = "/" + strings.Repeat("deep.slice/", 20) + "last.service"
	idle := one("192.0.2.1:1790", "198.51.100.8:40000", sockdiag.Application, 0, 0, 0)
	idle.Overhead, idle.Cgroup = nil, ""
	listener := socketShown{Local: "[::]:1790", State: "listening", Waiting: new(uint32(1)), MostWaiting: new(uint32(128)), Cgroup: "/telemetry.slice"}
	over := socketShown{Local: "192.0.2.1:1790", Remote: "198.51.100.9:40000", State: "time-wait"}
	return &Shown{Matched: 7, ByLimit: map[string]int{"send_buffer": 1, "receive_window": 1, "application": 3}, Sockets: []socketShown{held, long, idle, listener, over},
		Problems: []string{"SAFE and EXACT: calibrate: network is unreachable; check that lo is up"}}
}

func TestSocketsText(t *testing.T) {
	clitest.GoldenText(t, "sockets", func(t *command.Text) { socketsText(t, shownSockets()) })
	clitest.GoldenText(t, "sockets-none", func(t *command.Text) {
		socketsText(t, &Shown{Netns: "/run/netns/blue", Sockets: []socketShown{}, Problems: []string{}})
	})
}

// TestSocketsUnsupported checks the exit code on a kernel without sock_diag.
func TestSocketsUnsupported(t *testing.T) {
	err := socketsFailure(fmt.Errorf("read TCP sockets: %w", sockdiag.ErrUnsupported))
	if fault.Code(err) != fault.CodeUnsupported || fault.Hint(err) == "" {
		t.Errorf("%v: code %d, hint %q", err, fault.Code(err), fault.Hint(err))
	}
}

func TestReadEnd(t *testing.T) {
	for _, c := range []struct {
		Text     string
		yes, not []string
	}{
		{"192.0.2.1", []string{"192.0.2.1:1", "192.0.2.1:2"}, []string{"192.0.2.2:1", "[::1]:1"}},
		{"192.0.2.1:7", []string{"192.0.2.1:7"}, []string{"192.0.2.1:8", "192.0.2.2:7"}},
		{"192.0.2.77/24", []string{"192.0.2.1:1"}, []string{"192.0.3.1:1"}},
		{"192.0.2.0/24:7", []string{"192.0.2.1:7"}, []string{"192.0.2.1:8"}},
		{":7", []string{"192.0.2.1:7", "[::1]:7"}, []string{"192.0.2.1:8"}},
		{"*:7", []string{"[::1]:7"}, []string{"[::1]:8"}},
		{"::1", []string{"[::1]:7"}, []string{"[::2]:7"}},
		{"[::1]", []string{"[::1]:7"}, []string{"[::2]:7"}},
		{"[::1]:7", []string{"[::1]:7"}, []string{"[::1]:8"}},
		{"2001:db8::/32", []string{"[2001:db8::1]:7"}, []string{"[2001:db9::1]:7"}},
		{"[2001:db8::]/32:7", []string{"[2001:db8::1]:7"}, []string{"[2001:db8::1]:8", "[2001:db9::1]:7"}},
		{"[2001:db8::/32]:7", []string{"[2001:db8::1]:7"}, []string{"[2001:db8::1]:8"}},
		{"::ffff:192.0.2.1", []string{"192.0.2.1:7"}, []string{"192.0.2.2:7"}},
		{"fe80::1", []string{"[fe80::1%2]:7"}, []string{"[fe80::2%2]:7"}},
	} {
		f, err := readEnd("local", c.Text)
		if err != nil {
			t.Errorf("%s: %v", c.Text, err)
			continue
		}
		for _, a := range c.yes {
			if !f.matches(netip.MustParseAddrPort(a)) {
				t.Errorf("%s does not match %s", c.Text, a)
			}
		}
		for _, a := range c.not {
			if f.matches(netip.MustParseAddrPort(a)) {
				t.Errorf("%s matches %s", c.Text, a)
			}
		}
	}
}

func FuzzReadEnd(f *testing.F) {
	for _, text := range []string{"192.0.2.1", "[2001:db8::]/32:7", ":7", "[]", "/", "[::1]/:", "::/0"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		if end, err := readEnd("local", text); err == nil && end == (endFilter{}) {
			t.Fatalf("%q selects nothing", text)
		}
	})
}
