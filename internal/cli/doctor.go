// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"

	"sockeye/internal/api"
	"sockeye/internal/bigtcp"
	"sockeye/internal/cli/command"
	"sockeye/internal/cli/tunecmd"
	"sockeye/internal/config"
	"sockeye/internal/doctor"
	"sockeye/internal/fault"
	"sockeye/internal/rights"
	"sockeye/internal/steer"
	"sockeye/internal/trace"
	"sockeye/internal/tune"
)

func (c *commands) doctorCommand() *cobra.Command {
	var file, pins string
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Check whether this host can run Sockeye",
		Long: `Doctor checks the kernel, the capabilities of the caller, the mounts, and the
sockets on the ports of the policy's services. It changes nothing and needs no
agent. With a running agent, it also shows members that are not ready and tune
rules with missing options, and the reasons. The exit code is that of the most
severe finding.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var policy *config.Policy
			var broken []doctor.Finding
			var flaws config.Errors
			loaded, err := config.Load(file)
			switch {
			case err == nil:
				policy = loaded
			case errors.Is(err, os.ErrNotExist) && !cmd.Flags().Changed("policy"):
				broken = append(broken, doctor.Finding{Area: "policy", Check: file, Result: doctor.Note, Detail: "file not found", Hint: "name a policy file with --policy"})
			case errors.As(err, &flaws):
				broken = append(broken, doctor.Finding{Area: "policy", Check: file, Result: doctor.Failure, Code: fault.CodeUsage,
					Detail: command.Count(len(flaws), "error", "errors") + "; its services are not checked", Hint: "sockeye check " + file})
			default:
				return fault.Unreadable(err, "name a policy file with --policy")
			}
			findings := append(broken, examine(policy, pins, c.known(cmd))...)
			findings = append(findings, c.askAgent(cmd, policy)...)
			if err := c.Show(findings, func(w io.Writer) { diagnosis(w, findings) }); err != nil {
				return err
			}
			worst := 0
			for _, f := range findings {
				if f.Result == doctor.Failure {
					worst = max(worst, f.Code)
				}
			}
			if worst > 0 {
				return &command.Reported{Err: &fault.Error{Err: errors.New("the host is not ready"), Code: worst}}
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&file, "policy", command.DefaultPolicy, "policy file")
	cmd.Flags().StringVar(&pins, "pins", command.DefaultPins, "pin directory, in a bpffs")
	return cmd
}

// known returns the sockets and processes of a running agent's services; nil if no agent runs.
func (c *commands) known(cmd *cobra.Command) *doctor.Known {
	var status api.Status
	var slots []api.SlotStatus
	if c.Client().Get(cmd.Context(), "/v1/status", nil, &status) != nil || c.Client().Get(cmd.Context(), "/v1/slots", nil, &slots) != nil {
		return nil
	}
	known := &doctor.Known{Sockets: make(map[uint64]bool), Processes: map[int]bool{status.PID: true}} // the agent also has keeper sockets
	for _, s := range slots {
		for _, socket := range s.Sockets {
			known.Sockets[socket.Cookie] = true
		}
		known.Processes[s.PID] = true
	}
	for _, s := range status.Services {
		for _, w := range s.Waiting {
			known.Processes[w.PID] = true
		}
		for _, r := range s.Refused {
			known.Processes[r.PID] = true
		}
	}
	return known
}

// examine checks the host and, with a policy, the services of the policy. known is nil if no agent runs.
func examine(policy *config.Policy, pins string, known *doctor.Known) []doctor.Finding {
	report := doctor.NewReport(known)
	report.Kernel()
	bigtcp.Examine(report)
	report.Host(pins)
	if policy != nil {
		steer.Examine(report, policy)
	}
	return report.Findings
}

// examineRights checks whether the agent has the capabilities that a policy needs beyond those of the unit. A pid of
// 0 means that no agent runs.
func examineRights(policy *config.Policy, pid int) []doctor.Finding {
	report := doctor.NewReport(nil)
	report.Rights(needsOf(policy), pid)
	return report.Findings
}

// needsOf lists the capabilities that a policy needs beyond those of the unit, without duplicates.
func needsOf(policy *config.Policy) []rights.Need {
	var all []rights.Need
	for _, needs := range []func(*config.Policy) []rights.Need{steer.Needs, tune.Needs, trace.Needs, bigtcp.Needs, rights.EndpointNeeds} {
		all = append(all, needs(policy)...)
	}
	return rights.FirstNeeds(all)
}

func (c *commands) askAgent(cmd *cobra.Command, policy *config.Policy) []doctor.Finding {
	var status api.Status
	err := c.Client().Get(cmd.Context(), "/v1/status", nil, &status)
	if err != nil {
		findings := []doctor.Finding{{Area: "agent", Check: "running", Result: doctor.Note, Detail: err.Error(), Hint: fault.Hint(err)}}
		if policy != nil {
			findings = append(findings, examineRights(policy, 0)...)
		}
		return findings
	}
	findings := []doctor.Finding{{Area: "agent", Check: "running", Result: doctor.OK, Detail: fmt.Sprintf("pid %d", status.PID)}}
	if policy != nil {
		findings = append(findings, examineRights(policy, status.PID)...)
	}
	for _, s := range status.Services {
		if s.Problem != "" {
			check := "port steering"
			if s.PortsSteered {
				check = "devices" // split devices
			}
			findings = append(findings, doctor.Finding{Area: "service " + s.Name, Check: check, Result: doctor.Warning, Detail: s.Problem, Hint: s.Hint})
		}
		for _, w := range s.Waiting {
			findings = append(findings, doctor.Finding{Area: "service " + s.Name, Check: fmt.Sprintf("process %d", w.PID),
				Result: doctor.Warning, Detail: w.Problem, Hint: w.Hint})
		}
		for _, r := range s.Refused {
			findings = append(findings, doctor.Finding{Area: "service " + s.Name, Check: fmt.Sprintf("process %d", r.PID),
				Result: doctor.Warning, Detail: "refused as a member: " + r.Problem, Hint: r.Hint})
		}
	}
	return append(findings, c.askTune(cmd)...)
}

// askTune adds findings of a running agent about its tuned cgroups.
func (c *commands) askTune(cmd *cobra.Command) []doctor.Finding {
	var list []api.TuneStatus
	if err := c.Client().Get(cmd.Context(), "/v1/tune", nil, &list); err != nil {
		return []doctor.Finding{{Area: "tune", Check: "rules", Result: doctor.Warning, Detail: "not known: " + err.Error(), Hint: fault.Hint(err)}}
	}
	var findings []doctor.Finding
	for _, s := range list {
		add := func(check, result, detail, hint string) {
			findings = append(findings, doctor.Finding{Area: "tune " + s.Cgroup, Check: check, Result: result, Detail: detail, Hint: hint})
		}
		switch {
		case s.Problem != "":
			add("attached", doctor.Warning, s.Problem, s.Hint)
		case !s.Attached:
			add("attached", doctor.Warning, "no", "")
		default:
			add("attached", doctor.OK, command.Count(len(s.Rules), "rule", "rules"), "")
		}
		for _, f := range s.Foreign {
			result := doctor.Note
			if f.Order == "after" {
				result = doctor.Warning
			}
			add("foreign programs", result, tunecmd.ForeignText(f), "")
		}
		for _, r := range s.Rules {
			for _, f := range r.Failures {
				add("rule "+r.Name, doctor.Warning, tunecmd.FailureText(f), "")
			}
			for _, k := range r.Skipped {
				add("rule "+r.Name, doctor.Note, tunecmd.SkippedText(k), "")
			}
		}
	}
	return findings
}

func diagnosis(w io.Writer, findings []doctor.Finding) {
	fmt.Fprintln(w, "RESULT\tAREA\tCHECK\tDETAIL")
	for _, f := range findings {
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\n", f.Result, f.Area, f.Check, command.OrDash(f.Detail))
		if f.Hint != "" && f.Result != doctor.OK {
			fmt.Fprintf(w, "\t\t\thint: %s\n", f.Hint)
		}
	}
}
