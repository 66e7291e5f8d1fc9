// SPDX-License-Identifier: Apache-2.0

package chart

import (
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
)

// curvesHeight is the height of the box of distributions.
const curvesHeight = 160

// curves draws the distributions of a panel in a box with its upper left corner at x, y, and the scales outside of it.
func (p Panel) curves(w io.Writer, x, y, width int) {
	most := p.Most
	for _, v := range p.Samples {
		for _, sample := range v {
			most = max(most, sample)
		}
	}
	for _, share := range []int{0, 25, 50, 75, 100} {
		at := y + curvesHeight*(100-share)/100
		fmt.Fprintf(w, `<path class="grid" d="M%d %dh%d"/><text class="quiet" x="%d" y="%d" text-anchor="end">%d %%</text>`, x, at, width, x-8, at+4, share)
	}
	for tick, step := 0.0, roundStep(most/6); tick <= most; tick += step {
		at := float64(x) + tick/max(most, 1e-9)*float64(width)
		fmt.Fprintf(w, `<text class="quiet" x="%s" y="%d" text-anchor="middle">%s</text>`, Coordinate(at), y+curvesHeight+18, strconv.FormatFloat(tick, 'g', 6, 64))
	}
	for i, v := range p.Samples {
		if len(v) > 0 {
			fmt.Fprintf(w, "<path class=\"curve curve%d\" d=\"%s\"/>\n", i, cumulative(v, most, float64(x), float64(y), float64(width)))
		}
	}
}

// cumulative returns the path of the share of the samples that are at most a value, for values from 0 to most.
func cumulative(v []float64, most, x, y, width float64) string {
	v = slices.Sorted(slices.Values(v))
	var b strings.Builder
	fmt.Fprintf(&b, "M%s %s", Coordinate(x), Coordinate(y+curvesHeight))
	for i, sample := range v {
		fmt.Fprintf(&b, "H%sV%s", Coordinate(x+sample/max(most, 1e-9)*width), Coordinate(y+curvesHeight*(1-float64(i+1)/float64(len(v)))))
	}
	fmt.Fprintf(&b, "H%s", Coordinate(x+width))
	return b.String()
}

// roundStep returns the smallest of 1, 2 and 5 times a power of ten that is at least v, and 1 if v is not positive.
func roundStep(v float64) float64 {
	if !(v > 0) {
		return 1
	}
	power := math.Pow(10, math.Floor(math.Log10(v)))
	for _, f := range []float64{1, 2, 5} {
		if f*power >= v {
			return f * power
		}
	}
	return 10 * power
}
