// SPDX-License-Identifier: Apache-2.0

package steercmd

import (
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"sockeye/internal/api"
	"sockeye/internal/cli/command"
	"sockeye/internal/format"
)

const (
	// whyLines is the number of lines of the text for one service, or for a few.
	whyLines = 24
	// leastWhyLines is the number of lines of a service if there are many: those without connections and events.
	leastWhyLines = 8
	// mostWhySessions is the number of connections that the text lists for one service.
	mostWhySessions = 4
)

// whyWriter writes the answer of one service.
type whyWriter struct {
	*command.Text
	*command.Command
	left int  // lines
	cut  bool // long lines
}

func (c *commands) whyCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "why ADDRESS",
		Short: "Explain how the traffic of a device is steered, and what has happened to it",
		Long: `Why shows on one screen which process receives the traffic of a device, and why:
the prefix and the name in the device map, the bucket, the slot and what selects
it, the member, open connections, current rates, the last events, and what the
policy file would change. ADDRESS may be a name of the device map if only one
address of the device has sent packets. For an address that has sent no packet,
the command shows where its packets would go. In a fleet, the command names the
host of the device; run it on that host for the rest.

The command takes a second, because it measures the rates. sockeye where shows
the slots of many addresses.`,
		Example: `  sockeye why 192.0.2.1
  sockeye why edge-router-1 --service telemetry`,
		Args: command.Arguments(1, 1, "ADDRESS"),
	}
	query := serviceFlag(cmd)
	cmd.ValidArgsFunction = c.complete(c.deviceNames)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		q := query()
		q.Set("address", args[0])
		var list []api.Why
		if err := c.Client().Get(cmd.Context(), "/v1/why", q, &list); err != nil {
			return err
		}
		return c.Print(list, func(t *command.Text) {
			for i := range list {
				(&whyWriter{t, c.Command, max(whyLines/len(list), leastWhyLines), c.IsTerminal()}).write(&list[i])
			}
		})
	}
	return cmd
}

func (t *whyWriter) write(w *api.Why) {
	device := "a device of its own"
	if w.Device != "" {
		device = fmt.Sprintf("device %s, by prefix %s of the device map", w.Device, w.Prefix)
	}
	if w.Effect == "elsewhere" || w.Effect == "dropped" {
		t.add(w.Service, "%s is %s", w.Address, device)
		t.addElsewhere(w)
		return
	}
	host := ""
	if w.Host != "" {
		host = fmt.Sprintf(", which host %s of the fleet serves,", w.Host)
	}
	t.add(w.Service, "%s%s is %s", w.Address, host, device)
	t.add("slot", "%s", slotText(w, t.Now()))
	effect := map[string]string{
		"reach": "packets reach the member", "diverted": "packets are diverted to the standby slot", "wait": "packets wait", "refused": "packets are refused",
	}[w.Effect]
	if w.Reason != "" {
		effect += ": " + w.Reason
	}
	t.add("effect", "%s", effect)
	if m := w.Member; m != nil {
		t.add("member", "process %d in slot %d by %s, started %s (%s ago): %s", m.PID, m.Slot, m.Source, t.Clock(m.Since),
			age(t.Now(), m.Since), command.Shorten(m.Command, 40))
	} else {
		t.add("member", "none")
	}
	t.addSeen(w)
	t.add("now", "%s datagrams/s, %s/s by TCP, %s refused/s", command.Digits(w.Rates.Datagrams), command.Bytes(int64(w.Rates.Bytes)),
		command.Digits(w.Rates.Refused))
	t.add("policy", "%s", planText(w))
	t.addSessions(w)
	t.addEvents(w)
}

// addElsewhere adds where the packets of a device go that this host does not serve, and what is left of the device here.
func (t *whyWriter) addElsewhere(w *api.Why) {
	if w.Effect == "dropped" {
		t.add("host", "packets to the addresses of the fleet are dropped: %s", w.Reason)
	} else {
		t.add("host", "%s: packets to the addresses of the fleet go to that host", w.Host)
		t.add("", "sockeye why %s on that host gives the rest", w.Address)
	}
	if w.Seen != nil {
		t.addSeen(w)
	}
	if w.SessionCount > 0 {
		t.addSessions(w)
	}
}

// addSeen adds the counts of the address at this host.
func (t *whyWriter) addSeen(w *api.Why) {
	switch s := w.Seen; {
	case s == nil && w.SessionCount == 0:
		t.add("seen", "never, or not lately")
	case s == nil:
		t.add("seen", "no packets lately")
	default:
		served := "refused"
		if s.LastSlot != nil {
			served = fmt.Sprintf("to slot %d", *s.LastSlot)
		}
		dropped := ""
		if s.Dropped != nil && *s.Dropped > 0 {
			dropped = fmt.Sprintf(", %d dropped", *s.Dropped)
		}
		t.add("seen", "last SYN or datagram %s ago, %s; %s, %s, %d refused%s", age(t.Now(), s.LastSeen), served,
			format.Count(s.Connections, "SYN", "SYNs"), format.Count(s.Datagrams, "datagram", "datagrams"), s.Refused, dropped)
	}
}

// slotText describes the slot, and what selects the slot.
func slotText(w *api.Why, now time.Time) string {
	text := fmt.Sprintf("%d by bucket %d of the table", w.Slot, w.Bucket)
	switch w.Because {
	case "pin":
		text = fmt.Sprintf("%d by a pin (bucket %d)", w.Slot, w.Bucket)
		if w.Until != nil {
			text = fmt.Sprintf("%d by a pin, for another %s (bucket %d)", w.Slot, age(*w.Until, now), w.Bucket)
		}
	case "adopted":
		text = fmt.Sprintf("%d, whose member had its connections (on_start: adopt; bucket %d)", w.Slot, w.Bucket)
	}
	if w.Target != nil {
		text += fmt.Sprintf("; the device will move to slot %d", *w.Target)
	}
	return text
}

// planText describes what the policy file would change.
func planText(w *api.Why) string {
	p := &w.Plan
	if p.Slot == nil {
		return "the file on disk: " + p.Problem
	}
	settled := w.Slot
	if w.Target != nil {
		settled = *w.Target
	}
	var parts []string
	if *p.Slot != settled {
		parts = append(parts, fmt.Sprintf("moves the device to slot %d", *p.Slot))
	}
	switch p.Device {
	case w.Device:
	case "":
		parts = append(parts, "removes the device from the device map")
	default:
		parts = append(parts, "makes the address part of device "+p.Device)
	}
	if len(p.Changes) == 0 && len(parts) == 0 {
		return "the file on disk changes nothing for this service"
	}
	if len(parts) == 0 {
		parts = append(parts, "keeps the device at its slot")
	}
	text := "the file on disk " + strings.Join(parts, " and ")
	for i, change := range p.Changes {
		if i == 0 {
			text += ": "
		} else {
			text += "; "
		}
		text += change.What
	}
	return text
}

// addSessions adds the open connections, in at most half of the lines that are left.
func (t *whyWriter) addSessions(w *api.Why) {
	text := format.Count(w.SessionCount, "open connection", "open connections")
	if w.Split {
		text += ", SPLIT: not all are at the member that serves the device"
	}
	t.add("sessions", "%s", text)
	shown := w.Sessions[:max(0, min(len(w.Sessions), mostWhySessions, t.left/2))]
	for _, s := range shown {
		at := "at no member"
		if s.Slot != nil {
			at = fmt.Sprintf("at slot %d", *s.Slot)
		}
		if s.PID > 0 {
			at += fmt.Sprintf(", process %d", s.PID)
		}
		t.add("", "%s: %s received, %s unread, from %s to %s", at, command.Bytes(s.Received), command.Bytes(s.Unread), s.Remote, s.Local)
	}
	if more := w.SessionCount - len(shown); more > 0 && len(shown) > 0 {
		t.add("", "and %d more (-o json lists up to 100)", more)
	}
}

// addEvents adds the last events, in the lines that are left.
func (t *whyWriter) addEvents(w *api.Why) {
	events := w.Events[max(0, len(w.Events)-max(0, t.left)):]
	label := "events"
	for i := range events {
		e := &events[i]
		text := e.Text
		if e.Slot != nil {
			text = fmt.Sprintf("slot %d: %s", *e.Slot, text)
		}
		for _, key := range []string{"reason", "problem", "cause", "change", "what", "effect"} {
			if value := e.Details[key]; value != "" {
				text += ", " + value
			}
		}
		t.add(label, "%s  %s  %s", t.Clock(e.Time), e.Kind, text)
		label = ""
	}
	if len(events) == 0 && t.left > 0 {
		t.add(label, "none recorded")
	}
}

// add adds a line with a label, and cuts it to the width of a screen if the output is a terminal.
func (t *whyWriter) add(label, format string, args ...any) {
	text := []rune(command.Printable(fmt.Sprintf("%-9s", label) + " " + fmt.Sprintf(format, args...)))
	if t.cut && len(text) > command.LineWidth {
		text = append(text[:command.LineWidth-1], '…')
	}
	t.Line("%s", string(text))
	t.left--
}

// age returns the time from one time to a later one, in the largest two units.
func age(now, then time.Time) string {
	d := max(0, now.Sub(then)).Round(time.Second)
	switch {
	case d >= 48*time.Hour:
		return fmt.Sprintf("%dd%dh", d/(24*time.Hour), d%(24*time.Hour)/time.Hour)
	case d >= time.Hour:
		return fmt.Sprintf("%dh%dm", d/time.Hour, d%time.Hour/time.Minute)
	}
	return d.String()
}
