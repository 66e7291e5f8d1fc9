// SPDX-License-Identifier: Apache-2.0

package dist_test

import (
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v4"
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
	for _, a := range alerts(t) {
		if !fires[a.Alert] || !quiet[a.Alert] {
			t.Errorf("%s: no case in which %s fires (%v), or none in which it does not (%v)", tests, a.Alert, fires[a.Alert], quiet[a.Alert])
		}
	}
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
		t.Errorf("%s has the section %s, which is no alert", runbook, name)
	}
}

// TestRulesMetrics checks that the agent has the metrics of the alerts.
func TestRulesMetrics(t *testing.T) {
	documented := readFile(t, "../docs/metrics.md")
	for _, a := range alerts(t) {
		names := regexp.MustCompile(`sockeye_\w+`).FindAllString(a.Expr, -1)
		if len(names) == 0 && a.Alert != "SockeyeAgentDown" {
			t.Errorf("%s has no metric: %s", a.Alert, a.Expr)
		}
		for _, name := range names {
			if !strings.Contains(documented, "| `"+name+"` |") {
				t.Errorf("%s: docs/metrics.md has no %s", a.Alert, name)
			}
		}
	}
}
