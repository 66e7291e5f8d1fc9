// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"encoding/xml"
	"errors"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/bench/harness"
	"sockeye/internal/api"
	"sockeye/lab"
)

func TestFlowsOf(t *testing.T) {
	// The numbers of flows of the paper.
	for x, want := range map[int]int{1: 12, 2: 15, 4: 21, 8: 33, 16: 57} {
		n := 0
		for _, f := range loadOf(x) {
			n += senders * f.Count
		}
		if n != want || flowsOf(x) != want {
			t.Errorf("X = %d: load of %d flows, flowsOf is %d, want %d", x, n, flowsOf(x), want)
		}
	}
}

func TestSamePrefix(t *testing.T) {
	router := incastAddr(1, 0xfe)
	for _, a := range []netip.Addr{incastAddr(0, 1), incastTarget(0), incastTarget(5), router} {
		if !incastPrefix.Contains(a) {
			t.Errorf("%v is not in %v", a, incastPrefix)
		}
	}
	if incastTarget(0) == incastTarget(1) || incastAddr(0, 1) == incastAddr(1, 1) {
		t.Error("addresses are equal")
	}
}

func TestRulesOf(t *testing.T) {
	b := &bench{options: options{Buffers: 150_000, Clamp: 16, Only: incastPart, Arms: []string{baseline, tuned}}}
	if got, want := strings.Count(b.rulesOf("/lab"), "name:"), 1; got != want {
		t.Errorf("%d rules of one part, want %d", got, want)
	}
	b.Arms = append(b.Arms, byDCTCP)
	if rules := b.rulesOf("/lab"); !strings.Contains(rules, "cgroup: /lab/incast-dctcp,") || !strings.Contains(rules, "ecn: true, congestion: dctcp") {
		t.Errorf("no rule for DCTCP in\n%s", rules)
	}
	b.Only = ""
	if got := len(ruleGroup.FindAllString(b.rulesOf("/lab"), -1)); got != 13 {
		t.Errorf("%d rules of all parts with a cgroup, want 13", got)
	}
}

func TestTransferSizes(t *testing.T) {
	sizes := iwTransferSizes(40)
	if lo, hi := slices.Min(sizes), slices.Max(sizes); lo != iwSmallest || hi < iwLargest-1 || hi > iwLargest {
		t.Errorf("sizes from %d to %d", lo, hi)
	}
	if !slices.Equal(sizes, iwTransferSizes(40)) {
		t.Error("the order differs between runs")
	}
	below := 0
	for _, s := range sizes {
		if s < 122_000 { // the geometric mean
			below++
		}
	}
	if below != 20 {
		t.Errorf("%d of 40 sizes are below the geometric mean", below)
	}
}

func TestSocketOptions(t *testing.T) {
	l, err := (&net.ListenConfig{Control: socketOptions{}.set}).Listen(t.Context(), "tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	conn, err := dialer(socketOptions{SendBuffer: 30_000, ReceiveBuffer: 20_000, Window: 20_000, Congestion: "reno"}).Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	raw, err := conn.(*net.TCPConn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []struct{ level, option, value int }{
		{unix.SOL_SOCKET, unix.SO_SNDBUF, 60_000}, {unix.SOL_SOCKET, unix.SO_RCVBUF, 40_000}, {unix.IPPROTO_TCP, unix.TCP_WINDOW_CLAMP, 20_000},
	} {
		var got int
		var gerr error
		if err := raw.Control(func(fd uintptr) { got, gerr = unix.GetsockoptInt(int(fd), want.level, want.option) }); err != nil || gerr != nil {
			t.Fatal(err, gerr)
		}
		if got != want.value {
			t.Errorf("option %d: %d, want %d", want.option, got, want.value)
		}
	}
	var congestion string
	if err := raw.Control(func(fd uintptr) {
		congestion, err = unix.GetsockoptString(int(fd), unix.IPPROTO_TCP, unix.TCP_CONGESTION)
	}); err != nil || strings.TrimRight(congestion, "\x00") != "reno" {
		t.Errorf("congestion control %q, want reno; %v", congestion, err)
	}
}

func TestStreamMeasuresEachMegabyte(t *testing.T) {
	client, server := net.Pipe()
	defer client.Close()
	received := make(chan int64)
	go func() {
		n, _ := io.Copy(io.Discard, server)
		received <- n
	}()
	defer server.Close()
	begin := time.Now()
	r, err := send(client, begin, begin.Add(100*time.Millisecond))
	if err != nil {
		t.Fatal(err)
	}
	client.Close()
	if n := <-received / large; n == 0 || int64(len(r.Took)) < n-1 || int64(len(r.Took)) > n {
		t.Errorf("%d MB were received, times of %d MB", n, len(r.Took))
	}
}

// pipe returns the client's end of a connection that is served, after the header has been sent.
func pipe(t *testing.T, h header) net.Conn {
	t.Helper()
	client, server := net.Pipe()
	t.Cleanup(func() { client.Close() })
	go serve(server)
	if err := client.SetDeadline(time.Now().Add(10 * time.Second)); err != nil {
		t.Fatal(err)
	}
	if err := binary.Write(client, binary.BigEndian, h); err != nil {
		t.Fatal(err)
	}
	return client
}

func TestServeAnswersEachRequest(t *testing.T) {
	conn := pipe(t, header{Request: 10})
	for _, step := range []struct{ send, answers int }{{9, 0}, {1, 1}, {10, 1}, {15, 1}, {5, 1}} {
		if _, err := conn.Write(make([]byte, step.send)); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(conn, make([]byte, step.answers)); err != nil {
			t.Fatalf("after %d more bytes: %v", step.send, err)
		}
	}
	if err := conn.SetDeadline(time.Now().Add(20 * time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	if n, err := conn.Read(make([]byte, 1)); n > 0 || err == nil {
		t.Errorf("unexpected answer without a complete request: %d, %v", n, err)
	}
}

func TestServeResponds(t *testing.T) {
	b, err := io.ReadAll(pipe(t, header{Response: 100_000}))
	if err != nil || len(b) != 100_000 {
		t.Errorf("%d bytes, %v", len(b), err)
	}
}

func TestRequestMeasuresWithinTheWindow(t *testing.T) {
	for attempt := 1; ; attempt++ { // a busy host may run neither end in the window
		begin := time.Now().Add(50 * time.Millisecond)
		r, err := request(pipe(t, header{Request: 1000}), 1000, begin, begin.Add(100*time.Millisecond))
		if err != nil {
			t.Fatal(err)
		}
		if len(r.Took) > 0 {
			return
		}
		if attempt == 10 {
			t.Fatal("no request was measured")
		}
	}
}

func TestSnmp(t *testing.T) {
	text := "Ip: Forwarding RetransSegs\nIp: 1 7\nTcp: RtoAlgorithm MaxConn OutSegs RetransSegs\nTcp: 1 -1 345 12\n"
	for name, want := range map[string]uint64{"RetransSegs": 12, "OutSegs": 345, "Other": 0} {
		if got := harness.SNMP(text, "Tcp", name); got != want {
			t.Errorf("%s = %d, want %d", name, got, want)
		}
	}
}

func TestDropFirst(t *testing.T) {
	segment := func(port byte, flags byte) []byte {
		p := make([]byte, 40)
		p[0], p[9] = 0x45, 6
		p[21], p[33] = port, flags
		return p
	}
	drop := dropFirst(lab.AToB, tcpSYN)
	for i, step := range []struct {
		d      lab.Direction
		packet []byte
		want   bool
	}{
		{lab.BToA, segment(1, tcpSYN), false},
		{lab.AToB, segment(1, tcpSYN|tcpACK), false},
		{lab.AToB, segment(1, tcpSYN), true},
		{lab.AToB, segment(1, tcpSYN), false},
		{lab.AToB, segment(2, tcpSYN), true},
		{lab.AToB, segment(2, tcpACK), false},
		{lab.AToB, segment(3, tcpSYN)[:30], false},
		{lab.AToB, []byte{0x60}, false},
	} {
		if got := drop(step.d, step.packet); got != step.want {
			t.Errorf("packet %d: dropped: %t", i, got)
		}
	}
}

func TestTuneReport(t *testing.T) {
	class := func(retransmits uint64, rate float64, took ...float64) map[string]*classRun {
		return map[string]*classRun{"1mb": {retransmits, rate, took}, "stream": {1, 5, nil}, "10kb": {0, 1, []float64{1}}}
	}
	r := &report{
		Options: options{X: paperX, Arms: []string{baseline, tuned, byRoute}},
		incast: []incastRun{
			{Arm: baseline, X: 1, Segments: 100, Drops: 9, Classes: class(5, 10, 3, 1, 2)},
			{Arm: baseline, X: 1, CPU: 0.95, Classes: class(7, 20, 100)},
			{Arm: tuned, X: 1, Classes: class(0, 15, 4)},
			{Arm: baseline, X: 2, Segments: 100, Drops: 9, Classes: class(9, 1, 1)},
			{Arm: tuned, X: 2, Drops: 5, Classes: class(8, 1, 1)},
		},
		iw: []iwLink{{rtt: 20 * time.Millisecond, queue: 20, window: 16, took: map[string][]float64{
			fixed10: {100, 200, 300}, fixed40: {50, 100, 600}, explored: {80, 160, 240}, exploring: {90},
		}}},
		handshake: &handshakeLosses{},
		learned:   []learnedPrefix{{TuneLearned: api.TuneLearned{Prefix: "10.81.20.0/24", Window: 64}}},
		cost:      cost{costNone: {10, 20}, costUnmatched: {11, 20.5}, costMany: {11, 21}, costMatched: {13, 22}},
	}
	p := r.point(baseline, 1)
	if c := p.Classes["1mb"]; p.Retransmits != 14 || c.Retransmits != 12 || c.Rate != 15 || c.P50 != 2 || c.P99 != 100 || c.Samples != 4 {
		t.Errorf("point: %+v", p)
	}
	if n := r.saturated(); n != 1 {
		t.Errorf("%d saturated runs, want 1", n)
	}
	if x := r.effectEnd(); x != 2 {
		t.Errorf("the effect ends at %d, want 2", x)
	}
	b, err := harness.JSON(r)
	if err != nil {
		t.Fatal(err)
	}
	type point struct {
		Classes map[string]map[string]*float64
	}
	var got struct {
		Incast []struct {
			X, Flows               int
			Baseline, Tuned, Route *point
		}
		Ends map[string]int `json:"incast_effect_ends"`
		IW   []struct {
			RTT  float64 `json:"rtt_ms"`
			Arms map[string]struct {
				P50   float64               `json:"p50_ms"`
				Ratio *harness.Distribution `json:"ratio_to_fixed_10"`
			}
		} `json:"iw"`
		SYNRTO map[string]any             `json:"syn_rto"`
		Cost   map[string]json.RawMessage `json:"cost_us"`
	}
	if err := json.Unmarshal(b, &got); err != nil {
		t.Fatal(err)
	}
	if len(got.Incast) != len(paperX) || got.Incast[0].X != 1 || got.Incast[0].Flows != 12 || got.Ends["flows"] != 15 {
		t.Fatalf("incast: %s", b)
	}
	for key, want := range map[string]float64{"rate_mbit": 15, "retransmits": 12, "p50_ms": 2, "p99_ms": 100} {
		if v := got.Incast[0].Baseline.Classes["1mb"][key]; v == nil || *v != want {
			t.Errorf("%s: %v, want %v", key, v, want)
		}
	}
	if v, ok := got.Incast[0].Tuned.Classes["stream"]["p99_ms"]; !ok || v != nil {
		t.Errorf("a value that was not measured is not null: %v", v)
	}
	if len(got.IW) != 1 || got.IW[0].RTT != 20 || got.SYNRTO["syn_lost"] == nil {
		t.Fatalf("iw %v, syn_rto %v", got.IW, got.SYNRTO)
	}
	// The median is of the ratios by transfer, 0.5, 0.5 and 2, not the ratio of medians.
	if a := got.IW[0].Arms[fixed40]; a.P50 != 100 || a.Ratio == nil || a.Ratio.Median != 0.5 {
		t.Errorf("fixed window of 40: %+v", a)
	}
	if a := got.IW[0].Arms[exploring]; a.P50 != 90 || a.Ratio != nil {
		t.Errorf("while exploring: %+v", a)
	}
	for key, want := range map[string]string{"matched": "2.5", "unmatched": "0.75"} {
		if string(got.Cost[key]) != want {
			t.Errorf("cost_us.%s: %s, want %s", key, got.Cost[key], want)
		}
	}
	for name, svg := range map[string][]byte{"incast": r.incastChart().SVG(), "iw": r.iwChart().SVG()} {
		for d := xml.NewDecoder(bytes.NewReader(svg)); ; {
			if _, err := d.Token(); errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				t.Fatalf("svg of %s: %v", name, err)
			}
		}
		if bytes.Contains(svg, []byte("NaN")) {
			t.Errorf("svg of %s contains a bar without length", name)
		}
	}
	if text := harness.Text(r); strings.Contains(text, "NaN") || !strings.Contains(text, "ends at X = 2, with 15 flows") {
		t.Errorf("text:\n%s", text)
	}
}
