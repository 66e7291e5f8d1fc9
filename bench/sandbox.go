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
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/cgroup"
)

// The benchmark runs in two processes: a supervisor, which only cleans up, and
// inside, in a mount namespace of its own and network namespaces that it makes,
// which does the work.
// Each sees the other's end by a pipe, so that whichever is killed, the other
// ends everything below the benchmark's cgroup and removes what was made.

const (
	insideRole  = "inside"
	cgroupName  = "sockeye-bench-"
	envSandbox  = "SOCKEYE_BENCH_SANDBOX"
	envCgroup   = "SOCKEYE_BENCH_CGROUP"
	lifelineFD  = 3
	killTimeout = 10 * time.Second
)

type exitCode int

func (e exitCode) Error() string { return "exit status " + strconv.Itoa(int(e)) }

func supervise(args []string) error {
	if os.Geteuid() != 0 {
		return errors.New("needs root: it makes namespaces and cgroups, and loads BPF programs")
	}
	root, err := cgroup.Mount()
	if err != nil {
		return err
	}
	removeStale(root)
	name := cgroupName + strconv.Itoa(os.Getpid())
	dir, err := os.MkdirTemp("", name+"-")
	if err != nil {
		return fmt.Errorf("make scratch directory: %w", err)
	}
	defer os.RemoveAll(dir)
	cg, err := cgroup.Make(root, cgroupName, "")
	if err != nil {
		return err
	}
	defer removeCgroup(cg)

	lifeline, ours, err := os.Pipe()
	if err != nil {
		return err
	}
	cmd := exec.Command("/proc/self/exe", append([]string{insideRole}, args...)...)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	cmd.Env = append(os.Environ(), envSandbox+"="+dir, envCgroup+"="+cg)
	cmd.ExtraFiles = []*os.File{lifeline}
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNS}
	signals := make(chan os.Signal, 4)
	signal.Notify(signals, unix.SIGINT, unix.SIGTERM, unix.SIGHUP, unix.SIGPIPE)
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start in namespaces of its own: %w", err)
	}
	lifeline.Close()
	go func() {
		<-signals
		ours.Close() // inside sees it, and ends
	}()
	err = cmd.Wait()
	runtime.KeepAlive(ours)
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return exitCode(max(1, exit.ExitCode()))
	}
	return err
}

// sandbox is what inside has to work with.
type sandbox struct {
	dir    string // scratch
	cgroup string // absolute path of the benchmark's cgroup
	groups map[string]int
}

func openSandbox() (*sandbox, context.Context, func(), error) {
	s := &sandbox{dir: os.Getenv(envSandbox), cgroup: os.Getenv(envCgroup), groups: map[string]int{}}
	if s.dir == "" || s.cgroup == "" {
		return nil, nil, nil, errors.New("inside: only for bench itself")
	}
	ctx, cancel := context.WithCancelCause(context.Background())
	signal.Ignore(unix.SIGINT, unix.SIGHUP) // a terminal sends them to all; the supervisor decides
	go func() {
		_, _ = os.NewFile(lifelineFD, "lifeline").Read(make([]byte, 1))
		cancel(errors.New("interrupted"))
	}()
	cleanup := func() {
		removeCgroup(s.cgroup)
		os.RemoveAll(s.dir)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return nil, nil, nil, fmt.Errorf("make mounts private: %w", err)
	}
	context.AfterFunc(ctx, func() { _ = cgroup.Kill(s.cgroup) })
	return s, ctx, cleanup, nil
}

// A space is a network namespace. The main goroutine, bound to its thread, does
// all work and is in one space at a time.
type space int

func newSpace() (space, error) {
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return -1, fmt.Errorf("make network namespace: %w", err)
	}
	if err := loopbackUp(); err != nil {
		return -1, err
	}
	fd, err := unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("open network namespace: %w", err)
	}
	return space(fd), nil
}

func (s space) enter() error {
	if err := unix.Setns(int(s), unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("enter network namespace: %w", err)
	}
	return nil
}

func (s space) close() { unix.Close(int(s)) }

func loopbackUp() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("set lo up: %w", err)
	}
	defer unix.Close(fd)
	ifr, err := unix.NewIfreq("lo")
	if err != nil {
		return fmt.Errorf("set lo up: %w", err)
	}
	ifr.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
	if err := unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, ifr); err != nil {
		return fmt.Errorf("set lo up: %w", err)
	}
	return nil
}

// removeStale removes what benchmarks left of which both processes were killed
// at once.
func removeStale(root string) {
	for _, dir := range cgroup.Stale(root, cgroupName, "") {
		removeCgroup(dir)
	}
	dirs, _ := filepath.Glob(filepath.Join(os.TempDir(), cgroupName+"*-*"))
	for _, path := range dirs {
		number, _, _ := strings.Cut(strings.TrimPrefix(filepath.Base(path), cgroupName), "-")
		if pid, err := strconv.Atoi(number); err == nil && unix.Kill(pid, 0) == unix.ESRCH {
			os.RemoveAll(path)
		}
	}
}

func removeCgroup(dir string) {
	if err := cgroup.Destroy(dir); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
	}
}

// group opens the cgroup name below the benchmark's, and makes it if needed.
func (s *sandbox) group(name string) (int, error) {
	if fd, ok := s.groups[name]; ok {
		return fd, nil
	}
	path := filepath.Join(s.cgroup, name)
	if err := os.Mkdir(path, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
		return -1, fmt.Errorf("make cgroup: %w", err)
	}
	fd, err := unix.Open(path, unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("open cgroup %s: %w", path, err)
	}
	s.groups[name] = fd
	return fd, nil
}

// cpu is what the processes of a group have used so far, the dead ones
// included. The kernel counts what it did in softirq on a process's back as
// this process's (unless built with CONFIG_IRQ_TIME_ACCOUNTING).
func (s *sandbox) cpu(group string) time.Duration {
	b, err := os.ReadFile(filepath.Join(s.cgroup, group, "cpu.stat"))
	if err != nil {
		return 0
	}
	f := strings.Fields(string(b)) // usage_usec N ...
	us, _ := strconv.ParseInt(f[1], 10, 64)
	return time.Duration(us) * time.Microsecond
}

// quiesce waits until the groups have stopped working: nothing else tells from
// outside when a collector has read, or forwarded, all that it was sent.
func (s *sandbox) quiesce(ctx context.Context, groups ...string) error {
	const window, idle = 200 * time.Millisecond, 6 * time.Millisecond
	sum := func() (d time.Duration) {
		for _, g := range groups {
			d += s.cpu(g)
		}
		return d
	}
	calm := 0
	for last, end := sum(), time.Now().Add(20*time.Second); calm < 2; {
		if err := pause(ctx, window); err != nil {
			return err
		}
		now := sum()
		if calm++; now-last > idle {
			calm = 0
		}
		if last = now; time.Now().After(end) {
			return fmt.Errorf("wait for %s to become idle: still busy", strings.Join(groups, ", "))
		}
	}
	return nil
}

func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(d):
		return nil
	}
}

// A process is a child in one of the benchmark's cgroups.
type process struct {
	name   string
	cmd    *exec.Cmd
	in     io.WriteCloser
	out    *bufio.Reader
	stderr string // a file: a pipe would stay open in plugins that outlive their core
	done   chan struct{}
	err    error
}

// start runs a program in a group. It is killed with the benchmark. Call it
// from the main goroutine, whose thread lives as long as the process does.
func (s *sandbox) start(group, name string, argv ...string) (*process, error) {
	fd, err := s.group(group)
	if err != nil {
		return nil, err
	}
	p := &process{name: name, cmd: exec.Command(argv[0], argv[1:]...), done: make(chan struct{})}
	p.stderr = filepath.Join(s.dir, fmt.Sprintf("%s-%s.stderr", group, strings.ReplaceAll(name, " ", "-")))
	stderr, err := os.Create(p.stderr)
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	defer stderr.Close()
	p.cmd.Stderr = stderr
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: unix.SIGKILL, UseCgroupFD: true, CgroupFD: fd}
	p.cmd.Dir = s.dir
	p.cmd.Env = append(os.Environ(), "GODEBUG=asyncpreemptoff=1") // no signals into the receivers' loops
	if p.in, err = p.cmd.StdinPipe(); err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	r, w, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	p.cmd.Stdout, p.out = w, bufio.NewReader(r)
	err = p.cmd.Start()
	w.Close()
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	go func() {
		p.err = p.cmd.Wait()
		close(p.done)
	}()
	return p, nil
}

// ask sends one line (unless it is empty) and decodes the one that answers.
func (p *process) ask(question string, answer any) error {
	if question != "" {
		if _, err := io.WriteString(p.in, question+"\n"); err != nil {
			return p.fail(fmt.Errorf("ask %s: %w", p.name, err))
		}
	}
	line, err := p.out.ReadBytes('\n')
	if err != nil {
		return p.fail(fmt.Errorf("ask %s: %w", p.name, err))
	}
	if err := json.Unmarshal(line, answer); err != nil {
		return fmt.Errorf("ask %s: %w", p.name, err)
	}
	return nil
}

func (p *process) fail(err error) error {
	p.stop(unix.SIGKILL)
	return fmt.Errorf("%w\n%s", err, p.lastWords())
}

func (p *process) ended() bool {
	select {
	case <-p.done:
		return true
	default:
		return false
	}
}

const interrupt = unix.SIGINT

func (p *process) signal(sig syscall.Signal) { _ = p.cmd.Process.Signal(sig) }

// stop ends the process by a signal, and by SIGKILL if that takes too long.
func (p *process) stop(sig syscall.Signal) {
	if !p.ended() {
		p.signal(sig)
	}
	select {
	case <-p.done:
	case <-time.After(killTimeout):
		_ = p.cmd.Process.Kill()
		<-p.done
	}
	p.in.Close()
}

// lastWords is the end of what the process wrote to stderr.
func (p *process) lastWords() []byte {
	b, _ := os.ReadFile(p.stderr)
	lines := bytes.SplitAfter(bytes.TrimSpace(b), []byte("\n"))
	return bytes.Join(lines[max(0, len(lines)-5):], nil)
}

// killGroups ends what is left in groups, such as plugins without a core, and
// removes these.
func (s *sandbox) killGroups(names ...string) {
	for _, name := range names {
		if fd, ok := s.groups[name]; ok {
			unix.Close(fd)
			removeCgroup(filepath.Join(s.cgroup, name))
			delete(s.groups, name)
		}
	}
}

// empty says whether no process is left in a group.
func (s *sandbox) empty(group string) bool {
	pids, err := cgroup.Processes(filepath.Join(s.cgroup, group))
	return err == nil && len(pids) == 0
}

// sockets counts the sockets of the namespace that wait at a port: listening
// TCP, or UDP without a peer.
func sockets(protocol string, port uint16) int {
	n := 0
	for _, f := range []string{protocol, protocol + "6"} {
		b, _ := os.ReadFile("/proc/thread-self/net/" + f)
		for line := range strings.Lines(string(b)) {
			f := strings.Fields(line)
			state := map[string]string{"tcp": "0A", "udp": "07"}[protocol]
			if len(f) > 3 && f[3] == state && strings.HasSuffix(f[1], fmt.Sprintf(":%04X", port)) {
				n++
			}
		}
	}
	return n
}

// drops sums up the datagrams that found a socket of the namespace full.
func drops() (n uint64) {
	for _, f := range []string{"udp", "udp6"} {
		b, _ := os.ReadFile("/proc/thread-self/net/" + f)
		for line := range strings.Lines(string(b)) {
			f := strings.Fields(line)
			d, _ := strconv.ParseUint(f[len(f)-1], 10, 64) // 0 in the heading
			n += d
		}
	}
	return n
}

// await polls until done, for at most 20 seconds; it fails at once when one of
// the processes has ended.
func await(ctx context.Context, what string, procs []*process, done func() bool) error {
	for end := time.Now().Add(20 * time.Second); !done(); {
		if i := slices.IndexFunc(procs, (*process).ended); i >= 0 {
			return fmt.Errorf("wait for %s: %s has ended (%v)\n%s", what, procs[i].name, fmt.Sprint(procs[i].err), procs[i].lastWords())
		}
		if time.Now().After(end) {
			return fmt.Errorf("wait for %s: not within 20 s", what)
		}
		if err := pause(ctx, 20*time.Millisecond); err != nil {
			return err
		}
	}
	return nil
}
