// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"

	"sockeye/internal/agent"
	"sockeye/internal/api"
	"sockeye/internal/config"
	"sockeye/internal/fault"
)

func (c *command) doctorCommand() *cobra.Command {
	var file, pins string
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Look for what keeps Sockeye from working on this host",
		Long: `Doctor looks at the kernel, the rights of the caller, the mounts, and at the
sockets on the ports of the policy's services. It changes nothing and needs no
agent; with one it also shows which members are not ready, and which rules of
tune lack something, and why. The exit code is that of the worst finding.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var policy *config.Policy
			var broken []agent.Finding
			var flaws config.Errors
			loaded, err := config.Load(file)
			switch {
			case err == nil:
				policy = loaded
			case errors.Is(err, os.ErrNotExist) && !cmd.Flags().Changed("policy"):
				broken = append(broken, agent.Finding{Area: "policy", Check: file, Result: agent.ResultNote, Detail: "there is none", Hint: "name one with --policy"})
			case errors.As(err, &flaws):
				broken = append(broken, agent.Finding{Area: "policy", Check: file, Result: agent.ResultFailure, Code: fault.CodeUsage,
					Detail: count(len(flaws), "error", "errors") + "; its services are not looked at", Hint: "sockeye check " + file})
			default:
				return fault.Unreadable(err, "name a policy file with --policy")
			}
			findings := append(broken, examine(policy, pins, c.known(cmd))...)
			findings = append(findings, c.askAgent(cmd, policy)...)
			if err := c.show(findings, func(w io.Writer) { diagnosis(w, findings) }); err != nil {
				return err
			}
			worst := 0
			for _, f := range findings {
				if f.Result == agent.ResultFailure {
					worst = max(worst, f.Code)
				}
			}
			if worst > 0 {
				return &silent{&fault.Error{Err: errors.New("the host is not ready"), Code: worst}}
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&file, "policy", defaultPolicy, "policy file")
	cmd.Flags().StringVar(&pins, "pins", defaultPins, "directory of the pins, in a bpffs")
	return cmd
}

// known is what a running agent knows of processes on its services' ports; nil without one.
func (c *command) known(cmd *cobra.Command) *agent.Known {
	var status api.Status
	var slots []api.SlotStatus
	if c.client().Get(cmd.Context(), "/v1/status", nil, &status) != nil || c.client().Get(cmd.Context(), "/v1/slots", nil, &slots) != nil {
		return nil
	}
	known := &agent.Known{Sockets: make(map[uint64]bool), Processes: map[int]bool{status.PID: true}} // it has the anchors
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

// askAgent adds what a running agent knows of its members and rules, and the rights
// that it needs for the policy; nil is none.
// examine looks at the host and, with a policy, at what the policy names. Known is nil without an agent.
func examine(policy *config.Policy, pins string, known *agent.Known) []agent.Finding {
	report := agent.NewReport(known)
	report.Kernel()
	agent.ExamineBigTCP(report)
	report.Host(pins)
	if policy != nil {
		agent.ExamineServices(report, policy)
	}
	return report.Findings
}

// examineRights looks whether the agent, by its process id, has the capabilities beyond those of the unit
// that a policy needs; 0: no agent runs.
func examineRights(policy *config.Policy, pid int) []agent.Finding {
	report := agent.NewReport(nil)
	report.Rights(needsOf(policy), pid)
	return report.Findings
}

// needsOf lists the capabilities that a policy needs beyond those of the unit, each once.
func needsOf(policy *config.Policy) []agent.Need {
	var all []agent.Need
	for _, needs := range []func(*config.Policy) []agent.Need{agent.SteerNeeds, agent.TuneNeeds, agent.TraceNeeds, agent.BigTCPNeeds, agent.MetricsNeeds} {
		all = append(all, needs(policy)...)
	}
	return agent.FirstNeeds(all)
}

func (c *command) askAgent(cmd *cobra.Command, policy *config.Policy) []agent.Finding {
	var status api.Status
	err := c.client().Get(cmd.Context(), "/v1/status", nil, &status)
	if err != nil {
		findings := []agent.Finding{{Area: "agent", Check: "running", Result: agent.ResultNote, Detail: err.Error(), Hint: fault.Hint(err)}}
		if policy != nil {
			findings = append(findings, examineRights(policy, 0)...)
		}
		return findings
	}
	findings := []agent.Finding{{Area: "agent", Check: "running", Result: agent.ResultOK, Detail: fmt.Sprintf("pid %d", status.PID)}}
	if policy != nil {
		findings = append(findings, examineRights(policy, status.PID)...)
	}
	for _, s := range status.Services {
		if s.Problem != "" {
			check := "ports held"
			if s.Held {
				check = "devices" // that are split
			}
			findings = append(findings, agent.Finding{Area: "service " + s.Name, Check: check, Result: agent.ResultWarning, Detail: s.Problem, Hint: s.Hint})
		}
		for _, w := range s.Waiting {
			findings = append(findings, agent.Finding{Area: "service " + s.Name, Check: fmt.Sprintf("process %d", w.PID),
				Result: agent.ResultWarning, Detail: w.Problem, Hint: w.Hint})
		}
		for _, r := range s.Refused {
			findings = append(findings, agent.Finding{Area: "service " + s.Name, Check: fmt.Sprintf("process %d", r.PID),
				Result: agent.ResultWarning, Detail: "refused as a member: " + r.Problem, Hint: r.Hint})
		}
	}
	return append(findings, c.askTune(cmd)...)
}

// askTune adds what a running agent knows of the cgroups that it tunes.
func (c *command) askTune(cmd *cobra.Command) []agent.Finding {
	var list []api.TuneStatus
	if err := c.client().Get(cmd.Context(), "/v1/tune", nil, &list); err != nil {
		return []agent.Finding{{Area: "tune", Check: "rules", Result: agent.ResultWarning, Detail: "not known: " + err.Error(), Hint: fault.Hint(err)}}
	}
	var findings []agent.Finding
	for _, s := range list {
		add := func(check, result, detail, hint string) {
			findings = append(findings, agent.Finding{Area: "tune " + s.Cgroup, Check: check, Result: result, Detail: detail, Hint: hint})
		}
		switch {
		case s.Problem != "":
			add("attached", agent.ResultWarning, s.Problem, s.Hint)
		case !s.Attached:
			add("attached", agent.ResultWarning, "no", "")
		default:
			add("attached", agent.ResultOK, count(len(s.Rules), "rule", "rules"), "")
		}
		for _, f := range s.Foreign {
			result := agent.ResultNote
			if f.Order == "after" {
				result = agent.ResultWarning
			}
			add("foreign programs", result, foreign(f), "")
		}
		for _, r := range s.Rules {
			for _, f := range r.Failures {
				add("rule "+r.Name, agent.ResultWarning, failed(f), "")
			}
			for _, k := range r.Skipped {
				add("rule "+r.Name, agent.ResultNote, skipped(k), "")
			}
		}
	}
	return findings
}

func diagnosis(w io.Writer, findings []agent.Finding) {
	fmt.Fprintln(w, "RESULT\tAREA\tCHECK\tDETAIL")
	for _, f := range findings {
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\n", f.Result, f.Area, f.Check, orDash(f.Detail))
		if f.Hint != "" && f.Result != agent.ResultOK {
			fmt.Fprintf(w, "\t\t\thint: %s\n", f.Hint)
		}
	}
}
