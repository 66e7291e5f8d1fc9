// SPDX-License-Identifier: Apache-2.0

package dist_test

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v4"

	"sockeye/internal/testenv"
)

const rulesFile = "prometheus/sockeye.rules.yml"

// alert is a rule of Prometheus.
type alert struct {
	Alert       string            `yaml:"alert"`
	Expr        string            `yaml:"expr"`
	For         string            `yaml:"for"`
	Labels      map[string]string `yaml:"labels"`
	Annotations map[string]string `yaml:"annotations"`
}

func readFile(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// alerts returns the alerts of the rules.
func alerts(t *testing.T) (list []alert) {
	t.Helper()
	var rules struct {
		Groups []struct{ Rules []alert } `yaml:"groups"`
	}
	if err := yaml.Unmarshal([]byte(readFile(t, rulesFile)), &rules); err != nil {
		t.Fatal(err)
	}
	for _, g := range rules.Groups {
		list = append(list, g.Rules...)
	}
	if len(list) < 20 {
		t.Fatalf("%d alerts", len(list))
	}
	return list
}

// TestRules runs the tests of the alerts with promtool(1). Each alert has a host for which it fires, one for which it does
// not, and a time at which it does not fire yet.
func TestRules(t *testing.T) {
	const tests = "testdata/alerts_test.yml"
	for _, arguments := range [][]string{{"check", "rules", "--lint-fatal", rulesFile}, {"test", "rules", tests}} {
		if out, err := exec.Command("promtool", arguments...).CombinedOutput(); err != nil {
			t.Errorf("promtool %v: %v\n%s", arguments, err, out)
		}
	}
	var file struct {
		Tests []struct {
			Alerts []struct {
				Name string `yaml:"alertname"`
				Fire []any  `yaml:"exp_alerts"`
			} `yaml:"alert_rule_test"`
		} `yaml:"tests"`
	}
	if err := yaml.Unmarshal([]byte(readFile(t, tests)), &file); err != nil {
		t.Fatal(err)
	}
	fires, quiet := make(map[string]bool), make(map[string]bool)
	for _, test := range file.Tests {
		for _, a := range test.Alerts {
			if len(a.Fire) > 0 {
				fires[a.Name] = true
			} else {
				quiet[a.Name] = true
			}
		}
	}
	tested := 0
	for _, a := range alerts(t) {
		if fires[a.Alert] && quiet[a.Alert] {
			tested++
		} else {
			t.Errorf("%s: no case in which %s fires (%v), or none in which it does not (%v)", tests, a.Alert, fires[a.Alert], quiet[a.Alert])
		}
	}
	testenv.Record(t, "watch.json", map[string]any{"alerts_tested": tested})
}

// TestRunbook checks that each alert has a severity, texts and a section of the runbook, that there are no other sections, and
// that each section says what the alert means, what to look at, and what to do.
func TestRunbook(t *testing.T) {
	const runbook = "../docs/runbook.md"
	sections := make(map[string]string)
	for _, part := range regexp.MustCompile(`(?m)^## `).Split(readFile(t, runbook), -1)[1:] {
		name, text, _ := strings.Cut(part, "\n")
		sections[name] = text
	}
	for _, a := range alerts(t) {
		if !slices.Contains([]string{"critical", "warning", "info"}, a.Labels["severity"]) {
			t.Errorf("%s: severity %q", a.Alert, a.Labels["severity"])
		}
		if a.Annotations["summary"] == "" || !strings.Contains(a.Annotations["description"], `"`) {
			t.Errorf("%s has no summary, or a description without a command: %q", a.Alert, a.Annotations)
		}
		if want := "file:///usr/share/doc/sockeye/runbook.md#" + strings.ToLower(a.Alert); a.Annotations["runbook_url"] != want {
			t.Errorf("%s: runbook_url %q, want %q", a.Alert, a.Annotations["runbook_url"], want)
		}
		text, ok := sections[a.Alert]
		for _, part := range []string{"**Meaning.**", "**Look at.**", "**Do.**"} {
			if !strings.Contains(text, part) {
				t.Errorf("%s: %s lacks %s (has a section: %v)", runbook, a.Alert, part, ok)
			}
		}
		delete(sections, a.Alert)
	}
	for name := range sections {
		t.Errorf("%s has the section %s, which is not an alert", runbook, name)
	}
}

// documentedLabels returns the labels of the metrics of docs/metrics.md.
func documentedLabels(t *testing.T) map[string][]string {
	t.Helper()
	labels := make(map[string][]string)
	for _, m := range regexp.MustCompile("(?m)^\\| `(sockeye_\\w+)` \\|([^|]*)\\|").FindAllStringSubmatch(readFile(t, "../docs/metrics.md"), -1) {
		labels[m[1]] = []string{"instance", "job"}
		for label := range strings.SplitSeq(m[2], ",") {
			if label = strings.TrimSpace(label); label == "group" {
				labels[m[1]] = append(labels[m[1]], "protocol", "remote", "port", "service", "group_cgroup", "tune_rule", "arm")
			} else {
				labels[m[1]] = append(labels[m[1]], label)
			}
		}
	}
	if len(labels) < 70 {
		t.Fatalf("%d metrics", len(labels))
	}
	return labels
}

var (
	selector = regexp.MustCompile(`\b(sockeye_\w+)(?:\{([^}]*)\})?`)
	matcher  = regexp.MustCompile(`(\w+)(?:=~|!~|!=|=)"`)
	grouping = regexp.MustCompile(`\bby \(([^)]*)\)`)
	series   = regexp.MustCompile(`_(bucket|sum|count)$`)
)

// checkLabels checks that the metrics of an expression exist and have the labels by which the expression selects and groups,
// and returns their names. Prometheus accepts labels that no metric has.
func checkLabels(t *testing.T, where, expr string, documented map[string][]string) (names []string) {
	t.Helper()
	var known []string
	for _, s := range selector.FindAllStringSubmatch(expr, -1) {
		name := s[1]
		if documented[name] == nil {
			name = series.ReplaceAllString(name, "") // of a histogram
			known = append(known, "le")
		}
		labels := documented[name]
		if labels == nil {
			t.Errorf("%s: docs/metrics.md has no %s", where, s[1])
		}
		for _, m := range matcher.FindAllStringSubmatch(s[2], -1) {
			if !slices.Contains(labels, m[1]) {
				t.Errorf("%s: %s has no label %s", where, name, m[1])
			}
		}
		names, known = append(names, name), append(known, labels...)
	}
	for _, g := range grouping.FindAllStringSubmatch(expr, -1) {
		for label := range strings.SplitSeq(g[1], ", ") {
			if len(names) > 0 && !slices.Contains(known, label) {
				t.Errorf("%s: no metric has the label %s: %s", where, label, expr)
			}
		}
	}
	return names
}

// dashboard is a dashboard for Grafana.
type dashboard struct {
	Title, UID, Description string
	ID                      *int
	Templating              struct {
		List []struct{ Name, Type, Label, Query any }
	}
	Panels []struct {
		ID                       int
		Type, Title, Description string
		GridPos                  struct{ X, Y, W, H int }
		Datasource               struct{ UID string }
		FieldConfig              struct{ Defaults struct{ Unit string } }
		Targets                  []struct {
			RefID, Expr, LegendFormat string
			Datasource                struct{ UID string }
		}
	}
}

// TestDashboardPanels checks that panels have a title, a unit, a description and the data source of the variable, that they do
// not overlap, and that legends have labels of the results. TestDashboards of lab/e2e runs their queries.
func TestDashboardPanels(t *testing.T) {
	files, err := filepath.Glob("grafana/*.json")
	if err != nil || len(files) != 5 {
		t.Fatalf("dashboards %q, %v", files, err)
	}
	documented := documentedLabels(t)
	unused := make(map[string]bool)
	for name := range documented {
		unused[name] = true
	}
	legend := regexp.MustCompile(`\{\{(\w+)\}\}`)
	for _, file := range files {
		var d dashboard
		if err := json.Unmarshal([]byte(readFile(t, file)), &d); err != nil {
			t.Fatal(err)
		}
		if d.Title == "" || d.UID+".json" != filepath.Base(file) || d.Description == "" || d.ID != nil {
			t.Errorf("%s: title %q, uid %q, description %q, id %v", file, d.Title, d.UID, d.Description, d.ID)
		}
		if v := d.Templating.List[0]; v.Name != "datasource" || v.Type != "datasource" || v.Query != "prometheus" {
			t.Errorf("%s: variable %+v", file, v)
		}
		ids := make(map[int]bool)
		for i, p := range d.Panels {
			where := file + ": " + p.Title
			if p.Title == "" || ids[p.ID] {
				t.Errorf("%s: no title, or the id %d twice", where, p.ID)
			}
			ids[p.ID] = true
			a := p.GridPos
			for _, other := range d.Panels[:i] {
				b := other.GridPos
				if a.X < b.X+b.W && b.X < a.X+a.W && a.Y < b.Y+b.H && b.Y < a.Y+a.H {
					t.Errorf("%s overlaps %s", where, other.Title)
				}
			}
			if a.X < 0 || a.W < 1 || a.H < 1 || a.X+a.W > 24 {
				t.Errorf("%s: %+v", where, a)
			}
			if p.Type == "row" {
				continue
			}
			if p.Description == "" || p.FieldConfig.Defaults.Unit == "" || p.Datasource.UID != "${datasource}" || len(p.Targets) == 0 {
				t.Errorf("%s lacks a description, a unit, the data source or a query", where)
			}
			for _, q := range p.Targets {
				if q.Datasource.UID != "${datasource}" || p.Type != "table" && q.LegendFormat == "" {
					t.Errorf("%s: %s lacks the data source or a legend", where, q.RefID)
				}
				for _, name := range checkLabels(t, where, q.Expr, documented) {
					delete(unused, name)
				}
				if by := grouping.FindAllStringSubmatch(q.Expr, -1); by != nil {
					for _, m := range legend.FindAllStringSubmatch(q.LegendFormat, -1) {
						if !slices.Contains(strings.Split(by[len(by)-1][1], ", "), m[1]) {
							t.Errorf("%s: the legend has %s, by which the query does not group: %s", where, m[1], q.Expr)
						}
					}
				}
			}
		}
	}
	for name := range unused {
		t.Errorf("no dashboard shows %s", name)
	}
}

// TestRulesMetrics checks that the agent has the metrics of the alerts, with their labels.
func TestRulesMetrics(t *testing.T) {
	documented := documentedLabels(t)
	for _, a := range alerts(t) {
		if names := checkLabels(t, a.Alert, a.Expr, documented); len(names) == 0 && a.Alert != "SockeyeAgentDown" {
			t.Errorf("%s has no metric: %s", a.Alert, a.Expr)
		}
	}
}
