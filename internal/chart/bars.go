// SPDX-License-Identifier: Apache-2.0

package chart

import (
	"fmt"
	"html"
	"math"
	"strconv"
	"strings"
)

// Chart is one or more panels of horizontal bars, of lines, or of distributions, of the same kind. The SVG is for light and dark
// backgrounds.
type Chart struct {
	Title  string
	Legend []string // meaning of the parts of a bar, or of the distributions; at most four
	Panels []Panel
}

// Panel is a group of bars, of lines, or of distributions, with one scale.
type Panel struct {
	Title string
	Most  float64 // end of the scale; 0: the longest bar, the highest value, or the largest sample
	Bars  []Bar
	// Samples are drawn as their cumulative distributions, one for each entry of the legend. A panel with samples has no
	// bars.
	Samples [][]float64
	Lines   []Line // at most six
	Step    string // unit of the distance between two values of a line
}

// Line is a series of values at equal distances, from 0.
type Line struct {
	Label  string
	Values []float64
}

// Bar is a row: a label, the parts one after the other, and a note at its end.
type Bar struct {
	Label, Note string
	Parts       []float64
}

// SVG draws the chart.
func (c Chart) SVG() []byte {
	const width, left, row, thick, head = 800, 230, 30, 18, 62
	height, right := head+10, 190
	for _, p := range c.Panels {
		height += 44 + row*len(p.Bars) + p.plotHeight()
		if p.Samples != nil {
			height += curvesHeight + 24
		}
		for _, bar := range p.Bars {
			right = max(right, 20+7*len(bar.Note)) // a character is at most 7 wide on average
		}
	}
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %[1]d %[2]d" width="%[1]d" height="%[2]d" font-family="system-ui, sans-serif" font-size="13" role="img">
<title>%[3]s</title>
<style>
text { fill: #1f2328 } .quiet { fill: #59636e } .part0 { fill: #4f86c6 } .part1 { fill: #d9822b } .part2 { fill: #5a9e6f } .part3 { fill: #8e6cc0 }
.curve { fill: none; stroke-width: 2 } .curve0 { stroke: #4f86c6 } .curve1 { stroke: #d9822b } .curve2 { stroke: #5a9e6f } .curve3 { stroke: #8e6cc0 }
.grid { stroke: #8c959f; stroke-opacity: 0.35 }
polyline { fill: none; stroke-width: 1.5 } .axis { fill: none; stroke: #8c959f; stroke-width: 1 }
.line0 { stroke: #59636e } .line1 { stroke: #4f86c6 } .line2 { stroke: #5a9e6f } .line3 { stroke: #8e6bbf } .line4 { stroke: #d9822b } .line5 { stroke: #c2504f }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .quiet { fill: #9198a1 } }
</style>
<text x="10" y="22" font-size="15" font-weight="600">%[3]s</text>
`, width, height, html.EscapeString(c.Title))
	x := 10
	for i, name := range c.Legend {
		fmt.Fprintf(&b, "<rect class=\"part%d\" x=\"%d\" y=\"35\" width=\"12\" height=\"12\"/><text x=\"%d\" y=\"46\">%s</text>\n", i, x, x+17, html.EscapeString(name))
		x += 45 + 7*len(name)
	}
	y := head
	for _, p := range c.Panels {
		fmt.Fprintf(&b, "<text x=\"10\" y=\"%d\" font-weight=\"600\">%s</text>\n", y+20, html.EscapeString(p.Title))
		y += 30
		if p.Samples != nil {
			p.curves(&b, 60, y, width-90)
			y += curvesHeight + 38
			continue
		}
		most := p.Most
		for _, bar := range p.Bars {
			most = max(most, bar.length())
		}
		scale := float64(width-left-right) / max(most, 1e-9)
		for _, bar := range p.Bars {
			fmt.Fprintf(&b, `<text x="%d" y="%d" text-anchor="end">%s</text>`, left-10, y+thick-4, html.EscapeString(bar.Label))
			at := float64(left)
			for i, part := range bar.Parts {
				fmt.Fprintf(&b, `<rect class="part%d" x="%.1f" y="%d" width="%.1f" height="%d"/>`, i, at, y, part*scale, thick)
				at += part * scale
			}
			fmt.Fprintf(&b, "<text class=\"quiet\" x=\"%.1f\" y=\"%d\">%s</text>\n", at+8, y+thick-4, html.EscapeString(bar.Note))
			y += row
		}
		if len(p.Lines) > 0 {
			p.plot(&b, y, width)
			y += p.plotHeight()
		}
		y += 14
	}
	b.WriteString("</svg>\n")
	return []byte(b.String())
}

func (b Bar) length() (sum float64) {
	for _, part := range b.Parts {
		sum += part
	}
	return sum
}

// plot draws the lines of a panel, with the ends of both scales, from y on. Values that are not finite leave a gap.
func (p Panel) plot(b *strings.Builder, y, width int) {
	const left, right = 60, 250
	right0, height := width-right, p.plotHeight()-24
	most, steps := p.Most, 1
	for _, l := range p.Lines {
		steps = max(steps, len(l.Values)-1)
		for _, v := range l.Values {
			if !math.IsNaN(v) && !math.IsInf(v, 0) {
				most = max(most, v)
			}
		}
	}
	most = max(most, 1e-9)
	fmt.Fprintf(b, "<polyline class=\"axis\" points=\"%d,%d %d,%d %d,%d\"/>\n", left, y, left, y+height, right0, y+height)
	for _, label := range []struct {
		x, y int
		text string
	}{{left - 6, y + 10, short(most)}, {left - 6, y + height, "0"}, {right0, y + height + 18, fmt.Sprintf("%d %s", steps, p.Step)}} {
		fmt.Fprintf(b, "<text class=\"quiet\" x=\"%d\" y=\"%d\" text-anchor=\"end\">%s</text>\n", label.x, label.y, html.EscapeString(label.text))
	}
	for i, l := range p.Lines {
		var points []string
		draw := func() {
			if len(points) > 0 {
				fmt.Fprintf(b, "<polyline class=\"line%d\" points=\"%s\"/>\n", i, strings.Join(points, " "))
			}
			points = nil
		}
		for x, v := range l.Values {
			if math.IsNaN(v) || math.IsInf(v, 0) {
				draw()
				continue
			}
			points = append(points, fmt.Sprintf("%.1f,%.1f", float64(left)+float64(x*(right0-left))/float64(steps), float64(y+height)-v/most*float64(height)))
		}
		draw()
		at := y + 10 + 18*i
		fmt.Fprintf(b, "<polyline class=\"line%d\" points=\"%d,%d %d,%d\"/><text x=\"%d\" y=\"%d\">%s</text>\n", i, right0+14, at-4, right0+34, at-4, right0+40, at, html.EscapeString(l.Label))
	}
}

// plotHeight is the height of the lines of a panel, with their labels, and 0 without lines.
func (p Panel) plotHeight() int {
	if len(p.Lines) == 0 {
		return 0
	}
	return max(150, 18*len(p.Lines)) + 24
}

// short returns a value with three digits, or more before the decimal point.
func short(v float64) string {
	if v >= 1000 {
		return strconv.FormatFloat(v, 'f', 0, 64)
	}
	return fmt.Sprintf("%.3g", v)
}
