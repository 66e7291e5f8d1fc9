// SPDX-License-Identifier: Apache-2.0

// Command bench compares Sockeye with its alternatives. Each benchmark prints the results of all sides from one run,
// and writes the figures as JSON and SVG into the directory $OUT (default: the current directory).
//
//	go run ./bench steer [-quick]
//	go run ./bench tune [-quick]
//	go run ./bench trace [-quick]
//	go run ./bench trace-vm
//	go run ./bench bigtcp [-quick]
//	go run ./bench gateway [-quick]
//	go run ./bench continuity [-quick]
//	go run ./bench watch [-quick]
//	go run ./bench fleet [-quick]
//	go run ./bench summary [-docs docs]
package main

import (
	"os"

	"sockeye/bench/bigtcp"
	"sockeye/bench/continuity"
	"sockeye/bench/fleet"
	"sockeye/bench/gateway"
	"sockeye/bench/harness"
	"sockeye/bench/steer"
	"sockeye/bench/summary"
	"sockeye/bench/trace"
	"sockeye/bench/tune"
	"sockeye/bench/watch"
)

func main() {
	os.Exit(harness.RunCommand(os.Args[1:], steer.Benchmark, tune.Benchmark, trace.Benchmark, trace.GuestBenchmark, bigtcp.Benchmark, gateway.Benchmark,
		continuity.Benchmark, watch.Benchmark, fleet.Benchmark, summary.Benchmark))
}
