// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"fmt"
	"sockeye/internal/fault"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"
)

// text is made of lines that a terminal shows as they are: what comes from outside
// cannot end a line, nor be a command to the terminal.
type text struct{ bytes.Buffer }

// line adds a line.
func (t *text) line(format string, args ...any) {
	t.WriteString(strings.TrimRight(printable(fmt.Sprintf(format, args...)), " ") + "\n")
}

// hint adds what to do about the line before, if there is something.
func (t *text) hint(text string) {
	if text != "" {
		t.line("hint: %s", text)
	}
}

// table adds rows with their columns aligned: to the right where alignment has an
// r. A row of one cell is as long as it is.
func (t *text) table(alignment string, rows [][]string) {
	widths := make([]int, len(alignment))
	for _, row := range rows {
		for i, cell := range row {
			row[i] = printable(cell)
			if len(row) > 1 {
				widths[i] = max(widths[i], utf8.RuneCountInString(row[i]))
			}
		}
	}
	for _, row := range rows {
		var line strings.Builder
		for i, cell := range row {
			if i > 0 {
				line.WriteString("  ")
			}
			pad := strings.Repeat(" ", max(0, widths[i]-utf8.RuneCountInString(cell)))
			if alignment[i] == 'r' && len(row) > 1 {
				line.WriteString(pad + cell)
			} else {
				line.WriteString(cell + pad)
			}
		}
		t.WriteString(strings.TrimRight(line.String(), " ") + "\n")
	}
}

// print prints v as JSON, or else the text that write makes.
func (c *command) print(v any, write func(*text)) error {
	if c.output == "json" {
		return c.json(v)
	}
	var t text
	write(&t)
	_, err := t.WriteTo(c.Out)
	return err
}

// volume writes a number of bytes.
func volume[N int | int64 | uint32 | uint64](n N) string {
	return inUnits(float64(n), "B", "KB", "MB", "GB", "TB", "PB")
}

// clock writes when something was, to the second, on this host's clock.
func (c *command) clock(t time.Time) string {
	at, now := t.In(c.Now().Location()), c.Now()
	if at.Format(time.DateOnly) != now.Format(time.DateOnly) {
		return at.Format(time.DateTime)
	}
	return at.Format(time.TimeOnly)
}

// paragraph adds text in lines of at most lineWidth. Lines after the first have a
// deeper indent.
func (t *text) paragraph(indent, format string, args ...any) {
	line := indent
	for i, word := range strings.Fields(printable(fmt.Sprintf(format, args...))) {
		switch {
		case i == 0:
			line += word
		case utf8.RuneCountInString(line+" "+word) > lineWidth:
			t.WriteString(line + "\n")
			line = indent + "  " + word
		default:
			line += " " + word
		}
	}
	t.WriteString(line + "\n")
}

// digits writes a measured value, of which three digits count.
func digits(v float64) string {
	decimals := 0
	switch {
	case v < 9.995:
		decimals = 2
	case v < 99.95:
		decimals = 1
	}
	text := strconv.FormatFloat(v, 'f', decimals, 64)
	if decimals > 0 {
		text = strings.TrimRight(strings.TrimRight(text, "0"), ".")
	}
	return text
}

// inUnits writes a measured value in the largest of units, each 1000 times the
// one before, of which it has at least one.
func inUnits(v float64, units ...string) string {
	for len(units) > 1 && v >= 999.5 {
		v /= 1000
		units = units[1:]
	}
	return digits(v) + " " + units[0]
}

func microseconds(v float64) string { return inUnits(v, "µs", "ms", "s") }

// percentage writes a share of 1.
func percentage(share float64) string {
	if share > 0 && share < 0.00005 {
		return "< 0.01 %"
	}
	return digits(100*share) + " %"
}

// took writes how long something took.
func took(d time.Duration) string {
	if d < 0 {
		return "-" + took(-max(d, -1<<63+1))
	}
	return inUnits(float64(d), "ns", "µs", "ms", "s")
}

const spanHint = "a length of time, as in 90s, 5m or 1h"

// span reads a flag that is a length of time; it is 0 if it was not given.
func span(cmd *cobra.Command, flag string) (time.Duration, error) {
	if !cmd.Flags().Changed(flag) {
		return 0, nil
	}
	value := cmd.Flag(flag).Value.String()
	d, err := time.ParseDuration(value)
	if err != nil || d <= 0 {
		return 0, fault.Usage(fmt.Errorf("--%s is %q", flag, value), spanHint)
	}
	return d, nil
}

// lineWidth is the maximum length of a line of text in columns, unless a word is longer.
const lineWidth = 100
