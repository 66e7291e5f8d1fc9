// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"maps"
	"slices"
	"strings"
	"testing"

	"sockeye/bench/harness"
	"sockeye/internal/chart"
)

// at returns counters of sources, n each.
func at(n uint64, sources ...string) map[string]uint64 {
	m := map[string]uint64{}
	for _, s := range sources {
		m[s] = n
	}
	return m
}

func TestPlacesOf(t *testing.T) {
	one, two, three := routerAddr(1).String(), routerAddr(2).String(), routerAddr(3).String()
	before := []received{{TCP: at(1, one), UDP: at(5, one)}, {}}
	after := []received{
		{TCP: at(1, one), UDP: at(5, one)}, // nothing new
		{TCP: at(1, one, two), UDP: at(3, routerAddr6(1).String(), secondAddr(2).String(), three, "192.0.2.1")},
	}
	tcp, udp := placesOf(before, after)
	if want := (places{1: {1}, 2: {1}}); !maps.EqualFunc(tcp, want, slices.Equal) {
		t.Errorf("sessions %v, want %v", tcp, want)
	}
	if want := (places{1: {1}, 2: {1}, 3: {1}}); !maps.EqualFunc(udp, want, slices.Equal) {
		t.Errorf("datagrams %v, want %v", udp, want)
	}
	if got, want := togetherShare(tcp, udp, 8), harness.Figure(2.0/8); got != want {
		t.Errorf("together %v, want %v", got, want)
	}
	if got := togetherShare(places{1: {0}, 2: {0, 1}}, places{1: {1}, 2: {0}}, 2); got != 0 {
		t.Errorf("routers at different or several members are together: %v", got)
	}
}

func TestChange(t *testing.T) {
	before := places{0: {0}, 1: {0}, 2: {2}, 3: {3}, 4: {deadSlot}, 5: {deadSlot}, 6: {0, 2}}
	after := places{0: {0}, 1: {2}, 2: {2}, 4: {0}, 6: {0}}
	moved, lost := change(before, after)
	if moved != 0.5 { // 1 is at another member and 3 at none
		t.Errorf("moved %v, want 0.5", moved)
	}
	if lost != 0.5 { // 5
		t.Errorf("lost %v, want 0.5", lost)
	}
}

func TestServed(t *testing.T) {
	const heading = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
	line := func(local, state, rx, inode string) string {
		return "   0: 0100007F:" + local + " 0100007F:9C40 " + state + " 00000000:" + rx + " 00:00000000 00000000     0        0 " + inode + " 1 0\n"
	}
	text := heading +
		line("4E20", "01", "00000000", "4711") + // served
		line("4E21", "01", "00000000", "4712") + // served
		line("4E20", "01", "00000000", "0") + // in the accept queue
		line("4E20", "01", "00000010", "4713") + // not read yet
		line("4E20", "08", "00000000", "4714") + // CLOSE_WAIT
		line("4E20", "0A", "00000000", "4715") + // the listener
		line("06FE", "01", "00000000", "4716") // the port of HAProxy
	if n := served(text, []uint16{ownTCP, ownTCP + 1}); n != 2 {
		t.Errorf("%d sessions served, want 2", n)
	}
}

// TestStormFigures checks that the headline has the best of HAProxy and the worst of Sockeye.
func TestStormFigures(t *testing.T) {
	var s stormSet
	for arm, failed := range map[string]int{"plain": 1, "reuseport": 2, "lookup": 5, "proxy": 400, "proxy-splice": 300, "nft": 7} {
		s = append(s, stormRun{Arm: arm, Failed: failed})
	}
	s = append(s, stormRun{Arm: "lookup", Failed: 500, Exits: []string{"member 2: segmentation fault"}})
	f := s.figures()
	if h, k := f["haproxy_failed"].(*float64), f["sockeye_failed"].(*float64); *h != 300 || *k != 5 {
		t.Errorf("HAProxy %v, want 300; Sockeye %v, want 5", *h, *k)
	}
	crashed := append(slices.DeleteFunc(slices.Clone(s), func(r stormRun) bool { return r.Arm == "lookup" }), stormRun{Arm: "lookup", Exits: []string{"x"}})
	if k := crashed.figures()["sockeye_failed"].(*float64); k != nil {
		t.Errorf("Sockeye %v although a mode has no storm that counts", *k)
	}
	text := harness.Text(&stormReport{arms: []armTitle{{"plain", "plain"}, {"proxy", "proxy"}, {"ipvs", "not run"}}, storms: s})
	if !strings.Contains(text, "plain  1 [1 .. 1]") || strings.Contains(text, "not run") {
		t.Error(text)
	}
}

// TestUnrunnable has arms without programs and without a kernel's part.
func TestUnrunnable(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	for _, a := range []arm{&nftArm{}, &ipvsArm{scheduler: "sh"}, &proxyArm{}} {
		if missing(a) == nil {
			t.Errorf("%s can run without its program", a.title())
		}
	}
	if got := (&bench{}).arms("plain", "nft", "lookup"); len(got) != 2 {
		t.Errorf("%d arms, want plain and lookup", len(got))
	}
}

// TestGuestFigures reads the figures of a machine.
func TestGuestFigures(t *testing.T) {
	const figures = `{"run":{"kernel":"7.3.4","cpus":2},"text":"a\nb\n","peers":{"plain":{},"ipvs":{"rate_vs_plain":0.5}}}`
	g, err := readGuest([]byte(figures))
	if err != nil {
		t.Fatal(err)
	}
	r := &report{plain: &part{}, guest: g}
	peers := r.peers()
	if len(peers) != 1 || peers["ipvs"] == nil {
		t.Errorf("peers %v, want ipvs only", peers)
	}
	if text := harness.Text(&guestReport{g: g}); !strings.Contains(text, "\na\nb\n") {
		t.Error(text)
	}
	if _, err := readGuest([]byte("{")); err == nil {
		t.Error("no error without figures")
	}
}

type guestReport struct {
	harness.Run
	g *guest
}

func (r *guestReport) Print(p harness.Printf)       { r.g.print(p) }
func (*guestReport) Figures() any                   { return nil }
func (*guestReport) Charts() map[string]chart.Chart { return nil }
