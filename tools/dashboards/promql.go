// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"strings"
)

// metrics are the metrics of one selection of labels.
type metrics string

// selected returns the metrics that variables with the names of the labels select.
func selected(labels ...string) metrics {
	matchers := make([]string, len(labels))
	for i, label := range labels {
		matchers[i] = fmt.Sprintf(`%s=~"$%[1]s"`, label)
	}
	return metrics(strings.Join(matchers, ","))
}

// with adds matchers.
func (m metrics) with(matchers string) metrics { return m + metrics(","+matchers) }

// gauge is the value of a metric. name is without sockeye_.
func (m metrics) gauge(name string) string { return fmt.Sprintf("sockeye_%s{%s}", name, m) }

// rate is the rate of a counter over a few scrapes.
func (m metrics) rate(name string) string {
	return fmt.Sprintf("rate(sockeye_%s{%s}[$__rate_interval])", name, m)
}

// increase is the increase of a counter over the time that the dashboard shows.
func (m metrics) increase(name string) string {
	return fmt.Sprintf("increase(sockeye_%s{%s}[$__range])", name, m)
}

// quantile is a quantile of a histogram, of the native one where Prometheus has it, else of the classic one.
func (m metrics) quantile(q float64, name, by, over string) string {
	with := "le"
	if by != "" {
		with += ", " + by
	}
	return fmt.Sprintf("histogram_quantile(%v, %s) or histogram_quantile(%v, %s)",
		q, sum(by, fmt.Sprintf("rate(sockeye_%s{%s}[%s])", name, m, over)),
		q, sum(with, fmt.Sprintf("rate(sockeye_%s_bucket{%s}[%s])", name, m, over)))
}

// mean is the mean of a histogram, native or classic.
func (m metrics) mean(name, by string) string {
	native := sum(by, m.rate(name))
	return fmt.Sprintf("histogram_sum(%s) / histogram_count(%s) or %s / %s", native, native, sum(by, m.rate(name+"_sum")), sum(by, m.rate(name+"_count")))
}

// part is the sum of some results as a part of the sum of all of them. An outcome without results counts as 0.
func part(some, all string) string {
	return fmt.Sprintf("(%s or vector(0)) / %s", sum("", some), sum("", all))
}

// The rate interval and the time range of Grafana.
const (
	recently = "$__rate_interval"
	shown    = "$__range"
)

// sum is a sum by labels, which are separated by commas.
func sum(by, expr string) string {
	if by == "" {
		return fmt.Sprintf("sum (%s)", expr)
	}
	return fmt.Sprintf("sum by (%s) (%s)", by, expr)
}
