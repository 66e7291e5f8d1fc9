// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"sockeye/internal/api"
	"sockeye/internal/cli/clitest"
	"sockeye/internal/cli/command"
	"sockeye/internal/cli/tracecmd"
	"sockeye/internal/fault"
	"sockeye/internal/trace/measure"
)

// hour returns a history of slices of 10 s that ends at noon. of creates each slice.
func hour(slices int, of func(i int) []measure.Result) api.TraceHistory {
	h := api.TraceHistory{Slices: []measure.Period{}}
	for i := range slices {
		from := noon.Add(time.Duration(i-slices) * 10 * time.Second)
		h.Slices = append(h.Slices, measure.Period{From: from, To: from.Add(10 * time.Second), Results: of(i)})
	}
	return h
}

// reporting sets the answers of the fake agent to the data of a report.
func reporting(t *testing.T) *fake {
	f := newFake(t)
	f.answers["GET /v1/trace"] = tracedStatus(telemetry())
	f.answers["GET /v1/trace/history"] = hour(6, func(int) []measure.Result { return measurements().Results[:2] })
	f.answers["GET /v1/trace/slow"] = slowMessages()
	return f
}

func TestTraceReport(t *testing.T) {
	f := reporting(t)
	file := f.dir + "/trace.html"
	r := f.at("trace", "report", file, "--since", "15m", "--select", "rule=replies")
	f.wasAsked("GET /v1/trace", "GET /v1/trace/history select=rule=replies since=15m0s", "GET /v1/trace/slow n=200 select=rule=replies since=15m0s")
	size, page := f.page(file)
	if want := file + ": 74418 messages of 2 groups, from 11:59:00 to 12:00:00; " + command.Bytes(size) + "\n"; r.out != want || r.code != 0 || r.err != "" {
		t.Errorf("got %+v, want %s", r, want)
	}
	for _, want := range []string{
		"replies 192.0.2.0/24 :1790", "the peer&#39;s window", "Rule replies does not measure send: it needs fentry, which this architecture lacks.",
		"Rule replies chooses 1/10 of the connections and 1/100 of their messages.", "Only groups with rule=replies are shown.",
	} {
		if !strings.Contains(page, want) {
			t.Errorf("%q is not in the page", want)
		}
	}

	// An existing file is kept unless the command line says to replace it.
	taken := func(message, hint string, args ...string) {
		t.Helper()
		f.asked = nil
		f.refused(2, message, hint, nil, append([]string{"trace", "report"}, args...)...)
		f.wasAsked()
	}
	taken("DIR/trace.html exists", "name another file, or use --force to replace it", file)
	f.write("trace.html", "old")
	taken("DIR/trace.html exists", "name another file, or use --force to replace it", file)
	if _, page := f.page(file); page != "old" {
		t.Errorf("content of the file: %q", page)
	}
	got := must[tracecmd.Report](f.host, "trace", "report", file, "--force")
	f.wasAsked("GET /v1/trace", "GET /v1/trace/history", "GET /v1/trace/slow n=200")
	size, page = f.page(file)
	if want := (tracecmd.Report{File: file, Bytes: size, From: noon.Add(-time.Minute), To: noon, Slices: 6, Groups: 2, Messages: 74418, Slow: 3}); got != want || strings.Contains(page, "Only groups") {
		t.Errorf("got %+v, want %+v", got, want)
	}

	// A file that is not regular is never replaced.
	if err := os.Symlink(file, f.dir+"/link"); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"/link", ""} {
		for _, force := range [][]string{{}, {"--force"}} {
			taken("DIR"+name+" exists and is not a regular file", "name another file", append(force, f.dir+name)...)
		}
	}
	taken("/dev/null exists and is not a regular file", "name another file", "/dev/null", "--force")
	taken("write DIR/none/x.html: no such file or directory", "name a file in an existing directory", f.dir+"/none/x.html")
	taken("write DIR/trace.html/x.html: not a directory", "name a file in an existing directory", file+"/x.html")

	// If the agent fails, no file is left behind.
	f.answers["GET /v1/trace/slow"] = api.Failure{Error: "no more", Code: fault.CodeFailed}
	f.refused(1, "no more", "", nil, "trace", "report", f.dir+"/new.html")
	f.refused(1, "no more", "", nil, "trace", "report", "--force", file)
	if _, again := f.page(file); again != page {
		t.Error("a failed report replaced the previous report")
	}
	f.leaves("link", "policy.yaml", "run", "trace.html")
}

// page reads a report.
func (f *fake) page(file string) (size int64, page string) {
	f.t.Helper()
	data, err := os.ReadFile(file)
	if err != nil {
		f.t.Fatal(err)
	}
	return int64(len(data)), string(data)
}

// leaves fails the test if the directory has a file that is not expected.
func (f *fake) leaves(names ...string) {
	f.t.Helper()
	files, err := os.ReadDir(f.dir)
	if err != nil {
		f.t.Fatal(err)
	}
	for _, file := range files {
		if !strings.Contains(" "+strings.Join(names, " ")+" ", " "+file.Name()+" ") {
			f.t.Errorf("%s was left", file.Name())
		}
	}
}

// TestTraceReportLittle checks reports of no data, little data, and data that is no longer kept.
func TestTraceReportLittle(t *testing.T) {
	f := reporting(t)
	f.answers["GET /v1/trace/history"] = api.TraceHistory{Slices: []measure.Period{}}
	f.answers["GET /v1/trace/slow"] = []api.TraceSlow{}
	file := f.dir + "/trace.html"
	r := f.at("trace", "report", file)
	size, _ := f.page(file)
	if want := file + ": nothing was measured; " + command.Bytes(size) + "\n"; r.out != want || r.code != 0 || r.err != "" {
		t.Errorf("got %+v, want %s", r, want)
	}

	h := hour(6, func(int) []measure.Result { return measurements().Results[3:4] })
	h.Partial = true
	f.answers["GET /v1/trace/history"] = h
	gone := telemetry()
	gone.Problem = "attach: " + clitest.Hostile
	f.answers["GET /v1/trace"] = oldKernel(gone)
	r = f.at("trace", "report", file, "--since", "1h", "--force")
	if !strings.HasSuffix(r.out, "\nearlier measurements are not available\n") || !strings.Contains(r.out, ": 3000 messages of 1 group, ") || r.code != 0 || r.err != "" {
		t.Errorf("%+v", r)
	}
	_, page := f.page(file)
	for _, want := range []string{
		"The last 1h0m0s were requested. Measurements before 11:59:00 are not available.", "Messages sent over TCP were not measured: this needs BPF timestamping, Linux 6.15 or later.",
		"Cgroup telemetry.slice: attach: a",
	} {
		if !strings.Contains(page, want) {
			t.Errorf("%q is not in the page", want)
		}
	}
	if strings.Contains(page, "\x1b") {
		t.Error("the page has an escape sequence")
	}
}

// TestTraceReportRace checks that a file that appears during the report is not replaced, and that other file errors
// name the file.
func TestTraceReportRace(t *testing.T) {
	f := reporting(t)
	file := f.dir + "/trace.html"
	f.answers["GET /v1/trace/slow"] = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		f.write("trace.html", "somebody else's")
		writeJSON(t, w, []api.TraceSlow{})
	})
	if r := f.at("trace", "report", file); r.code != 2 || r.err != "sockeye: "+file+" exists\nhint: name another file, or use --force to replace it\n" || r.out != "" {
		t.Errorf("%+v", r)
	}
	if _, page := f.page(file); page != "somebody else's" {
		t.Errorf("content of the file: %q", page)
	}
	f.leaves("policy.yaml", "run", "trace.html")
}
