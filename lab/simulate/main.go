// SPDX-License-Identifier: Apache-2.0

// Command simulate lets a fleet of hosts run for a simulated year, by the model of package model, and a fleet of processes with a
// real etcd while it kills and stops them.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/lab/simulate/model"
)

func main() {
	if isHost() {
		return
	}
	fleets := flag.String("hosts", "3,10,100,1000", "numbers of hosts")
	days := flag.Int("days", 365, "simulated days")
	seed := flag.Uint64("seed", 1, "seed of the random numbers")
	count := flag.Int("processes", 0, "number of hosts that are processes with a real etcd; 0: none")
	disturb := flag.Duration("disturb", time.Minute, "time for which these processes and etcd are killed and stopped")
	out := flag.String("out", "", "directory of simulate.json; none by default")
	flag.Parse()
	if flag.NArg() > 0 {
		fmt.Fprintf(os.Stderr, "simulate: unexpected argument %q\n", flag.Arg(0))
		os.Exit(2)
	}
	if err := run(*fleets, *days, *seed, *count, *disturb, *out); err != nil {
		fmt.Fprintln(os.Stderr, "simulate:", err)
		os.Exit(1)
	}
}

func run(fleets string, days int, seed uint64, count int, disturb time.Duration, out string) error {
	var sizes []int
	for text := range strings.SplitSeq(fleets, ",") {
		hosts, err := strconv.Atoi(strings.TrimSpace(text))
		if err != nil || hosts < 3 || hosts > 2000 {
			return fmt.Errorf("-hosts %q: each number is between 3 and 2000", fleets)
		}
		sizes = append(sizes, hosts)
	}
	switch {
	case days < 1 || days > 3650:
		return fmt.Errorf("-days %d is not between 1 and 3650", days)
	case count != 0 && (count < 2 || count > 500) || disturb < 0 || disturb > time.Hour:
		return fmt.Errorf("-processes %d -disturb %v: 2 to 500 processes, and at most an hour", count, disturb)
	}
	if out != "" {
		if err := os.MkdirAll(out, 0o755); err != nil {
			return err
		}
	}
	results := []model.Result{}
	var failed error // what the simulation has found
	for _, hosts := range sizes {
		c := model.Usual(hosts)
		c.Duration, c.Seed = time.Duration(days)*model.Day, seed
		r := model.Run(c)
		fmt.Print(r.String())
		results = append(results, r)
		if n := r.Packets.Misdirected + r.Packets.Lost; n > 0 {
			failed = errors.Join(failed, fmt.Errorf("%d hosts: %d packets were lost or misdirected", hosts, n))
		}
	}
	written := map[string]any{"simulated": results}
	if count != 0 {
		ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, unix.SIGTERM, unix.SIGHUP)
		defer stop()
		p, err := RunProcesses(ctx, count, disturb, seed)
		if errors.Is(err, context.Canceled) {
			return errors.New("interrupted")
		}
		if err != nil {
			return err
		}
		fmt.Print(p.String())
		written["processes"] = p
		if p.Conflicts > 0 || p.Backwards > 0 {
			failed = errors.Join(failed, fmt.Errorf("%d processes: %d epochs with two tables, %d tables that went back", count, p.Conflicts, p.Backwards))
		}
	}
	if out == "" {
		return failed
	}
	data, err := json.MarshalIndent(written, "", "  ")
	if err == nil {
		err = os.WriteFile(filepath.Join(out, "simulate.json"), append(data, '\n'), 0o644)
	}
	return errors.Join(failed, err)
}
