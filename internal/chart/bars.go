// SPDX-License-Identifier: Apache-2.0

package chart

import (
	"fmt"
	"html"
	"strings"
)

// Chart is one or more panels of horizontal bars, or of distributions, of the same kind. The SVG is for light and dark
// backgrounds.
type Chart struct {
	Title  string
	Legend []string // meaning of the parts of a bar, or of the distributions; at most four
	Panels []Panel
}

// Panel is a group of bars, or of distributions, with one scale.
type Panel struct {
	Title string
	Most  float64 // end of the scale; 0: the longest bar, or the largest sample
	Bars  []Bar
	// Samples are drawn as their cumulative distributions, one for each entry of the legend. A panel with samples has no
	// bars.
	Samples [][]float64
}

// Bar is a row: a label, the parts one after the other, and a note at its end.
type Bar struct {
	Label, Note string
	Parts       []float64
}

func (b Bar) length() (sum float64) {
	for _, part := range b.Parts {
		sum += part
	}
	return sum
}

// SVG draws the chart.
func (c Chart) SVG() []byte {
	const width, left, row, thick, head = 800, 230, 30, 18, 62
	height, right := head+10, 190
	for _, p := range c.Panels {
		height += 44 + row*len(p.Bars)
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
		y += 14
	}
	b.WriteString("</svg>\n")
	return []byte(b.String())
}
