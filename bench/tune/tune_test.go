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
	"testing"
	"time"

	"sockeye/bench/harness"
	"sockeye/internal/api"
	"sockeye/lab"
)

func TestLoadOf(t *testing.T) {
	for _, x := range incastFlows {
		sum, most, least := map[int]int{}, 0, x
		for sender := range senders {
			for _, f := range loadOf(sender, x) {
				sum[f.Size] += f.Count
				if f.Size == large {
					most, least = max(most, f.Count), min(least, f.Count)
				}
			}
		}
		if sum[large] != x || sum[small] != 2 || sum[0] != 1 {
			t.Errorf("%d flows: %v", x, sum)
		}
		if most-least > 1 {
			t.Errorf("%d flows are not distributed evenly: %d to %d per sender", x, least, most)
		}
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
	begin := time.Now().Add(50 * time.Millisecond)
	r, err := request(pipe(t, header{Request: 1000}), 1000, begin, begin.Add(100*time.Millisecond))
	if err != nil {
		t.Fatal(err)
	}
	// RPCs in flight at an end of the window are only in one of the two figures.
	if n := int64(len(r.Took)); n == 0 || r.Bytes/1000 < n-1 || r.Bytes/1000 > n+1 {
		t.Errorf("%d requests started, %d bytes in completed requests", n, r.Bytes)
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
	r := &report{
		incast: []incastRun{
			{Arm: baseline, X: 1, Rate: 10, Retransmits: 5, large: []float64{3, 1, 2}, small: []float64{1}},
			{Arm: baseline, X: 1, Rate: 20, Retransmits: 7, CPU: 0.95, large: []float64{100}, small: []float64{2}},
			{Arm: tuned, X: 1, Rate: 15, large: []float64{4}, small: []float64{1}},
		},
		iw:        []iwPoint{{RTT: 15, Bytes: 10_000, Baseline: harness.Spread{Median: 45, Min: 44, Max: 46}, Tuned: harness.Spread{Median: 30, Min: 29, Max: 31}}},
		handshake: &handshakeLosses{},
		learned:   []learnedPrefix{{TuneLearned: api.TuneLearned{Prefix: "10.81.20.0/24", Window: 64}}},
		cost:      cost{costNone: {10, 20}, costUnmatched: {11, 20.5}, costMany: {11, 21}, costMatched: {13, 22}},
	}
	p := r.point(baseline, 1)
	if p.Rate != 15 || p.Retransmits != 12 || p.P50Large != 2 || p.P99Large != 100 {
		t.Errorf("point: %+v", p)
	}
	if n := r.saturated(); n != 1 {
		t.Errorf("%d saturated runs, want 1", n)
	}
	b, err := harness.JSON(r)
	if err != nil {
		t.Fatal(err)
	}
	var got struct {
		Incast []struct {
			X               int
			Baseline, Tuned map[string]*float64
		}
		IW     []map[string]any           `json:"iw"`
		SYNRTO map[string]any             `json:"syn_rto"`
		Cost   map[string]json.RawMessage `json:"cost_us"`
	}
	if err := json.Unmarshal(b, &got); err != nil {
		t.Fatal(err)
	}
	if len(got.Incast) != len(incastFlows) || got.Incast[0].X != 1 {
		t.Fatalf("incast: %s", b)
	}
	for key, want := range map[string]float64{"rate_1mb_mbit": 15, "retransmits": 12, "p99_10kb_ms": 2, "p99_1mb_ms": 100} {
		if v := got.Incast[0].Baseline[key]; v == nil || *v != want {
			t.Errorf("%s: %v, want %v", key, v, want)
		}
	}
	if v, ok := got.Incast[1].Tuned["p99_1mb_ms"]; !ok || v != nil {
		t.Errorf("a value that was not measured is not null: %v", v)
	}
	if len(got.IW) != 1 || got.SYNRTO["syn_lost"] == nil {
		t.Errorf("iw %v, syn_rto %v", got.IW, got.SYNRTO)
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
		if bytes.Contains(svg, []byte(`width="NaN"`)) {
			t.Errorf("svg of %s contains a bar without length", name)
		}
	}
}
