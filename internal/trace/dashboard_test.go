// SPDX-License-Identifier: Apache-2.0

//go:build !vm

package trace

import (
	"encoding/json"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"sockeye/internal/trace/measure"
)

type dashboard struct {
	Inputs     []struct{ Name, Type, PluginID string } `json:"__inputs"`
	Requires   []struct{ Type, ID string }             `json:"__requires"`
	ID         *int                                    `json:"id"`
	Templating struct{ List []dashboardVariable }      `json:"templating"`
	Panels     []dashboardPanel                        `json:"panels"`
}

type dashboardVariable struct {
	Name, Type, Definition, AllValue string
	Query                            any
}

type dashboardPanel struct {
	ID                       int
	Type, Title, Description string
	GridPos                  struct{ X, Y, W, H int }
	FieldConfig              struct{ Defaults struct{ Unit string } }
	Options                  struct{ YAxis struct{ Unit string } }
	Targets                  []struct{ RefID, Expr, LegendFormat string }
}

func readDashboard(t *testing.T) (d dashboard, tree any) {
	t.Helper()
	data, err := os.ReadFile("../../docs/grafana-trace.json")
	if err != nil {
		t.Fatal(err)
	}
	for _, to := range []any{&d, &tree} {
		if err := json.Unmarshal(data, to); err != nil {
			t.Fatal(err)
		}
	}
	return d, tree
}

// storedMetric is a metric as Prometheus stores it.
type storedMetric struct {
	family string
	labels []string
	gauge  bool
}

// traceMetrics returns all metrics of trace by name. Prometheus adds the label instance to each.
func traceMetrics(t *testing.T) map[string]storedMetric {
	t.Helper()
	registry := prometheus.NewRegistry()
	registry.MustRegister(prometheus.CollectorFunc(func(out chan<- prometheus.Metric) {
		for _, desc := range []*prometheus.Desc{descTraceAttached, descTraceChosen, descTraceMessages, descTraceInFlight,
			descTraceBytes, descTraceReceived, descTraceWaiting, descTraceOldest, descTraceStage} {
			values := make([]string, len(prometheus.MakeLabelPairs(desc, make([]string, 64))))
			if desc == descTraceStage {
				out <- stageMetric{values, &measure.Histogram{}}
			} else {
				out <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, 1, values...)
			}
		}
	}))
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	stored := make(map[string]storedMetric)
	var names []string
	for _, f := range families {
		name := f.GetName()
		m := storedMetric{family: name, labels: []string{"instance"}}
		for _, label := range f.GetMetric()[0].GetLabel() {
			m.labels = append(m.labels, label.GetName())
		}
		names = append(names, name)
		if f.GetType() == dto.MetricType_HISTOGRAM {
			stored[name+"_sum"], stored[name+"_count"] = m, m
			stored[name+"_bucket"] = storedMetric{family: name, labels: append(slices.Clone(m.labels), "le")}
		} else {
			m.gauge = !strings.HasSuffix(name, "_total")
		}
		stored[name] = m
	}
	source, err := os.ReadFile("metrics.go")
	if err != nil {
		t.Fatal(err)
	}
	var defined []string
	for _, m := range regexp.MustCompile(`NewDesc\("(\w+)"`).FindAllStringSubmatch(string(source), -1) {
		defined = append(defined, m[1])
	}
	slices.Sort(defined)
	if !slices.Equal(names, defined) {
		t.Fatalf("metrics in this test: %q, in metrics.go: %q", names, defined)
	}
	return stored
}

var (
	queryToken     = regexp.MustCompile(`"(?:[^"\\]|\\.)*"|\$\{?\w+\}?|[A-Za-z_]\w*|[0-9][0-9a-zA-Z.]*|[=!]~|[=!<>]=|\S`)
	queryWord      = regexp.MustCompile(`^[A-Za-z_]`)
	queryOperators = []string{"+", "-", "*", "/", ",", "<", ">", "==", ">=", "<=", "[", "]", "or"}
	queryFunctions = []string{"rate", "sum", "max", "count", "topk", "vector", "histogram_quantile", "histogram_sum", "histogram_count"}
)

// query is the set of metrics and labels in a PromQL expression.
type query struct {
	families  []string
	grouping  []string // labels after by
	variables []string
}

// readQuery parses the part of PromQL that the dashboard uses. Anything else is an error, and so are metrics and
// labels that are not stored, the rate of a gauge, and the plain value of a counter.
func readQuery(text string, stored map[string]storedMetric) (q query, err error) {
	tokens := append(queryToken.FindAllString(text, -1), "")
	labels := []string{}
	depth := 0
	for i := 0; i < len(tokens)-1; i++ {
		token, next := tokens[i], tokens[i+1]
		switch {
		case token == "(":
			depth++
		case token == ")":
			if depth--; depth < 0 {
				return q, fmt.Errorf("a ) too many")
			}
		case strings.HasPrefix(token, "$"):
			q.variables = append(q.variables, strings.Trim(token, "${}"))
		case slices.Contains(queryOperators, token), token[0] >= '0' && token[0] <= '9':
		case (token == "by" || token == "on") && next == "(":
			for i += 2; i < len(tokens)-1 && tokens[i] != ")"; i++ {
				if tokens[i] != "," {
					q.grouping = append(q.grouping, tokens[i])
				}
			}
		case next == "(" || next == "by":
			if !slices.Contains(queryFunctions, token) {
				return q, fmt.Errorf("%s is not a function", token)
			}
		case queryWord.MatchString(token):
			m, ok := stored[token]
			if !ok {
				return q, fmt.Errorf("unknown metric %s", token)
			}
			q.families = append(q.families, m.family)
			labels = append(labels, m.labels...)
			if next == "{" {
				var variables []string
				if i, variables, err = readMatchers(tokens, i+2, m); err != nil {
					return q, err
				}
				q.variables = append(q.variables, variables...)
			}
			if ranged := tokens[i+1] == "["; ranged == m.gauge {
				return q, fmt.Errorf("%s: rate is for counters and histograms, and only for them", token)
			}
		default:
			return q, fmt.Errorf("unexpected %s", token)
		}
	}
	if depth != 0 {
		return q, fmt.Errorf("a ( too many")
	}
	for _, label := range q.grouping {
		if !slices.Contains(labels, label) {
			return q, fmt.Errorf("by %s, which no metric of it has", label)
		}
	}
	return q, nil
}

// readMatchers parses label="value",... up to the closing brace, and returns its index.
func readMatchers(tokens []string, i int, m storedMetric) (end int, variables []string, err error) {
	for ; i+3 < len(tokens); i += 4 {
		label, op, value := tokens[i], tokens[i+1], strings.Trim(tokens[i+2], `"`)
		if !slices.Contains([]string{"=", "!=", "=~", "!~"}, op) {
			return i, nil, fmt.Errorf("%s is not followed by a matcher", label)
		}
		if !slices.Contains(m.labels, label) {
			return i, nil, fmt.Errorf("%s has no label %s", m.family, label)
		}
		var known []string
		for _, s := range measure.Stages {
			if label == "stage" {
				known = append(known, string(s))
			}
		}
		for _, o := range slices.Concat(measure.Outcomes, measure.RXOutcomes) {
			if label == "outcome" {
				known = append(known, string(o))
			}
		}
		for one := range strings.SplitSeq(value, "|") {
			if name, ok := strings.CutPrefix(one, "$"); ok {
				variables = append(variables, name)
			} else if !slices.Contains(known, one) {
				return i, nil, fmt.Errorf("%s is never %q", label, one)
			}
		}
		if tokens[i+3] == "}" {
			return i + 3, variables, nil
		}
	}
	return i, nil, fmt.Errorf("a { too many")
}

// TestDashboardQueries checks that the agent exports every metric that the dashboard queries.
func TestDashboardQueries(t *testing.T) {
	d, _ := readDashboard(t)
	stored := traceMetrics(t)
	variables := []string{"__rate_interval", "__range"}
	used := make(map[string]bool)
	for _, v := range d.Templating.List {
		if m := regexp.MustCompile(`^label_values\((\w+)(\{.*\})?, (\w+)\)$`).FindStringSubmatch(v.Definition); m != nil {
			text := m[1] + m[2]
			q, err := readQuery("rate("+text+"[5m])", stored)
			if err == nil && !slices.Contains(append(stored[m[1]].labels, "instance"), m[3]) {
				err = fmt.Errorf("%s has no label %s", m[1], m[3])
			}
			for _, name := range q.variables {
				if !slices.Contains(variables, name) {
					err = fmt.Errorf("$%s is not defined before", name)
				}
			}
			asked, _ := v.Query.(map[string]any)
			if err != nil || m[3] != v.Name || asked["query"] != v.Definition || v.AllValue != ".*" {
				t.Errorf("variable %s: %s: %v", v.Name, v.Definition, err)
			}
		} else if v.Type == "query" {
			t.Errorf("variable %s: %s", v.Name, v.Definition)
		}
		if v.Name == "stage" {
			var stages []string
			for _, s := range measure.Stages {
				stages = append(stages, string(s))
			}
			got := strings.Split(v.Query.(string), ",")
			slices.Sort(stages)
			slices.Sort(got)
			if !slices.Equal(got, stages) {
				t.Errorf("variable stage has %q, want %q", got, stages)
			}
		}
		variables = append(variables, v.Name)
	}
	for _, name := range []string{"datasource", "cgroup", "rule", "remote", "port", "protocol", "stage"} {
		if !slices.Contains(variables, name) {
			t.Errorf("no variable %s", name)
		}
	}
	legend := regexp.MustCompile(`\{\{(\w+)\}\}`)
	for _, p := range d.Panels {
		for _, target := range p.Targets {
			q, err := readQuery(target.Expr, stored)
			if err != nil {
				t.Errorf("panel %q, %s: %v\n%s", p.Title, target.RefID, err, target.Expr)
			}
			for _, name := range q.variables {
				if !slices.Contains(variables, name) {
					t.Errorf("panel %q, %s: no variable %s", p.Title, target.RefID, name)
				}
			}
			for _, m := range legend.FindAllStringSubmatch(target.LegendFormat, -1) {
				if !slices.Contains(q.grouping, m[1]) {
					t.Errorf("panel %q, %s: the legend has %s, by which it is not grouped", p.Title, target.RefID, m[1])
				}
			}
			for _, family := range q.families {
				used[family] = true
			}
		}
	}
	for name, m := range stored {
		if !used[m.family] {
			t.Errorf("no panel shows %s", name)
		}
	}
}

// TestDashboardMistakes checks that wrong queries fail the test above.
func TestDashboardMistakes(t *testing.T) {
	stored := traceMetrics(t)
	for text, want := range map[string]string{
		`sum by (rule) (rate(sockeye_trace_chosen_total{cgroup=~"$cgroup"}[5m]))`:            "",
		`max (sockeye_trace_in_flight) > 0 or vector(0)`:                                     "",
		`sum (rate(sockeye_trace_picked_total[5m]))`:                                         "unknown metric",
		`sum (rate(sockeye_trace_chosen_total{outcome="acked"}[5m]))`:                        "has no label outcome",
		`sum by (stage) (rate(sockeye_trace_chosen_total[5m]))`:                              "by stage",
		`sum by (le) (rate(sockeye_trace_stage_seconds[5m]))`:                                "by le",
		`sum (rate(sockeye_trace_messages_total{outcome=~"acked|lost"}[5m]))`:                `never "lost"`,
		`sum (rate(sockeye_trace_stage_seconds_sum{stage!~"wire"}[5m]))`:                     `never "wire"`,
		`sum (rate(sockeye_trace_in_flight[5m]))`:                                            "only for them",
		`sum (sockeye_trace_chosen_total)`:                                                   "only for them",
		`sum (increase(sockeye_trace_chosen_total[5m]))`:                                     "not a function",
		`sum (rate(sockeye_trace_chosen_total[5m])`:                                          "( too many",
		`sum (rate(sockeye_trace_chosen_total[5m])))`:                                        ") too many",
		`sum (rate(sockeye_trace_chosen_total{cgroup="$cgroup"`:                              "{ too many",
		`sum (rate(sockeye_trace_chosen_total{cgroup<"$cgroup"}[5m]))`:                       "matcher",
		`sum (rate(sockeye_trace_chosen_total[5m])) ; sum (rate(sockeye_trace_nothing[5m]))`: "unexpected ;",
	} {
		_, err := readQuery(text, stored)
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", text, err, want)
		}
	}
}

// TestDashboardPanels checks that panels do not overlap and have a description.
func TestDashboardPanels(t *testing.T) {
	d, _ := readDashboard(t)
	ids := make(map[int]string)
	for i, p := range d.Panels {
		if other, ok := ids[p.ID]; ok || p.ID < 1 {
			t.Errorf("panel %q has the id %d, as %q has", p.Title, p.ID, other)
		}
		ids[p.ID] = p.Title
		a := p.GridPos
		if a.X < 0 || a.Y < 0 || a.W < 1 || a.H < 1 || a.X+a.W > 24 {
			t.Errorf("panel %q: %+v", p.Title, a)
		}
		for _, other := range d.Panels[:i] {
			b := other.GridPos
			if a.X < b.X+b.W && b.X < a.X+a.W && a.Y < b.Y+b.H && b.Y < a.Y+a.H {
				t.Errorf("panels %q and %q overlap", p.Title, other.Title)
			}
		}
		if p.Title == "" {
			t.Errorf("panel %d has no title", p.ID)
		}
		if p.Type == "row" {
			continue
		}
		if p.Description == "" || p.FieldConfig.Defaults.Unit == "" && p.Options.YAxis.Unit == "" || len(p.Targets) == 0 {
			t.Errorf("panel %q lacks a description, a unit or a query", p.Title)
		}
		refs := make(map[string]bool)
		for _, target := range p.Targets {
			if refs[target.RefID] || target.Expr == "" || p.Type != "table" && target.LegendFormat == "__auto" {
				t.Errorf("panel %q: query %q has a name twice, no expression or no legend", p.Title, target.RefID)
			}
			refs[target.RefID] = true
		}
	}
	for _, row := range []string{"Where messages spend their time", "What became of them", "Readers"} {
		if !slices.ContainsFunc(d.Panels, func(p dashboardPanel) bool { return p.Type == "row" && p.Title == row }) {
			t.Errorf("no row %q", row)
		}
	}
}

// TestDashboardImport checks that an import asks for the data source, and that the file has no identifiers of the
// Grafana that exported it.
func TestDashboardImport(t *testing.T) {
	d, tree := readDashboard(t)
	if d.ID != nil || len(d.Inputs) != 1 || d.Inputs[0] != struct{ Name, Type, PluginID string }{"DS_PROMETHEUS", "datasource", "prometheus"} {
		t.Errorf("id %v, inputs %v", d.ID, d.Inputs)
	}
	for _, p := range d.Panels {
		if p.Type != "row" && !slices.Contains(d.Requires, struct{ Type, ID string }{"panel", p.Type}) {
			t.Errorf("__requires lacks the panel %s", p.Type)
		}
	}
	sources := 0
	var walk func(node any)
	walk = func(node any) {
		switch node := node.(type) {
		case []any:
			for _, one := range node {
				walk(one)
			}
		case map[string]any:
			for key, value := range node {
				if source, ok := value.(map[string]any); ok && key == "datasource" {
					sources++
					uid := source["uid"]
					if uid != "${datasource}" && uid != "-- Grafana --" {
						t.Errorf("data source %v", uid)
					}
				} else if key == "datasource" {
					t.Errorf("data source %v", value)
				}
				walk(value)
			}
		}
	}
	walk(tree)
	if sources < len(d.Panels) {
		t.Errorf("%d data sources", sources)
	}
	for _, v := range d.Templating.List {
		if v.Name == "datasource" && (v.Type != "datasource" || v.Query != "prometheus") {
			t.Errorf("variable datasource: %+v", v)
		}
	}
}
