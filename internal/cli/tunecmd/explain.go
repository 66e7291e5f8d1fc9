// SPDX-License-Identifier: Apache-2.0

package tunecmd

import (
	"errors"
	"fmt"
	"io"
	"net/netip"
	"net/url"
	"regexp"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"sockeye/internal/api"
	"sockeye/internal/cli/command"
	"sockeye/internal/config"
	"sockeye/internal/fault"
	"sockeye/internal/format"
	"sockeye/internal/match"
)

func (c *commands) tuneExplainCommand() *cobra.Command {
	var role, tag, cgroup, socket string
	cmd := &cobra.Command{
		Use:   "explain LOCAL REMOTE",
		Short: "Show the rule that applies to a connection, and why",
		Long: `Explain shows for each rule, in order, whether it matches a connection between
two addresses, and why. LOCAL and REMOTE are IP or IP:PORT; without a port,
rules that match this port do not apply. Without --role, both roles are shown if
the results differ.

With --socket, it shows an open connection, identified by PID and file
descriptor or by both addresses: its rule, and the requested and the effective
value of each option. For an MPTCP connection, it shows each subflow; the
addresses of any subflow identify the connection.`,
		Example: `  sockeye tune explain 10.0.0.1:1790 192.0.2.1:40000 --role accept
  sockeye tune explain 2001:db8::1 2001:db8::2 --tag rack-12
  sockeye tune explain --socket 812:7
  sockeye tune explain --socket 10.0.0.1:1790,192.0.2.1:40000`,
		Args: func(cmd *cobra.Command, args []string) error {
			switch {
			case cmd.Flags().Changed("socket"):
				return command.Arguments(0, 0, "")(cmd, args)
			case len(args) == 1:
				return command.Arguments(2, 2, "REMOTE")(cmd, args)
			}
			return command.Arguments(2, 2, "LOCAL")(cmd, args)
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if cmd.Flags().Changed("socket") {
				for _, other := range []string{"role", "tag", "cgroup"} {
					if cmd.Flags().Changed(other) {
						return fault.Usage(fmt.Errorf("--socket and --%s are mutually exclusive", other), "these are properties of the open connection")
					}
				}
				return c.explainSocket(cmd, socket)
			}
			local, remote, err := command.Endpoints(args[0], args[1])
			if err != nil {
				return err
			}
			if r := config.Role(role); cmd.Flags().Changed("role") && r != config.RoleConnect && r != config.RoleAccept {
				return fault.Usage(fmt.Errorf("--role is %q", role), "connect or accept")
			}
			if cmd.Flags().Changed("tag") {
				if _, err := config.ParseTag(tag); err != nil {
					return fault.Usage(fmt.Errorf("--tag is %q", tag), "1 to 16 printable ASCII characters, or 0x and 1 to 16 bytes in hexadecimal")
				}
			}
			var list []api.TuneExplanation
			q := command.Query("local", local.String(), "remote", remote.String(), "role", role, "tag", tag, "cgroup", cgroup)
			if err := c.Client().Get(cmd.Context(), "/v1/tune/explain", q, &list); err != nil {
				return err
			}
			return c.Show(list, func(w io.Writer) { explanations(w, list, local, remote) })
		},
	}
	cmd.Flags().StringVar(&role, "role", "", "role of this host: connect or accept")
	cmd.Flags().StringVar(&tag, "tag", "", "tag of the peer: text, or 0x and hexadecimal digits")
	cmd.Flags().StringVar(&cgroup, "cgroup", "", "show only this cgroup, named as in the policy")
	cmd.Flags().StringVar(&socket, "socket", "", "open connection, as PID:FD or LOCAL,REMOTE")
	cmd.ValidArgsFunction = cobra.NoFileCompletions
	command.CompleteFlag(cmd, "role", string(config.RoleConnect), string(config.RoleAccept))
	for _, free := range []string{"tag", "cgroup", "socket"} {
		command.CompleteFlag(cmd, free)
	}
	return cmd
}

func explanations(w io.Writer, list []api.TuneExplanation, local, remote netip.AddrPort) {
	if len(list) == 0 {
		fmt.Fprintln(w, "there are no tune rules")
	}
	for i := 0; i < len(list); i++ {
		e := list[i]
		if i > 0 {
			fmt.Fprintln(w)
		}
		role := e.Role
		if i+1 < len(list) && sameAnswer(e, list[i+1]) {
			i++
			role += " or " + list[i].Role
		}
		fmt.Fprintf(w, "%s, %s\n\n", e.Cgroup, role)
		steps(w, e.Steps)
		fmt.Fprintln(w)
		switch {
		case e.Rule == "":
			fmt.Fprintln(w, "no rule matches: the kernel's defaults apply")
		case len(e.Set) == 0:
			fmt.Fprintf(w, "rule %s, sets no options\n", e.Rule)
		default:
			fmt.Fprintf(w, "rule %s: %s\n", e.Rule, strings.Join(e.Set, ", "))
		}
	}
	for _, side := range []struct {
		name string
		end  netip.AddrPort
	}{{"local", local}, {"remote", remote}} {
		if side.end.Port() == 0 && len(list) > 0 {
			fmt.Fprintf(w, "\nno %[1]s port given: rules that match the %[1]s port do not apply\n", side.name)
		}
	}
}

// sameAnswer reports whether the explanations of both roles are the same.
func sameAnswer(a, b api.TuneExplanation) bool {
	return a.Cgroup == b.Cgroup && a.Rule == b.Rule && slices.Equal(a.Steps, b.Steps)
}

func (c *commands) explainSocket(cmd *cobra.Command, text string) error {
	q, err := socketQuery(text)
	if err != nil {
		return err
	}
	var s api.TuneSocket
	if err := c.Client().Get(cmd.Context(), "/v1/tune/socket", q, &s); err != nil {
		return err
	}
	return c.Show(&s, func(w io.Writer) { openConnection(w, &s) })
}

var pidFD = regexp.MustCompile(`^([1-9][0-9]{0,8}):([0-9]{1,9})$`)

// socketQuery returns the query for an open connection PID:FD or LOCAL,REMOTE.
func socketQuery(text string) (url.Values, error) {
	localText, remoteText, isPair := strings.Cut(text, ",")
	if !isPair {
		parts := pidFD.FindStringSubmatch(text)
		if parts == nil {
			return nil, fault.Usage(fmt.Errorf("--socket is %q", text),
				"PID:FD as in 812:7, or LOCAL,REMOTE as in 10.0.0.1:1790,192.0.2.1:40000")
		}
		return command.Query("pid", parts[1], "fd", parts[2]), nil
	}
	local, remote, err := command.Endpoints(localText, remoteText)
	if err != nil {
		return nil, err
	}
	if local.Port() == 0 || remote.Port() == 0 {
		return nil, fault.Usage(errors.New("a port is missing in --socket"), "give both ports, as in 10.0.0.1:1790,192.0.2.1:40000")
	}
	return command.Query("local", local.String(), "remote", remote.String()), nil
}

func openConnection(w io.Writer, s *api.TuneSocket) {
	fmt.Fprintf(w, "%s to %s, %s: descriptor %d of process %d (%s)\n", s.Local, s.Remote, s.Role, s.FD, s.PID, command.Shorten(s.Command, 50))
	fmt.Fprintf(w, "cgroup %s, ", command.OrDash(s.Cgroup))
	switch s.MPTCP {
	case "":
		tunedConnection(w, &s.Tuned)
		return
	case api.MPTCPFallback:
		fmt.Fprintln(w, "MPTCP socket that fell back to TCP")
	default:
		fmt.Fprintf(w, "MPTCP socket with %s\n", format.Count(len(s.Subflows), "subflow", "subflows"))
	}
	for i := range s.Subflows {
		f := &s.Subflows[i]
		fmt.Fprintf(w, "\nsubflow %s to %s, %s: ", f.Local, f.Remote, f.Role)
		tunedConnection(w, &f.Tuned)
	}
}

// tunedConnection appends the rule to the current line, and writes the values and the steps.
func tunedConnection(w io.Writer, s *api.Tuned) {
	if s.Rule == "" {
		fmt.Fprint(w, "no rule")
	} else {
		fmt.Fprintf(w, "rule %s", s.Rule)
	}
	if s.Rule != "" && !s.Current {
		fmt.Fprint(w, ", no longer in force")
	}
	if s.Arm == "control" {
		fmt.Fprint(w, ", control arm of its trial")
	}
	if s.TunedLive {
		fmt.Fprint(w, ", applied while open")
	}
	if s.Reacted {
		fmt.Fprint(w, ", has reacted")
	}
	if s.Candidate != nil {
		fmt.Fprintf(w, ", initial window %d", *s.Candidate)
	}
	fmt.Fprintln(w)
	if len(s.Values) > 0 {
		fmt.Fprintln(w, "\nOPTION\tREQUESTED\tEFFECTIVE\tREAD FROM\tNOTE")
		for _, v := range s.Values {
			note := v.Note
			if note == "" && v.Differs {
				note = "differs"
			}
			fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\n", v.Option, command.OrDash(v.Requested), command.OrDash(v.Effective), command.OrDash(v.Source), command.OrDash(note))
		}
	}
	if (s.Rule == "" || !s.Current) && len(s.Steps) > 0 {
		fmt.Fprintln(w, "\nby the rules in force:")
		steps(w, s.Steps)
	}
}

func steps(w io.Writer, list []match.Step) {
	fmt.Fprintln(w, "RULE\tMATCHES\tWHY")
	for _, s := range list {
		fmt.Fprintf(w, "%s\t%s\t%s\n", s.Rule, command.YesNo(s.Matches), command.OrDash(s.Why))
	}
}
