// SPDX-License-Identifier: Apache-2.0

package main

import (
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"sockeye/internal/testenv"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

func TestReport(t *testing.T) {
	for _, test := range []struct {
		name, in, want string
		code           int
	}{
		{"passed and skipped", `{"Action":"pass","Package":"p","Test":"A"}
{"Action":"output","Package":"p","Test":"B","Output":"    b_test.go:7: kernel: no sk_lookup\n"}
{"Action":"skip","Package":"p","Test":"B"}
{"Action":"pass","Package":"p","Elapsed":1}`,
			"ok  \tp\t1.000s\nnot run: p B: kernel: no sk_lookup\n1 passed, 0 failed, 1 skipped\n", 0},
		{"skip without the kernel's reason", `{"Action":"pass","Package":"p","Test":"A"}
{"Action":"output","Package":"p","Test":"B","Output":"    b_test.go:7: too slow\n"}
{"Action":"skip","Package":"p","Test":"B"}`,
			"not run: p B: too slow\n  not a permitted reason\n1 passed, 1 failed, 0 skipped\n", 1},
		{"failed", `{"Action":"output","Package":"p","Test":"A/b","Output":"broken\n"}
{"Action":"fail","Package":"p","Test":"A/b"}
{"Action":"fail","Package":"p","Test":"A"}
{"Action":"fail","Package":"p","Elapsed":1}`,
			"--- FAIL: p A/b\nbroken\n--- FAIL: p A\nFAIL\tp\t1.000s\n0 passed, 1 failed, 0 skipped\n", 1},
		{"panicked", `{"Action":"output","Package":"p","Test":"A","Output":"panic: no\n"}
{"Action":"fail","Package":"p","Test":"A"}
{"Action":"fail","Package":"p","Elapsed":1}`,
			"--- FAIL: p A\npanic: no\nFAIL\tp\t1.000s\n0 passed, 1 failed, 0 skipped\n", 1},
		{"does not build", `{"Action":"pass","Package":"q","Test":"A"}
{"Action":"fail","Package":"p","Elapsed":0}`,
			"FAIL\tp\t0.000s\n1 passed, 0 failed, 0 skipped\n", 1},
		{"killed", `{"Action":"start","Package":"p"}
{"Action":"run","Package":"p","Test":"A"}
{"Action":"pass","Package":"p","Test":"A"}
{"Action":"run","Package":"p","Test":"B"}
{"Action":"output","Package":"p","Test":"B","Output":"half\n"}`,
			"FAIL\tp  did not end\nFAIL\tp B did not end\nhalf\n1 passed, 0 failed, 0 skipped\n", 1},
		{"nothing", "", "0 passed, 0 failed, 0 skipped\n", 1},
	} {
		var out strings.Builder
		code := report([]io.Reader{strings.NewReader(test.in)}, &out, io.Discard)
		if code != test.code || out.String() != test.want {
			t.Errorf("%s: code %d, output:\n%s\nwant code %d:\n%s",
				test.name, code, out.String(), test.code, test.want)
		}
	}
}

// Two commands run tests of one package. Each failure has the output of its command.
func TestReportOfTwo(t *testing.T) {
	half := func(test, result string) io.Reader {
		return strings.NewReader(`{"Action":"start","Package":"p"}
{"Action":"` + result + `","Package":"p","Test":"` + test + `"}
{"Action":"output","Package":"p","Output":"shuffle ` + test + `\n"}
{"Action":"` + result + `","Package":"p","Elapsed":1}`)
	}
	var out strings.Builder
	code := report([]io.Reader{half("A", "pass"), half("B", "pass")}, &out, io.Discard)
	if want := "ok  \tp\t1.000s\nok  \tp\t1.000s\n2 passed, 0 failed, 0 skipped\n"; code != 0 || out.String() != want {
		t.Errorf("code %d, output:\n%s\nwant:\n%s", code, out.String(), want)
	}
	out.Reset()
	if code := report([]io.Reader{half("A", "pass"), half("B", "fail")}, &out, io.Discard); code != 1 || strings.Contains(out.String(), "shuffle A") || !strings.Contains(out.String(), "shuffle B") {
		t.Errorf("code %d, output:\n%s", code, out.String())
	}
}

// A command that fails before its first test has no event, and is a failure.
func TestCommandFails(t *testing.T) {
	t.Setenv("TEST_EVENTS", "") // of the tests that run this one
	passes := []string{"echo", `{"Action":"pass","Package":"p","Test":"A"}`}
	for _, test := range []struct {
		second []string
		code   int
		want   string
	}{
		{passes, 0, "2 passed, 0 failed, 0 skipped\n"},
		{[]string{"false"}, 1, "1 passed, 0 failed, 0 skipped\nFAIL\tfalse: exit status 1\n"},
		{[]string{"sh", "-c", "kill -KILL $$"}, 1, "1 passed, 0 failed, 0 skipped\nFAIL\tsh -c kill -KILL $$: signal: killed\n"},
	} {
		var out strings.Builder
		code := run(append(append(passes[:2:2], "--"), test.second...), &out)
		if code != test.code || out.String() != test.want {
			t.Errorf("%q: code %d, output:\n%s\nwant:\n%s", test.second, code, out.String(), test.want)
		}
	}
	var out strings.Builder
	if code := run(append(append(passes[:2:2], "--"), "/nonexistent"), &out); code != 1 || !strings.Contains(out.String(), "no such file") {
		t.Errorf("code %d, output:\n%s", code, out.String())
	}
}

func TestEvents(t *testing.T) {
	name := filepath.Join(t.TempDir(), "events")
	t.Setenv("TEST_EVENTS", name)
	event := `{"Action":"pass","Package":"p","Test":"A","Elapsed":7}`
	if code := run([]string{"echo", event}, io.Discard); code != 0 {
		t.Errorf("code %d", code)
	}
	if text, err := os.ReadFile(name); err != nil || string(text) != event+"\n" {
		t.Errorf("%q, %v", text, err)
	}
	t.Setenv("TEST_EVENTS", name+"/below")
	var out strings.Builder
	if code := run([]string{"echo", event}, &out); code != 1 || !strings.Contains(out.String(), "not a directory") {
		t.Errorf("code %d, output:\n%s", code, out.String())
	}
}
