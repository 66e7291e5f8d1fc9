// SPDX-License-Identifier: Apache-2.0

package topcmd

import (
	"cmp"
	"slices"
	"strconv"
	"strings"

	"github.com/charmbracelet/x/ansi"

	"sockeye/internal/cli/command"
)

// column is a column of a list.
type column[T any] struct {
	title string
	width int // 0: the rest of the line
	right bool
	cell  func(*T) string
	// compare orders rows by the column.
	compare func(a, b *T) int
	least   int                  // width of the screen from which on the column is shown
	used    func(rows []*T) bool // whether the column is shown; nil: always
}

// number returns a column of numbers, the largest first.
func number[T any, N cmp.Ordered](title string, width int, of func(*T) N, show func(N) string) column[T] {
	return column[T]{title: title, width: width, right: true, cell: func(v *T) string { return show(of(v)) },
		compare: func(a, b *T) int { return cmp.Compare(of(b), of(a)) }}
}

// text returns a column of texts.
func text[T any](title string, width int, of func(*T) string) column[T] {
	return column[T]{title: title, width: width, cell: of, compare: func(a, b *T) int { return cmp.Compare(of(a), of(b)) }}
}

// ordinal returns a column of small numbers, the smallest first.
func ordinal[T any](title string, width int, of func(*T) int) column[T] {
	return column[T]{title: title, width: width, right: true, cell: func(v *T) string { return strconv.Itoa(of(v)) },
		compare: func(a, b *T) int { return cmp.Compare(of(a), of(b)) }}
}

// from makes a column need a width of the screen.
func (c column[T]) from(least int) column[T] {
	c.least = least
	return c
}

// list is a list of rows with a cursor, which stays at its row while the order changes.
type list[T any] struct {
	columns []column[T]
	texts   func(*T) []string // the texts that a filter searches
	same    func(a, b *T) bool
	mark    func(*T) style // nil: plain

	rows    []*T // filtered and sorted
	total   int  // rows without the filter
	order   int  // column by which the rows are sorted
	reverse bool
	at      int // index of the row with the cursor
	chosen  *T  // row to which the cursor was moved; nil: the cursor is at the first row
}

// table is a list of any type.
type table interface {
	move(by int)
	sortBy(step, width int)
	flip()
	sorted() string
	lines(width, height int, cursor bool) []line
}

// fill sets the rows. The list refers to all.
func (l *list[T]) fill(all []T, filter string) {
	filter = strings.ToLower(filter)
	l.rows, l.total = l.rows[:0], len(all)
	for i := range all {
		if filter == "" || slices.ContainsFunc(l.texts(&all[i]), func(t string) bool { return strings.Contains(strings.ToLower(t), filter) }) {
			l.rows = append(l.rows, &all[i])
		}
	}
	compare := l.columns[l.order].compare
	slices.SortStableFunc(l.rows, func(a, b *T) int {
		if l.reverse {
			return compare(b, a)
		}
		return compare(a, b)
	})
	if l.chosen == nil {
		l.at = 0
	} else if i := slices.IndexFunc(l.rows, func(row *T) bool { return l.same(row, l.chosen) }); i >= 0 {
		l.at = i
	}
	l.at = max(0, min(l.at, len(l.rows)-1))
}

// move moves the cursor by a number of rows, at most to the first or the last one.
func (l *list[T]) move(by int) {
	l.at = max(0, min(l.at+by, len(l.rows)-1))
	l.chosen = nil
	if l.at > 0 {
		chosen := *l.rows[l.at]
		l.chosen = &chosen
	}
}

// selected returns the row with the cursor, or nil.
func (l *list[T]) selected() *T {
	if l.at >= len(l.rows) {
		return nil
	}
	return l.rows[l.at]
}

// sortBy chooses the next shown column in a direction for sorting. The caller fills the list again.
func (l *list[T]) sortBy(step, width int) {
	for range l.columns {
		l.order = (l.order + step + len(l.columns)) % len(l.columns)
		if l.shows(&l.columns[l.order], width) {
			break
		}
	}
	l.reverse = false
}

// flip reverses the order. The caller fills the list again.
func (l *list[T]) flip() { l.reverse = !l.reverse }

// sorted returns the column by which the rows are sorted, with a minus sign if the order is reversed.
func (l *list[T]) sorted() string {
	if l.reverse {
		return "-" + l.columns[l.order].title
	}
	return l.columns[l.order].title
}

func (l *list[T]) shows(c *column[T], width int) bool {
	return c.least <= width && (c.used == nil || c.used(l.rows))
}

// lines returns the header and the rows around the cursor that fit into a height. Only these rows are formatted.
func (l *list[T]) lines(width, height int, cursor bool) []line {
	if height <= 0 {
		return nil
	}
	var columns []*column[T]
	for i := range l.columns {
		if l.shows(&l.columns[i], width) {
			columns = append(columns, &l.columns[i])
		}
	}
	header := " "
	for _, c := range columns {
		header += pad(c.title, c.width, c.right) + " "
	}
	lines := []line{{header, title}}
	if len(l.rows) == 0 {
		none := "  none"
		if l.total > 0 {
			none = "  none of " + strconv.Itoa(l.total) + " matches the filter"
		}
		return append(lines, line{none, plain})
	}
	height--
	first := max(0, min(l.at-height/2, len(l.rows)-height))
	for i := first; i < min(first+height, len(l.rows)); i++ {
		row := line{text: " "}
		if l.mark != nil {
			row.style = l.mark(l.rows[i])
		}
		if cursor && i == l.at {
			row = line{">", chosen}
		}
		for _, c := range columns {
			row.text += pad(command.Printable(c.cell(l.rows[i])), c.width, c.right) + " "
		}
		lines = append(lines, row)
	}
	return lines
}

// pad brings a text to a width in columns of the screen; 0 leaves the text as it is.
func pad(s string, width int, right bool) string {
	n := ansi.StringWidth(s)
	switch {
	case width == 0 || n == width:
		return s
	case n > width:
		s = cut(s, width)
		return s + strings.Repeat(" ", width-ansi.StringWidth(s)) // a wide character was cut
	case right:
		return strings.Repeat(" ", width-n) + s
	}
	return s + strings.Repeat(" ", width-n)
}

// cut cuts a text to a width in columns of the screen.
func cut(s string, width int) string {
	if ansi.StringWidth(s) <= width {
		return s
	}
	return ansi.Truncate(s, max(0, width), "…")
}
