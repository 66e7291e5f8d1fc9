// SPDX-License-Identifier: Apache-2.0

// Package chart draws the charts of the benchmarks, of the demo, of the trace report and of the web page. It has whole
// charts as SVG documents ([Chart]), and the paths of charts that a template or a page completes.
package chart

import (
	"fmt"
	"math"
	"strconv"
	"strings"
)

// Coordinate formats a number of a path with the precision that a plot needs, a tenth.
func Coordinate(v float64) string {
	return strconv.FormatFloat(math.Round(v*10)/10, 'f', -1, 64)
}

// Size of the box of a sparkline.
const (
	SparkWidth  = 120
	SparkHeight = 24
)

// Spark returns the path of values over time in a box of SparkWidth x SparkHeight, from 0 to the maximum. A NaN is a gap.
// The result is "" if there are less than two values, or only zeros.
func Spark(values []float64) string {
	most, known := 0.0, 0
	for _, v := range values {
		if !math.IsNaN(v) {
			most, known = max(most, v), known+1
		}
	}
	if most == 0 || known < 2 {
		return ""
	}
	var b strings.Builder
	pen := false
	for i, v := range values {
		if math.IsNaN(v) {
			pen = false
			continue
		}
		command := "L"
		if !pen {
			command = "M"
		}
		x := float64(i) / float64(len(values)-1) * SparkWidth
		fmt.Fprintf(&b, "%s%s %s", command, Coordinate(x), Coordinate(1+(1-v/most)*(SparkHeight-2)))
		if !pen && (i+1 == len(values) || math.IsNaN(values[i+1])) {
			b.WriteString("h0.1")
		}
		pen = true
	}
	return b.String()
}

// Cells returns one path for each level: the cells that have this level, as lines through their middle, for a stroke of
// width 1. A cell is 1 x 1. The levels of a row are from the left, those of the first row are at the top; 0 is an empty
// cell. Adjacent cells of a row are one line.
func Cells(rows [][]uint8, levels int) []string {
	paths := make([]strings.Builder, levels)
	pens := make([]struct{ column, row int }, levels) // positions of the pens; row counts from 1, and 0 is unset
	for row := len(rows) - 1; row >= 0; row-- {
		cells := rows[row]
		for c := 0; c < len(cells); {
			if cells[c] == 0 {
				c++
				continue
			}
			l, end := cells[c]-1, c+1
			for end < len(cells) && cells[end] == cells[c] {
				end++
			}
			if pens[l].row == row+1 {
				fmt.Fprintf(&paths[l], "m%d 0h%d", c-pens[l].column, end-c)
			} else {
				fmt.Fprintf(&paths[l], "M%d %d.5h%d", c, row, end-c)
			}
			pens[l].column, pens[l].row = end, row+1
			c = end
		}
	}
	all := make([]string, levels)
	for l := range paths {
		all[l] = paths[l].String()
	}
	return all
}

// Gaps returns the path of the columns that are not covered, in a box of height 1. A column is 1 wide.
func Gaps(covered []bool) string {
	var b strings.Builder
	for c := 0; c < len(covered); {
		end := c
		for end < len(covered) && !covered[end] {
			end++
		}
		if end > c {
			fmt.Fprintf(&b, "M%d 0h%dv1h-%dz", c, end-c, end-c)
		}
		c = end + 1
	}
	return b.String()
}
