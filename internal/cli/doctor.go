// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"

	"sockeye/internal/api"
	"sockeye/internal/cli/command"
	"sockeye/internal/config"
	"sockeye/internal/doctor"
	"sockeye/internal/fault"
	"sockeye/internal/format"
	"sockeye/internal/rights"
)

func (c *commands) doctorCommand() *cobra.Command {
	var file, pins string
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Check whether this host can run Sockeye",
		Long: `Doctor checks the kernel, the capabilities of the caller, the mounts, the
sockets on the ports of the policy's services, and which of their processes the
rules match. It changes nothing and needs no agent. With a running agent, it
shows the members that are not ready instead, and tune rules with missing
options, with the reasons; missing capabilities of the caller are not failures
then. The exit code is the highest code of all failures;
warnings do not change it.`,
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
					Detail: format.Count(len(flaws), "error", "errors") + "; its services are not checked", Hint: "sockeye check " + file})
			default:
				return fault.Unreadable(err, "name a policy file with --policy")
			}
			known, err := c.known(cmd.Context())
			findings := append(broken, examine(policy, pins, known)...)
			findings = append(findings, c.askAgent(cmd.Context(), policy, err)...)
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

// agentPatience is how long doctor waits for answers of the agent: the host may be examined because the agent hangs.
const agentPatience = 10 * time.Second

// known returns the sockets and processes of a running agent's services; nil and an error if no agent answers.
func (c *commands) known(ctx context.Context) (*doctor.Known, error) {
	ctx, cancel := context.WithTimeout(ctx, agentPatience)
	defer cancel()
	var status api.Status
	var slots []api.SlotStatus
	if err := c.Client().Get(ctx, "/v1/status", nil, &status); err != nil {
		return nil, err
	}
	if err := c.Client().Get(ctx, "/v1/slots", nil, &slots); err != nil {
		return nil, err
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
		for _, b := range s.Bypass {
			known.Sockets[b.Cookie] = true
		}
	}
	return known, nil
}

// examine checks the host and, with a policy, the parts of the policy. known is nil if no agent runs.
func examine(policy *config.Policy, pins string, known *doctor.Known) []doctor.Finding {
	report := doctor.NewReport(known)
	report.Kernel()
	for _, d := range domains() {
		if d.examineKernel != nil {
			d.examineKernel(report)
		}
	}
	report.Host(pins)
	for _, d := range domains() {
		if policy != nil && d.examine != nil {
			d.examine(report, policy)
		}
	}
	return report.Findings
}

// askAgent adds findings about the agent, and those of a running agent. An agent that did not answer before, with the error failed, is not
// asked again.
func (c *commands) askAgent(ctx context.Context, policy *config.Policy, failed error) []doctor.Finding {
	ctx, cancel := context.WithTimeout(ctx, agentPatience)
	defer cancel()
	report := doctor.NewReport(nil)
	var status api.Status
	err := failed
	if !errors.Is(failed, api.ErrSilent) {
		err = c.Client().Get(ctx, "/v1/status", nil, &status)
	}
	if errors.Is(err, api.ErrSilent) {
		report.Add("agent", "running", doctor.Warning, err.Error(), fault.Hint(err))
	} else if err != nil {
		report.Add("agent", "running", doctor.Note, err.Error(), fault.Hint(err))
	} else {
		report.Add("agent", "running", doctor.OK, fmt.Sprintf("pid %d", status.PID), "")
	}
	if policy != nil {
		report.Rights(needsOf(policy), status.PID) // 0 if no agent runs
	}
	for _, d := range domains() {
		if err == nil && d.examineAgent != nil {
			d.examineAgent(ctx, report, c.Client(), &status)
		}
	}
	return report.Findings
}

// needsOf lists the capabilities that a policy needs beyond those of the unit, without duplicates.
func needsOf(policy *config.Policy) []rights.Need {
	var all []rights.Need
	for _, d := range domains() {
		all = append(all, d.needs(policy)...)
	}
	return rights.FirstNeeds(append(all, rights.EndpointNeeds(policy)...))
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
