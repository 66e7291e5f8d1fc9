// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"bytes"
	"encoding/json"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/bench/harness"
	"sockeye/internal/config"
	"sockeye/internal/testenv"
)

// TestMain also runs the ends of loads. An end blocks its processor in system calls, so the two ends cannot be
// goroutines of one process.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && Benchmark.Workers[os.Args[1]] != nil {
		os.Exit(harness.RunCommand(os.Args[1:], Benchmark))
	}
	os.Exit(testenv.Run(m))
}

type testEnd struct {
	pid   int
	tasks *json.Encoder
	lines *json.Decoder
}

func startEnd(t *testing.T) testEnd {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe", role)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	stderr := &bytes.Buffer{}
	cmd.Stderr = stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if _ = cmd.Wait(); stderr.Len() > 0 {
			t.Errorf("stderr of an end: %s", stderr)
		}
	})
	return testEnd{cmd.Process.Pid, json.NewEncoder(in), json.NewDecoder(out)}
}

func (e testEnd) tell(t *testing.T, task traceTask) {
	t.Helper()
	if err := e.tasks.Encode(task); err != nil {
		t.Fatal(err)
	}
}

func (e testEnd) hear(t *testing.T, into any) {
	t.Helper()
	if err := e.lines.Decode(into); err != nil {
		t.Fatal(err)
	}
}

func TestTraceWorkers(t *testing.T) {
	var cpus unix.CPUSet
	if err := unix.SchedGetaffinity(0, &cpus); err != nil {
		t.Fatal(err)
	}
	cpu := 0
	for !cpus.IsSet(cpu) {
		cpu++
	}
	free, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := free.Addr().(*net.TCPAddr).AddrPort()
	free.Close()
	client, server := startEnd(t), startEnd(t)
	for _, load := range traceLoads {
		for _, stamped := range []bool{false, true} {
			name := fmt.Sprintf("%s, stamped %t", load.name, stamped)
			task := traceTask{CPU: cpu, Message: load.message, Answers: load.answers, Stamped: stamped,
				Warmup: 10 * time.Millisecond, Duration: 50 * time.Millisecond, PIDs: []int{client.pid, server.pid}}
			accepting := task
			accepting.Listen = address
			server.tell(t, accepting)
			server.hear(t, &struct{}{})
			task.Target = address
			client.tell(t, task)
			var pieces []piece
			client.hear(t, &pieces)
			var r piece
			for _, p := range pieces {
				if p.Messages == 0 {
					t.Errorf("%s: empty piece: %+v", name, pieces)
				}
				r.Messages += p.Messages
				r.Elapsed += p.Elapsed
				r.CPU += p.CPU
				r.Stamps += p.Stamps
			}
			if r.Messages == 0 || r.Elapsed < task.Duration {
				t.Errorf("%s: %+v", name, r)
			}
			if r.CPU <= 0 || r.CPU > r.Elapsed*3/2 {
				t.Errorf("%s: %v of CPU time in %v on one CPU", name, r.CPU, r.Elapsed)
			}
			if stamped != (r.Stamps >= r.Messages) || !stamped && r.Stamps > 0 {
				t.Errorf("%s: %d timestamps for %d messages", name, r.Stamps, r.Messages)
			}
			end := map[string]any{"": nil}
			server.hear(t, &end)
		}
	}
}

func TestTraceVisits(t *testing.T) {
	visit := map[string]int{}
	for i, arms := range visits {
		states := map[string]bool{}
		for _, name := range arms {
			at := slices.IndexFunc(traceArms, func(a traceArm) bool { return a.name == name })
			if at < 0 {
				t.Fatalf("arm %s does not exist", name)
			}
			states[traceArms[at].state] = true
			if _, ok := visit[name]; ok {
				t.Errorf("%s is visited twice", name)
			}
			visit[name] = i
		}
		if len(states) != 1 {
			t.Errorf("visit %d needs several states: %v", i, states)
		}
	}
	if len(visit) != len(traceArms) {
		t.Errorf("%d arms are visited, want %d", len(visit), len(traceArms))
	}
	if visit[armOff] == visit[armOffAgain] {
		t.Error("off and off, again are in the same visit")
	}
}

func TestTracePolicies(t *testing.T) {
	for _, a := range traceArms {
		if a.state == traceOff {
			if a.traced {
				t.Errorf("no rule traces %s", a.name)
			}
			continue
		}
		if others[a.state] != nil {
			continue // without an agent
		}
		policy, err := config.Parse(tracePolicy(a.state, "/lab/"+tracedGroup), "policy.yaml")
		if err != nil {
			t.Fatal(err)
		}
		if i := slices.IndexFunc(policy.Trace, func(r config.TraceRule) bool { return r.Cgroup != "/lab/traced" }); i >= 0 {
			t.Errorf("%s: a rule for %s", a.name, policy.Trace[i].Cgroup)
		}
		first := slices.IndexFunc(policy.Trace, func(r config.TraceRule) bool {
			return r.Match.Ports == nil || slices.ContainsFunc(r.Match.Ports, func(p config.PortRange) bool { return int(p.First) <= a.port && a.port <= int(p.Last) })
		})
		if !a.traced {
			continue
		}
		if first < 0 {
			t.Errorf("%s: no rule for port %d", a.name, a.port)
			continue
		}
		rule := policy.Trace[first]
		if want := map[string]int{armSampled: 100, armEvery: 1, armRX: 100}[a.name]; rule.Messages.OneIn != want || rule.Connections != 1 {
			t.Errorf("%s: 1/%d messages of 1/%d connections", a.name, rule.Messages.OneIn, rule.Connections)
		}
		if received := slices.Contains(rule.Stages, config.StageReader) && slices.Contains(rule.Stages, config.StageRXStack); received != (a.state == rX) {
			t.Errorf("%s: stages %v", a.name, rule.Stages)
		}
	}
}

func traceRounds(rates ...map[string]float64) (rounds []traceRound) {
	for _, arms := range rates {
		round := traceRound{}
		for arm, rate := range arms {
			s := sample{Rate: rate, CPU: 1e6 / rate, Share: 1}
			round[arm] = map[string]sample{loadStream: s, loadRR: s}
		}
		rounds = append(rounds, round)
	}
	return rounds
}

func TestTraceReport(t *testing.T) {
	r := &report{
		rounds: traceRounds(
			map[string]float64{armOff: 90, armOffAgain: 110, armOthers: 100, armSampled: 99, armEvery: 95, armStamping: 80},
			map[string]float64{armOff: 200, armOffAgain: 200, armOthers: 200, armSampled: 198, armEvery: 190, armStamping: 160},
			map[string]float64{armOff: 50, armOffAgain: 50, armOthers: 50, armSampled: 49.5, armEvery: 47.5, armStamping: 40},
		),
		programs: []program{{armEvery, loadStream, "trace_sockops", 5, 200}},
	}
	if got := r.ratios(armOffAgain, measures[0]); got[0] <= 1.2 || got[1] != 1 {
		t.Errorf("ratio of off, again to off: %v", got)
	}
	b, err := harness.JSON(r)
	if err != nil {
		t.Fatal(err)
	}
	d := json.NewDecoder(bytes.NewReader(b))
	for _, want := range []string{
		"{", "throughput_ratio", "{", "others", "1", "sampled_100", "0.99", "every", "0.95", "rx", "<nil>", "}",
		"rr_ratio", "{", "others", "1", "sampled_100", "0.99", "every", "0.95", "rx", "<nil>", "}",
		"cpu_ratio", "{", "others", "1", "sampled_100", "1.0101", "every", "1.0526", "rx", "<nil>", "}",
	} {
		token, err := d.Token()
		if err != nil {
			t.Fatal(err)
		}
		if got := fmt.Sprint(token); got != want {
			t.Fatalf("got %s, want %s in %s", got, want, b)
		}
	}
	text := harness.Text(r)
	for _, want := range []string{"0.950 [0.950 .. 0.950]", "0.97: missed", "0.99: met", "trace_sockops  5.000", "none"} {
		if !strings.Contains(text, want) {
			t.Errorf("the report does not contain %q:\n%s", want, text)
		}
	}
	for d := xml.NewDecoder(bytes.NewReader(r.chart().SVG())); ; {
		if _, err := d.Token(); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatalf("svg: %v", err)
		}
	}
}
