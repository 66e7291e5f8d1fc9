// SPDX-License-Identifier: Apache-2.0

// Command bench measures Sockeye against what people use without it. Each
// benchmark prints both sides from one run, and writes the figures as JSON and
// SVG into the directory $OUT (default: the current one).
//
//	go run ./bench steer [-quick]
//	go run ./bench tune [-quick]
//	go run ./bench trace [-quick]
//	go run ./bench bigtcp [-quick]
//	go run ./bench gateway [-quick]
package main

import "os"

func main() {
	os.Exit(runCommand(os.Args[1:], steerBenchmark, tuneBenchmark, traceBenchmark, bigtcpBenchmark, gatewayBenchmark))
}
