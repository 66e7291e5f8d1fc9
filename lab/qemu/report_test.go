// SPDX-License-Identifier: Apache-2.0

package qemu

import (
	"io"
	"strings"
	"testing"
)

func TestReport(t *testing.T) {
	const passing = `{"Action":"run","Test":"TestA"}{"Action":"pass","Test":"TestA"}`
	skip := func(reason string) string {
		return passing + `{"Action":"run","Test":"TestS"}{"Action":"output","Test":"TestS","Output":"=== RUN   TestS\n"}` +
			`{"Action":"output","Test":"TestS","Output":"    s_test.go:1: earlier\n"}` +
			`{"Action":"output","Test":"TestS","Output":"    s_test.go:2: ` + reason + `\n"}{"Action":"skip","Test":"TestS"}`
	}
	for _, test := range []struct {
		name, events, end string
		want              [3]int // passed, skipped, failed
		line              string
	}{
		{"pass", passing, "", [3]int{1, 0, 0}, ""},
		{"nothing", "", "", [3]int{0, 0, 1}, "failed  no test ran"},
		{"skip", skip("kernel: no migration"), "", [3]int{1, 1, 0}, "skipped p.TestS: kernel: no migration"},
		{"skip with version", skip("not supported (requires >= v5.14)"), "", [3]int{1, 1, 0}, "skipped p.TestS: not supported (requires >= v5.14)"},
		{"skip without reason", skip("too slow"), "", [3]int{1, 0, 1}, `failed  p.TestS: skipped without a permitted reason: "too slow"`},
		{"fail", passing + `{"Action":"run","Test":"TestB"}{"Action":"fail","Test":"TestB"}`, "exit status 1", [3]int{1, 0, 1}, "failed  p.TestB"},
		{"output of a failure", `{"Action":"run","Test":"TestB"}{"Action":"output","Test":"TestB","Output":"=== RUN   TestB\n"}` +
			`{"Action":"output","Test":"TestB","Output":"    b_test.go:1: 3 lost\n"}{"Action":"output","Test":"TestB","Output":"        of 5\n"}{"Action":"fail","Test":"TestB"}`,
			"exit status 1", [3]int{0, 0, 1}, "failed  p.TestB\n            b_test.go:1: 3 lost\n                of 5"},
		{"no end", passing + `{"Action":"run","Test":"TestB"}`, "exit status 2", [3]int{1, 0, 1}, "failed  p.TestB"},
		{"benchmark", `{"Action":"run","Test":"BenchmarkA"}{"Action":"output","Test":"BenchmarkA","Output":"BenchmarkA \t 1\t 8 ns/op\n"}`, "", [3]int{1, 0, 0}, ""},
		{"failed benchmark", `{"Action":"run","Test":"BenchmarkA"}{"Action":"output","Test":"BenchmarkA","Output":"    a_test.go:1: lost\n"}{"Action":"fail","Test":"BenchmarkA"}`,
			"exit status 1", [3]int{0, 0, 1}, "failed  p.BenchmarkA\n            a_test.go:1: lost"},
		{"late crash", passing, "exit status 2", [3]int{1, 0, 1}, "failed  p: exit status 2"},
		{"subtests", `{"Action":"run","Test":"T"}{"Action":"run","Test":"T/a"}{"Action":"fail","Test":"T/a"}` +
			`{"Action":"run","Test":"T/b"}{"Action":"pass","Test":"T/b"}{"Action":"fail","Test":"T"}`, "exit status 1", [3]int{1, 0, 1}, "failed  p.T/a"},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := NewReport("")
			r.out = io.Discard
			if err := r.read("p", strings.NewReader(test.events)); err != nil {
				t.Fatal(err)
			}
			r.close("p", test.end)
			passed, skipped, failed, lines := r.count()
			if got := [3]int{passed, skipped, failed}; got != test.want {
				t.Errorf("counts %v, want %v", got, test.want)
			}
			if got := strings.Join(lines, "\n"); got != test.line {
				t.Errorf("lines %q, want %q", got, test.line)
			}
			if r.Failed() != (test.want[2] > 0) {
				t.Errorf("failed is %v", r.Failed())
			}
		})
	}
}
