// SPDX-License-Identifier: Apache-2.0

package continuity

import (
	"encoding/json"
	"encoding/xml"
	"errors"
	"io"
	"os"
	"strings"
	"testing"

	"sockeye/bench/harness"
	"sockeye/internal/testenv"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

func TestReport(t *testing.T) {
	r := &report{Options: options{Devices: 60, Rounds: 2}}
	for round := range 2 {
		r.runs = append(r.runs,
			measurement{Scenario: "resize", Arm: "plain", Round: round, Sent: 1000, Lost: 5, Split: 50 + round, SplitEver: 55, SplitMS: 5000},
			measurement{Scenario: "resize", Arm: "keep", Round: round, Sent: 1000, WithoutRoutes: 100, Split: 10 - round, SplitEver: 10, SplitMS: 900 + float64(round)},
			measurement{Scenario: "resize", Arm: "sockeye", Round: round, Sent: 1000, SplitEver: 7, SplitMS: 3.5, Needless: round},
		)
	}
	r.memory = []memory{
		{Cold: peak{Queue: 30 * megabyte}, Move: peak{Queue: 20 * megabyte}, measurement: measurement{Arm: "unpaced"}},
		{Cold: peak{Queue: 3 * megabyte}, Move: peak{Queue: 2 * megabyte}, measurement: measurement{Arm: "paced"}},
	}
	r.runs = append(r.runs,
		measurement{Scenario: "restart", Arm: "plain", Sent: 100, Undecodable: 30, WithoutRoutes: 40, Undecoded: 1.5},
		measurement{Scenario: "restart", Arm: "reject", Sent: 100, Lost: 20, InProcess: 1, Undecodable: 10, Retries: 7},
		measurement{Scenario: "restart", Arm: "sockeye", Sent: 100, InProcess: 2, Undecoded: 0.5},
	)
	r.templates = &templateCost{IPFIX: harness.Distribution{Median: 8, Low: 7.5, High: 9}}
	r.skip("drain", "no")
	r.skip("drain", "no")
	b, err := harness.JSON(r)
	if err != nil {
		t.Fatal(err)
	}
	var got struct {
		Resize map[string]*outcome `json:"resize"`
		Drain  map[string]*outcome `json:"drain"`
		Memory map[string]struct {
			Move peak   `json:"move"`
			Arm  string `json:"arm"`
		} `json:"memory"`
		SplitMS  float64                       `json:"split_ms_max"`
		Restart  map[string]map[string]float64 `json:"restart"`
		Upgrade  map[string]*outcome           `json:"upgrade_member"`
		Template float64                       `json:"template_ns_per_datagram"`
	}
	if err := json.Unmarshal(b, &got); err != nil {
		t.Fatal(err)
	}
	if want := (outcome{Sent: 2000, Lost: 10, Split: 51, SplitEver: 55, SplitMS: 5000, Rounds: 2}); *got.Resize["plain"] != want {
		t.Errorf("plain: %+v, want %+v", got.Resize["plain"], want)
	}
	if want := (outcome{Sent: 2000, WithoutRoutes: 200, Split: 10, SplitEver: 10, SplitMS: 901, Rounds: 2}); *got.Resize["keep"] != want {
		t.Errorf("keep: %+v, want %+v", got.Resize["keep"], want)
	}
	if o, ok := got.Drain["sockeye"]; !ok || o != nil || got.SplitMS != 3.5 || got.Memory["paced"].Move.Queue != 2*megabyte || got.Memory["paced"].Arm != "paced" {
		t.Errorf("%s", b)
	}
	for arm, want := range map[string]map[string]float64{
		"plain":   {"lost": 0, "undecodable": 30, "without_routes": 40, "first_decoded_s": 1.5, "syns_refused": 0},
		"reject":  {"lost": 20, "undecodable": 10, "without_routes": 0, "first_decoded_s": 0, "syns_refused": 7, "in_process": 1},
		"sockeye": {"lost": 0, "undecodable": 0, "without_routes": 0, "first_decoded_s": 0.5, "syns_refused": 0, "in_process": 2},
	} {
		for name, value := range want {
			if v, ok := got.Restart[arm][name]; !ok || v != value {
				t.Errorf("restart, %s: %s is %v, want %v", arm, name, v, value)
			}
		}
	}
	if o, ok := got.Upgrade["sockeye"]; !ok || o != nil || got.Template != 8 {
		t.Errorf("%s", b)
	}
	text := harness.Text(r)
	for _, want := range []string{
		"resize: 4 to 5 slots, and 5 to 3\n", "Sockeye, on_move: keep   10 of 60       901.0 ms       0 of 2000",
		"datagrams lost                 0.0  at most 0: met\n", "sessions closed needlessly     1.0  at most 0: missed\n",
		"longest split of a device, ms  3.5  at most 100: met\n", "not run: drain: no\n\nDuration",
		"pace: {devices: 4}  3.0 MB",
		"Sockeye, reject, no templates  20 of 100     1               10           0               0.00 s             7 ",
		"8.0 [7.5 .. 9.0] ns for an IPFIX datagram", "template filter, ns            8.0  at most 10: met\n",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
	for _, chart := range r.Charts() {
		for d := xml.NewDecoder(strings.NewReader(string(chart.SVG()))); ; {
			if _, err := d.Token(); errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				t.Fatalf("svg: %v", err)
			}
		}
	}
}
