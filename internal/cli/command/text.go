// SPDX-License-Identifier: Apache-2.0

package command

import (
	"bytes"
	"fmt"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"sockeye/internal/fault"
)

// Text is a list of lines for a terminal. Untrusted strings, such as names of processes and
// interfaces, cannot end a line or send an escape sequence.
type Text struct{ bytes.Buffer }

// Line adds a line.
func (t *Text) Line(format string, args ...any) {
	t.WriteString(strings.TrimRight(Printable(fmt.Sprintf(format, args...)), " ") + "\n")
}

// Hint adds a hint for the previous line, unless text is empty.
func (t *Text) Hint(text string) {
	if text != "" {
		t.Line("hint: %s", text)
	}
}

// Table adds rows with aligned columns. A column is aligned to the right if its character in
// alignment is 'r'. A row with a single cell does not widen the column.
func (t *Text) Table(alignment string, rows [][]string) {
	widths := make([]int, len(alignment))
	for _, row := range rows {
		for i, cell := range row {
			row[i] = Printable(cell)
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

// Print prints v as JSON, or the text that write adds.
func (c *Command) Print(v any, write func(*Text)) error {
	if c.Output == "json" {
		return c.JSON(v)
	}
	var t Text
	write(&t)
	_, err := t.WriteTo(c.Out)
	return err
}

// Bytes formats a number of bytes with a decimal unit, as in "1.5 MB".
func Bytes[N int | int64 | uint32 | uint64](n N) string {
	return InUnits(float64(n), "B", "KB", "MB", "GB", "TB", "PB")
}

// Clock formats a time in the zone of the host, to the second. It omits the date of today.
func (c *Command) Clock(t time.Time) string {
	at, now := t.In(c.Now().Location()), c.Now()
	if at.Format(time.DateOnly) != now.Format(time.DateOnly) {
		return at.Format(time.DateTime)
	}
	return at.Format(time.TimeOnly)
}

// LineWidth is the maximum length of a line of text in columns. A longer word is not split.
const LineWidth = 100

// Paragraph adds text, wrapped to LineWidth. Lines after the first are indented by two more columns.
func (t *Text) Paragraph(indent, format string, args ...any) {
	line := indent
	for i, word := range strings.Fields(Printable(fmt.Sprintf(format, args...))) {
		switch {
		case i == 0:
			line += word
		case utf8.RuneCountInString(line+" "+word) > LineWidth:
			t.WriteString(line + "\n")
			line = indent + "  " + word
		default:
			line += " " + word
		}
	}
	t.WriteString(line + "\n")
}

// Microseconds formats a measured time in microseconds.
func Microseconds(v float64) string { return InUnits(v, "µs", "ms", "s") }

// Percentage formats a fraction of 1 in per cent.
func Percentage(share float64) string {
	if share > 0 && share < 0.00005 {
		return "< 0.01 %"
	}
	return Digits(100*share) + " %"
}

// Duration formats a measured duration to three significant digits.
func Duration(d time.Duration) string {
	if d < 0 {
		return "-" + Duration(-max(d, -1<<63+1))
	}
	return InUnits(float64(d), "ns", "µs", "ms", "s")
}

// InUnits formats a measured value in the largest unit that does not exceed the value. Each unit is
// 1000 times the previous unit.
func InUnits(v float64, units ...string) string {
	for len(units) > 1 && v >= 999.5 {
		v /= 1000
		units = units[1:]
	}
	return Digits(v) + " " + units[0]
}

// Digits formats a measured value to three significant digits.
func Digits(v float64) string {
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

// IntervalHint is the hint for a duration that cannot be parsed.
const IntervalHint = "a duration, as in 90s, 5m or 1h"

// Interval parses a flag that is a duration. It returns 0 if the flag was not given.
func Interval(cmd *cobra.Command, flag string) (time.Duration, error) {
	if !cmd.Flags().Changed(flag) {
		return 0, nil
	}
	value := cmd.Flag(flag).Value.String()
	d, err := time.ParseDuration(value)
	if err != nil || d <= 0 {
		return 0, fault.Usage(fmt.Errorf("--%s is %q", flag, value), IntervalHint)
	}
	return d, nil
}
