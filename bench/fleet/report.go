// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"maps"

	"sockeye/bench/harness"
	"sockeye/internal/chart"
)

// part is the result of an entry of measures.
type part interface {
	print(p harness.Printf)
	// figures returns the fields that the part adds to the JSON file.
	figures() map[string]any
	targets() []harness.Target
	panels() []chart.Panel
}

type report struct {
	Options options `json:"options"`
	harness.Run

	parts []part
}

// Print implements harness.Report.
func (r *report) Print(p harness.Printf) {
	p("\nLinux %s, %d CPUs.\n", r.Kernel, r.CPUs)
	for _, part := range r.parts {
		part.print(p)
	}
	p("\nDuration %s.\n", r.Took)
}

// Targets implements harness.Report.
func (r *report) Targets() (all []harness.Target) {
	for _, part := range r.parts {
		all = append(all, part.targets()...)
	}
	return all
}

// Figures implements harness.Report.
func (r *report) Figures() any {
	all := map[string]any{"run": r}
	for _, part := range r.parts {
		maps.Copy(all, part.figures())
	}
	return all
}

// Charts implements harness.Report.
func (r *report) Charts() map[string]chart.Chart {
	drawing := chart.Chart{Title: "Forwarding between hosts of a fleet"}
	for _, part := range r.parts {
		drawing.Panels = append(drawing.Panels, part.panels()...)
	}
	return map[string]chart.Chart{"": drawing}
}
