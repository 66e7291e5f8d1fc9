// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"sockeye/internal/api"
	"sockeye/internal/cli/command"
	"sockeye/internal/events"
	"sockeye/internal/fault"
)

func (c *commands) eventsCommand() *cobra.Command {
	var follow bool
	var since, service, device string
	var kinds []string
	var slot, last int
	cmd := &cobra.Command{
		Use:   "events",
		Short: "Show what has happened: members, slots, devices, refusals, policies",
		Long: `Events prints a line for each recorded event, the oldest one first: the last 50
events, or all since --since. With --follow, it continues to print new events
until Ctrl-C. With -o jsonl, the lines are JSON.

The agent keeps events in files of a limited size (events.size of the policy),
which outlive the agent. Events of a kind that are too frequent are counted
instead of recorded: see events_suppressed. The systemd journal has the same
events, with the fields SOCKEYE_EVENT, SOCKEYE_SERVICE, SOCKEYE_SLOT,
SOCKEYE_DEVICE and others.`,
		Example: `  sockeye events --follow
  sockeye events --since 1h --slot 2
  sockeye events --device 192.0.2.1 -o jsonl
  sockeye events --kind device --kind slot_closed`,
		PersistentPreRunE: func(*cobra.Command, []string) error {
			if c.Output != "table" && c.Output != "json" && c.Output != "jsonl" {
				return fault.Usage(fmt.Errorf("--output is %q", c.Output), "table or jsonl; json is the same as jsonl")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, _ []string) error {
			q := url.Values{}
			if cmd.Flags().Changed("since") {
				begin, err := sinceTime(since, c.Now())
				if err != nil {
					return err
				}
				q.Set("since", begin.Format(time.RFC3339Nano))
			}
			if cmd.Flags().Changed("last") && last < 1 {
				return fault.Usage(fmt.Errorf("--last is %d", last), "1 or more")
			}
			if !cmd.Flags().Changed("since") || cmd.Flags().Changed("last") {
				q.Set("last", strconv.Itoa(last))
			}
			if cmd.Flags().Changed("slot") {
				if slot < 0 {
					return fault.Usage(fmt.Errorf("--slot is %d", slot), "the number of a slot, from 0")
				}
				q.Set("slot", strconv.Itoa(slot))
			}
			for _, kind := range kinds {
				if !events.Known(kind) {
					return fault.Usage(fmt.Errorf("--kind is %q", kind), "a kind, or its first word: "+strings.Join(events.Words(), ", "))
				}
				q.Add("kind", kind)
			}
			for key, value := range map[string]string{"service": service, "device": device} {
				if value != "" {
					q.Set(key, value)
				}
			}
			if follow {
				q.Set("follow", "1")
			}
			return c.events(cmd.Context(), q, follow)
		},
	}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "continue to print new events until Ctrl-C")
	cmd.Flags().StringVar(&since, "since", "", "begin at this time: a duration, as in 1h, 90s or 2d, or a time, as in 2026-01-02T15:04:05Z")
	cmd.Flags().IntVarP(&last, "last", "n", 50, "show only the last events before --follow")
	cmd.Flags().StringVar(&service, "service", "", "show only this service")
	cmd.Flags().StringVar(&device, "device", "", "show only this device: an address, or a name of the device map")
	cmd.Flags().IntVar(&slot, "slot", 0, "show only this slot")
	cmd.Flags().StringArrayVar(&kinds, "kind", nil, "show only events of this kind, or of the kinds that begin with this word; may be repeated")
	return cmd
}

// sinceTime parses a duration before now, or a time.
func sinceTime(text string, now time.Time) (time.Time, error) {
	if d, err := time.ParseDuration(text); err == nil && d >= 0 {
		return now.Add(-d), nil
	}
	if days, ok := strings.CutSuffix(text, "d"); ok {
		if n, err := strconv.ParseUint(days, 10, 16); err == nil {
			return now.Add(-time.Duration(n) * 24 * time.Hour), nil
		}
	}
	if t, err := time.Parse(time.RFC3339Nano, text); err == nil {
		return t, nil
	}
	return time.Time{}, fault.Usage(fmt.Errorf("--since is %q", text), "a duration, as in 1h, 90s or 2d, or a time, as in 2026-01-02T15:04:05Z")
}

// events prints the events of a query. With follow, it goes on with the events of the next agent when the agent ends.
func (c *commands) events(ctx context.Context, q url.Values, follow bool) error {
	p := &eventPrinter{commands: c, last: api.Event{Time: c.Now()}}
	if err := c.knownService(ctx, q.Get("service")); err != nil {
		return err
	}
	err := p.print(ctx, q)
	for told := uint64(0); follow && p.connected && p.failed == nil && ctx.Err() == nil; {
		if told != p.last.ID+1 { // once for each end of an agent
			told = p.last.ID + 1
			command.Hint(c.Err, "the agent has ended; waiting for the next one")
		}
		select {
		case <-ctx.Done():
		case <-time.After(time.Second):
		}
		q.Del("last")
		q.Set("since", p.last.Time.Format(time.RFC3339Nano))
		err = p.print(ctx, q)
	}
	if ctx.Err() != nil {
		return nil
	}
	if err != nil || p.failed != nil || p.last.ID > 0 {
		return errors.Join(p.failed, err)
	}
	if c.Output == "table" {
		command.Hint(c.Err, "no recorded event is among those that were asked for")
	}
	return nil
}

// knownService returns an error if the policy has no service of a name, and no event has the name: the events of a service outlive the service.
func (c *commands) knownService(ctx context.Context, name string) error {
	if name == "" {
		return nil
	}
	stream, err := c.Client().Stream(ctx, "/v1/events", url.Values{"service": {name}, "last": {"1"}})
	if err != nil {
		return err
	}
	defer stream.Close()
	var event json.RawMessage
	if err := stream.Next(&event); !errors.Is(err, io.EOF) {
		return err
	}
	var slots []api.SlotStatus
	if err := c.Client().Get(ctx, "/v1/slots", url.Values{"service": {name}}, &slots); fault.Code(err) == fault.CodeUsage {
		return err
	}
	return nil // also if the service has a problem
}

// eventPrinter prints events once.
type eventPrinter struct {
	*commands
	connected bool      // the agent has answered
	last      api.Event // that was printed
	failed    error     // of the output
}

// print prints the events of a query until the end of the answer.
func (p *eventPrinter) print(ctx context.Context, q url.Values) error {
	stream, err := p.Client().Stream(ctx, "/v1/events", q)
	if err != nil {
		return err
	}
	defer stream.Close()
	p.connected = true
	for {
		var raw json.RawMessage
		err := stream.Next(&raw)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		var e api.Event
		if err := json.Unmarshal(raw, &e); err != nil {
			return fmt.Errorf("read agent's answer: %w", err)
		}
		if e.ID > 0 && e.ID <= p.last.ID && !e.Time.After(p.last.Time) {
			continue // printed before
		}
		line := string(command.EscapeJSON(raw)) + "\n"
		if p.Output == "table" {
			line = command.EventLine(&e, p.Now()) + "\n"
		}
		if _, p.failed = io.WriteString(p.Out, line); p.failed != nil {
			return nil
		}
		p.last = e
	}
}
