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
	"slices"
	"strconv"
	"strings"
	"time"
)

// Machine is a virtual machine whose guest runs suites of Go tests and sends Events
// over its second serial port.
type Machine struct {
	Kernel      *Kernel
	Initramfs   string // file
	Console     string // file for the output of the first serial port
	CPUs        int
	Memory      int           // MiB
	Append      string        // additional kernel parameters
	Args        []string      // additional arguments of qemu
	Suites      []string      // import paths; an Event names its suite by the index
	BootTimeout time.Duration // from power on to the first suite
	Timeout     time.Duration // of a suite; the same as the timeout of its test binary
	// ShutdownTimeout is the maximum time from the last event to power off by the
	// guest. 0: the host kills the machine at the last event.
	ShutdownTimeout time.Duration
}

// Run runs the machine until the guest is done. Errors in the guest are added to the
// report; Run returns errors of the host.
func (m *Machine) Run(ctx context.Context, r *Report) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	arch := m.Kernel.Arch
	// RCU grace periods are expedited, because each write to a map of maps waits for one.
	machine := Command(ctx, arch.command, slices.Concat(arch.machine, []string{
		"-smp", strconv.Itoa(m.CPUs), "-m", strconv.Itoa(m.Memory),
		"-nodefaults", "-no-user-config", "-no-reboot", "-display", "none", "-monitor", "none",
		"-kernel", m.Kernel.Image, "-initrd", m.Initramfs,
		"-append", strings.TrimSpace(strings.Join([]string{"console=" + arch.console, "panic=-1 oops=panic mitigations=off rcupdate.rcu_expedited=1", arch.kernel, m.Append}, " ")),
		"-serial", "file:" + m.Console}, arch.port, m.Args)...)
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
		_, _ = io.Copy(io.Discard, results) // returns when the machine exits
		late.Stop()
		if cause = context.Cause(ctx); cause != nil && !errors.Is(cause, ErrInterrupted) {
			r.Problem("%v", cause)
			hung = true
		}
	}
	cancel(nil)
	_ = machine.Wait() // the guest's events and qemu's stderr have the details
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

// printConsole prints the end of the guest's console output.
func (m *Machine) printConsole(r *Report, cause error, stderr []byte) {
	log, _ := os.ReadFile(m.Console)
	fmt.Fprintf(os.Stderr, "%s: %v %s\nend of its console:\n%s\n", r.machine, cause, stderr, tail(log, 40))
}

func tail(text []byte, lines int) string {
	all := strings.Split(strings.TrimSpace(strings.ReplaceAll(string(text), "\r", "")), "\n")
	return "\t" + strings.Join(all[max(0, len(all)-lines):], "\n\t")
}

// follow reads the guest's events until the end of the stream. It calls cancel if an
// expected event does not arrive in time, and reports whether the guest has finished.
func (r *Report) follow(ctx context.Context, cancel context.CancelCauseFunc, events io.Reader, m *Machine, begin time.Time) (done bool) {
	deadline := time.AfterFunc(m.BootTimeout, func() { cancel(fmt.Errorf("no test started within %v", m.BootTimeout)) })
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
			// The timeout of the test binary is shorter, and prints the stacks.
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

// parser is a test2json process for the output of one suite.
type parser struct {
	r      *Report
	pkg    string
	cmd    *exec.Cmd
	in     io.WriteCloser
	parsed chan error
}

func (r *Report) parse(ctx context.Context, pkg string) (*parser, error) {
	// The process does not depend on ctx, so that it prints all output received so far.
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
	_, _ = p.in.Write(b) // an early exit of test2json is reported by end
}

// end waits for the results. how is the error of the test binary, or "".
func (p *parser) end(how string) {
	_ = p.in.Close()
	err := errors.Join(<-p.parsed, p.cmd.Wait())
	if err != nil {
		p.r.Problem("%s: read the output: %v", p.pkg, err)
	}
	p.r.close(p.pkg, how)
}
