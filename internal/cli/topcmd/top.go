// SPDX-License-Identifier: Apache-2.0

// Package topcmd has the command top: the live state of slots, devices, groups and stuck connections on a terminal, and
// the replay of recorded states.
package topcmd

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	tea "charm.land/bubbletea/v2"
	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"sockeye/internal/api"
	"sockeye/internal/cli/command"
	"sockeye/internal/config"
	"sockeye/internal/fault"
)

const (
	// recordedTime is the time that the agent keeps frames, the default of --replay.
	recordedTime = "1h"
	// framesPerSecond is the maximum rate at which the screen is drawn.
	framesPerSecond = 30
	// onceWidth is the width of the lists of --once in columns.
	onceWidth = 160
)

type commands struct{ *command.Command }

// options are the flags.
type options struct {
	service string
	replay  string // duration; "": live
	once    bool
}

// New returns the command.
func New(env *command.Command) *cobra.Command {
	c := &commands{env}
	var o options
	cmd := &cobra.Command{
		Use:   "top [--replay [DURATION]] [--service S] [--once]",
		Short: "Watch slots, devices, groups and stuck connections, or replay the last hour",
		Long: `Top shows the slots of a service with their load, queues and closed windows, the
devices by rate, the tuned and traced groups, and TCP connections that do not
progress. Each slot and each device has a page with its recent events. The
screen is drawn again each second; the key ? shows all keys.

With --replay, top shows the states that the agent has recorded every ten
seconds, of the last hour or of DURATION. A replay changes nothing.

The keys d and m drain a slot and move a device, as the commands slot set and
move do. Both require the number of the slot or the name of the device as a
confirmation.

With --once, top prints the lists once, without keys. With -o json, it prints
one state as JSON. Colors are omitted if NO_COLOR is set.`,
		Example: `  sockeye top
  sockeye top --service telemetry
  sockeye top --replay 15m
  sockeye top -o json`,
		Args: command.Arguments(0, 1, ""),
	}
	cmd.Flags().StringVar(&o.service, "service", "", "show this service first; with --once and -o json, only this one")
	cmd.Flags().StringVar(&o.replay, "replay", "", "show the recorded states of this time")
	cmd.Flag("replay").NoOptDefVal = recordedTime
	cmd.Flags().BoolVar(&o.once, "once", false, "print the lists once")
	c.CompleteService(cmd)
	command.CompleteFlag(cmd, "replay", "15m", "30m", recordedTime)
	cmd.ValidArgsFunction = cobra.NoFileCompletions
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if len(args) > 0 && o.replay != recordedTime {
			return fault.Usage(fmt.Errorf("unexpected argument %q", args[0]), "usage: "+cmd.UseLine())
		}
		if len(args) > 0 {
			o.replay = args[0]
		}
		if cmd.Flags().Changed("replay") {
			if d, err := time.ParseDuration(o.replay); err != nil || d <= 0 {
				return fault.Usage(fmt.Errorf("--replay is %q", o.replay), command.IntervalHint)
			}
		}
		if c.Output == "json" {
			o.once = true
		}
		if o.once && o.replay != "" {
			return fault.Usage(errors.New("--replay cannot be combined with --once or -o json"), "usage: "+cmd.UseLine())
		}
		return c.top(cmd.Context(), o)
	}
	return cmd
}

// top shows the screen until the user quits or ctx is done, or prints one frame.
func (c *commands) top(ctx context.Context, o options) error {
	var in, out *os.File
	if !o.once {
		var err error
		if in, out, err = c.terminal(); err != nil {
			return err
		}
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	f := &feed{client: c.Client(), replay: o.replay, retry: retryInterval, messages: make(chan tea.Msg)}
	stream, first, err := f.connect(ctx, o.once)
	if err != nil {
		return err
	}
	defer stream.Close()
	if err := hasService(first, o.service); err != nil {
		return err
	}
	if o.once {
		return c.once(first, o.service)
	}
	m := newModel(f.actions(ctx))
	m.service = o.service
	m.now = c.Now
	m.colors = os.Getenv("NO_COLOR") == ""
	if o.replay != "" {
		m.replay = &replay{speed: 1}
	}
	go f.run(ctx, stream, first)
	_, err = tea.NewProgram(m, tea.WithContext(ctx), tea.WithInput(in), tea.WithOutput(out), tea.WithFPS(framesPerSecond),
		tea.WithoutSignalHandler()).Run()
	if ctx.Err() != nil {
		return nil // a signal
	}
	if err != nil {
		return fmt.Errorf("draw the screen: %w", err)
	}
	return nil
}

// terminal returns the terminal. It returns an error if input or output is something else.
func (c *commands) terminal() (in, out *os.File, err error) {
	hint := "sockeye top --once prints the lists once, and -o json prints JSON"
	out, isFile := command.Underlying(c.Out).(*os.File)
	if !isFile || !isTerminal(out) {
		return nil, nil, fault.Usage(errors.New("the standard output is not a terminal"), hint)
	}
	in, isFile = c.In.(*os.File)
	if !isFile || !isTerminal(in) {
		return nil, nil, fault.Usage(errors.New("the standard input is not a terminal"), hint)
	}
	if os.Getenv("TERM") == "dumb" {
		return nil, nil, fault.Usage(errors.New("the terminal cannot move the cursor (TERM is dumb)"), hint)
	}
	return in, out, nil
}

func isTerminal(f *os.File) bool {
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}

// hasService checks that a frame has a service. The name "" stands for any.
func hasService(f *api.Frame, name string) error {
	if name == "" || slices.ContainsFunc(f.Services, func(s api.LiveService) bool { return s.Name == name }) {
		return nil
	}
	var names []string
	for i := range f.Services {
		names = append(names, f.Services[i].Name)
	}
	hint := "the policy has no services"
	if near := config.Nearest(name, names); near != "" {
		hint = fmt.Sprintf("did you mean %s?", near)
	} else if len(names) > 0 {
		hint = "the policy has " + strings.Join(names, ", ")
	}
	return fault.Usage(fmt.Errorf("there is no service %q", name), hint)
}

// once prints a frame.
func (c *commands) once(f *api.Frame, service string) error {
	if service != "" {
		f.Services = slices.DeleteFunc(f.Services, func(s api.LiveService) bool { return s.Name != service })
		f.Stuck = slices.DeleteFunc(f.Stuck, func(s api.LiveSocket) bool { return s.Service != service })
	}
	if c.Output == "json" {
		return c.JSON(f)
	}
	var text command.Text
	for _, l := range report(f, c.Now()) {
		text.Line("%s", l.text)
	}
	_, err := io.WriteString(c.Out, text.String())
	return err
}

// report returns all lists of a frame, those of each service first.
func report(f *api.Frame, now time.Time) []line {
	m := newModel(actions{})
	m.width, m.now, m.arrived = onceWidth, func() time.Time { return now }, now
	m.show(f)
	var lines []line
	show := func(v view) {
		m.turn(v)
		m.fill()
		rows := m.table().lines(m.width, 1<<30, false)
		lines = append(append(lines, line{}, line{text: viewNames[v]}), rows...)
	}
	for i := range f.Services {
		m.service = f.Services[i].Name
		if i > 0 {
			lines = append(lines, line{})
		}
		lines = append(lines, m.summary())
		if p := f.Services[i].Problem; p != "" {
			lines = append(lines, line{text: p})
		}
		lines = append(lines, outsideLines(&f.Services[i])...)
		show(slotsView)
		show(devicesView)
	}
	if f.Problem != "" {
		lines = append(lines, line{text: f.Problem})
	}
	show(groupsView)
	show(stuckView)
	return lines
}
