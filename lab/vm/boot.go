// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"sockeye/lab/qemu"
)

// bootTimeout is for the way from power on to the first suite.
const bootTimeout = 90 * time.Second

// boot runs all suites in a virtual machine. What goes wrong in there is in
// the report; the error is for what goes wrong here.
func boot(ctx context.Context, tmp string, k *qemu.Kernel, suites []suite, o *options) (*report, error) {
	initramfs, console := filepath.Join(tmp, "initramfs"), filepath.Join(tmp, "console")
	if err := writeInitramfs(ctx, initramfs, tmp, k, suites, o); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	// A thread for each processor would be faster, but now and then loses a
	// breakpoint that the kernel sets to change its own code, and crashes. Grace
	// periods of RCU, for which each write to a map of maps waits, are hurried.
	machine := qemu.Command(ctx, "qemu-system-x86_64",
		"-accel", "tcg,thread=single", "-cpu", "max", "-smp", "2", "-m", "1024",
		"-nodefaults", "-no-user-config", "-no-reboot", "-display", "none", "-monitor", "none",
		"-kernel", k.Image, "-initrd", initramfs,
		"-append", "console=ttyS0 panic=-1 oops=panic mitigations=off rcupdate.rcu_expedited=1",
		"-serial", "file:"+console, "-serial", "stdio")
	results, err := machine.StdoutPipe()
	if err != nil {
		return nil, err
	}
	var stderr bytes.Buffer
	machine.Stderr = &stderr
	begin := time.Now()
	if err := machine.Start(); err != nil {
		return nil, fmt.Errorf("start qemu: %w", err)
	}
	r := newReport(k)
	done := r.follow(ctx, cancel, results, suites, begin, o.timeout)
	cause := context.Cause(ctx)
	cancel(nil)
	_ = machine.Wait() // says no more than the guest's events and qemu's stderr
	r.total = time.Since(begin)
	if done || errors.Is(cause, qemu.ErrInterrupted) {
		return r, nil
	}
	if cause == nil {
		cause = errors.New("the machine stopped")
	}
	r.problem("%v", cause)
	log, _ := os.ReadFile(console)
	fmt.Fprintf(os.Stderr, "vm: %s: %v %s\nvm: end of its console:\n%s\n", k.Short(), cause, stderr.Bytes(), tail(log, 40))
	return r, nil
}

func tail(text []byte, lines int) string {
	all := strings.Split(strings.TrimSpace(strings.ReplaceAll(string(text), "\r", "")), "\n")
	return "\t" + strings.Join(all[max(0, len(all)-lines):], "\n\t")
}

// follow reads the guest's events to their end, and cancels when none of the
// awaited comes in time. It reports whether the guest came to its end.
func (r *report) follow(ctx context.Context, cancel context.CancelCauseFunc, events io.Reader, suites []suite, begin time.Time, timeout time.Duration) (done bool) {
	deadline := time.AfterFunc(bootTimeout, func() { cancel(fmt.Errorf("no test began within %v", bootTimeout)) })
	defer func() { deadline.Stop() }()
	var p *parser
	defer func() {
		if p != nil {
			p.end("the machine stopped")
		}
	}()
	lines := bufio.NewScanner(events)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var e event
		if err := json.Unmarshal(lines.Bytes(), &e); err != nil {
			r.problem("unreadable event %q", lines.Text())
			continue
		}
		switch {
		case e.Start != nil:
			if r.booted == 0 {
				r.booted = time.Since(begin)
			}
			name := suites[*e.Start].Package
			deadline.Stop()
			// The test binary has its own timeout, which says more.
			deadline = time.AfterFunc(timeout+30*time.Second, func() { cancel(fmt.Errorf("%s hangs", name)) })
			var err error
			if p, err = r.parse(ctx, name); err != nil {
				cancel(err)
			}
		case e.End != nil && p != nil:
			p.end(*e.End)
			p = nil
		case e.Output != nil && p != nil:
			p.write(e.Output)
		case e.Error != "":
			r.problem("%s", e.Error)
		case e.Done:
			return true
		}
	}
	return false
}

// A parser is a test2json process for one suite's output.
type parser struct {
	r      *report
	pkg    string
	cmd    *exec.Cmd
	in     io.WriteCloser
	parsed chan error
}

func (r *report) parse(ctx context.Context, pkg string) (*parser, error) {
	// Not ended by ctx, so that it can print what there is.
	cmd := qemu.Command(context.WithoutCancel(ctx), "go", "tool", "test2json")
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start test2json: %w", err)
	}
	p := &parser{r: r, pkg: pkg, cmd: cmd, in: in, parsed: make(chan error, 1)}
	go func() { p.parsed <- r.read(pkg, out) }()
	return p, nil
}

func (p *parser) write(b []byte) {
	_, _ = p.in.Write(b) // test2json's end, if early, is reported by end
}

// end waits for the results; how says why the test binary's end was not a good one.
func (p *parser) end(how string) {
	_ = p.in.Close()
	err := errors.Join(<-p.parsed, p.cmd.Wait())
	if err != nil {
		p.r.problem("%s: read the output: %v", p.pkg, err)
	}
	p.r.close(p.pkg, how)
}
