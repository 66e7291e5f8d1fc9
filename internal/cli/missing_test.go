// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"sockeye/internal/api"
)

// missingDevices returns the devices that devices --missing lists, as "name or address: streams".
func (h *host) missingDevices(service string) (m api.Missing, list []string) {
	h.t.Helper()
	all := must[[]api.Missing](h, "devices", "--missing", "--service", service)
	if len(all) != 1 {
		h.t.Fatalf("missing: %+v", all)
	}
	for _, d := range all[0].Devices {
		name := d.Device
		if d.Address != nil {
			name = d.Address.String()
		}
		list = append(list, name+": "+strings.Join(d.Missing, ","))
	}
	slices.Sort(list)
	return all[0], list
}

// TestMissing compares the missing devices with real traffic, and checks that they outlive the agent and the pins.
func TestMissing(t *testing.T) {
	h := newHost(t, strings.Replace(twoServices, "slots: 4", "slots: 1", 1))
	h.write("devices.csv", "127.0.0.1,edge\n127.0.0.2,edge\n127.0.0.3,core\n127.0.1.0/24,far\n")
	h.start()
	member := func() {
		pid, _ := h.member(nil, "tcp [::]:1790", "udp [::]:4739")
		must[api.Membership](h, "register", "--service", "telemetry", "--pid", strconv.Itoa(pid))
	}
	member()
	expect := func(when string, expected int, want ...string) api.Missing {
		t.Helper()
		m, list := h.missingDevices("telemetry")
		if !slices.Equal(list, want) || m.Missing != len(want) || m.Expected != expected || m.Omitted != 0 || m.Problem != "" {
			t.Errorf("%s: %v of %d (%+v), want %v of %d", when, list, m.Expected, m, want, expected)
		}
		return m
	}
	m := expect("before any traffic", 3, "core: tcp,udp", "edge: tcp,udp", "far: tcp,udp")
	if d := m.Devices[0]; d.Since != nil || d.LastConnection != nil || d.LastDatagram != nil || d.Prefix != "127.0.0.1/32" || d.Slot != 0 {
		t.Errorf("a device that was never seen: %+v", d)
	}
	// One device sends its streams from two addresses, one has a connection only, and one without a name, too.
	ask("udp", "127.0.0.1")
	edge, core := connectFrom(t, "127.0.0.2"), connectFrom(t, "127.0.0.3")
	connectFrom(t, "127.0.0.9")
	expect("with traffic", 4, "127.0.0.9: udp", "core: udp", "far: tcp,udp")
	ask("udp", "127.0.0.3")
	expect("after a datagram", 4, "127.0.0.9: udp", "far: tcp,udp")
	edge.Close()
	core.Close()
	h.eventually("the connections are closed", func() bool { m, _ := h.missingDevices("telemetry"); return m.Missing == 4 })
	m = expect("without connections", 4, "127.0.0.9: udp", "core: tcp", "edge: tcp", "far: tcp,udp")
	if last := m.Devices[3]; last.Device != "far" || m.Devices[0].LastConnection == nil {
		t.Errorf("the order: %+v", m.Devices)
	}
	for _, d := range m.Devices {
		if (d.Device == "core" || d.Device == "edge") && (d.Since == nil || !d.Since.Equal(*d.LastConnection) || d.LastDatagram == nil) {
			t.Errorf("%s: %+v", d.Device, d)
		}
	}
	text := h.sockeye("devices", "--missing").out
	for _, want := range []string{"telemetry: 4 of 4 expected devices are missing\n", "spare: 0 of 0 expected devices are missing\n"} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
	if limited := must[[]api.Missing](h, "devices", "--missing", "--limit", "1", "--service", "telemetry")[0]; limited.Missing != 4 || limited.Omitted != 3 || len(limited.Devices) != 1 {
		t.Errorf("with a limit: %+v", limited)
	}

	// The learned device, which the kernel does not know after a reset, is still expected.
	if err := h.agent.Process.Signal(unix.SIGTERM); err != nil {
		t.Fatal(err)
	}
	h.agent.Wait()
	if r := h.sockeye("reset", "--state-dir", h.state, "--pins", h.pins); r.code != 0 {
		t.Fatalf("reset: %+v", r)
	}
	h.start()
	m, list := h.missingDevices("telemetry")
	if !slices.Contains(list, "edge: tcp,udp") || !slices.ContainsFunc(m.Devices, func(d api.MissingDevice) bool {
		return d.Device == "core" && d.LastConnection != nil && d.LastDatagram != nil // the datagram came less than a minute before the end
	}) || m.Expected != 4 {
		t.Errorf("after a reset: %v, %+v", list, m)
	}
}

// TestMissingRefuses checks invalid arguments, and services that do not track devices.
func TestMissingRefuses(t *testing.T) {
	h := newHost(t, "services:\n  flows:\n    slots: 1\n    track_devices: off\n    cgroup: CGROUP\n    listeners:\n      - {protocol: udp, address: \"[::]:4739\"}\n")
	h.start()
	h.refused(2, `limit is "0"`, "1 to 100000", nil, "devices", "--missing", "--limit", "0")
	h.refused(2, "--limit requires --missing", "usage: sockeye devices [flags]", nil, "devices", "--limit", "5")
	if m, _ := h.missingDevices("flows"); len(m.Streams) != 0 || m.Problem == "" {
		t.Errorf("without track_devices: %+v", m)
	}
}
