// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"sockeye/internal/api"
	"sockeye/internal/cli/clitest"
	"sockeye/internal/fault"
	"sockeye/internal/trace/measure"
)

// lines answers with lines, each sent at once, and then calls last or ends the response.
func lines(t *testing.T, last func(w http.ResponseWriter, r *http.Request), all ...any) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		for _, line := range all {
			if err := json.NewEncoder(w).Encode(line); err != nil {
				t.Error(err)
			}
		}
		w.(http.Flusher).Flush()
		if last != nil {
			last(w, r)
		}
	}
}

// untilGone waits until the client has disconnected.
func untilGone(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }

// breakOff closes the connection, like an agent that exits.
func breakOff(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }

// numbered returns a message with a distinct number.
func numbered(key int) api.TraceSampleLine {
	s := message()
	s.Key = uint32(key)
	return api.TraceSampleLine{Sample: &s}
}

func TestTraceSamples(t *testing.T) {
	f := newFake(t)
	f.answers["GET /v1/trace"] = tracedStatus(telemetry())
	samples := func(last func(http.ResponseWriter, *http.Request), all ...any) {
		f.answers["GET /v1/trace/samples"] = lines(t, last, all...)
		f.asked = nil
	}
	keys := func(out string) (all []uint32) {
		t.Helper()
		for line := range strings.Lines(out) {
			d := json.NewDecoder(strings.NewReader(line))
			d.DisallowUnknownFields()
			var s measure.Sample
			if err := d.Decode(&s); err != nil || d.More() {
				t.Errorf("%v in %q", err, line)
			}
			all = append(all, s.Key)
		}
		return all
	}

	// The command ends after the requested number of messages.
	samples(untilGone, numbered(1), numbered(2), api.TraceSampleLine{}, numbered(3))
	r := f.at("trace", "samples", "-o", "jsonl", "--count", "2", "--select", "rule=replies", "--cgroup", "/lab", "--buffer", "3MB")
	f.wasAsked("GET /v1/trace cgroup=/lab", "GET /v1/trace/samples buffer=4194304 cgroup=/lab select=rule=replies")
	if got := fmt.Sprint(keys(r.out)); got != "[1 2]" || r.code != 0 || r.err != "" {
		t.Errorf("%s: %+v", got, r)
	}
	// JSON output, and an end by time.
	r = f.at("trace", "samples", "-o", "json", "--for", "1s")
	if got := fmt.Sprint(keys(r.out)); got != "[1 2 3]" || r.code != 0 || r.err != "" {
		t.Errorf("%s: %+v", got, r)
	}

	// Text output.
	odd := message()
	odd.Outcome, odd.Group.Rule, odd.Stages = measure.Unacknowledged, clitest.Hostile, nil
	samples(untilGone, numbered(1), api.TraceSampleLine{Sample: &odd})
	f.printsGolden("trace-samples", "trace", "samples", "--count", "2")
	f.wasAsked("GET /v1/trace", "GET /v1/trace/samples")

	// SIGINT ends the command.
	ctx, stop := context.WithTimeout(context.Background(), 20*time.Second)
	defer stop()
	samples(func(w http.ResponseWriter, r *http.Request) {
		stop()
		untilGone(w, r)
	}, numbered(1))
	if r := f.during(ctx, "trace", "samples", "-o", "jsonl"); r.code != 0 || r.err != "" {
		t.Errorf("%+v", r)
	}

	// Lost messages are reported once, at the end, and determine the exit code.
	samples(untilGone, api.TraceSampleLine{Lost: 3}, numbered(1), api.TraceSampleLine{Lost: 12}, numbered(2))
	r = f.at("trace", "samples", "-o", "jsonl", "--count", "2")
	if got := fmt.Sprint(keys(r.out)); got != "[1 2]" || r.code != 1 ||
		r.err != "sockeye: 12 messages were lost: the buffer was full\nhint: use a larger --buffer, or choose fewer messages in the policy\n" {
		t.Errorf("%s: %+v", got, r)
	}
	samples(untilGone, api.TraceSampleLine{Lost: 1})
	if r := f.at("trace", "samples", "--for", "1s"); r.code != 1 || !strings.HasPrefix(r.err, "sockeye: 1 message was lost: the buffer was full\n") || r.out != "" {
		t.Errorf("%+v", r)
	}

	// If the agent exits, the command fails.
	for _, last := range []func(http.ResponseWriter, *http.Request){nil, breakOff} {
		samples(last, numbered(1))
		r := f.at("trace", "samples", "-o", "jsonl")
		if got := fmt.Sprint(keys(r.out)); got != "[1]" || r.code != 1 || !strings.HasPrefix(r.err, "sockeye: the answer of the agent is incomplete: ") || !strings.HasSuffix(r.err, "\nhint: the agent may have exited; see sockeye status\n") {
			t.Errorf("%s: %+v", got, r)
		}
	}
	samples(untilGone, "no object")
	if r := f.at("trace", "samples"); r.code != 1 || !strings.HasPrefix(r.err, "sockeye: read agent's answer: ") {
		t.Errorf("%+v", r)
	}

	// The agent's own error passes through.
	f.answers["GET /v1/trace/samples"] = api.Failure{Error: "no memory for the buffer", Hint: "take a smaller one", Code: fault.CodeUsage}
	f.refused(2, "no memory for the buffer", "take a smaller one", nil, "trace", "samples", "--buffer", "256MB")
}

// TestTraceSamplesPipe checks that the command ends when its reader closes the pipe, as head does.
func TestTraceSamplesPipe(t *testing.T) {
	f := newFake(t)
	f.mu.Lock()
	f.answers["GET /v1/trace"] = tracedStatus(telemetry())
	f.answers["GET /v1/trace/samples"] = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		for n := 0; r.Context().Err() == nil; n++ {
			if json.NewEncoder(w).Encode(numbered(n)) != nil {
				return
			}
		}
	})
	f.mu.Unlock()
	cmd := process("sockeye", "--run-dir", f.run, "trace", "samples", "-o", "jsonl")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	var errs strings.Builder
	cmd.Stderr = &errs
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer cmd.Process.Kill()
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil || !strings.Contains(line, `"key":0`) {
		t.Errorf("%v: %q", err, line)
	}
	out.Close()
	if err := cmd.Wait(); err != nil || errs.Len() > 0 {
		t.Errorf("%v, %s", err, errs.String())
	}
}
