// SPDX-License-Identifier: Apache-2.0

package continuity

import (
	"encoding/json"
	"net/netip"
	"reflect"
	"strings"
	"testing"
	"time"

	"sockeye/bench/harness"
	"sockeye/internal/sockdiag"
	"sockeye/lab/traffic"
)

func TestTable(t *testing.T) {
	for _, n := range []int{1, routesPerUpdate, routesPerUpdate + 1, 200_000} {
		seen := map[netip.Prefix]bool{}
		for _, r := range table(n) {
			for _, p := range r.Prefixes {
				if p != p.Masked() || p.Addr().IsMulticast() || !p.Addr().IsValid() {
					t.Fatalf("prefix %v", p)
				}
				seen[p] = true
			}
			if _, err := traffic.AppendUpdate(nil, r); err != nil {
				t.Fatal(err)
			}
		}
		if len(seen) != n {
			t.Errorf("%d prefixes, want %d", len(seen), n)
		}
	}
}

func TestSentDump(t *testing.T) {
	const answer = `
BMP state for BGP VRF default:

  Targets "lab":
    Route Monitoring IPv4 unicast post-policy

    Outbound connections:
remote             state timer local
----------------------------------------
10.77.0.254:1790   Up    (none) (unspec)

    1 connected clients:
remote           uptime   MonSent MirrSent MirrLost ByteSent ByteQ ByteQKernel
-------------------------------------------------------------------------------
10.77.0.254:1790 00:01:10 2002    0        0        230000   0     0
`
	for _, c := range []struct {
		answer string
		routes int
		want   bool
	}{
		{answer, 2000, true},
		{answer, 2003, false},
		{strings.Replace(answer, "230000   0 ", "230000   90", 1), 2000, false},
		{strings.Replace(answer, " 0\n", " 512\n", 1), 2000, false},
		{"", 0, false},
	} {
		if got := sentDump(c.answer, c.routes); got != c.want {
			t.Errorf("%d routes: %v, want %v in\n%s", c.routes, got, c.want, c.answer)
		}
	}
}

func TestAcceptedRoutes(t *testing.T) {
	for answer, want := range map[string]int{
		`{"peers":{"10.76.0.250":{"pfxRcd":2000},"10.76.0.1":{"pfxRcd":7}}}`: 2000,
		`{"peers":{}}`: 0, "": 0,
	} {
		if got := acceptedRoutes(answer); got != want {
			t.Errorf("%s: %d, want %d", answer, got, want)
		}
	}
}

func TestSampled(t *testing.T) {
	routers := []netip.AddrPort{netip.MustParseAddrPort("10.77.0.1:40000"), netip.MustParseAddrPort("10.77.0.2:40000")}
	socket := func(router int, cookie, received uint64, unread uint32) (s sockdiag.Socket) {
		s.Remote, s.Cookie, s.Unread = routers[router], cookie, unread
		s.Info.Bytes_received = received
		return s
	}
	m := sampled{dumps: map[netip.Addr]*sampledDump{}}
	m.add(1*time.Second, []sockdiag.Socket{socket(0, 1, 0, 0)})                         // connected
	m.add(2*time.Second, []sockdiag.Socket{socket(0, 1, 500, 100), socket(1, 2, 9, 9)}) // both send
	m.add(3*time.Second, []sockdiag.Socket{socket(0, 1, 800, 70), socket(1, 2, 9, 0)})
	m.add(4*time.Second, []sockdiag.Socket{socket(0, 1, 800, 0), socket(1, 3, 40, 0)}) // router 1 has connected again
	m.add(5*time.Second, []sockdiag.Socket{socket(0, 1, 800, 0), socket(1, 3, 40, 0)})
	if !m.idle(routers[0].Addr()) || m.idle(netip.MustParseAddr("10.77.0.9")) {
		t.Errorf("idle: %v, %v", m.idle(routers[0].Addr()), m.idle(netip.MustParseAddr("10.77.0.9")))
	}
	want := dumps{
		Routers: 2, Queue: 109, Deepest: 100, AtOnce: 2, Seconds: 4, Each: 0.5, Idle: 3, Bytes: 840,
		Dumps: []dumpTime{{routers[0].Addr(), 2, 3}, {routers[1].Addr(), 4, 4}},
	}
	if got := m.result(); !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, want %+v", got, want)
	}
}

func TestIdleTime(t *testing.T) {
	if got := idleTime([]dumpTime{{From: 9, To: 10}, {From: 1, To: 3}, {From: 2, To: 6}, {From: 4, To: 5}}); got != 1+3 {
		t.Errorf("%v, want 4", got)
	}
	if got := idleTime(nil); got != 0 {
		t.Errorf("no dumps: %v", got)
	}
}

func TestPacingReport(t *testing.T) {
	r := &report{Options: options{Pacing: pacing{Routers: 12, Routes: 200_000, Rounds: 2}}}
	if text := harness.Text(r); strings.Contains(text, "FRR") {
		t.Errorf("pacing was not compared:\n%s", text)
	}
	for round := range 2 {
		r.paced = append(r.paced,
			pacedRun{Arm: "without", Round: round, Restart: dumps{Routers: 12, Queue: (60 - round) * megabyte, AtOnce: 12, Seconds: 30 + float64(round)}},
			pacedRun{Arm: "with", Round: round, Restart: dumps{Routers: 12, Queue: 5 * megabyte, AtOnce: 2, Seconds: 50}, Drain: dumps{Resets: 12}},
		)
	}
	text := harness.Text(r)
	for _, want := range []string{
		"12 FRR routers with 200000 routes each, by BMP to nfacctd; the worst of 2 rounds\n",
		"member restarted, without pacing      12 of 12       60.0 MB", " 31.0 s ", "member restarted, pace: {devices: 2}  2 of 12        5.0 MB",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
	b, err := harness.JSON(r)
	if err != nil {
		t.Fatal(err)
	}
	var got struct {
		Pace map[string]pacedOutcome `json:"pace"`
	}
	if err := json.Unmarshal(b, &got); err != nil {
		t.Fatal(err)
	}
	if w, o := got.Pace["with"], got.Pace["without"]; w.Rounds != 2 || w.Drain.Resets != 12 || o.Restart.Queue != 60*megabyte || o.Restart.Seconds != 31 {
		t.Errorf("%+v", got.Pace)
	}
}
