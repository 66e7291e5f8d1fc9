// SPDX-License-Identifier: Apache-2.0

package config

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// Error is one error in a policy file.
type Error struct {
	File string
	// Line and Column count from 1, Column in characters. Both are 0 for an empty file.
	Line, Column int
	// Path names the value, as in services.telemetry.listeners[0].address. Path is "" for errors of the YAML
	// syntax.
	Path    string
	Message string
	// Hint suggests a correction; often "".
	Hint string
}

// Error returns one line, followed by a line "  hint: ..." if there is a hint.
func (e *Error) Error() string {
	var b strings.Builder
	b.WriteString(e.File)
	if e.Line > 0 {
		fmt.Fprintf(&b, ":%d:%d", e.Line, e.Column)
	}
	if e.Path != "" {
		b.WriteString(": " + e.Path)
	}
	b.WriteString(": " + e.Message)
	if e.Hint != "" {
		b.WriteString("\n  hint: " + e.Hint)
	}
	return b.String()
}

// Errors has all errors in a policy file, in the order of the file.
type Errors []*Error

func (e Errors) Error() string {
	lines := make([]string, len(e))
	for i, err := range e {
		lines[i] = err.Error()
	}
	return strings.Join(lines, "\n")
}

// Sort sorts the errors by line and column.
func (e Errors) Sort() {
	slices.SortStableFunc(e, func(a, b *Error) int {
		return cmp.Or(a.Line-b.Line, a.Column-b.Column)
	})
}

// Unwrap makes errors.As find the first [*Error].
func (e Errors) Unwrap() []error {
	errs := make([]error, len(e))
	for i, err := range e {
		errs[i] = err
	}
	return errs
}

// Nearest returns the known word with the smallest edit distance to word, or "" if the distance of all is too large.
// Case is ignored; the first of equally near words is returned.
func Nearest(word string, known []string) string {
	word = strings.ToLower(word)
	nearest, least := "", -1
	for _, k := range known {
		limit := (max(len(word), len(k)) + 2) / 3
		if max(len(word)-len(k), len(k)-len(word)) > limit {
			continue
		}
		if d := distance(word, strings.ToLower(k)); d <= limit && (least < 0 || d < least) {
			nearest, least = k, d
		}
	}
	return nearest
}

// distance returns the number of insertions, deletions, substitutions and transpositions of adjacent characters that
// turn a into b (optimal string alignment).
func distance(a, b string) int {
	var before []int
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := 1; i <= len(a); i++ {
		next := make([]int, len(b)+1)
		next[0] = i
		for j := 1; j <= len(b); j++ {
			cost := 1
			if a[i-1] == b[j-1] {
				cost = 0
			}
			next[j] = min(row[j]+1, next[j-1]+1, row[j-1]+cost)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				next[j] = min(next[j], before[j-2]+1)
			}
		}
		before, row = row, next
	}
	return row[len(b)]
}
