// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"context"
	"fmt"

	"sockeye/internal/api"
	"sockeye/internal/doctor"
	"sockeye/internal/fault"
	"sockeye/internal/format"
)

// ExamineAgent adds findings of a running agent about its tuned cgroups.
func ExamineAgent(ctx context.Context, d *doctor.Report, agent *api.Client, _ *api.Status) {
	var list []api.TuneStatus
	if err := agent.Get(ctx, "/v1/tune", nil, &list); err != nil {
		d.Add("tune", "rules", doctor.Warning, "not known: "+err.Error(), fault.Hint(err))
		return
	}
	for _, s := range list {
		area := "tune " + s.Cgroup
		switch {
		case s.Problem != "":
			d.Add(area, "attached", doctor.Warning, s.Problem, s.Hint)
		case !s.Attached:
			d.Add(area, "attached", doctor.Warning, "no", "")
		default:
			d.Add(area, "attached", doctor.OK, format.Count(len(s.Rules), "rule", "rules"), "")
		}
		for _, f := range s.Foreign {
			result := doctor.Note
			if f.Order == "after" {
				result = doctor.Warning
			}
			d.Add(area, "foreign programs", result, ForeignText(f), "")
		}
		for _, r := range s.Rules {
			for _, f := range r.Failures {
				d.Add(area, "rule "+r.Name, doctor.Warning, FailureText(f), "")
			}
			for _, k := range r.Skipped {
				d.Add(area, "rule "+r.Name, doctor.Note, SkippedText(k), "")
			}
		}
	}
}

// ForeignText describes a sock_ops program of another owner.
func ForeignText(f api.TuneForeign) string {
	return fmt.Sprintf("program %d of another owner, in %s, runs %s the rules: %s", f.ID, f.Cgroup, f.Order, f.Effect)
}

// FailureText describes a failed setsockopt.
func FailureText(f api.TuneFailure) string {
	return fmt.Sprintf("%s failed %s: %s", f.Option, format.Count(int(f.Count), "time", "times"), f.Error)
}

// SkippedText describes an option that the kernel does not support.
func SkippedText(s api.TuneSkipped) string {
	return fmt.Sprintf("%s is skipped: it needs %s", s.Option, s.Needs)
}
