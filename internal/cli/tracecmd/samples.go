// SPDX-License-Identifier: Apache-2.0

package tracecmd

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/bits"
	"os"
	"os/signal"
	"regexp"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"sockeye/internal/cli/command"
	"sockeye/internal/config"
	"sockeye/internal/fault"
	"sockeye/internal/format"
	"sockeye/internal/trace/measure"
)

func (c *commands) traceSamplesCommand() *cobra.Command {
	var selector, cgroup, buffer string
	var number int
	cmd := &cobra.Command{
		Use:   "samples",
		Short: "Stream the chosen messages",
		Long: `Samples prints a line for each chosen message when it is complete, until Ctrl-C
or until the limit of --count or --for. With -o jsonl, the lines are JSON and
have the state of the connection at the time of sending.

The kernel writes messages to a ring buffer. If the buffer is full, messages are
lost; then their number is printed at the end, and the exit code is 1. The
kernel keeps no messages while samples does not run. Each cgroup can have one
reader at a time.`,
		Example: `  sockeye trace samples --count 20
  sockeye trace samples -o jsonl --for 10s --buffer 4MB > messages.jsonl
  sockeye trace samples -o jsonl --select rule=replies | jq .stages_ns.network`,
		PersistentPreRunE: func(*cobra.Command, []string) error {
			if c.Output != "table" && c.Output != "json" && c.Output != "jsonl" {
				return fault.Usage(fmt.Errorf("--output is %q", c.Output), "table or jsonl")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, _ []string) error {
			if cmd.Flags().Changed("count") && number < 1 {
				return fault.Usage(fmt.Errorf("--count is %d", number), "1 or more")
			}
			during, err := command.Interval(cmd, "for")
			if err != nil {
				return err
			}
			size, err := bufferSize(cmd, buffer)
			if err != nil {
				return err
			}
			if err := selection("--select", selector); err != nil {
				return err
			}
			ctx := cmd.Context()
			if during > 0 {
				var stop context.CancelFunc
				ctx, stop = context.WithTimeout(ctx, during)
				defer stop()
			}
			q := query(0, selector)
			if cgroup != "" {
				q.Set("cgroup", cgroup)
			}
			if size > 0 {
				q.Set("buffer", strconv.Itoa(size))
			}
			return c.samples(ctx, q, number)
		},
	}
	cmd.Flags().IntVar(&number, "count", 0, "maximum number of messages")
	cmd.Flags().String("for", "", "duration of the stream, as in 10s")
	bufferFlag(cmd, &buffer, "1MB")
	cmd.Flags().StringVar(&cgroup, "cgroup", "", "show only this cgroup, named as in the policy")
	selectFlag(cmd, &selector)
	_ = cmd.RegisterFlagCompletionFunc("cgroup", c.tracedCgroups)
	command.CompleteFlag(cmd, "count")
	command.CompleteFlag(cmd, "for")
	return cmd
}

// bufferFlag adds --buffer.
func bufferFlag(cmd *cobra.Command, size *string, otherwise string) {
	cmd.Flags().StringVar(size, "buffer", otherwise, "size of the ring buffer, 4KB to 256MB, rounded up to a power of two")
	command.CompleteFlag(cmd, "buffer")
}

const (
	leastBuffer = 4 << 10
	mostBuffer  = 256 << 20 // limit of the agent
)

var (
	sizeText  = regexp.MustCompile(`^([0-9]{1,9})(B|KB|MB|KiB|MiB)$`)
	sizeUnits = map[string]int{"B": 1, "KB": 1e3, "MB": 1e6, "KiB": 1 << 10, "MiB": 1 << 20}
)

// bufferSize parses --buffer and rounds the size up to a power of two, which the kernel requires. It returns 0 if the flag
// is not given.
func bufferSize(cmd *cobra.Command, text string) (int, error) {
	if !cmd.Flags().Changed("buffer") {
		return 0, nil
	}
	parts := sizeText.FindStringSubmatch(text)
	if parts == nil {
		return 0, fault.Usage(fmt.Errorf("--buffer is %q", text), "a size, as in 256KB or 4MB")
	}
	n, err := strconv.Atoi(parts[1])
	if err != nil {
		return 0, err
	}
	if n *= sizeUnits[parts[2]]; n > 0 {
		n = 1 << bits.Len(uint(n-1))
	}
	if n < leastBuffer || n > mostBuffer {
		return 0, fault.Usage(fmt.Errorf("--buffer is %q", text), "4KB to 256MB")
	}
	return max(n, os.Getpagesize()), nil
}

// sampleLine is api.TraceSampleLine with the undecoded message.
type sampleLine struct {
	Sample json.RawMessage `json:"sample"`
	Lost   uint64          `json:"lost"`
}

// samples writes messages until ctx is done, number messages are written, or the reader of the output closes it.
func (c *commands) samples(ctx context.Context, q map[string][]string, number int) error {
	if _, err := c.sendStatus(ctx, strings.Join(q["cgroup"], "")); err != nil {
		return unlessDone(ctx, err)
	}
	s, err := c.Client().Stream(ctx, "/v1/trace/samples", q)
	if err != nil {
		return unlessDone(ctx, err)
	}
	defer s.Close()
	// With a handler for SIGPIPE, a write to a closed pipe returns EPIPE instead of terminating the process.
	gone := make(chan os.Signal, 1)
	signal.Notify(gone, unix.SIGPIPE)
	defer signal.Stop(gone)

	out := bufio.NewWriterSize(c.Out, 64<<10)
	var lost uint64
	var line sampleLine
	for n := 0; number == 0 || n < number; {
		line = sampleLine{}
		if err = s.Next(&line); err != nil {
			break
		}
		lost = max(lost, line.Lost)
		if line.Sample != nil {
			if err = c.sample(out, line.Sample); err != nil {
				break
			}
			n++
		}
		if !s.Waiting() {
			if err = out.Flush(); err != nil {
				break
			}
		}
	}
	if flushed := out.Flush(); err == nil || ctx.Err() != nil {
		err = flushed
	}
	switch {
	case errors.Is(err, unix.EPIPE), err == nil:
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return truncated(err)
	default:
		return err
	}
	if lost > 0 {
		return &fault.Error{Err: fmt.Errorf("%s lost: the buffer was full", format.Count(lost, "message was", "messages were")),
			Hint: "use a larger --buffer, or choose fewer messages in the policy", Code: fault.CodeFailed}
	}
	return nil
}

// truncated returns the error for an incomplete answer.
func truncated(err error) error {
	return &fault.Error{Err: fmt.Errorf("the answer of the agent is incomplete: %w", err), Hint: "the agent may have exited; see sockeye status", Code: fault.CodeFailed}
}

// unlessDone returns err, or nil if ctx is done.
func unlessDone(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return nil
	}
	return err
}

// sample writes one message.
func (c *commands) sample(out *bufio.Writer, raw json.RawMessage) error {
	if c.Output != "table" {
		_, err := fmt.Fprintf(out, "%s\n", command.EscapeJSON(raw))
		return err
	}
	var s measure.Sample
	if err := json.Unmarshal(raw, &s); err != nil {
		return fmt.Errorf("read agent's answer: %w", err)
	}
	var stages []string
	for _, stage := range []config.Stage{config.StageSend, config.StageStack, config.StageQdisc, config.StageNIC, config.StageNetwork} {
		if d, ok := s.Stages[stage]; ok {
			stages = append(stages, string(stage)+" "+command.Duration(d))
		}
	}
	if s.Outcome != measure.Acked {
		stages = append(stages, outcomeText(s.Outcome))
	}
	var l command.Text
	l.Line("%s  %8s  %8s  %s  %s to %s  %s", c.moment(s.Ended), command.Duration(s.Stages[measure.Total]), command.Bytes(s.Length),
		s.Group.Label(), s.Local, s.Remote, strings.Join(stages, ", "))
	_, err := l.WriteTo(out)
	return err
}
