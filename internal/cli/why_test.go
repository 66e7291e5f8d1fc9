// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"sockeye/internal/api"
)

// sendFrom sends datagrams from an address to a port until the test ends.
func sendFrom(t *testing.T, address string, port int) {
	t.Helper()
	conn, err := net.DialUDP("udp", &net.UDPAddr{IP: net.ParseIP(address)}, &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1), Port: port})
	if err != nil {
		t.Fatal(err)
	}
	end := make(chan struct{})
	var sending sync.WaitGroup
	sending.Go(func() {
		every := time.NewTicker(5 * time.Millisecond)
		defer every.Stop()
		for {
			select {
			case <-end:
				return
			case <-every.C:
				_, _ = conn.Write([]byte("?")) // a refused datagram fails the next call
			}
		}
	})
	t.Cleanup(func() {
		close(end)
		sending.Wait()
		conn.Close()
	})
}

// connectFrom opens a connection from an address to the telemetry service until the test ends.
func connectFrom(t *testing.T, address string) net.Conn {
	t.Helper()
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(address)}, Timeout: patience}
	d.SetMultipathTCP(false)
	conn, err := d.Dial("tcp", "127.0.0.1:1790")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

// why returns the answer about an address of the telemetry service.
func (h *host) why(address string) api.Why {
	h.t.Helper()
	list := must[[]api.Why](h, "why", address, "--service", "telemetry")
	if len(list) != 1 {
		h.t.Fatalf("why %s: %+v", address, list)
	}
	return list[0]
}

// TestWhy compares the answers with members, traffic, pins, and a changed policy file.
func TestWhy(t *testing.T) {
	h, pids := running(t)
	edge := must[[]api.WhereStatus](h, "where", "127.0.0.1", "--service", "telemetry")[0]
	if w := h.why("edge"); w.Slot != edge.Slot || w.Bucket != edge.Bucket || w.Address.String() != "127.0.0.1" || w.Seen != nil || w.Because != "bucket" ||
		w.Prefix != "127.0.0.1/32" || w.SessionCount != 0 || w.Rates.Datagrams != 0 || *w.Plan.Slot != edge.Slot || len(w.Plan.Changes) != 0 {
		t.Errorf("a device that was never seen: %+v", w)
	}

	must[api.Plan](h, "move", "edge", "1", "--service", "telemetry", "--for", "1h")
	sendFrom(t, "127.0.0.1", 4739)
	conn := connectFrom(t, "127.0.0.1")
	must[api.Plan](h, "move", "127.0.0.9", "0", "--service", "telemetry")
	connectFrom(t, "127.0.0.9")
	h.eventually("datagrams are counted", func() bool {
		return slices.ContainsFunc(must[[]api.DeviceStatus](h, "devices", "--service", "telemetry"), func(d api.DeviceStatus) bool {
			return d.Address.String() == "127.0.0.1" && d.Datagrams > 0 && d.Sessions == 1
		})
	})
	w := h.why("edge")
	if w.Slot != 1 || w.Because != "pin" || w.Until == nil || w.Effect != "reach" || w.Reason != "" || w.Device != "edge" || w.Split {
		t.Errorf("a pinned device: %+v", w)
	}
	if w.Member == nil || w.Member.PID != pids[1] || w.Member.Slot != 1 || w.Member.Source != "register" {
		t.Errorf("the member: %+v, want process %d", w.Member, pids[1])
	}
	if w.Seen == nil || w.Seen.Datagrams == 0 || w.Seen.Connections != 1 || w.Seen.LastSlot == nil || *w.Seen.LastSlot != 1 {
		t.Errorf("counts: %+v", w.Seen)
	}
	if w.Rates.Datagrams < 1 || w.Rates.Datagrams > 1000 || w.Rates.Seconds < 1 || w.Rates.Refused != 0 {
		t.Errorf("rates: %+v", w.Rates)
	}
	if w.SessionCount != 1 || len(w.Sessions) != 1 || w.Sessions[0].Remote.String() != conn.LocalAddr().String() || w.Sessions[0].PID != pids[1] ||
		w.Sessions[0].Slot == nil || *w.Sessions[0].Slot != 1 {
		t.Errorf("connections: %+v, want one from %s", w.Sessions, conn.LocalAddr())
	}
	kinds := make(map[string]bool)
	for _, e := range w.Events {
		kinds[e.Kind] = true
		if e.Slot != nil && *e.Slot != 1 && e.Device != "edge" {
			t.Errorf("event of another slot: %+v", e)
		}
	}
	if !kinds["member_registered"] || !kinds["slot_changed"] {
		t.Errorf("events: %+v", w.Events)
	}
	// The answer for all services has the one without members, too. It does not know the name.
	if all := must[[]api.Why](h, "why", "127.0.0.1"); len(all) != 2 || all[0].Service != "spare" || all[0].Effect != "refused" || all[0].Member != nil {
		t.Errorf("all services: %+v", all)
	}
	if all := must[[]api.Why](h, "why", "edge"); len(all) != 1 {
		t.Errorf("all services that know the name: %+v", all)
	}
	for _, args := range [][]string{{"why", "edge"}, {"why", "127.0.0.1"}} {
		text := h.sockeye(args...).out
		if lines := strings.Count(text, "\n"); lines > 24 || !strings.Contains(text, "process "+strconv.Itoa(pids[1])) || !strings.Contains(text, "member_registered") {
			t.Errorf("%d lines:\n%s", lines, text)
		}
		if strings.Contains(text, "…\n") {
			t.Errorf("lines are cut without a terminal:\n%s", text)
		}
	}

	// Slot 3 has no member.
	for n := 5; ; n++ {
		address := fmt.Sprintf("127.0.0.%d", n)
		if must[[]api.WhereStatus](h, "where", address, "--service", "telemetry")[0].Slot != 3 {
			continue
		}
		sendFrom(t, address, 4739)
		h.eventually("datagrams are refused", func() bool { w = h.why(address); return w.Rates.Refused > 0 })
		if w.Effect != "refused" || w.Reason != "slot 3 has no member" || w.Member != nil || w.Seen == nil || w.Seen.LastSlot != nil {
			t.Errorf("a refused device: %+v", w)
		}
		break
	}

	policy := strings.Replace(twoServices, "slots: 4", "slots: 2\n    when_empty: {standby: 0}", 1)
	h.write("policy.yaml", policy)
	planned := must[[]api.WhereStatus](h, "where", "127.0.0.9", "--plan", h.policy, "--service", "telemetry")[0].Slot
	if w := h.why("127.0.0.9"); w.Plan.Slot == nil || *w.Plan.Slot != planned || len(w.Plan.Changes) != 2 || w.Plan.Problem != "" {
		t.Errorf("the policy file changes slots: %+v, want slot %d", w.Plan, planned)
	}
	h.write("devices.csv", "127.0.0.1,edge\n127.0.0.9,core\n")
	if w := h.why("127.0.0.9"); w.Device != "" || w.Plan.Device != "core" {
		t.Errorf("the device map changes: %+v", w.Plan)
	}
	must[api.Plan](h, "apply")
	if w := h.why("127.0.0.9"); w.Device != "core" || len(w.Plan.Changes) != 0 || *w.Plan.Slot != w.Slot {
		t.Errorf("after apply: %+v", w)
	}
	h.write("policy.yaml", "services: 7\n")
	if w := h.why("127.0.0.9"); w.Plan.Slot != nil || !strings.HasPrefix(w.Plan.Problem, "the policy file is invalid: ") {
		t.Errorf("an invalid policy file: %+v", w.Plan)
	}
	h.write("policy.yaml", "services: {}\n")
	if w := h.why("127.0.0.9"); w.Plan.Slot != nil || w.Plan.Problem != "the policy file does not have the service" {
		t.Errorf("a policy file without the service: %+v", w.Plan)
	}
}

// TestWhyRefuses checks devices that why cannot explain.
func TestWhyRefuses(t *testing.T) {
	h, _ := running(t)
	must[api.Plan](h, "move", "edge", "0", "--service", "telemetry")
	for _, address := range []string{"127.0.0.1", "127.0.0.2"} {
		ask("udp", address)
	}
	for _, one := range []struct{ args, message, hint string }{
		{"why", "ADDRESS is missing", "usage: sockeye why ADDRESS [flags]"},
		{"why edgy", `"edgy" is neither an IP address nor a device of a device map`, "did you mean edge?"},
		{"why 192.0.2.1/24", `"192.0.2.1/24" is neither an IP address nor a device of a device map`, "as in 192.0.2.1 or 2001:db8::1, or a name of a device map"},
		{"why edge", "service telemetry: edge has sent packets from several addresses: 127.0.0.1, 127.0.0.2", "name one of the addresses"},
		{"why edge --service spare", `"edge" is neither an IP address nor a device of a device map`, "as in 192.0.2.1 or 2001:db8::1, or a name of a device map"},
		{"why 192.0.2.1 --service telemetri", `there is no service "telemetri"`, "did you mean telemetry?"},
	} {
		h.refused(2, one.message, one.hint, nil, strings.Fields(one.args)...)
	}
	none := newHost(t, "services: {}\n")
	none.start()
	none.refused(2, "the policy has no services", "sockeye init prints services for the collectors of this host", nil, "why", "192.0.2.1")
}
