// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"strings"
)

// benchmark is a command of bench.
type benchmark struct {
	name string
	// run runs the benchmark with its flags.
	run func(args []string) error
	// sandboxed benchmarks run in a process that supervise starts, and open the sandbox with openSandbox.
	sandboxed bool
	// workers are what the benchmark starts this program as, by the first argument.
	workers map[string]func(args []string) error
}

// runCommand runs the benchmark or the worker that the first argument names, and returns the exit status.
func runCommand(args []string, benchmarks ...benchmark) int {
	err := dispatch(args, benchmarks)
	var code exitCode
	switch {
	case err == nil:
		return 0
	case errors.As(err, &code):
		return int(code)
	}
	fmt.Fprintln(os.Stderr, "bench:", err)
	return 1
}

func dispatch(args []string, benchmarks []benchmark) error {
	inside := len(args) > 0 && args[0] == insideRole
	if inside {
		args = args[1:]
	}
	var names []string
	for _, b := range benchmarks {
		names = append(names, b.name)
		switch {
		case len(args) == 0:
		case args[0] == b.name && b.sandboxed && !inside:
			return supervise(args)
		case args[0] == b.name:
			return b.run(args[1:])
		case b.workers[args[0]] != nil && !inside:
			return b.workers[args[0]](args[1:])
		}
	}
	fmt.Fprintf(os.Stderr, "usage: bench %s [-help] [flags]\n", strings.Join(names, "|"))
	return exitCode(2)
}

// parseFlags parses the flags of a benchmark, which takes no other arguments. Where it returns false, the benchmark
// ends with err, nil after -help.
func parseFlags(fs *flag.FlagSet, args []string) (ok bool, err error) {
	switch err := fs.Parse(args); { // which prints its errors itself
	case errors.Is(err, flag.ErrHelp):
		return false, nil
	case err != nil:
		return false, exitCode(2)
	case fs.NArg() > 0:
		return false, misused(fs)
	}
	return true, nil
}

// misused prints the flags of a benchmark, and returns the exit status of wrong usage.
func misused(fs *flag.FlagSet) error {
	fs.Usage()
	return exitCode(2)
}
