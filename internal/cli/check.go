// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"sockeye/internal/cli/command"
	"sockeye/internal/config"
	"sockeye/internal/format"
	"sockeye/internal/member"
	"sockeye/internal/otlp"
	"sockeye/internal/ui"
)

// checked is the JSON output of check.
type checked struct {
	File       string        `json:"file"`
	Valid      bool          `json:"valid"`
	Services   int           `json:"services"`
	TuneRules  int           `json:"tune_rules"`
	TraceRules int           `json:"trace_rules"`
	BigTCP     int           `json:"bigtcp_rules"`
	Errors     []checkedFlaw `json:"errors"`
	// Notes are parts that this host or this kernel lacks, and parts that were not checked.
	Notes []string `json:"notes"`
}

type checkedFlaw struct {
	Line    int    `json:"line"`
	Column  int    `json:"column"`
	Path    string `json:"path"`
	Message string `json:"message"`
	Hint    string `json:"hint,omitempty"`
}

func (c *commands) checkCommand() *cobra.Command {
	var schema bool
	cmd := &cobra.Command{
		Use:   "check FILE",
		Short: "Check a policy file and the files that it refers to",
		Long: `Check parses a policy file like the agent and lists the errors: the first 20, or
all with -o json. It changes nothing and needs no privileges and no agent. With
root privileges, it also checks whether this kernel supports the tune and trace
rules; with a running agent, it checks the tune rules.

A valid policy can name cgroups, network namespaces and interfaces that only
another host has. Check reports those that do not exist on this host, because
sockeye apply refuses the policy here.`,
		Args: func(cmd *cobra.Command, args []string) error {
			if schema {
				return command.Arguments(0, 0, "")(cmd, args)
			}
			return command.Arguments(1, 1, "FILE")(cmd, args)
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if schema {
				text, err := config.Schema()
				if err == nil {
					_, err = c.Out.Write(text)
				}
				return err
			}
			return c.check(cmd, args[0])
		},
	}
	cmd.Flags().BoolVar(&schema, "schema", false, "print the JSON Schema of the policy file, for editors")
	return cmd
}

func (c *commands) check(cmd *cobra.Command, file string) error {
	policy, err := command.LoadPolicy(file)
	if err == nil {
		err = checkNamed(policy)
	}
	result := checked{File: file, Errors: []checkedFlaw{}, Notes: []string{}}
	for _, d := range domains() {
		if err != nil || d.check == nil {
			continue
		}
		var notes []string
		notes, err = d.check(cmd.Context(), c.Client(), policy)
		result.Notes = append(result.Notes, notes...)
	}
	result.Valid = err == nil
	var flaws config.Errors
	if errors.As(err, &flaws) {
		for _, f := range flaws {
			result.Errors = append(result.Errors, checkedFlaw{f.Line, f.Column, f.Path, f.Message, f.Hint})
		}
	}
	switch {
	case err != nil && c.Output == "json" && flaws != nil:
		if err := c.JSON(result); err != nil {
			return err
		}
		return &command.Reported{Err: err}
	case err != nil:
		return err
	}
	result.Services, result.TuneRules, result.TraceRules, result.BigTCP = len(policy.Services), len(policy.Tune), len(policy.Trace), len(policy.BigTCP)
	return c.Show(&result, func(w io.Writer) {
		fmt.Fprintf(w, "%s is valid, %s\n", file, contents(policy))
		for _, note := range result.Notes {
			fmt.Fprintln(w, note)
		}
	})
}

// contents counts the parts of a policy, as in "1 service, 3 tune rules, metrics".
func contents(policy *config.Policy) string {
	var parts []string
	for _, d := range domains() {
		if n := d.count(policy); n > 0 {
			parts = append(parts, format.Count(n, d.one, d.many))
		}
	}
	if policy.Metrics != (config.Metrics{}) {
		parts = append(parts, "metrics")
	}
	if policy.UI.Listen != "" {
		parts = append(parts, "web page")
	}
	if parts == nil {
		return "without services and rules"
	}
	return strings.Join(parts, ", ")
}

// checkNamed checks the users and the files of the web page and of metrics.otlp that the policy refers to.
func checkNamed(policy *config.Policy) error {
	if err := member.CheckUsers(policy); err != nil {
		return err
	}
	if _, err := ui.ReadSettings(policy.UI); err != nil {
		return err
	}
	_, err := otlp.New(policy.Metrics.OTLP, nil, "", nil)
	return err
}
