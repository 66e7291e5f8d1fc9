// SPDX-License-Identifier: Apache-2.0

package report

import (
	"bytes"
	"encoding/xml"
	"fmt"
	"io"
	"math"

	"sockeye/internal/chart"
	"sockeye/internal/config"
	"sockeye/internal/trace/measure"
)

// Compared is the input of WriteComparison: the names of two sides, and the stages that both have.
type Compared struct {
	A, B   string
	Stages []ComparedStage
}

// ComparedStage contains the times of a stage of both sides. Neither is empty.
type ComparedStage struct {
	Stage config.Stage
	A, B  *measure.Histogram
}

// Size of a panel, and of the text above all of them.
const (
	panelWidth  = plotLeft + plotInnerWidth + 30
	panelHeight = plotTop + plotInnerHeight + 90
	titleHeight = 56
)

// sideColors are the colors of A and B, which differ in brightness, too.
var sideColors = [2]string{"#1f6fb4", "#d9730d"}

// WriteComparison writes an SVG picture with the cumulative distributions of both sides, one panel per stage.
func WriteComparison(w io.Writer, c Compared) error {
	const columns = 2
	rows := (len(c.Stages) + columns - 1) / columns
	var b bytes.Buffer
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" font-family="sans-serif" font-size="12" fill="#222">`+"\n", columns*panelWidth, titleHeight+rows*panelHeight)
	fmt.Fprintf(&b, `<rect width="100%%" height="100%%" fill="#fff"/>`+"\n")
	for i, name := range []string{c.A, c.B} {
		y := 22 + 20*i
		fmt.Fprintf(&b, `<path d="M%d %dh24" stroke="%s" stroke-width="3"/><text x="%d" y="%d">%s: %s</text>`+"\n",
			plotLeft, y-4, sideColors[i], plotLeft+32, y, "AB"[i:i+1], escaped(shortened(name)))
	}
	for i, s := range c.Stages {
		fmt.Fprintf(&b, `<g transform="translate(%d %d)">`+"\n", i%columns*panelWidth+plotLeft, titleHeight+i/columns*panelHeight+plotTop+20)
		s.draw(&b)
		b.WriteString("</g>\n")
	}
	b.WriteString("</svg>\n")
	_, err := b.WriteTo(w)
	return err
}

// draw draws a panel, whose origin is the upper left corner of its axes.
func (s ComparedStage) draw(b *bytes.Buffer) {
	lo, hi := math.MaxInt, 0
	for _, h := range []*measure.Histogram{s.A, s.B} {
		if first, last, ok := buckets(h); ok {
			lo, hi = min(lo, first), max(hi, last)
		}
	}
	axis := newLogAxis(lo, hi, plotInnerWidth)
	fmt.Fprintf(b, `<text y="-8" font-weight="bold">%s</text>`+"\n", escaped(stageName(s.Stage)))
	for share := 0; share <= 100; share += 25 {
		y := chart.Coordinate(evenHeight(float64(share) / 100))
		fmt.Fprintf(b, `<path d="M0 %sH%d" stroke="#ddd"/><text x="-6" y="%s" dy="4" text-anchor="end">%d %%</text>`+"\n", y, plotInnerWidth, y, share)
	}
	for _, t := range axis.ticks(46) {
		x := chart.Coordinate(t.At)
		fmt.Fprintf(b, `<path d="M%s 0V%d" stroke="#eee"/><text x="%s" y="%d" text-anchor="middle">%s</text>`+"\n", x, plotInnerHeight, x, plotInnerHeight+16, escaped(t.Text))
	}
	for i, h := range []*measure.Histogram{s.A, s.B} {
		fmt.Fprintf(b, `<path d="%s" fill="none" stroke="%s" stroke-width="1.8"/>`+"\n", newCurve(s.Stage, h, axis, 2).Even, sideColors[i])
		fmt.Fprintf(b, `<text y="%d" fill="%s">%s: p50 %s, p99 %s, %s</text>`+"\n", plotInnerHeight+34+16*i, sideColors[i], "AB"[i:i+1],
			durationText(h.Quantile(0.5)), durationText(h.Quantile(0.99)), countOf(int(min(h.Count, math.MaxInt32)), "message", "messages"))
	}
}

// shortened cuts a name that is wider than the picture. File, host and selection may have any length.
func shortened(name string) string {
	const most = 160
	if r := []rune(name); len(r) > most {
		return string(r[:most]) + "…"
	}
	return name
}

// escaped escapes text for XML, which control characters are not a part of.
func escaped(text string) string {
	var b bytes.Buffer
	_ = xml.EscapeText(&b, []byte(text)) // a bytes.Buffer does not fail
	return b.String()
}
