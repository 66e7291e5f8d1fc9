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

import (
	"errors"
	"fmt"
	"os"

	"sockeye/internal/cli"
	"sockeye/internal/isolate"
)

func main() {
	if len(os.Args) < 2 {
		usage()
	}
	var err error
	switch args := os.Args[2:]; os.Args[1] {
	case "steer":
		err = supervise(args)
	case tuneCommand, traceCommand, gatewayCommand:
		err = supervise(os.Args[1:])
	case bigtcpCommand:
		err = benchBigTCP(args)
	case insideRole:
		switch {
		case len(args) > 0 && args[0] == tuneCommand:
			err = insideTune(args[1:])
		case len(args) > 0 && args[0] == traceCommand:
			err = insideTrace(args[1:])
		case len(args) > 0 && args[0] == gatewayCommand:
			err = insideGateway(args[1:])
		default:
			err = inside(args)
		}
	case serverRole:
		err = tuneServer(args)
	case clientRole:
		err = tuneClient()
	case costRole:
		err = tuneCost()
	case traceRole:
		err = traceWorker()
	case gatewayServerRole:
		err = gatewayServer(args)
	case gatewayClientRole:
		err = gatewayClient()
	case gatewayRole:
		err = gatewayWorker(args)
	case gatewayDatagramRole:
		err = gatewayDatagramWorker(args)
	case isolateCommand:
		err = isolateAsUser()
	case isolate.InsideCommand: // of isolate
		os.Exit(cli.Main(os.Args[1:], cli.Host()))
	case "receiver":
		err = receiver(args)
	case "generator":
		err = generator()
	default:
		usage()
	}
	var code exitCode
	switch {
	case errors.As(err, &code):
		os.Exit(int(code))
	case err != nil:
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func usage() {
	fmt.Fprintln(os.Stderr, "usage: bench steer|tune|trace|bigtcp|gateway [-help] [flags]")
	os.Exit(2)
}
