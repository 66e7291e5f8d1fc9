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
	telemetry := func() api.ServiceStatus {
		status := must[api.Status](h, "status").Services
		return status[slices.IndexFunc(status, func(s api.ServiceStatus) bool { return s.Name == "telemetry" })]
	}
	if drops := telemetry().Drops; len(drops) != 0 {
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
		drops = telemetry().Drops
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
	// Where the kernel reports the datagrams, the device has them all.
	devices := must[[]api.DeviceStatus](h, "devices", "--service", "telemetry")
	if len(devices) != 1 {
		t.Fatalf("devices: %+v", devices)
	}
	if devices[0].Dropped == nil {
		t.Skip("kernel: does not report the datagrams that it drops (until Linux 6.10)")
	}
	h.eventually("the status has all drops", func() bool { d = telemetry().Drops[0]; return d.Dropped >= *devices[0].Dropped })
	w := h.why("127.0.0.1")
	if *devices[0].Dropped != d.Dropped || w.Seen.Dropped == nil || *w.Seen.Dropped != d.Dropped ||
		len(d.Devices) != 1 || d.Devices[0].Device != "edge" || d.Devices[0].Dropped != d.Dropped {
		t.Errorf("by device: %+v, %+v, %+v; by member: %d", devices, w.Seen, d.Devices, d.Dropped)
	}
	for _, args := range [][]string{{"devices"}, {"why", "127.0.0.1", "--service", "telemetry"}, {"status"}} {
		if text := h.sockeye(args...).out; !strings.Contains(text, strconv.FormatUint(d.Dropped, 10)) || !strings.Contains(strings.ToLower(text), "dropped") {
			t.Errorf("no %d in\n%s", d.Dropped, text)
		}
	}
	frame := must[api.Frame](h, "top", "--service", "telemetry")
	if one := &frame.Services[0].Devices[0]; one.Dropped == nil || *one.Dropped != d.Dropped {
		t.Errorf("top: %+v; by member: %d", one, d.Dropped)
	}
	h.eventually("top has the rate of the drops", func() bool {
		for range 1000 {
			if _, err := conn.Write(make([]byte, 1000)); err != nil {
				t.Fatal(err)
			}
		}
		frame := must[api.Frame](h, "top", "--service", "telemetry")
		return frame.Services[0].Devices[0].Drops > 0
	})
}
