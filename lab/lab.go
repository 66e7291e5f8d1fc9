// SPDX-License-Identifier: Apache-2.0

// Package lab builds a network on one Linux host for the demo, the end-to-end tests and the benchmarks. The network
// runs routers (FRR's bgpd with its BMP module), IPFIX exporters (pmacctd with nfprobe), small flows between the
// routers, and collectors (nfacctd).
//
// The network has a bridge in its own namespace, a collector namespace and router namespaces. A veth interface "eth0"
// connects each namespace to the bridge.
//
//	router i    10.77.0.(1+i)/24   fd77::(1+i)/64    own prefixes 10.78.i.0/24 and fd78:0:i::/64
//	  for BGP   10.76.0.(1+i)/24   fd76::(1+i)/64
//	collector   10.77.0.254/24     fd77::fe/64
//
// BGP uses separate addresses. Otherwise nfacctd also uses the routes that another router's BMP session reports for a
// BGP peer with the exporter's address ("reflector", bmp_lookup.c of pmacct), and prefers them to the exporter's own
// session if the latter started later.
//
// The lab leaves nothing behind. Namespaces have no name, so that they exist only as long as descriptors and processes refer
// to them. All processes are in the lab's cgroup. A watchdog, a shell that waits until the lab's process exits, kills
// the remaining processes and removes the cgroup and the work files. The lab does not change the host's interfaces,
// addresses, rules, sysctls and other cgroups. It needs root.
package lab

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"sockeye/internal/cgroup"
	"sockeye/internal/netns"
)

// MaxRouters is the maximum number of routers in a lab. The following addresses are free for other hosts (Attach).
const MaxRouters = 200

// Options configures New. The zero value is a lab with a collector namespace and no router.
type Options struct {
	Routers int          // number of router namespaces, 0 to MaxRouters
	Dir     string       // parent of the work directory, accessible to other users; default: os.TempDir()
	Keep    bool         // keep the work directory (configuration, logs, records)
	Log     *slog.Logger // default: no log
}

// Lab is a running network. Methods of namespaces, processes and collectors are safe for concurrent use. Methods that
// start, wait for and measure routers are not.
type Lab struct {
	dir    string
	keep   bool
	log    *slog.Logger
	cgroup string // absolute path
	mount  string // mount point of cgroup v2

	namespaces map[string]*Namespace
	routers    []*Router
	ports      atomic.Int32 // of the bridge
	watchdog   *watchdog
	starts     chan func() // run on the thread from which all children are started
	stopping   chan struct{}
	background sync.WaitGroup // goroutines of the lab that end when stopping is closed

	mu         sync.Mutex
	processes  []*Process
	collectors map[int]*Collector
	closers    []func() error
	closed     bool
	closeErr   error
}

// New builds a lab. It undoes all changes if it returns an error. It also removes the empty cgroups of labs whose
// process no longer exists.
func New(ctx context.Context, o Options) (_ *Lab, err error) {
	if o.Routers < 0 || o.Routers > MaxRouters {
		return nil, fmt.Errorf("make lab: %d routers, not 0 to %d", o.Routers, MaxRouters)
	}
	if os.Geteuid() != 0 {
		return nil, errors.New("make lab: root is required")
	}
	l := &Lab{
		keep: o.Keep, log: o.Log,
		namespaces: map[string]*Namespace{}, collectors: map[int]*Collector{},
		starts: make(chan func()), stopping: make(chan struct{}),
	}
	if l.log == nil {
		l.log = slog.New(slog.DiscardHandler)
	}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("make lab: %w", err), l.Close())
		}
	}()

	if l.dir, err = os.MkdirTemp(o.Dir, "sockeye-lab-"); err != nil {
		return nil, err
	}
	if err = os.Chmod(l.dir, 0o755); err != nil { // programs of other users read their configuration there
		return nil, err
	}
	if l.mount, err = cgroup.Mount(); err != nil {
		return nil, err
	}
	removeStaleCgroups(l.mount)
	if l.cgroup, err = makeCgroup(l.mount); err != nil {
		return nil, err
	}
	if l.watchdog, err = startWatchdog(l.cgroup, l.dir, l.keep); err != nil {
		return nil, err
	}
	// The kernel sends PDEATHSIG when the parent thread exits. Therefore one thread, which exists as long as the lab,
	// starts all children.
	l.background.Go(func() {
		_ = netns.Thread(func() error {
			for {
				select {
				case f := <-l.starts:
					f()
				case <-l.stopping:
					return nil
				}
			}
		})
	})
	if err = l.buildNetwork(ctx, o.Routers); err != nil {
		return nil, err
	}
	l.log.Info("lab is up", "routers", o.Routers, "dir", l.dir, "cgroup", l.cgroup)
	return l, nil
}

// Close kills all processes of the lab and removes its namespaces, cgroup and work files. Further calls return the
// result of the first one.
func (l *Lab) Close() error {
	l.mu.Lock()
	if l.closed {
		l.mu.Unlock()
		return l.closeErr
	}
	l.closed = true
	processes, closers := l.processes, l.closers
	l.mu.Unlock()

	var errs []error
	for _, f := range slices.Backward(closers) {
		errs = append(errs, f())
	}
	if l.cgroup != "" {
		errs = append(errs, cgroup.Kill(l.cgroup))
	}
	for _, p := range processes {
		<-p.done
	}
	close(l.stopping)
	l.background.Wait()
	for _, n := range l.namespaces {
		errs = append(errs, n.close())
	}
	if l.cgroup != "" {
		errs = append(errs, cgroup.Remove(l.cgroup))
	}
	if l.dir != "" && !l.keep {
		errs = append(errs, os.RemoveAll(l.dir))
	}
	if l.watchdog != nil {
		errs = append(errs, l.watchdog.stop())
	}
	if err := errors.Join(errs...); err != nil {
		l.closeErr = fmt.Errorf("close lab: %w", err)
	}
	return l.closeErr
}

// Dir returns the work directory, which has the configuration, logs and records of all programs.
func (l *Lab) Dir() string { return l.dir }

// Cgroup returns the absolute path of the lab's cgroup. Processes are in its direct children.
func (l *Lab) Cgroup() string { return l.cgroup }

// CgroupPath returns the path of the lab's cgroup below the cgroup v2 mount, without a leading slash.
func (l *Lab) CgroupPath() string { return filepath.Base(l.cgroup) }

// AtClose registers a function that Close calls before it kills processes. The function that was registered last is
// called first.
func (l *Lab) AtClose(f func() error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closers = append(l.closers, f)
}

// WaitFor polls cond every 50 ms until cond returns true or an error, or ctx is done. The error contains what and wraps
// the error of cond or ctx.
func (l *Lab) WaitFor(ctx context.Context, what string, cond func() (bool, error)) error {
	start := time.Now()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		switch ok, err := cond(); {
		case err != nil:
			return fmt.Errorf("wait for %s: %w", what, err)
		case ok:
			l.log.Info("came up", "what", what, "after", time.Since(start).Round(time.Millisecond))
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for %s: %w after %v", what, context.Cause(ctx), time.Since(start).Round(time.Millisecond))
		case <-l.stopping:
			return fmt.Errorf("wait for %s: lab is closed", what)
		case <-tick.C:
		}
	}
}

// watchdog is a shell script that cleans up after the lab's process was killed.
type watchdog struct {
	cmd  *exec.Cmd
	pipe *os.File // closed when this process exits, for any reason
}

const watchdogScript = `
cat >/dev/null
i=0
while [ $i -lt 100 ] && [ -d "$1" ]; do
	find "$1" -name cgroup.procs -exec cat {} + | xargs -r kill -9
	find "$1" -depth -type d -exec rmdir {} +
	i=$((i + 1))
	[ ! -d "$1" ] || sleep 0.05
done
[ -z "$3" ] || exit 0
# A bpffs of an agent, if the lab has a mount namespace of its own. Last in the list is innermost.
while read -r _ at _; do case $at in "$2"/*) echo "$at" ;; esac; done </proc/self/mounts | tac | xargs -r umount --lazy
rm -rf "$2"
`

// startWatchdog returns nil if there is no shell, as in the virtual machines of lab/vm, which power off after the
// tests.
func startWatchdog(cgroup, dir string, keep bool) (*watchdog, error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("make pipe: %w", err)
	}
	defer r.Close()
	kept := ""
	if keep {
		kept = "keep"
	}
	cmd := exec.Command("/bin/sh", "-c", watchdogScript, "sockeye-lab-watchdog", cgroup, dir, kept)
	cmd.Stdin = r
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // the watchdog must not receive signals to the process group
	err = cmd.Start()
	if err != nil {
		w.Close()
	}
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("start watchdog: %w", err)
	}
	return &watchdog{cmd: cmd, pipe: w}, nil
}

func (w *watchdog) stop() error {
	w.pipe.Close()
	if err := w.cmd.Wait(); err != nil {
		return fmt.Errorf("watchdog: %w", err)
	}
	return nil
}
