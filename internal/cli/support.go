// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"sockeye/internal/api"
	"sockeye/internal/cli/command"
	"sockeye/internal/events"
	"sockeye/internal/fault"
	"sockeye/internal/support"
)

// supported is the JSON output of support.
type supported struct {
	File  string         `json:"file"`
	Files []support.File `json:"files"`
}

// The maximum times for each command: for most of them, for the first one that asks the agent, and for the others once the agent has not
// answered. The command doctor has a patience of its own with such an agent, and much to tell without it.
const (
	supportTimeout = 30 * time.Second
	firstTimeout   = 10 * time.Second
	silentTimeout  = time.Second
)

// supportCommands are the commands whose output is packed. devices is packed on request.
var supportCommands = [][]string{
	{"version"}, {"status"}, {"slots"}, {"moves"}, {"templates"}, {"doctor"}, {"plan"}, {"tune"}, {"trace"}, {"bigtcp"}, {"events"},
}

func (c *commands) supportCommand() *cobra.Command {
	var file, policy, pins string
	var devices bool
	cmd := &cobra.Command{
		Use:   "support",
		Short: "Write an archive of diagnostic data for a maintainer",
		Long: `Support writes an archive with the policy without its comments, the output of
status, slots, doctor, events, plan and other commands, the last 5,000 lines of
the agent's journal, the kernel, sysctls, and the sizes of maps. It lists the
contents, changes nothing else, and works without an agent. Run it as root: for
other users, the journal, the pins and what only root may ask the agent are
missing. Read the archive before you pass it on: it contains arguments of
processes, mounts, addresses of exporters, and with --devices those of all
devices. In the arguments, values after names such as password, secret or token,
and passwords in URLs are masked; other secrets are not recognized.`,
		Args: command.Arguments(0, 0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return c.support(cmd.Context(), file, policy, pins, cmd.Flags().Changed("policy"), devices)
		},
	}
	cmd.Flags().StringVar(&file, "file", "", "file to write (default sockeye-support-TIME.tar.gz in the working directory)")
	cmd.Flags().StringVar(&policy, "policy", command.DefaultPolicy, "policy file")
	cmd.Flags().StringVar(&pins, "pins", command.DefaultPins, "directory of the pins")
	cmd.Flags().BoolVar(&devices, "devices", false, "pack the list of devices and their events, too")
	return cmd
}

func (c *commands) support(ctx context.Context, file, policy, pins string, named, devices bool) error {
	now := c.Now().UTC()
	name := "sockeye-support-" + now.Format("20060102T150405Z")
	if file == "" {
		file = name + ".tar.gz"
	}
	exists := fault.Conflict(fmt.Errorf("%s exists", file), "name another file with --file")
	if _, err := os.Lstat(file); err == nil {
		return exists
	}
	files := []support.File{support.Policy(policy)}
	list := supportCommands
	if devices {
		list = append(slices.Clone(list), []string{"devices"})
	}
	silent := false
	for _, args := range list {
		flags, timeout := []string{"--run-dir", c.RunDir, "-o", "json"}, supportTimeout
		switch {
		case args[0] == "status":
			timeout = firstTimeout
		case silent && args[0] != "doctor":
			timeout = silentTimeout
		}
		switch {
		case args[0] == "events":
			flags = append(flags, "--last", strconv.Itoa(supportEvents))
			for _, word := range events.Words() {
				if devices || !strings.HasPrefix(word, "device") {
					flags = append(flags, "--kind", word)
				}
			}
		case args[0] == "doctor":
			flags = append(flags, "--pins", pins)
			if named {
				flags = append(flags, "--policy", policy)
			}
		case args[0] == "plan" && named:
			flags = append(flags, "--", policy)
		}
		packed, late := c.outputOf(ctx, args, flags, timeout)
		files, silent = append(files, packed), silent || late
	}
	files = append(files, support.Pins(pins), support.Journal(ctx))
	files = append(files, support.Host()...)
	var archive bytes.Buffer
	if err := errors.Join(support.Write(&archive, name, files, now), ctx.Err()); err != nil {
		return fmt.Errorf("write the archive: %w", err)
	}
	// Only its owner reads the archive, and nothing is replaced.
	out, err := os.OpenFile(file, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if errors.Is(err, fs.ErrExist) {
		return exists
	}
	if err != nil {
		return fmt.Errorf("write the archive: %w", err)
	}
	_, err = out.Write(archive.Bytes())
	if err = errors.Join(err, out.Close()); err != nil {
		return errors.Join(fmt.Errorf("write the archive: %w", err), os.Remove(file))
	}
	return c.Show(&supported{file, files}, func(w io.Writer) {
		support.Table(w, files)
		fmt.Fprintf(c.Err, "%s written; read it before you pass it on\n", file)
		if os.Geteuid() != 0 {
			command.Hint(c.Err, "the archive is incomplete, because only root may read the journal, the pins and the whole state: run it as root")
		}
	})
}

// supportEvents is the number of events in the archive.
const supportEvents = 5000

// outputOf runs a command of this program, and tells whether it has used up its time.
func (c *commands) outputOf(ctx context.Context, args, flags []string, timeout time.Duration) (packed support.File, late bool) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	var out bytes.Buffer
	env := c.Environment
	env.Out, env.Err, env.In = &out, io.Discard, strings.NewReader("")
	var err error
	if code := Run(ctx, append(slices.Clone(args), flags...), env); code != 0 {
		var failure api.Failure // of a command without a result
		_ = json.Unmarshal(out.Bytes(), &failure)
		err = fmt.Errorf("exit code %d%s", code, strings.TrimSuffix(": "+failure.Error, ": "))
	}
	return support.New("commands/"+strings.Join(args, "-")+".json", "sockeye "+strings.Join(args, " "), support.MaskCommands(out.Bytes()), err), ctx.Err() != nil
}
