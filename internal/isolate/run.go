// SPDX-License-Identifier: Apache-2.0

package isolate

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"os"
	"os/signal"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/gateway"
	"sockeye/internal/gateway/access"
	"sockeye/internal/sandbox"
	"sockeye/internal/tun"
)

// InterfaceName is the name of the TUN interface inside.
const InterfaceName = "sockeye0"

// lingerTime is the time that the gateway continues after the exit of the program, to deliver data that the host's sockets have not
// accepted yet.
const lingerTime = 5 * time.Second

// Options configures Run.
type Options struct {
	MTU            int        // of the TUN interface, bytes
	Guest4, Guest6 netip.Addr // addresses of the TUN interface
	Outbound       access.Outbound
	// User is the user of the gateway and the program; nil: the user of this process.
	User *User
	// Listen opens the published sockets of the host. Run calls Listen after the change to User and before the program starts.
	Listen func() ([]gateway.Forward, error)
	// RequireSandbox makes Run fail with an IncompleteError if the confinement is incomplete.
	RequireSandbox bool
	// Warn is called for each restriction that the kernel does not support, and for each feature that is not available to the program.
	Warn func(text string)
	// Joined is called when the gateway of an existing namespace is running.
	Joined func()
	Log    *slog.Logger
}

// IncompleteError lists the restrictions that the kernel does not support.
type IncompleteError struct{ Missing []string }

func (e *IncompleteError) Error() string {
	return "the sandbox is incomplete: " + strings.Join(e.Missing, "; ")
}

// Run prepares a guest and is its gateway until the guest's program exits or the existing namespace is removed. The code is the exit
// code of the program, or 128 plus the number of the signal that terminated it; 0 for an existing namespace. Run forwards PassedSignals
// to the program, except signals that are ignored when Run is called. A failure before the program starts is a StepError or an
// IncompleteError if it has a remedy.
func Run(ctx context.Context, guest *Guest, o *Options) (code int, err error) {
	signals := make(chan os.Signal, 8)
	if guest.Existing == nil {
		for _, s := range PassedSignals {
			if !signal.Ignored(s) { // as by nohup(1)
				signal.Notify(signals, s)
			}
		}
		defer signal.Stop(signals)
	}
	if o.User != nil {
		if err := o.User.become(); err != nil {
			return 0, err
		}
	}
	guest.Interface = tun.Interface{Name: InterfaceName, MTU: o.MTU, Addresses: []netip.Addr{o.Guest4, o.Guest6}}
	forwards, err := o.Listen()
	if err != nil {
		return 0, &StepError{StepListen, err}
	}
	p, err := guest.Prepare([]string{"/proc/self/exe", InsideCommand})
	if err != nil {
		return prepareFailed(err, signals)
	}
	g, terminal, err := o.start(guest, p, forwards)
	if err != nil {
		p.Kill()
		return 0, err
	}
	defer g.LogCounts(o.Log, "ended")
	o.Log.Info("joined", "interface", InterfaceName, "ipv4", o.Guest4, "ipv6", o.Guest6, "ports", len(forwards))
	if guest.Existing != nil {
		o.Joined()
		return 0, serve(ctx, g, guest.Existing.Ended)
	}
	if ctx.Err() != nil && len(signals) == 0 {
		// A signal arrived before Run forwarded signals.
		p.Kill()
		return 0, errors.New("interrupted before the program started")
	}
	err = serve(context.WithoutCancel(ctx), g, func(running context.Context) (err error) {
		code, err = runProgram(running, p, signals, terminal)
		return err
	})
	return code, err
}

// keyTime is the maximum time between the exit of the process inside by a terminal key and the arrival of the key's signal.
const keyTime = 500 * time.Millisecond

// prepareFailed returns 128 plus the number of the signal if a terminal key terminated the process inside, which is in the process
// group of the gateway. The process inside, the init of its PID namespace, exits with a code of the Go runtime then, and the runtime of
// the gateway may deliver the signal later.
func prepareFailed(err error, signals <-chan os.Signal) (code int, _ error) {
	var wait time.Duration
	if _, ok := errors.AsType[*StepError](err); !ok {
		wait = keyTime
	}
	if number, ok := nextSignal(signals, wait).(unix.Signal); ok {
		return 128 + int(number), nil
	}
	if ended, ok := errors.AsType[*EndedError](err); ok && slices.Contains(PassedSignals, os.Signal(ended.Signal)) {
		return 128 + int(ended.Signal), nil
	}
	if _, ok := errors.AsType[*StepError](err); !ok {
		err = &StepError{StepPrepare, err}
	}
	return 0, err
}

// nextSignal returns a signal that has arrived or arrives in time, or nil.
func nextSignal(signals <-chan os.Signal, wait time.Duration) (s os.Signal) {
	select {
	case s = <-signals:
		return s
	default:
	}
	select {
	case s = <-signals:
	case <-time.After(wait):
	}
	return s
}

// start creates the gateway of a prepared guest and confines this process.
func (o *Options) start(guest *Guest, p *Prepared, forwards []gateway.Forward) (g *gateway.Gateway, t terminal, err error) {
	if err := o.report(p.Missing); err != nil {
		return nil, t, err
	}
	for _, w := range p.Warnings {
		o.Warn(w)
	}
	linger := lingerTime
	if guest.Existing != nil {
		linger = 0 // the programs in the namespace continue, and so do their connections
	}
	g, err = gateway.New(gateway.Config{
		TUN: p.TUN, MTU: o.MTU, Guest4: o.Guest4, Guest6: o.Guest6, Host4: Host4, Host6: Host6,
		Forwards: forwards, Diag: p.Diag, Outbound: o.Outbound, Kernel: p.Kernel, Log: o.Log,
		Linger: linger,
	})
	if err != nil {
		return nil, t, &StepError{StepPrepare, err}
	}
	box := sandbox.Gateway{Outbound: o.Outbound, Listens: guest.Watched}
	if guest.Existing == nil {
		box.Child = p.PID()
	}
	t = openTerminal()
	gateway.ConfigureRuntime()
	missing, err := box.Enter()
	if err != nil {
		return nil, t, err
	}
	for n, name := range missing {
		missing[n] = "the gateway is not confined by " + name
	}
	return g, t, o.report(missing)
}

// report calls Warn for restrictions that the kernel does not support, or returns an IncompleteError if RequireSandbox is set.
func (o *Options) report(missing []string) error {
	if len(missing) > 0 && o.RequireSandbox {
		return &IncompleteError{missing}
	}
	for _, m := range missing {
		o.Warn((&IncompleteError{[]string{m}}).Error())
	}
	return nil
}

// serve runs the gateway until work returns or ctx is done. If the gateway returns first, serve cancels the context of work.
func serve(ctx context.Context, g *gateway.Gateway, work func(context.Context) error) error {
	running, stop := context.WithCancel(ctx)
	defer stop()
	ended := make(chan error, 1)
	go func() {
		defer stop()
		ended <- g.Run(running)
	}()
	err := work(running)
	stop()
	if failed := <-ended; failed != nil {
		return failed
	}
	return err
}

// runProgram starts the prepared program, forwards signals, and returns the program's exit code.
func runProgram(ctx context.Context, p *Prepared, signals <-chan os.Signal, t terminal) (code int, err error) {
	if t.foreground() { // evaluated before a shell inside becomes the foreground process group
		defer t.setForeground()
	}
	if err := p.Go(); err != nil {
		p.Kill()
		return 0, err
	}
	early := len(signals)
	pass := make(chan os.Signal, 8)
	go func() {
		for s := range signals {
			// The terminal sends the signal of a key to the whole process group, which includes a started program.
			key := s == unix.SIGINT || s == unix.SIGQUIT
			if early--; early < 0 && key && t.foreground() {
				continue
			}
			pass <- s
		}
	}()
	return p.Wait(ctx, pass)
}
