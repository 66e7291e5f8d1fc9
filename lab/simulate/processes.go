// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/fleet/follow"
	"sockeye/internal/fleet/lead"
	"sockeye/internal/fleet/store"
	"sockeye/internal/fleet/table"
	"sockeye/internal/statedir"
)

// hostRole is the first argument of a process that is one host.
const hostRole = "host"

// patience is the longest time in which a fleet without faults comes to rest.
const patience = 2 * time.Minute

// rulesOf returns the rules of a fleet of processes.
func rulesOf(hosts int) lead.Config {
	return lead.Config{MinHosts: max(1, hosts/2), Settle: 2 * time.Second, OnDeath: lead.Next, Batch: 2048, Nonce: 19}
}

// recordingPath prints each table that it applies, and keeps the last one in a file.
type recordingPath struct {
	file string
	out  io.Writer
}

// Apply prints the epoch and a hash of the owners.
func (p *recordingPath) Apply(t *table.Table) error {
	data, err := t.Encode()
	if err != nil {
		return err
	}
	if err := statedir.Write(p.file, data); err != nil {
		return err
	}
	hash := sha256.Sum256(data)
	atRest := 0
	if t.Moving() == 0 {
		atRest = 1
	}
	_, err = fmt.Fprintln(p.out, t.Epoch, hex.EncodeToString(hash[:8]), len(t.Hosts), atRest)
	return err
}

// HandOver does nothing.
func (p *recordingPath) HandOver(context.Context, *table.Table) error { return nil }

// TakeOver does nothing.
func (p *recordingPath) TakeOver(context.Context, *table.Table) error { return nil }

// Processes is the result of a fleet of processes.
type Processes struct {
	Hosts   int `json:"hosts"`
	Kills   int `json:"kills"`
	Stops   int `json:"stops"`   // of hosts, for a while
	Outages int `json:"outages"` // of the store
	Epochs  int `json:"epochs"`
	// Conflicts are epochs with two tables, and Backwards are tables that came after a later one at a host.
	Conflicts int `json:"conflicts"`
	Backwards int `json:"backwards"`
	// Rest is the time from the last fault to the same table at rest on all hosts, in seconds.
	Rest float64 `json:"rest_s"`
}

func (p *Processes) String() string {
	return fmt.Sprintf("%d processes with etcd: %d killed, %d stopped for a while, %d outages of etcd; %d epochs, %d of them with two tables, %d times backwards; at rest after %.1f s\n",
		p.Hosts, p.Kills, p.Stops, p.Outages, p.Epochs, p.Conflicts, p.Backwards, p.Rest)
}

// process is a host of the fleet.
type process struct {
	name   string
	cmd    *exec.Cmd
	stdin  io.Closer
	epoch  uint64
	atRest bool
	hosts  int // in the table
	fresh  bool
}

// processes is a fleet of processes.
type processes struct {
	dir, program   string
	endpoint, peer string // URLs of etcd
	etcd           *exec.Cmd
	readers        sync.WaitGroup

	mu     sync.Mutex
	hosts  []*process
	hashes map[uint64]string // by epoch
	result Processes
}

// RunProcesses starts etcd and hosts, each in a process of its own, disturbs them for a time, and waits until they agree.
func RunProcesses(ctx context.Context, hosts int, disturb time.Duration, seed uint64) (_ *Processes, err error) {
	if _, err := exec.LookPath("etcd"); err != nil {
		return nil, fmt.Errorf("%w\nhint: tools/setup etcd-server", err)
	}
	f := &processes{hashes: make(map[uint64]string), result: Processes{Hosts: hosts}}
	if f.program, err = os.Executable(); err != nil {
		return nil, err
	}
	if f.dir, err = os.MkdirTemp("", "sockeye-fleet-"); err != nil {
		return nil, err
	}
	defer os.RemoveAll(f.dir)
	defer f.end()
	if err := f.serve(); err != nil {
		return nil, err
	}
	for i := range hosts {
		p := &process{name: fmt.Sprintf("host-%03d", i)}
		f.hosts = append(f.hosts, p)
		if err := f.start(p); err != nil {
			return nil, err
		}
	}
	if err := f.rest(ctx); err != nil {
		return nil, err
	}
	if err := f.disturb(ctx, disturb, rand.New(rand.NewPCG(seed, 100))); err != nil {
		return nil, err
	}
	begun := time.Now()
	if err := f.rest(ctx); err != nil {
		return nil, err
	}
	f.result.Rest = time.Since(begun).Seconds()
	f.result.Epochs = len(f.hashes)
	return &f.result, nil
}

// end ends all processes.
func (f *processes) end() {
	for _, p := range f.hosts {
		kill(p.cmd)
	}
	kill(f.etcd)
	f.readers.Wait()
}

// rest waits until all hosts have the same table, with all hosts, in which nothing moves.
func (f *processes) rest(ctx context.Context) error {
	state := func() string {
		f.mu.Lock()
		defer f.mu.Unlock()
		for _, p := range f.hosts {
			switch {
			case p.epoch != f.hosts[0].epoch || p.epoch == 0:
				return fmt.Sprintf("%s has epoch %d, and %s %d", f.hosts[0].name, f.hosts[0].epoch, p.name, p.epoch)
			case p.hosts != len(f.hosts):
				return fmt.Sprintf("the table has %d of %d hosts", p.hosts, len(f.hosts))
			case !p.atRest:
				return fmt.Sprintf("buckets move in epoch %d", p.epoch)
			}
		}
		return ""
	}
	for end := time.Now().Add(patience); ; {
		why := state()
		if why == "" {
			return nil
		}
		if time.Now().After(end) {
			return errors.New("the fleet does not come to rest: " + why)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// disturb kills and stops hosts and etcd for a time. All of them run at the end.
func (f *processes) disturb(ctx context.Context, d time.Duration, random *rand.Rand) error {
	pause := func(most time.Duration) error {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(time.Duration(random.Int64N(int64(most)))):
			return nil
		}
	}
	for end := time.Now().Add(d); time.Now().Before(end); {
		p := f.hosts[random.IntN(len(f.hosts))]
		var err error
		switch random.IntN(6) {
		case 0, 1, 2:
			f.result.Kills++
			kill(p.cmd)
			if err = pause(6 * time.Second); err == nil {
				err = f.start(p)
			}
		case 3, 4:
			f.result.Stops++
			_ = p.cmd.Process.Signal(unix.SIGSTOP)
			err = pause(8 * time.Second)
			_ = p.cmd.Process.Signal(unix.SIGCONT)
		case 5:
			f.result.Outages++
			kill(f.etcd)
			if err = pause(6 * time.Second); err == nil {
				err = f.serve()
			}
		}
		if err == nil {
			err = pause(time.Second)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// serve starts etcd, on free ports at first.
func (f *processes) serve() error {
	if f.endpoint == "" {
		var ports [2]int
		for i := range ports {
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				return err
			}
			defer l.Close()
			ports[i] = l.Addr().(*net.TCPAddr).Port
		}
		f.endpoint, f.peer = fmt.Sprintf("http://127.0.0.1:%d", ports[0]), fmt.Sprintf("http://127.0.0.1:%d", ports[1])
	}
	f.etcd = exec.Command("etcd", "--data-dir", filepath.Join(f.dir, "etcd"), "--listen-client-urls", f.endpoint, "--advertise-client-urls", f.endpoint,
		"--listen-peer-urls", f.peer, "--initial-advertise-peer-urls", f.peer, "--initial-cluster", "default="+f.peer, "--logger", "zap", "--log-level", "fatal", "--unsafe-no-fsync")
	f.etcd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: unix.SIGKILL}
	return f.etcd.Start()
}

// start starts a host.
func (f *processes) start(p *process) error {
	p.cmd = exec.Command(f.program, hostRole, p.name, f.endpoint, f.dir, strconv.Itoa(len(f.hosts)))
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: unix.SIGKILL} // also if it is stopped
	in, err := p.cmd.StdinPipe()
	if err != nil {
		return err
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		return err
	}
	p.cmd.Stderr = os.Stderr
	if err := p.cmd.Start(); err != nil {
		return err
	}
	p.stdin, p.fresh = in, true
	f.readers.Go(func() {
		for lines := bufio.NewScanner(out); lines.Scan(); {
			f.record(p, lines.Text())
		}
	})
	return nil
}

// record records that a host has applied a table.
func (f *processes) record(p *process, line string) {
	var epoch uint64
	var hash string
	var hosts, atRest int
	if _, err := fmt.Sscan(line, &epoch, &hash, &hosts, &atRest); err != nil {
		return // the process was killed while it wrote
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if before, known := f.hashes[epoch]; known && before != hash {
		f.result.Conflicts++
	}
	f.hashes[epoch] = hash
	if epoch < p.epoch || epoch == p.epoch && !p.fresh { // a new process applies its last table again
		f.result.Backwards++
	}
	p.epoch, p.hosts, p.atRest, p.fresh = epoch, hosts, atRest == 1, false
}

// kill kills a process and waits for its end.
func kill(cmd *exec.Cmd) {
	if cmd != nil && cmd.Process != nil {
		_ = cmd.Process.Signal(unix.SIGCONT)
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}
}

// isHost reports whether this process is one host, and runs it.
func isHost() bool {
	if len(os.Args) < 2 || os.Args[1] != hostRole {
		return false
	}
	if err := runHost(os.Args[2:]); err != nil {
		fmt.Fprintln(os.Stderr, "simulate:", strings.TrimSpace(err.Error()))
		os.Exit(1)
	}
	return true
}

// runHost is one host, until its standard input ends.
func runHost(arguments []string) error {
	if len(arguments) != 4 {
		return errors.New("host NAME ENDPOINT DIRECTORY HOSTS")
	}
	name, endpoint, dir := arguments[0], arguments[1], arguments[2]
	hosts, err := strconv.Atoi(arguments[3])
	if err != nil {
		return err
	}
	log := slog.New(slog.DiscardHandler)
	c := follow.Config{Lead: rulesOf(hosts), Log: log, Path: &recordingPath{filepath.Join(dir, name), os.Stdout},
		Host: store.Registration{Host: table.Host{Name: name, Weight: 100}, Healthy: true}}
	if data, err := os.ReadFile(filepath.Join(dir, name)); err == nil {
		if c.Last, err = table.Decode(data); err != nil {
			return err
		}
	}
	etcd, err := store.OpenEtcd(store.EtcdConfig{Endpoints: []string{endpoint}, Fleet: "simulated", Host: c.Host, Log: log})
	if err != nil {
		return err
	}
	defer etcd.Close(true)
	c.Store = etcd
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		cancel()
	}()
	follow.New(c).Run(ctx)
	return nil
}
