// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"sockeye/internal/cli/command"
	"sockeye/internal/config"
	"sockeye/internal/fault"
	"sockeye/internal/statedir"
	"sockeye/internal/steer/firstpolicy"
)

// initial is the JSON output of init.
type initial struct {
	File     string           `json:"file"`
	Written  bool             `json:"written"`
	Policy   string           `json:"policy"`
	Services []initialService `json:"services"`
}

type initialService struct {
	Name      string           `json:"name"`
	Listeners []string         `json:"listeners"`
	User      string           `json:"user"`
	Slots     int              `json:"slots"`
	Processes []initialProcess `json:"processes"`
	Problem   string           `json:"problem,omitempty"`
}

type initialProcess struct {
	PID        int    `json:"pid"`
	Executable string `json:"executable,omitempty"`
	Unit       string `json:"unit,omitempty"`
}

func (c *commands) initCommand() *cobra.Command {
	var file string
	var write bool
	cmd := &cobra.Command{
		Use:   "init",
		Short: "Write a first policy from the processes that share ports",
		Long: `Init finds the processes of this host that share ports by SO_REUSEPORT, with
their units and users, and prints a policy with a service for each group. It
changes nothing without --write, and replaces only a policy that does nothing.
Read the policy before the agent applies it: any local user can start
processes that share a port.`,
		Args: command.Arguments(0, 0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return c.init(file, write, cmd.Flags().Changed("policy"))
		},
	}
	cmd.Flags().StringVar(&file, "policy", command.DefaultPolicy, "policy file for --write")
	cmd.Flags().BoolVar(&write, "write", false, "write the policy file")
	return cmd
}

// init shows or writes a first policy. named is whether the user has named the file.
func (c *commands) init(file string, write, named bool) error {
	host, err := firstpolicy.Read()
	if err != nil {
		return err
	}
	services, alone := host.Services()
	text, ok := firstpolicy.Policy(services)
	if !ok {
		return nothingShared(services, alone)
	}
	result := initial{File: file, Written: write, Policy: text, Services: []initialService{}}
	for _, s := range services {
		one := initialService{Name: s.Name, User: s.User, Slots: s.Slots, Problem: s.Problem(), Listeners: []string{}}
		for _, p := range s.Ports {
			one.Listeners = append(one.Listeners, p.String())
		}
		for _, p := range s.Programs {
			one.Processes = append(one.Processes, initialProcess{p.PID, p.Exe, p.Unit})
		}
		result.Services = append(result.Services, one)
	}
	if write {
		if err := writePolicy(file, text); err != nil {
			return err
		}
	}
	return c.Show(&result, func(w io.Writer) {
		if !write {
			fmt.Fprint(w, text)
		} else {
			fmt.Fprintf(w, "%s written\n", file)
		}
		for _, s := range services {
			if problem := s.Problem(); problem != "" {
				fmt.Fprintf(c.Err, "left out: %s: %s\n", describePrograms(s.Programs), problem)
			}
		}
		switch {
		case !write && named:
			command.Hint(c.Err, file+" is not written without --write")
		case write && file == command.DefaultPolicy:
			command.Hint(c.Err, "read it, then: sockeye doctor; systemctl enable sockeye; systemctl reload-or-restart sockeye")
		case write: // the unit reads another file
			command.Hint(c.Err, fmt.Sprintf("read it, then: sockeye doctor --policy %s; sockeye agent --policy %s", file, file))
		}
	})
}

// nothingShared returns the error of a host without a service, and names the programs that could share their ports.
func nothingShared(services []*firstpolicy.Service, alone []*firstpolicy.Program) error {
	hint := "start at least two processes that listen on the same ports with SO_REUSEPORT, as nfacctd does"
	switch {
	case len(services) > 0:
		return fault.WithHint(fmt.Errorf("no policy for %s: %s", describePrograms(services[0].Programs), services[0].Problem()), hint)
	case len(alone) > 0:
		hint = fmt.Sprintf("%s could share its ports: start another one", describePrograms(alone[:1]))
	}
	return fault.WithHint(errors.New("no processes of this host share a port by SO_REUSEPORT"), hint)
}

// describePrograms names programs, as in "nfacctd (process 812, and 3 more)".
func describePrograms(list []*firstpolicy.Program) string {
	more := ""
	if len(list) > 1 {
		more = fmt.Sprintf(", and %d more", len(list)-1)
	}
	return fmt.Sprintf("%s (process %d%s)", list[0].Name(), list[0].PID, more)
}

// writePolicy writes a policy file. It replaces only a policy that does nothing, as that of the packages.
func writePolicy(file, text string) error {
	switch old, err := config.Load(file); {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return fault.Conflict(fmt.Errorf("%s exists and is not a valid policy: %w", file, err), "correct it, or name another file with --policy")
	case !old.DoesNothing():
		return fault.Conflict(fmt.Errorf("%s exists and has %s", file, contents(old)), "name another file with --policy")
	}
	if file == command.DefaultPolicy {
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			return fmt.Errorf("write policy: %w", err)
		}
	} else if _, err := os.Stat(filepath.Dir(file)); err != nil {
		return fault.Unreadable(fmt.Errorf("write policy: %w", err), "make the directory, or name another file with --policy")
	}
	if err := statedir.Write(file, []byte(text)); err != nil {
		return err
	}
	return os.Chmod(file, 0o644)
}
