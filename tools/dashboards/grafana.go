// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// The types below are the part of Grafana's JSON model of dashboards, version 39 (Grafana 11), that the dashboards use.

type dashboard struct {
	Title         string     `json:"title"`
	UID           string     `json:"uid"`
	Description   string     `json:"description"`
	Tags          []string   `json:"tags"`
	SchemaVersion int        `json:"schemaVersion"`
	Version       int        `json:"version"`
	Editable      bool       `json:"editable"`
	GraphTooltip  int        `json:"graphTooltip"` // 1: a shared cross hair
	Refresh       string     `json:"refresh"`
	Time          timeRange  `json:"time"`
	Links         []link     `json:"links"`
	Templating    templating `json:"templating"`
	Panels        []panel    `json:"panels"`
}

type timeRange struct {
	From string `json:"from"`
	To   string `json:"to"`
}

// link is a menu of the other dashboards.
type link struct {
	Title       string   `json:"title"`
	Type        string   `json:"type"`
	Tags        []string `json:"tags"`
	AsDropdown  bool     `json:"asDropdown"`
	IncludeVars bool     `json:"includeVars"`
	KeepTime    bool     `json:"keepTime"`
}

type templating struct {
	List []variable `json:"list"`
}

type variable struct {
	Type        string         `json:"type"`
	Name        string         `json:"name"`
	Label       string         `json:"label"`
	Description string         `json:"description,omitempty"`
	Datasource  *datasource    `json:"datasource,omitempty"`
	Definition  string         `json:"definition,omitempty"`
	Query       any            `json:"query"`
	Refresh     int            `json:"refresh,omitempty"` // 1: at load; 2: also when the time range changes
	Sort        int            `json:"sort,omitempty"`    // 1: by text; 3: by number
	IncludeAll  bool           `json:"includeAll"`
	Multi       bool           `json:"multi"`
	AllValue    string         `json:"allValue,omitempty"`
	Current     map[string]any `json:"current"`
	Options     []option       `json:"options"`
}

type option struct {
	Text     string `json:"text"`
	Value    string `json:"value"`
	Selected bool   `json:"selected"`
}

type datasource struct {
	Type string `json:"type"`
	UID  string `json:"uid"`
}

type panel struct {
	ID              int              `json:"id"`
	Type            string           `json:"type"`
	Title           string           `json:"title"`
	Description     string           `json:"description,omitempty"`
	GridPos         gridPos          `json:"gridPos"`
	Datasource      *datasource      `json:"datasource,omitempty"`
	FieldConfig     *fieldConfig     `json:"fieldConfig,omitempty"`
	Options         map[string]any   `json:"options,omitempty"`
	Targets         []target         `json:"targets,omitempty"`
	Transformations []transformation `json:"transformations,omitempty"`
	Collapsed       *bool            `json:"collapsed,omitempty"` // of a row
	Panels          []panel          `json:"panels,omitzero"`     // of a collapsed row
}

type gridPos struct {
	H int `json:"h"`
	W int `json:"w"`
	X int `json:"x"`
	Y int `json:"y"`
}

type fieldConfig struct {
	Defaults  map[string]any `json:"defaults"`
	Overrides []override     `json:"overrides"`
}

type override struct {
	Matcher    property   `json:"matcher"`
	Properties []property `json:"properties"`
}

type property struct {
	ID      string `json:"id"`
	Options any    `json:"options,omitempty"`
	Value   any    `json:"value,omitempty"`
}

type target struct {
	RefID        string      `json:"refId"`
	Datasource   *datasource `json:"datasource"`
	Expr         string      `json:"expr"`
	LegendFormat string      `json:"legendFormat"`
	Format       string      `json:"format"`
	Instant      bool        `json:"instant"`
	Range        bool        `json:"range"`
}

type transformation struct {
	ID      string         `json:"id"`
	Options map[string]any `json:"options"`
}

var source = &datasource{"prometheus", "${datasource}"}

// newDashboard returns a dashboard with the variables datasource and instance. metric is one that each host with a part
// for this dashboard has.
func newDashboard(name, title, description, metric string) *dashboard {
	d := &dashboard{
		Title: "Sockeye: " + title, UID: "sockeye-" + name, Description: description, Tags: []string{"sockeye"},
		SchemaVersion: 39, Version: 1, Editable: true, GraphTooltip: 1, Refresh: "30s", Time: timeRange{"now-1h", "now"},
		Links: []link{{"Sockeye", "dashboards", []string{"sockeye"}, true, true, true}},
	}
	d.Templating.List = append(d.Templating.List, variable{
		Type: "datasource", Name: "datasource", Label: "Data source", Query: "prometheus", Refresh: 1, Current: map[string]any{}, Options: []option{},
	})
	d.choose("instance", "Host", "The agents, by the address that Prometheus scrapes.", metric)
	return d
}

// query is a PromQL expression and the legend of its results.
type query struct{ expr, legend string }

// choose adds a variable with the values of a label, of the metrics that the variables before it select.
func (d *dashboard) choose(label, title, description, metric string) {
	var matchers []string
	for _, v := range d.Templating.List[1:] {
		matchers = append(matchers, fmt.Sprintf(`%s=~"$%[1]s"`, v.Name))
	}
	if len(matchers) > 0 {
		metric += "{" + strings.Join(matchers, ",") + "}"
	}
	query := fmt.Sprintf("label_values(%s, %s)", metric, label)
	d.Templating.List = append(d.Templating.List, variable{
		Type: "query", Name: label, Label: title, Description: description, Datasource: source, Definition: query,
		Query:   map[string]any{"qryType": 1, "query": query, "refId": "PrometheusVariableQueryEditor-VariableQuery"},
		Refresh: 2, Sort: 3, IncludeAll: true, Multi: true, AllValue: ".*",
		Current: map[string]any{"text": []string{"All"}, "value": []string{"$__all"}}, Options: []option{},
	})
}

// offer adds a variable with fixed values, of which the first one is chosen.
func (d *dashboard) offer(name, title, description string, values []string) {
	v := variable{Type: "custom", Name: name, Label: title, Description: description, Query: strings.Join(values, ","),
		Current: map[string]any{"text": values[0], "value": values[0]}}
	for i, value := range values {
		v.Options = append(v.Options, option{value, value, i == 0})
	}
	d.Templating.List = append(d.Templating.List, v)
}

// row begins a new row with a title.
func (d *dashboard) row(title string) {
	open := false
	d.place(panel{Type: "row", Title: title, GridPos: gridPos{H: 1, W: 24}, Collapsed: &open, Panels: []panel{}})
}

// stat adds a panel with the last value. bad are the values from which the panel is orange and red; 0 for none.
func (d *dashboard) stat(title, description, unit string, bad [2]float64, queries ...query) {
	steps := []map[string]any{{"color": "text", "value": nil}}
	for i, color := range []string{"orange", "red"} {
		if bad[i] > 0 {
			steps = append(steps, map[string]any{"color": color, "value": bad[i]})
		}
	}
	d.place(panel{
		Type: "stat", Title: title, Description: description, GridPos: gridPos{H: 4, W: 4}, Datasource: source, Targets: targets(queries),
		FieldConfig: &fieldConfig{
			Defaults: map[string]any{
				"unit": unit, "color": map[string]any{"mode": "thresholds"}, "thresholds": map[string]any{"mode": "absolute", "steps": steps},
			},
			Overrides: []override{},
		},
		Options: map[string]any{
			"colorMode": "value", "graphMode": "none", "textMode": "auto",
			"reduceOptions": map[string]any{"calcs": []string{"lastNotNull"}, "fields": "", "values": false},
		},
	})
}

// style is how a graph looks.
type style struct {
	unit    string
	width   int               // of 24; 0: 8
	stacked bool              // areas on top of each other
	log     bool              // logarithmic axis
	colors  map[string]string // by legend
	dashed  string            // legend of a line that is not stacked
}

// graph adds a panel with lines over time.
func (d *dashboard) graph(title, description string, s style, queries ...query) {
	custom := map[string]any{
		"drawStyle": "line", "lineWidth": 1, "fillOpacity": 5, "showPoints": "auto", "pointSize": 4, "spanNulls": false,
		"stacking": map[string]any{"group": "A", "mode": "none"}, "scaleDistribution": map[string]any{"type": "linear"},
	}
	defaults := map[string]any{"unit": s.unit, "color": map[string]any{"mode": "palette-classic"}, "custom": custom}
	if s.stacked {
		custom["lineWidth"], custom["fillOpacity"], custom["stacking"] = 0, 70, map[string]any{"group": "A", "mode": "normal"}
	}
	if s.log {
		custom["scaleDistribution"] = map[string]any{"type": "log", "log": 10}
	} else {
		defaults["min"] = 0
	}
	overrides := []override{}
	for _, legend := range slices.Sorted(maps.Keys(s.colors)) {
		overrides = append(overrides, override{property{ID: "byName", Options: legend},
			[]property{{ID: "color", Value: map[string]any{"mode": "fixed", "fixedColor": s.colors[legend]}}}})
	}
	if s.dashed != "" {
		overrides = append(overrides, override{property{ID: "byName", Options: s.dashed}, []property{
			{ID: "custom.stacking", Value: map[string]any{"group": "A", "mode": "none"}},
			{ID: "custom.fillOpacity", Value: 0}, {ID: "custom.lineWidth", Value: 1},
			{ID: "custom.lineStyle", Value: map[string]any{"dash": []int{8, 6}, "fill": "dash"}},
		}})
	}
	if s.width == 0 {
		s.width = 8
	}
	d.place(panel{
		Type: "timeseries", Title: title, Description: description, GridPos: gridPos{H: 9, W: s.width}, Datasource: source, Targets: targets(queries),
		FieldConfig: &fieldConfig{defaults, overrides},
		Options: map[string]any{
			"legend":  map[string]any{"displayMode": "table", "placement": "bottom", "showLegend": true, "calcs": []string{"lastNotNull", "max"}},
			"tooltip": map[string]any{"mode": "multi", "sort": "desc"},
		},
	})
}

func targets(queries []query) (list []target) {
	for i, q := range queries {
		list = append(list, target{RefID: string(rune('A' + i)), Datasource: source, Expr: q.expr, LegendFormat: q.legend, Format: "time_series", Range: true})
	}
	return list
}

// heatmap adds a panel with the distribution of a histogram over time.
func (d *dashboard) heatmap(title, description, expr string) {
	d.place(panel{
		Type: "heatmap", Title: title, Description: description, GridPos: gridPos{H: 9, W: 12}, Datasource: source,
		Targets: []target{{RefID: "A", Datasource: source, Expr: expr, LegendFormat: "{{le}}", Format: "heatmap", Range: true}},
		FieldConfig: &fieldConfig{map[string]any{"unit": "s", "custom": map[string]any{"scaleDistribution": map[string]any{"type": "linear"}}},
			[]override{}},
		Options: map[string]any{
			"calculate": false, "cellGap": 1, "cellValues": map[string]any{"unit": "mps"}, "filterValues": map[string]any{"le": 1e-9},
			"color":   map[string]any{"mode": "scheme", "scheme": "Oranges", "scale": "exponential", "exponent": 0.5, "steps": 64, "fill": "dark-orange"},
			"legend":  map[string]any{"show": true},
			"tooltip": map[string]any{"mode": "single", "yHistogram": true},
			"yAxis":   map[string]any{"axisPlacement": "left", "unit": "s"},
		},
	})
}

// column is a query whose values are a column of a table.
type column struct{ title, unit, expr string }

// table adds a panel with one line for each set of labels, sorted by the first column.
func (d *dashboard) table(title, description string, width int, labels []string, columns ...column) {
	p := panel{
		Type: "table", Title: title, Description: description, GridPos: gridPos{H: 10, W: width}, Datasource: source,
		FieldConfig: &fieldConfig{map[string]any{"unit": columns[0].unit, "custom": map[string]any{"align": "auto", "filterable": true}}, []override{}},
		Options: map[string]any{
			"cellHeight": "sm", "showHeader": true, "sortBy": []map[string]any{{"displayName": columns[0].title, "desc": true}},
		},
	}
	names, order := map[string]any{}, map[string]any{}
	for i, label := range labels {
		order[label] = i
	}
	for i, c := range columns {
		ref := string(rune('A' + i))
		p.Targets = append(p.Targets, target{RefID: ref, Datasource: source, Expr: c.expr, Format: "table", Instant: true})
		names["Value #"+ref], order["Value #"+ref] = c.title, len(labels)+i
		if i > 0 {
			p.FieldConfig.Overrides = append(p.FieldConfig.Overrides, override{property{ID: "byName", Options: c.title}, []property{{ID: "unit", Value: c.unit}}})
		}
	}
	if len(columns) == 1 { // Grafana names the values of a single query so
		names, order["Value"] = map[string]any{"Value": columns[0].title}, len(labels)
	}
	p.Transformations = []transformation{
		{"merge", map[string]any{}},
		{"organize", map[string]any{"excludeByName": map[string]any{"Time": true, "job": true}, "renameByName": names, "indexByName": order}},
	}
	d.place(p)
}

// place adds a panel to the right of the last one, or below if there is no space.
func (d *dashboard) place(p panel) {
	p.ID = len(d.Panels) + 1
	if len(d.Panels) > 0 {
		last := d.Panels[len(d.Panels)-1].GridPos
		p.GridPos.X, p.GridPos.Y = last.X+last.W, last.Y
		if p.GridPos.X+p.GridPos.W > 24 {
			p.GridPos.X = 0
			for _, other := range d.Panels {
				p.GridPos.Y = max(p.GridPos.Y, other.GridPos.Y+other.GridPos.H)
			}
		}
	}
	d.Panels = append(d.Panels, p)
}
