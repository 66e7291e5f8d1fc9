// SPDX-License-Identifier: Apache-2.0

package tracecmd

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"

	"sockeye/internal/api"
	"sockeye/internal/cli/command"
	"sockeye/internal/fault"
	"sockeye/internal/format"
	"sockeye/internal/linux"
	"sockeye/internal/trace/measure"
)

// Saved is the JSON output of trace save.
type Saved struct {
	File     string    `json:"file"`
	Bytes    int64     `json:"bytes"`
	From     time.Time `json:"from"`
	To       time.Time `json:"to"`
	Slices   int       `json:"slices"`
	Groups   int       `json:"groups"`
	Messages uint64    `json:"messages"`
	Partial  bool      `json:"partial"`
}

func (c *commands) traceSaveCommand() *cobra.Command {
	var selector string
	var force bool
	cmd := &cobra.Command{
		Use:   "save FILE",
		Short: "Save the measurements to a file, for trace compare",
		Long: `Save writes the measurements of the last hour, or of the last DURATION with
--since, to a JSON file, in slices of 10 s. trace compare compares two such files
of different hosts or days. The file contains no data of the messages, but the
addresses, cgroups and rules by which the trace rules group.`,
		Example: `  sockeye trace save monday.json
  sockeye trace save slow-host.json --since 10m --select rule=bmp`,
		Args: command.Arguments(1, 1, "FILE"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if args[0] != "" && !isSaved(args[0]) {
				return fault.Usage(fmt.Errorf("the name %s does not end in .json", args[0]), "trace compare reads files whose names end in .json")
			}
			s, err := writeMeasurements(cmd, args[0], selector, force, c.traceSave)
			if err != nil {
				return err
			}
			return c.Print(s, func(l *command.Text) {
				l.Line("%s: %s of %s, from %s to %s; %s", s.File, format.Count(s.Messages, "message", "messages"), format.Count(s.Groups, "group", "groups"),
					c.Clock(s.From), c.Clock(s.To), command.Bytes(s.Bytes))
				if s.Partial {
					l.Line("earlier measurements are not available")
				}
			})
		},
	}
	cmd.Flags().String("since", "", "save only measurements of the last DURATION, as in 15m")
	cmd.Flags().BoolVar(&force, "force", false, "replace an existing file")
	selectFlag(cmd, &selector)
	command.CompleteFlag(cmd, "since")
	return cmd
}

// traceSave requests the measurements and writes them.
func (c *commands) traceSave(ctx context.Context, file *newFile, since time.Duration, selector string) (*Saved, error) {
	if _, err := c.traceStatus(ctx, ""); err != nil {
		return nil, err
	}
	var history api.TraceHistory
	if err := c.Client().Get(ctx, "/v1/trace/history", query(since, selector), &history); err != nil {
		return nil, err
	}
	whole := measure.Merge(history.Slices)
	s := &Saved{File: file.path, From: whole.From, To: whole.To, Slices: len(history.Slices), Groups: len(whole.Results), Partial: history.Partial}
	for _, r := range whole.Results {
		s.Messages += r.Chosen + r.RXChosen
	}
	if s.Messages == 0 && selector != "" {
		return nil, fault.WithHint(fmt.Errorf("no message of %s was measured in this time", selector), "sockeye trace shows the rules and their groups")
	}
	if s.Messages == 0 {
		return nil, fault.WithHint(errors.New("nothing was measured in this time"), "sockeye trace shows the rules and their groups")
	}
	content := SavedTrace{Format: savedFormat, Number: savedVersion, Version: command.Version, Saved: c.Now(), Select: selector,
		Partial: history.Partial, Slices: history.Slices}
	var err error
	if content.Host, err = os.Hostname(); err != nil {
		return nil, fmt.Errorf("write %s: %w", file.path, err)
	}
	if content.Kernel, _, err = linux.Uname(); err != nil {
		return nil, fmt.Errorf("write %s: %w", file.path, err)
	}
	data, err := json.Marshal(content)
	if err == nil {
		_, err = file.Write(append(data, '\n'))
	}
	if err != nil {
		return nil, fmt.Errorf("write %s: %w", file.path, err)
	}
	s.Bytes = int64(len(data)) + 1
	return s, nil
}
