// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"net/netip"
	"reflect"
	"strings"
	"testing"
	"time"

	"sockeye/internal/api"
	"sockeye/internal/cli/clitest"
	"sockeye/internal/config"
	"sockeye/internal/trace/measure"
)

// message is a message that waited for the receiver's window.
func message() measure.Sample {
	ms := time.Millisecond
	return measure.Sample{
		Ended: noon.Add(-90*time.Second + 345*ms), Group: replies("192.0.2.0/24"), Cookie: 17, Role: config.RoleAccept, Outcome: measure.Acked,
		Local: netip.MustParseAddrPort("10.0.0.1:1790"), Remote: netip.MustParseAddrPort("192.0.2.7:40000"), Key: 4294967295, Length: 65536,
		Stages: map[config.Stage]time.Duration{config.StageStack: 200 * ms, config.StageQdisc: 12_300, config.StageNIC: 3000, config.StageNetwork: 11_800_000, measure.Total: 211_812_300},
		Cwnd:   10, InFlight: 4, Outstanding: 5792, Unsent: 65536, Window: 5792, MSS: 1448, SRTT: 11 * ms, MinRTT: 10 * ms, WindowLimited: 200 * ms,
	}
}

func slowMessages() []api.TraceSlow {
	lost := message()
	lost.Ended = noon.Add(-26 * time.Hour)
	lost.Group = measure.Group{Rule: clitest.Hostile, Other: true}
	lost.Outcome = "rx_odd" + clitest.Hostile
	lost.Stages = map[config.Stage]time.Duration{config.StageQdisc: 10 * time.Millisecond, measure.Total: 100 * time.Millisecond}
	lost.Requeued = 30 * time.Millisecond
	bare := message()
	bare.Stages = map[config.Stage]time.Duration{measure.Total: 0}
	return []api.TraceSlow{
		{Sample: message(), Explanation: measure.Explanation{Stage: config.StageStack, Cause: measure.CauseWindow,
			Text:    "200 ms of 212 ms before it was sent: the peer's window was full",
			Details: []string{"stack 200 ms, qdisc 12.3 µs, network 11.8 ms", "the peer's window limited the connection for 200 ms"}}},
		{Sample: lost, Explanation: measure.Explanation{Stage: measure.Total, Cause: measure.CauseLocalDrop, Text: "dropped\x1b]52;c;eA==\x07 here", Details: []string{}}},
		{Sample: bare, Explanation: measure.Explanation{Stage: measure.Total, Cause: measure.CauseUnknown, Text: "nothing is known", Details: []string{}}},
	}
}

func TestTraceSlow(t *testing.T) {
	f := newFake(t)
	f.answers["GET /v1/trace/slow"] = slowMessages()
	f.printsGolden("trace-slow", "trace", "slow")
	f.wasAsked("GET /v1/trace/slow n=10")
	got := must[[]api.TraceSlow](f.host, "trace", "slow", "-n", "3", "--since", "90s", "--select", "arm=treated")
	f.wasAsked("GET /v1/trace/slow n=3 select=arm=treated since=1m30s")
	if len(got) != 3 || !reflect.DeepEqual(got[0], slowMessages()[0]) {
		t.Errorf("%+v", got)
	}

	// The complete explanation of a message.
	m := message()
	e := measure.Explain(&m)
	f.answers["GET /v1/trace/slow"] = []api.TraceSlow{{Sample: m, Explanation: e}}
	r := f.at("trace", "slow")
	for _, want := range append([]string{e.Text}, e.Details...) {
		if !strings.Contains(r.out, " "+want+"\n") {
			t.Errorf("%q is not in\n%s", want, r.out)
		}
	}
}
