// SPDX-License-Identifier: Apache-2.0

package command

import (
	"net/url"

	"github.com/spf13/cobra"

	"sockeye/internal/api"
)

// RuleNames completes the names of tune rules that are not yet arguments, up to most arguments. If
// most is -1, the number has no bound.
func (c *Command) RuleNames(most int) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
		var list []api.TuneStatus
		if err := c.Client().Get(cmd.Context(), "/v1/tune", nil, &list); err != nil {
			return nil, cobra.ShellCompDirectiveError
		}
		taken := make(map[string]bool)
		for _, name := range args {
			taken[name] = true
		}
		var names []cobra.Completion
		for _, s := range list {
			for _, r := range s.Rules {
				if !taken[r.Name] && (most < 0 || len(args) < most) {
					names = append(names, cobra.CompletionWithDesc(r.Name, s.Cgroup))
				}
			}
		}
		return names, cobra.ShellCompDirectiveNoFileComp
	}
}

// CompleteService completes --service with the services of the policy in force.
func (c *Command) CompleteService(cmd *cobra.Command) {
	// An error occurs only if the command does not have the flag.
	_ = cmd.RegisterFlagCompletionFunc("service", func(cmd *cobra.Command, _ []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
		var status api.Status
		var names []cobra.Completion
		if c.Client().Get(cmd.Context(), "/v1/status", nil, &status) == nil {
			for _, s := range status.Services {
				names = append(names, s.Name)
			}
		}
		return names, cobra.ShellCompDirectiveNoFileComp
	})
}

// Query returns a query with the pairs of keys and values whose value is not empty.
func Query(pairs ...string) url.Values {
	q := url.Values{}
	for i := 0; i < len(pairs); i += 2 {
		if pairs[i+1] != "" {
			q.Set(pairs[i], pairs[i+1])
		}
	}
	return q
}

// CompleteFlag makes the shell complete a flag with words instead of file names.
func CompleteFlag(cmd *cobra.Command, flag string, words ...cobra.Completion) {
	// An error occurs only if the command does not have the flag.
	_ = cmd.RegisterFlagCompletionFunc(flag, cobra.FixedCompletions(words, cobra.ShellCompDirectiveNoFileComp))
}
