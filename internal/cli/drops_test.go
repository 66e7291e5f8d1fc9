// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"net"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"sockeye/internal/api"
)

// TestDrops checks that the status names a member whose receive buffer overflows, and which buffer helps.
func TestDrops(t *testing.T) {
	h, pids := running(t)
	if drops := must[api.Status](h, "status").Services[1].Drops; len(drops) != 0 {
		t.Errorf("before: %+v", drops)
	}
	must[api.Plan](h, "move", "edge", "1", "--service", "telemetry")
	if err := unix.Kill(pids[1], unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	conn, err := net.DialUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)}, &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 4739})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	var drops []api.DropStatus
	h.eventually("drops are in the status", func() bool {
		for range 1000 {
			if _, err := conn.Write(make([]byte, 1000)); err != nil {
				t.Fatal(err)
			}
		}
		status := must[api.Status](h, "status").Services
		drops = status[slices.IndexFunc(status, func(s api.ServiceStatus) bool { return s.Name == "telemetry" })].Drops
		return len(drops) > 0
	})
	d := drops[0]
	if len(drops) != 1 || d.Slot != 1 || d.PID != pids[1] || d.Protocol != "udp" || d.Dropped == 0 || d.Limit == 0 || !strings.Contains(d.Hint, "net.core.rmem_max") {
		t.Errorf("drops: %+v", drops)
	}
	text := h.sockeye("status").out
	for _, want := range []string{"telemetry: the kernel has dropped ", " at process " + strconv.Itoa(pids[1]) + " in slot 1, ", "hint: the program uses the default buffer"} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
}
