// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"strings"
	"testing"

	"sockeye/internal/api"
)

// TestTopRefusals checks that top says why it does not start.
func TestTopRefusals(t *testing.T) {
	h, _ := running(t)
	usage := "usage: sockeye top [--replay [DURATION]] [--service S] [--once] [flags]"
	duration := "a duration, as in 90s, 5m or 1h"
	for _, c := range []struct{ args, message, hint string }{
		{"top 5m", `unexpected argument "5m"`, usage},
		{"top --replay=5m 6m", `unexpected argument "6m"`, usage},
		{"top --replay 5m 6m", `unexpected argument "6m"`, usage},
		{"top --replay=", `--replay is ""`, duration},
		{"top --replay=yesterday", `--replay is "yesterday"`, duration},
		{"top --replay -- -1h", `--replay is "-1h"`, duration},
		{"top --once --replay", "--replay cannot be combined with --once or -o json", usage},
		{"top --once --service telemetri", `there is no service "telemetri"`, "did you mean telemetry?"},
		{"top --once --service qqqqqqqqqq", `there is no service "qqqqqqqqqq"`, "the policy has spare, telemetry"},
	} {
		h.refused(2, c.message, c.hint, nil, strings.Fields(c.args)...)
	}
	hint := "\nhint: sockeye top --once prints the lists once, and -o json prints JSON\n"
	if r := h.child(nil, "sockeye", "--run-dir", h.run, "top"); r.code != 2 || r.err != "sockeye: the standard output is not a terminal"+hint || r.out != "" {
		t.Errorf("%+v", r)
	}
	h.kill()
	if r := h.sockeye("top", "--once"); r.code != 1 || !strings.Contains(r.err, "no agent answers") {
		t.Errorf("%+v", r)
	}
}

// TestTopOnce checks the lists without a terminal, and those of one service.
func TestTopOnce(t *testing.T) {
	h, pids := running(t)
	ask("udp", "127.0.0.3")
	r := h.sockeye("top", "--once")
	for _, want := range []string{"  spare (of 2)  0 of 2 ready  ", "  telemetry (of 2)  3 of 4 ready  ", "\nslots\n", "\ndevices\n", "\ngroups\n", "\nstuck\n", " 127.0.0.3\n"} {
		if !strings.Contains("  "+r.out, want) || r.code != 0 || r.err != "" {
			t.Errorf("%q is missing: %+v", want, r)
		}
	}
	for args, want := range map[string]string{"--service ": "spare\ntelemetry\n:4\n", "--replay=": "15m\n30m\n1h\n:4\n"} {
		r := h.sockeye(append([]string{"__complete", "top"}, strings.Split(args, " ")...)...)
		if r.out != want {
			t.Errorf("completions of %s: %q, want %q", args, r.out, want)
		}
	}
	frame := must[api.Frame](h, "top", "--service", "telemetry")
	if len(frame.Services) != 1 || frame.Services[0].Slots[0].PID != pids[0] || frame.Seconds <= 0 {
		t.Errorf("%+v", frame)
	}
	if frame := must[api.Frame](h, "top"); len(frame.Services) != 2 {
		t.Errorf("%+v", frame)
	}
}
