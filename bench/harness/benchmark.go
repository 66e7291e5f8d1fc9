// SPDX-License-Identifier: Apache-2.0

// Package harness contains the common parts of the benchmarks: sandbox, workers, figures and reports.
package harness

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"strings"
)

// Benchmark is a command of bench.
type Benchmark struct {
	Name string
	// Run runs the benchmark with its flags.
	Run func(args []string) error
	// Sandboxed benchmarks run in a process that supervise starts, and call InSandbox or InLab.
	Sandboxed bool
	// Workers contains the worker roles of this program, by the first argument.
	Workers map[string]func(args []string) error
}

// RunCommand runs the benchmark or the worker that the first argument names, and returns the exit status.
func RunCommand(args []string, benchmarks ...Benchmark) int {
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

func dispatch(args []string, benchmarks []Benchmark) error {
	inside := len(args) > 0 && args[0] == insideRole
	if inside {
		args = args[1:]
	}
	var names []string
	for _, b := range benchmarks {
		names = append(names, b.Name)
		switch {
		case len(args) == 0:
		case args[0] == b.Name && b.Sandboxed && !inside:
			return supervise(args)
		case args[0] == b.Name:
			return b.Run(args[1:])
		case b.Workers[args[0]] != nil && !inside:
			return b.Workers[args[0]](args[1:])
		}
	}
	fmt.Fprintf(os.Stderr, "usage: bench %s [-help] [flags]\n", strings.Join(names, "|"))
	return exitCode(2)
}

// ParseFlags parses the flags of a benchmark, which accepts no other arguments. If it returns false, the benchmark
// returns err, which is nil after -help.
func ParseFlags(fs *flag.FlagSet, args []string) (ok bool, err error) {
	switch err := fs.Parse(args); { // Parse prints its errors
	case errors.Is(err, flag.ErrHelp):
		return false, nil
	case err != nil:
		return false, exitCode(2)
	case fs.NArg() > 0:
		return false, Misused(fs)
	}
	return true, nil
}

// Misused prints the flags of a benchmark, and returns the exit status of wrong usage.
func Misused(fs *flag.FlagSet) error {
	fs.Usage()
	return exitCode(2)
}
