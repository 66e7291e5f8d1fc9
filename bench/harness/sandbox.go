// SPDX-License-Identifier: Apache-2.0

package harness

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
	"sockeye/internal/netns"
	"sockeye/lab"
)

// A sandboxed benchmark runs in two processes. The supervisor starts the inside process, which measures, in its own
// mount namespace, and cleans up after it. A pipe lets each process detect the exit of the other. If one of them is
// killed, the other kills all processes in the benchmark's cgroup and removes the cgroup and the scratch directory.

const (
	insideRole = "inside"
	cgroupName = "sockeye-bench-"
	envSandbox = "SOCKEYE_BENCH_SANDBOX"
	envCgroup  = "SOCKEYE_BENCH_CGROUP"
	lifelineFD = 3

	// KillTimeout is the time between the termination signal and SIGKILL.
	KillTimeout = 10 * time.Second
)

type exitCode int

func (e exitCode) Error() string { return "exit status " + strconv.Itoa(int(e)) }

// supervise runs a benchmark in a sandbox: this program again, with insideRole before its arguments.
func supervise(args []string) error {
	if os.Geteuid() != 0 {
		return errors.New("needs root: the benchmark creates namespaces and cgroups and loads BPF programs")
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
		ours.Close() // the inside process receives EOF and exits
	}()
	err = cmd.Wait()
	runtime.KeepAlive(ours)
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return exitCode(max(1, exit.ExitCode()))
	}
	return err
}

// Sandbox is the environment of the inside process.
type Sandbox struct {
	Dir    string         // scratch directory
	Cgroup string         // absolute path of the benchmark's cgroup
	Idle   time.Duration  // CPU time of idle cgroups in Quiesce, per 200 ms; 0: 6 ms
	groups map[string]int // open cgroups by name
}

// InLab runs a benchmark in a lab in the sandbox, and closes the lab.
func InLab(run func(ctx context.Context, l *lab.Lab) error) error {
	return InSandbox(func(ctx context.Context, s *Sandbox) (err error) {
		l, err := lab.New(ctx, lab.Options{Dir: s.Dir})
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, l.Close()) }()
		return run(ctx, l)
	})
}

// InSandbox runs a benchmark in the sandbox that supervise has prepared, and cleans up.
func InSandbox(run func(ctx context.Context, s *Sandbox) error) error {
	s, ctx, cleanup, err := openSandbox()
	if err != nil {
		return err
	}
	defer cleanup()
	err = run(ctx, s)
	if ctx.Err() != nil { // the processes were killed: err only names the first one that failed
		return context.Cause(ctx)
	}
	return err
}

func openSandbox() (*Sandbox, context.Context, func(), error) {
	s := &Sandbox{Dir: os.Getenv(envSandbox), Cgroup: os.Getenv(envCgroup), groups: map[string]int{}}
	if s.Dir == "" || s.Cgroup == "" {
		return nil, nil, nil, errors.New("inside: internal command of bench")
	}
	ctx, cancel := context.WithCancelCause(context.Background())
	signal.Ignore(unix.SIGINT, unix.SIGHUP) // a terminal sends them to both processes; only the supervisor handles them
	go func() {
		_, _ = os.NewFile(lifelineFD, "lifeline").Read(make([]byte, 1))
		cancel(errors.New("interrupted"))
	}()
	cleanup := func() {
		removeCgroup(s.Cgroup)
		os.RemoveAll(s.Dir)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return nil, nil, nil, fmt.Errorf("make mounts private: %w", err)
	}
	context.AfterFunc(ctx, func() { _ = cgroup.Kill(s.Cgroup) })
	return s, ctx, cleanup, nil
}

// EnterNew makes a network namespace with lo up, and enters it. The measuring goroutine is bound to its thread, and enters
// one namespace after the other. The kernel removes the namespace after its last process, when the file is closed.
func EnterNew() (*os.File, error) {
	file, err := netns.New()
	if err != nil {
		return nil, err
	}
	if err = netns.Enter(file); err == nil {
		err = loopbackUp()
	}
	if err != nil {
		file.Close()
		return nil, err
	}
	return file, nil
}

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

// removeStale removes the remains of benchmarks whose two processes were killed at the same time.
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

// Usage is CPU time, divided into that of programs and that of the kernel on their behalf.
type Usage struct {
	User   time.Duration `json:"user_ns"`
	System time.Duration `json:"system_ns"`
}

// Total returns the CPU time of both.
func (u Usage) Total() time.Duration { return u.User + u.System }

// Sub returns the CPU time since an earlier reading.
func (u Usage) Sub(earlier Usage) Usage {
	return Usage{u.User - earlier.User, u.System - earlier.System}
}

// CPU returns the total of Usage.
func (s *Sandbox) CPU(group string) time.Duration { return s.Usage(group).Total() }

// Usage returns the CPU time of all current and former processes of a cgroup. Unless the kernel was built with
// CONFIG_IRQ_TIME_ACCOUNTING, this includes softirqs that interrupt these processes.
func (s *Sandbox) Usage(group string) (u Usage) {
	b, err := os.ReadFile(filepath.Join(s.Cgroup, group, "cpu.stat"))
	if err != nil {
		return u
	}
	for line := range strings.Lines(string(b)) { // usage_usec N, user_usec N, system_usec N, ...
		name, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		us, _ := strconv.ParseInt(value, 10, 64)
		switch name {
		case "user_usec":
			u.User = time.Duration(us) * time.Microsecond
		case "system_usec":
			u.System = time.Duration(us) * time.Microsecond
		}
	}
	return u
}

// Memory returns the proportional set size of all processes of a cgroup in bytes: a page that several processes map
// counts once. It excludes memory of the kernel, such as socket buffers and BPF maps.
func (s *Sandbox) Memory(group string) (bytes uint64) {
	pids, err := cgroup.Processes(filepath.Join(s.Cgroup, group))
	if err != nil {
		return 0
	}
	for _, pid := range pids {
		b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid)) // the process may have exited
		for line := range strings.Lines(string(b)) {
			if f := strings.Fields(line); len(f) > 1 && f[0] == "Pss:" {
				kb, _ := strconv.ParseUint(f[1], 10, 64)
				bytes += kb << 10
			}
		}
	}
	return bytes
}

// BPFMemory returns the memory of the BPF maps and programs that processes of a cgroup have open, in bytes.
func (s *Sandbox) BPFMemory(group string) (bytes uint64) {
	pids, err := cgroup.Processes(filepath.Join(s.Cgroup, group))
	if err != nil {
		return 0
	}
	seen := map[string]bool{}
	for _, pid := range pids {
		files, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fdinfo/*", pid))
		for _, file := range files {
			b, _ := os.ReadFile(file)
			var id string
			var size uint64
			for line := range strings.Lines(string(b)) {
				switch name, value, _ := strings.Cut(strings.TrimSpace(line), ":\t"); name {
				case "map_id", "prog_id":
					id = name + value
				case "memlock":
					size, _ = strconv.ParseUint(value, 10, 64)
				}
			}
			if id != "" && !seen[id] {
				seen[id] = true
				bytes += size
			}
		}
	}
	return bytes
}

// Quiesce waits up to 20 seconds until the cgroups use almost no CPU. There is no other external sign that a collector
// has read or forwarded all its input.
func (s *Sandbox) Quiesce(ctx context.Context, groups ...string) error {
	const window = 200 * time.Millisecond
	idle := s.Idle
	if idle == 0 {
		idle = 6 * time.Millisecond
	}
	sum := func() (d time.Duration) {
		for _, g := range groups {
			d += s.CPU(g)
		}
		return d
	}
	calm := 0
	for last, end := sum(), time.Now().Add(20*time.Second); calm < 2; {
		if err := Pause(ctx, window); err != nil {
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

// Process is a child in one of the benchmark's cgroups.
type Process struct {
	name   string
	cmd    *exec.Cmd
	In     io.WriteCloser
	out    *bufio.Reader
	stderr string        // a file: plugins that outlive their core process would keep a pipe open
	Done   chan struct{} // closed when the process has exited
	err    error
}

// Start starts a program in a cgroup. The kernel kills the program when the thread that started it exits: call Start
// from the main goroutine, bound to its thread.
func (s *Sandbox) Start(group, name string, argv ...string) (*Process, error) {
	fd, err := s.Group(group)
	if err != nil {
		return nil, err
	}
	p := &Process{name: name, cmd: exec.Command(argv[0], argv[1:]...), Done: make(chan struct{})}
	p.stderr = filepath.Join(s.Dir, fmt.Sprintf("%s-%s.stderr", group, strings.ReplaceAll(name, " ", "-")))
	stderr, err := os.Create(p.stderr)
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	defer stderr.Close()
	p.cmd.Stderr = stderr
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: unix.SIGKILL, UseCgroupFD: true, CgroupFD: fd}
	p.cmd.Dir = s.Dir
	p.cmd.Env = append(os.Environ(), "GODEBUG=asyncpreemptoff=1") // no signals into the receivers' loops
	if p.In, err = p.cmd.StdinPipe(); err != nil {
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
		close(p.Done)
	}()
	return p, nil
}

// Group returns a descriptor of a cgroup below that of the benchmark. It creates the cgroup if needed.
func (s *Sandbox) Group(name string) (int, error) {
	if fd, ok := s.groups[name]; ok {
		return fd, nil
	}
	path := filepath.Join(s.Cgroup, name)
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

// Ask sends a question as one line, unless it is empty, and decodes the line of the answer.
func (p *Process) Ask(question string, answer any) error {
	if question != "" {
		if _, err := io.WriteString(p.In, question+"\n"); err != nil {
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

func (p *Process) fail(err error) error {
	p.Stop(unix.SIGKILL)
	return fmt.Errorf("%w\n%s", err, p.LastWords())
}

// Signal sends a signal. It ignores errors, because the process may have exited.
func (p *Process) Signal(sig syscall.Signal) { _ = p.cmd.Process.Signal(sig) }

// Stop sends a signal and waits until the process has exited. It kills the process after KillTimeout.
func (p *Process) Stop(sig syscall.Signal) {
	if !p.Ended() {
		p.Signal(sig)
	}
	select {
	case <-p.Done:
	case <-time.After(KillTimeout):
		_ = p.cmd.Process.Kill()
		<-p.Done
	}
	p.In.Close()
}

// Exit returns how the process ended, or nil.
func (p *Process) Exit() error {
	if !p.Ended() {
		return nil
	}
	return p.err
}

// Ended returns whether the process has exited.
func (p *Process) Ended() bool {
	select {
	case <-p.Done:
		return true
	default:
		return false
	}
}

// Interrupt is the signal on which nfacctd terminates regularly.
const Interrupt = unix.SIGINT

// KillGroups kills all remaining processes in cgroups, such as plugins without a core process, and removes the cgroups.
func (s *Sandbox) KillGroups(names ...string) {
	for _, name := range names {
		if fd, ok := s.groups[name]; ok {
			unix.Close(fd)
			removeCgroup(filepath.Join(s.Cgroup, name))
			delete(s.groups, name)
		}
	}
}

func removeCgroup(dir string) {
	if err := cgroup.Destroy(dir); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
	}
}

// Empty returns whether a cgroup has no process.
func (s *Sandbox) Empty(group string) bool {
	pids, err := cgroup.Processes(filepath.Join(s.Cgroup, group))
	return err == nil && len(pids) == 0
}

// Sockets returns the number of sockets of this network namespace on a port: TCP listeners, or UDP sockets without a
// peer.
func Sockets(protocol string, port uint16) int {
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

// Drops returns the number of datagrams dropped because the receive buffer of a UDP socket of this namespace was full.
func Drops() (n uint64) {
	for _, f := range []string{"udp", "udp6"} {
		b, _ := os.ReadFile("/proc/thread-self/net/" + f)
		for line := range strings.Lines(string(b)) {
			f := strings.Fields(line)
			d, _ := strconv.ParseUint(f[len(f)-1], 10, 64) // 0 for the heading line
			n += d
		}
	}
	return n
}

// Await polls done for up to a minute: nfacctd with room for 512 routers needs a second of CPU time to start. It returns
// an error at once if one of the processes exits.
func Await(ctx context.Context, what string, procs []*Process, done func() bool) error {
	for end := time.Now().Add(time.Minute); !done(); {
		if i := slices.IndexFunc(procs, (*Process).Ended); i >= 0 {
			return fmt.Errorf("wait for %s: %s exited (%v)\n%s", what, procs[i].name, fmt.Sprint(procs[i].err), procs[i].LastWords())
		}
		if time.Now().After(end) {
			return fmt.Errorf("wait for %s: timeout after a minute", what)
		}
		if err := Pause(ctx, 20*time.Millisecond); err != nil {
			return err
		}
	}
	return nil
}

// Pause waits for d. If ctx is done first, it returns the cause.
func Pause(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(d):
		return nil
	}
}

// LastWords returns the last five lines of the process's stderr.
func (p *Process) LastWords() []byte {
	b, _ := os.ReadFile(p.stderr)
	lines := bytes.SplitAfter(bytes.TrimSpace(b), []byte("\n"))
	return bytes.Join(lines[max(0, len(lines)-5):], nil)
}
