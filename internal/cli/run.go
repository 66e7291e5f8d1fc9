// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"

	"github.com/spf13/cobra"

	"sockeye/internal/agent"
)

func (c *command) runCommand() *cobra.Command {
	var service string
	var slot int
	cmd := &cobra.Command{
		Use:   "run [--service S] [--slot N] -- PROGRAM [ARGUMENT...]",
		Short: "Start a program as a member of a service",
		Long: `Run reserves a slot for this process and becomes the program, which is
registered when it listens on all of the service's listeners. The program has
no rights that it would not have otherwise; SOCKEYE_SERVICE and SOCKEYE_SLOT in
its environment say where it is.`,
		Example: "  sockeye run --service telemetry --slot 2 -- nfacctd -f /etc/pmacct/nfacctd-2.conf",
		Args:    arguments(1, -1, "PROGRAM"),
		RunE: func(cmd *cobra.Command, args []string) error {
			path, err := exec.LookPath(args[0])
			if err != nil {
				var lookup *exec.Error
				if errors.As(err, &lookup) {
					err = lookup.Err
				}
				var file *os.PathError
				if errors.As(err, &file) {
					err = file.Err
				}
				return agent.Usage(fmt.Errorf("find program %s: %w", args[0], err), "name it as in the shell, or with its path")
			}
			m := agent.Membership{Service: service}
			if cmd.Flags().Changed("slot") {
				m.Slot = &slot
			}
			var got agent.Membership
			if err := c.client().Post(cmd.Context(), "/v1/run", m, &got); err != nil {
				return err
			}
			if got.Slot == nil {
				return errors.New("run member: the agent named no slot")
			}
			var env []string
			for _, v := range os.Environ() {
				if !strings.HasPrefix(v, "SOCKEYE_") {
					env = append(env, v)
				}
			}
			env = append(env, "SOCKEYE_SERVICE="+got.Service, fmt.Sprintf("SOCKEYE_SLOT=%d", *got.Slot))
			if err := c.Exec(path, args, env); err != nil {
				return fmt.Errorf("start %s: %w", path, err)
			}
			return nil
		},
	}
	cmd.Flags().SetInterspersed(false)
	cmd.Flags().StringVar(&service, "service", "", "service; may be left out where there is only one")
	cmd.Flags().IntVar(&slot, "slot", 0, "slot; the first free one by default")
	return cmd
}
