// SPDX-License-Identifier: Apache-2.0

package tracecmd

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"sockeye/internal/config"
	"sockeye/internal/fault"
	"sockeye/internal/trace/measure"
)

// spanText formats a duration for a request; "" for 0.
func spanText(d time.Duration) string {
	if d == 0 {
		return ""
	}
	return d.String()
}

// selection checks a selector of groups. name is the flag or argument in the error.
func selection(name, selector string) error {
	_, err := measure.MatchGroup(selector, measure.Group{})
	if bad, ok := errors.AsType[*measure.SelectorError](err); ok {
		return fault.Usage(fmt.Errorf("%s is %q: %s", name, selector, bad.Message), bad.Hint)
	}
	return err
}

const selectUsage = "show only these groups: KEY=VALUE,... with the keys rule, protocol, remote, port, service, cgroup, tune_rule, arm, other"

// selectFlag adds --select.
func selectFlag(cmd *cobra.Command, selector *string) {
	cmd.Flags().StringVar(selector, "select", "", selectUsage)
	_ = cmd.RegisterFlagCompletionFunc("select", completeSelector)
}

// completeSelector completes the keys of selectors.
func completeSelector(_ *cobra.Command, _ []string, typed string) ([]cobra.Completion, cobra.ShellCompDirective) {
	before := typed[:strings.LastIndex(typed, ",")+1]
	var offered []cobra.Completion
	for _, word := range []string{"rule=", "protocol=tcp", "protocol=udp", "remote=", "port=", "service=", "cgroup=", "tune_rule=", "arm=treated", "arm=control", "other=true"} {
		offered = append(offered, before+word)
	}
	return offered, cobra.ShellCompDirectiveNoFileComp | cobra.ShellCompDirectiveNoSpace
}

// readStages parses names of stages. Without names, it returns all stages.
func readStages(names []string) ([]config.Stage, error) {
	if len(names) == 0 {
		return measure.Stages, nil
	}
	var known []string
	for _, s := range measure.Stages {
		known = append(known, string(s))
	}
	var stages []config.Stage
	for _, name := range names {
		if !slices.Contains(known, name) {
			hint := "stages: " + strings.Join(known, ", ")
			if near := config.Nearest(name, known); near != "" && name != "" {
				hint = "did you mean " + near + "?"
			}
			return nil, fault.Usage(fmt.Errorf("there is no stage %q", name), hint)
		}
		stages = append(stages, config.Stage(name))
	}
	return stages, nil
}

// outcomeText formats an outcome.
func outcomeText(o measure.Outcome) string { return strings.ReplaceAll(string(o), "_", " ") }

// balance formats the equation between the number of chosen messages and the sum of outcomes and open messages.
func balance(chosen uint64, word string, outcomes map[measure.Outcome]uint64, known []measure.Outcome, open uint64, openWord string) string {
	parts, sum := outcomesText(outcomes, known)
	left := fmt.Sprintf("%d %s", chosen, word)
	if open > 0 || len(parts) == 0 {
		parts = append(parts, fmt.Sprintf("%d %s", open, openWord))
	}
	switch sum += open; {
	case sum > chosen:
		left += fmt.Sprintf(" + %d %s before", sum-chosen, openWord)
	case sum < chosen:
		parts = append(parts, fmt.Sprintf("%d not accounted for", chosen-sum))
	}
	return left + " = " + strings.Join(parts, " + ")
}

// outcomesText formats the counts of outcomes in the order of known, without zeros, followed by unknown outcomes.
func outcomesText(outcomes map[measure.Outcome]uint64, known []measure.Outcome) (parts []string, sum uint64) {
	order := slices.Clone(known)
	for _, o := range slices.Sorted(maps.Keys(outcomes)) {
		if !slices.Contains(known, o) {
			order = append(order, o)
		}
	}
	for _, o := range order {
		if n := outcomes[o]; n > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", n, outcomeText(o)))
			sum += n
		}
	}
	return parts, sum
}
