// SPDX-License-Identifier: Apache-2.0

package qemu

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
	"strconv"
	"strings"
	"time"
)

// A Machine is a virtual machine whose guest runs suites of Go tests and sends
// Events over its second serial port.
type Machine struct {
	Kernel      *Kernel
	Initramfs   string // file
	Console     string // file for the output of the first serial port
	CPUs        int
	Memory      int           // MiB
	Append      string        // further words for the kernel's command line
	Args        []string      // further arguments of qemu
	Suites      []string      // import paths; an Event names its suite by the index
	BootTimeout time.Duration // from power on to the first suite
	Timeout     time.Duration // that a suite's own timeout has
	// ShutdownTimeout is for the way from the last event to power off, which is
	// the guest's to begin. 0: the host ends the machine at the last event.
	ShutdownTimeout time.Duration
}

// Run runs the machine until the guest is done. What goes wrong in there is in
// the report; the error is for what goes wrong here.
func (m *Machine) Run(ctx context.Context, r *Report) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	// A thread for each processor would be faster, but now and then loses a
	// breakpoint that the kernel sets to change its own code, and crashes. Grace
	// periods of RCU, for which each write to a map of maps waits, are hurried.
	machine := Command(ctx, "qemu-system-x86_64", append([]string{
		"-accel", "tcg,thread=single", "-smp", strconv.Itoa(m.CPUs), "-m", strconv.Itoa(m.Memory),
		"-nodefaults", "-no-user-config", "-no-reboot", "-display", "none", "-monitor", "none",
		"-kernel", m.Kernel.Image, "-initrd", m.Initramfs,
		"-append", strings.TrimSpace("console=ttyS0 panic=-1 oops=panic mitigations=off rcupdate.rcu_expedited=1 " + m.Append),
		"-serial", "file:" + m.Console, "-serial", "stdio"}, m.Args...)...)
	results, err := machine.StdoutPipe()
	if err != nil {
		return err
	}
	var stderr bytes.Buffer
	machine.Stderr = &stderr
	begin := time.Now()
	if err := machine.Start(); err != nil {
		return fmt.Errorf("start qemu: %w", err)
	}
	done := r.follow(ctx, cancel, results, m, begin)
	cause, hung := context.Cause(ctx), false
	if done && m.ShutdownTimeout > 0 {
		late := time.AfterFunc(m.ShutdownTimeout, func() {
			cancel(fmt.Errorf("the machine did not shut down within %v", m.ShutdownTimeout))
		})
		_, _ = io.Copy(io.Discard, results) // ends with the machine
		late.Stop()
		if cause = context.Cause(ctx); cause != nil && !errors.Is(cause, ErrInterrupted) {
			r.Problem("%v", cause)
			hung = true
		}
	}
	cancel(nil)
	_ = machine.Wait() // says no more than the guest's events and qemu's stderr
	r.total += time.Since(begin)
	if hung {
		m.printConsole(r, cause, stderr.Bytes())
	}
	if done || errors.Is(cause, ErrInterrupted) {
		return nil
	}
	if cause == nil {
		cause = errors.New("the machine stopped")
	}
	r.Problem("%v", cause)
	m.printConsole(r, cause, stderr.Bytes())
	return nil
}

// printConsole prints what the guest's console had last.
func (m *Machine) printConsole(r *Report, cause error, stderr []byte) {
	log, _ := os.ReadFile(m.Console)
	fmt.Fprintf(os.Stderr, "%s: %v %s\nend of its console:\n%s\n", r.machine, cause, stderr, tail(log, 40))
}

func tail(text []byte, lines int) string {
	all := strings.Split(strings.TrimSpace(strings.ReplaceAll(string(text), "\r", "")), "\n")
	return "\t" + strings.Join(all[max(0, len(all)-lines):], "\n\t")
}

// follow reads the guest's events to their end, and cancels when none of the
// awaited comes in time. It reports whether the guest came to its end.
func (r *Report) follow(ctx context.Context, cancel context.CancelCauseFunc, events io.Reader, m *Machine, begin time.Time) (done bool) {
	deadline := time.AfterFunc(m.BootTimeout, func() { cancel(fmt.Errorf("no test began within %v", m.BootTimeout)) })
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
		var e Event
		if err := json.Unmarshal(lines.Bytes(), &e); err != nil {
			r.Problem("unreadable event %q", lines.Text())
			continue
		}
		switch {
		case e.Start != nil:
			if r.booted == 0 {
				r.booted = time.Since(begin)
			}
			if *e.Start < 0 || *e.Start >= len(m.Suites) {
				r.Problem("the guest began suite %d of %d", *e.Start, len(m.Suites))
				continue
			}
			name := m.Suites[*e.Start]
			deadline.Stop()
			// The test binary has its own timeout, which says more.
			deadline = time.AfterFunc(m.Timeout+30*time.Second, func() { cancel(fmt.Errorf("%s hangs", name)) })
			var err error
			if p, err = r.parse(ctx, name); err != nil {
				cancel(err)
			}
		case e.End != nil && p != nil:
			p.end(*e.End)
			p = nil
		case e.Output != nil && p != nil:
			p.write(e.Output)
		case e.Journal != nil && r.Journal != nil:
			if _, err := r.Journal.Write(e.Journal); err != nil {
				r.Problem("write the journal: %v", err)
			}
		case e.Error != "":
			r.Problem("%s", e.Error)
		case e.Done:
			return true
		}
	}
	return false
}

// A parser is a test2json process for one suite's output.
type parser struct {
	r      *Report
	pkg    string
	cmd    *exec.Cmd
	in     io.WriteCloser
	parsed chan error
}

func (r *Report) parse(ctx context.Context, pkg string) (*parser, error) {
	// Not ended by ctx, so that it can print what there is.
	cmd := Command(context.WithoutCancel(ctx), "go", "tool", "test2json", "-t")
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
		p.r.Problem("%s: read the output: %v", p.pkg, err)
	}
	p.r.close(p.pkg, how)
}
