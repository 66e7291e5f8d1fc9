// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"encoding/json"
	"encoding/xml"
	"errors"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/api"
	"sockeye/internal/cli/clitest"
	"sockeye/internal/cli/command"
	"sockeye/internal/cli/tracecmd"
	"sockeye/internal/trace/measure"
)

// saved saves the arm of a trial as a host would that has only this arm.
func saved(t *testing.T, f *fake, name, arm string, before time.Duration) string {
	t.Helper()
	h := twoArms(12)
	for i := range h.Slices {
		p := &h.Slices[i]
		p.From, p.To = p.From.Add(-before), p.To.Add(-before)
		for _, r := range p.Results {
			if r.Group.Arm == arm {
				r.Group.Arm, r.Group.TuneRule = "", ""
				p.Results = []measure.Result{r}
				break
			}
		}
	}
	f.answers["GET /v1/trace/history"] = h
	path := f.dir + "/" + name
	if r := f.at("trace", "save", path); r.code != 0 {
		t.Fatalf("%+v", r)
	}
	return path
}

func TestTraceSave(t *testing.T) {
	f := newFake(t)
	f.answers["GET /v1/trace"] = tracedStatus(telemetry())
	f.answers["GET /v1/trace/history"] = hour(6, func(int) []measure.Result { return measurements().Results[:2] })
	file := f.dir + "/trace.json"
	r := f.at("trace", "save", file, "--since", "15m", "--select", "rule=replies")
	f.wasAsked("GET /v1/trace", "GET /v1/trace/history select=rule=replies since=15m0s")
	size, content := f.page(file)
	if want := file + ": 74418 messages of 2 groups, from 11:59:00 to 12:00:00; " + command.Bytes(size) + "\n"; r.out != want || r.code != 0 || r.err != "" {
		t.Errorf("got %+v, want %s", r, want)
	}
	var got tracecmd.SavedTrace
	if err := json.Unmarshal([]byte(content), &got); err != nil {
		t.Fatal(err)
	}
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	if got.Format != "sockeye-trace" || got.Number != 1 || got.Host != host || got.Kernel == "" || got.Select != "rule=replies" || !got.Saved.Equal(noon) || len(got.Slices) != 6 || len(got.Slices[5].Results) != 2 {
		t.Errorf("%+v", got)
	}
	f.refused(2, "DIR/trace.json exists", "name another file, or use --force to replace it", nil, "trace", "save", file)
	if s := must[tracecmd.Saved](f.host, "trace", "save", file, "--force"); s != (tracecmd.Saved{File: file, Bytes: s.Bytes, From: noon.Add(-time.Minute), To: noon, Slices: 6, Groups: 2, Messages: 74418}) {
		t.Errorf("%+v", s)
	}

	// Without measurements, no file is left behind.
	f.answers["GET /v1/trace/history"] = api.TraceHistory{Slices: []measure.Period{}}
	f.refused(1, "nothing was measured in this time", "sockeye trace shows the rules and their groups", nil, "trace", "save", f.dir+"/new.json")
	f.refused(1, "no message of rule=x was measured in this time", "sockeye trace shows the rules and their groups", nil, "trace", "save", f.dir+"/new.json", "--select", "rule=x")
	f.leaves("policy.yaml", "run", "trace.json")
}

func TestTraceCompareSaved(t *testing.T) {
	f := newFake(t)
	f.answers["GET /v1/trace"] = tracedStatus(telemetry())
	a, b := saved(t, f, "a.json", "control", 48*time.Hour), saved(t, f, "b.json", "treated", 0)

	// The agent is not asked.
	f.asked = nil
	picture := f.dir + "/ab.svg"
	r := f.at("trace", "compare", a, b, "--select", "rule=replies", "--svg", picture)
	f.wasAsked()
	out := gaps.ReplaceAllString(r.out, "  ")
	for _, want := range []string{
		"A: " + a + ", ", ", rule=replies, 2026-03-12 11:58:00 to 2026-03-12 12:00:00: 12000 messages in 12 slices of 10 s\n", "B: " + b + ", ", ", rule=replies, 11:58:00 to 12:00:00: ",
		"\nCDF  10 %  25 %  50 %  75 %  90 %  99 %  99.9 %\n", "\nstack  A  ", "\nnetwork  A  ", "B is ", "\nwrote " + picture + "\n",
	} {
		if !strings.Contains(out, want) {
			t.Errorf("%q is not in\n%s", want, r.out)
		}
	}
	if r.code != 0 || r.err != "" {
		t.Errorf("%+v", r)
	}
	clitest.PrintableOnly(t, r.out)
	_, drawing := f.page(picture)
	d := xml.NewDecoder(strings.NewReader(drawing))
	for {
		if _, err := d.Token(); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatalf("%v in\n%s", err, drawing)
		}
	}
	if strings.Count(drawing, ">stack<") != 1 || strings.Count(drawing, `stroke-width="1.8"`) != 4 {
		t.Errorf("two stages have no panel, or no two curves each:\n%s", drawing)
	}
	f.refused(2, "DIR/ab.svg exists", "name another file, or use --force to replace it", nil, "trace", "compare", a, b, "--svg", picture)

	c := must[tracecmd.Compared](f.host, "trace", "compare", a, b, "--svg", picture, "--force")
	if c.A.File != a || c.B.File != b || c.A.Host == "" || c.A.Kernel == "" || c.Chart != picture || len(c.CDF) != 2 {
		t.Errorf("%+v", c)
	}
	for _, stage := range c.CDF {
		for _, side := range [][]struct {
			of   string
			last float64
		}{{{"a", stage.A[len(stage.A)-1].Share}, {"b", stage.B[len(stage.B)-1].Share}}} {
			for _, s := range side {
				if s.last != 1 {
					t.Errorf("distribution of %s of %s ends at %v", stage.Stage, s.of, s.last)
				}
			}
		}
	}

	const save = "save the measurements with sockeye trace save FILE"
	good, err := os.ReadFile(a)
	if err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string]string{
		"empty.json": "", "other.json": `{"slices": []}`, "text.json": "stack 1 ms\n", "new.json": `{"format": "sockeye-trace", "format_version": 2, "version": "9.0"}`,
		"cut.json": string(good[:len(good)-20]), "damaged.json": strings.Replace(string(good), `"slices":[{`, `"slices":[{"from":7,`, 1),
		"none.json": `{"format": "sockeye-trace", "format_version": 1, "slices": []}`,
	} {
		f.write(name, content)
	}
	if err := os.Symlink("a.json", f.dir+"/link.json"); err != nil {
		t.Fatal(err)
	}
	f.refused(2, "the name DIR/a.txt does not end in .json", "trace compare reads files whose names end in .json", nil, "trace", "save", f.dir+"/a.txt")
	if err := unix.Mkfifo(f.dir+"/fifo.json", 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ args, message, hint string }{
		{"DIR/a.json DIR/fifo.json", "DIR/fifo.json is not a regular file", save},
		{"DIR/a.json DIR/no.json", "read saved trace: open DIR/no.json: no such file or directory", save},
		{"DIR/a.json DIR/empty.json", "DIR/empty.json is empty", save},
		{"DIR/other.json DIR/a.json", "DIR/other.json is not a saved trace", save},
		{"DIR/a.json DIR/text.json", "DIR/text.json is not a saved trace", save},
		{"DIR/a.json DIR/new.json", "DIR/new.json has format 2 of Sockeye 9.0; this version reads format 1",
			"compare the files with the newer of the two versions, or save the measurements again"},
		{"DIR/a.json DIR/none.json", "DIR/none.json has no measurements", "save the measurements again, after messages were sent"},
		{"DIR/a.json DIR/link.json", "both sides are the same", "name two different files"},
		{"DIR/a.json DIR/b.json --svg DIR/b.json --force", "--svg DIR/b.json is a file that is compared", "name another file"},
		{"DIR/a.json DIR/a.json", "both sides are the same", "name two different files"},
		{"DIR/a.json rule=x", "rule=x is not a file of trace save", "compare two files with names that end in .json, or two groups"},
		{"DIR/a.json DIR/b.json --svg=", "--svg names no file", "usage: sockeye trace compare {SELECT-A SELECT-B | A.json B.json} [flags]"},
		{"DIR/a.json DIR/b.json --trial x", "--trial and files are mutually exclusive", "select groups of the files with --select"},
		{"DIR/a.json DIR/b.json --period-a -10m..-5m --period-b -5m..", "--period-a and files are mutually exclusive", "select groups of the files with --select"},
		{"DIR/a.json DIR/b.json --since 5m", "--since and files are mutually exclusive", "use trace save --since"},
		{"DIR/a.json DIR/b.json --select rule=x", `DIR/a.json: no measured group matches "rule=x"`, "groups: replies"},
	} {
		f.refused(2, c.message, c.hint, nil, append([]string{"trace", "compare"}, strings.Fields(strings.ReplaceAll(c.args, "DIR", f.dir))...)...)
	}
	for _, name := range []string{"damaged.json", "cut.json"} {
		if r := f.at("trace", "compare", a, f.dir+"/"+name); r.code != 2 || !strings.HasPrefix(r.err, "sockeye: "+f.dir+"/"+name+" is damaged at byte ") {
			t.Errorf("%+v", r)
		}
	}
}
