// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"

	"golang.org/x/sys/unix"

	"sockeye/bench/harness"
)

const (
	costRole  = "tune-cost"
	costBatch = 500 // connections per measurement
)

// Arms of the part cost, by the rules of their cgroups.
const (
	costNone      = "none"      // no program
	costUnmatched = "unmatched" // rules that none of its connections matches
	costMany      = "unmatched_10000_prefixes"
	costMatched   = "matched"
)

var (
	costArms   = []string{costNone, costUnmatched, costMany, costMatched}
	costTitles = map[string]string{
		costNone: "no program", costUnmatched: "two rules, no match", costMany: "rule of 10000 prefixes, no match", costMatched: "rule of five options, match",
	}
)

// cost contains the CPU time in microseconds of connect, accept and close with both ends in the cgroup, by arm.
type cost map[string][]float64

// more returns the difference of an arm from the arm without a program, by round.
func (c cost) more(arm string) (out []float64) {
	for i, us := range c[arm] {
		out = append(out, us-c[costNone][i])
	}
	return out
}

// ratio returns the ratio of an arm to the arm without a program, by round.
func (c cost) ratio(arm string) (out []float64) {
	for i, us := range c[arm] {
		out = append(out, us/c[costNone][i])
	}
	return out
}

func (t *bench) cost(ctx context.Context) (cost, error) {
	fmt.Fprint(os.Stderr, "cost: ")
	defer fmt.Fprintln(os.Stderr)
	n, err := plainHost(t.Lab, "cost")
	if err != nil {
		return nil, err
	}
	c := cost{}
	workers := map[string]*harness.Worker{}
	for _, arm := range costArms {
		group, err := t.Group("cost-" + arm)
		if err != nil {
			return nil, err
		}
		if workers[arm], err = t.Worker(ctx, n, group, costRole); err != nil {
			return nil, err
		}
	}
	for round := range t.Batches + 1 { // the first round is a warm-up
		for i := range costArms {
			arm := costArms[(round+i)%len(costArms)] // the order rotates
			var ns int64
			if err := workers[arm].Ask(struct{}{}, &ns); err != nil {
				return nil, err
			}
			if round > 0 {
				c[arm] = append(c[arm], float64(ns)/1000/costBatch)
			}
		}
	}
	return c, nil
}

// tuneCost answers each line of stdin with the CPU time of a batch of connections in nanoseconds. A single thread does
// all work, which avoids wake-ups.
func tuneCost([]string) error {
	runtime.LockOSThread()
	listener, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open socket: %w", err)
	}
	if err := unix.Bind(listener, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		return fmt.Errorf("bind: %w", err)
	}
	if err := unix.Listen(listener, 16); err != nil {
		return fmt.Errorf("listen: %w", err)
	}
	target, err := unix.Getsockname(listener)
	if err != nil {
		return fmt.Errorf("read own address: %w", err)
	}
	lines, answers := json.NewDecoder(os.Stdin), json.NewEncoder(os.Stdout)
	for {
		if err := lines.Decode(&struct{}{}); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return fmt.Errorf("read question: %w", err)
		}
		start := threadCPU()
		for range costBatch {
			if err := oneConnection(listener, target); err != nil {
				return err
			}
		}
		if err := answers.Encode(threadCPU() - start); err != nil {
			return err
		}
	}
}

// threadCPU returns the CPU time of the calling thread in nanoseconds, with the processing of its packets on
// loopback.
func threadCPU() int64 {
	var t unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t)
	return t.Nano()
}

// oneConnection opens a connection and resets it, so that no TIME_WAIT socket remains.
func oneConnection(listener int, target unix.Sockaddr) error {
	client, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open socket: %w", err)
	}
	if err := unix.SetsockoptLinger(client, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}); err != nil {
		return fmt.Errorf("set linger: %w", err)
	}
	if err := unix.Connect(client, target); err != nil {
		return fmt.Errorf("connect: %w", err)
	}
	server, _, err := unix.Accept4(listener, unix.SOCK_CLOEXEC)
	if err != nil {
		return fmt.Errorf("accept: %w", err)
	}
	unix.Close(client)
	unix.Close(server)
	return nil
}
