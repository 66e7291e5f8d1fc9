// SPDX-License-Identifier: Apache-2.0

package socketscmd

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"

	"sockeye/internal/cli/command"
	"sockeye/internal/format"
	"sockeye/internal/sockdiag"
)

// socketOrders are the sort orders. Figures are sorted in descending order, except room; addresses in ascending order.
var socketOrders = map[string]func(a, b *found) int{
	"queued":        most(func(f *found) int64 { return int64(f.socket.Queued) }),
	"payload":       most(payload),
	"unsent":        most(func(f *found) int64 { return int64(f.socket.Info.Notsent_bytes) }),
	"unread":        most(received),
	"buffer":        most(func(f *found) int64 { return int64(f.socket.Buffer) }),
	"rtt":           most(func(f *found) int64 { return int64(f.socket.Info.Rtt) }),
	"retransmitted": most(func(f *found) int64 { return int64(f.socket.Info.Total_retrans) }),
	"room": most(func(f *found) int64 {
		if f.room == nil {
			return math.MinInt64
		}
		return -int64(f.room.Safe)
	}),
	"local":  func(a, b *found) int { return cmp.Or(a.socket.Local.Compare(b.socket.Local), byEnds(a, b)) },
	"remote": func(a, b *found) int { return cmp.Or(a.socket.Remote.Compare(b.socket.Remote), byEnds(a, b)) },
}

// Orders returns the values of --sort.
func Orders() []string { return slices.Sorted(maps.Keys(socketOrders)) }

// payload returns 0 for a listener, for which the field counts connections.
func payload(f *found) int64 {
	if f.socket.State == sockdiag.Listening {
		return 0
	}
	return int64(f.socket.Payload)
}

func received(f *found) int64 {
	if f.socket.State == sockdiag.Listening {
		return 0
	}
	return int64(f.socket.Unread)
}

func most(of func(*found) int64) func(a, b *found) int {
	return func(a, b *found) int { return cmp.Or(cmp.Compare(of(b), of(a)), byEnds(a, b)) }
}

func byEnds(a, b *found) int {
	return cmp.Or(a.socket.Local.Compare(b.socket.Local), a.socket.Remote.Compare(b.socket.Remote), cmp.Compare(a.socket.Cookie, b.socket.Cookie))
}

// limitTexts are short names for the column LIMITED BY.
var limitTexts = map[sockdiag.Limit]string{
	sockdiag.ReceiveWindow: "receive window", sockdiag.CongestionWindow: "congestion", sockdiag.SendBuffer: "send buffer",
}

func limitText(l sockdiag.Limit) string { return cmp.Or(limitTexts[l], string(l)) }

// socketsText prints each socket: a line with its addresses, a line of figures, and the advice.
func socketsText(t *command.Text, shown *Shown) {
	in := ""
	if shown.Netns != "" {
		in = " in " + shown.Netns
	}
	words := format.Count(shown.Matched, "socket", "sockets") + in
	var by []string
	for _, limit := range sockdiag.Limits {
		if n := shown.ByLimit[string(limit)]; n > 0 {
			by = append(by, fmt.Sprintf("%d %s", n, limitText(limit)))
		}
	}
	if len(by) > 0 {
		words += ", limited by: " + strings.Join(by, ", ")
	}
	if n := len(shown.Sockets); n < shown.Matched {
		words += fmt.Sprintf("; the first %d", n)
	}
	t.Paragraph("", "%s", words)
	for _, problem := range shown.Problems {
		t.Paragraph("", "not read: %s", problem)
	}
	if len(shown.Sockets) == 0 {
		return
	}
	const alignment = "lrrrrrrrr"
	rows := [][]string{{"LIMITED BY", "QUEUED", "PAYLOAD", "OVERHEAD", "UNSENT", "BUFFER", "SAFE", "EXACT", "RTT"}}
	for i := range shown.Sockets {
		s := &shown.Sockets[i]
		rows = append(rows, []string{""})
		for _, line := range s.names() {
			rows = append(rows, []string{line})
		}
		rows = append(rows, s.figures())
		if s.Advice != nil {
			var advice command.Text
			advice.Paragraph("  ", "%s", s.Advice.Detail)
			advice.Paragraph("  ", "hint: %s", s.Advice.Hint)
			for line := range strings.Lines(advice.String()) {
				rows = append(rows, []string{strings.TrimSuffix(line, "\n")})
			}
		}
	}
	t.WriteString("\n")
	t.Table(alignment, rows)
}

// names returns the addresses of the socket and its other properties, wrapped to the width of a line.
func (s *socketShown) names() []string {
	words := []string{s.Local}
	if s.Remote != "" {
		words = append(words, "-> "+s.Remote)
	}
	if s.State != sockdiag.Established.String() && s.LimitedBy != "" {
		words = append(words, s.State)
	}
	if s.Unread != nil && *s.Unread > 0 {
		words = append(words, fmt.Sprintf("%d unread", *s.Unread))
	}
	if s.Path != nil && s.Path.Retransmitted > 0 {
		words = append(words, fmt.Sprintf("%d retransmitted", s.Path.Retransmitted))
	}
	if s.Cgroup != "" {
		words = append(words, command.Shorten(s.Cgroup, command.LineWidth-2))
	}
	for i, p := range s.Processes {
		const most = 3
		if i == most {
			words = append(words, fmt.Sprintf("and %d more", len(s.Processes)-most))
			break
		}
		words = append(words, fmt.Sprintf("%s(%d)", command.Printable(p.Command), p.PID))
	}
	lines := []string{words[0]}
	for _, word := range words[1:] {
		last := &lines[len(lines)-1]
		if joined := *last + " " + word; len([]rune(joined)) <= command.LineWidth {
			*last = joined
		} else {
			lines = append(lines, "  "+word)
		}
	}
	return lines
}

func (s *socketShown) figures() []string {
	if s.MostWaiting != nil {
		return []string{fmt.Sprintf("  %s, %d of at most %d waiting", s.State, *s.Waiting, *s.MostWaiting)}
	}
	by := limitText(s.LimitedBy)
	if by == "" {
		by = s.State
	} else if s.Share != nil {
		by += fmt.Sprintf(" %.0f %%", 100**s.Share)
	}
	safe, exact, overhead, rtt := "-", "-", "-", "-"
	if s.Room != nil {
		safe, exact = fmt.Sprint(s.Room.Safe), fmt.Sprint(s.Room.Exact)
	}
	if s.Overhead != nil {
		overhead = fmt.Sprintf("%.2f", *s.Overhead)
	}
	if s.Path != nil && s.Path.RTT > 0 {
		rtt = command.Duration(s.Path.RTT)
	}
	return []string{"  " + by, orNone(s.Queued), orNone(s.Payload), overhead, orNone(s.Unsent), orNone(s.Buffer), safe, exact, rtt}
}

// orNone formats a number, or "-" for nil.
func orNone[N int | uint32](n *N) string {
	if n == nil {
		return "-"
	}
	return fmt.Sprint(*n)
}
