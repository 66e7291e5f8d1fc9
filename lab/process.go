// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/cgroup"
	"sockeye/internal/netns"
)

// Process is a program in a namespace and a cgroup of the lab, which is killed when the lab closes. Set the fields
// before Start.
type Process struct {
	// Cmd is the command. Env, Dir, ExtraFiles, Stdin, Stdout and Stderr may be set; the default of the latter two is
	// the log file. Start sets SysProcAttr except AmbientCaps.
	Cmd *exec.Cmd
	// Name is the name of the cgroup and of the log file. Default: the program's base name and a number.
	Name string
	// User is a user name or uid; default: root. The process gets the user's groups.
	User string
	// Nice is the niceness, -20 to 19 (sched(7)).
	Nice int

	lab     *Lab
	ns      *Namespace
	logPath string
	started bool
	done    chan struct{}
	err     error // valid when done is closed
}

// Command prepares a program for the namespace. The main process is killed when ctx is done.
func (n *Namespace) Command(ctx context.Context, argv ...string) *Process {
	return &Process{Cmd: exec.CommandContext(ctx, argv[0], argv[1:]...), lab: n.lab, ns: n, done: make(chan struct{})}
}

// Start starts the program and returns. The output is appended to LogPath.
func (p *Process) Start() (err error) {
	l := p.lab
	defer func() {
		if err != nil {
			err = fmt.Errorf("start %s in %s: %w", filepath.Base(p.Cmd.Path), p.ns.name, err)
		}
	}()
	if p.Name == "" {
		l.mu.Lock()
		p.Name = fmt.Sprintf("%s-p%d", filepath.Base(p.Cmd.Path), len(l.processes))
		l.mu.Unlock()
	}
	p.logPath = filepath.Join(l.dir, filepath.Clean("/"+p.Name)+".log") // a cgroup outside of the lab's begins with ..
	if p.Cmd.Stdout == nil || p.Cmd.Stderr == nil {
		f, err := os.OpenFile(p.logPath, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
		if err != nil {
			return err
		}
		defer f.Close()
		if p.Cmd.Stdout == nil {
			p.Cmd.Stdout = f
		}
		if p.Cmd.Stderr == nil {
			p.Cmd.Stderr = f
		}
	}
	if err := os.Mkdir(p.CgroupDir(), 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("make cgroup: %w", err)
	}
	cg, err := os.Open(p.CgroupDir())
	if err != nil {
		return fmt.Errorf("open cgroup: %w", err)
	}
	defer cg.Close()
	attr := &syscall.SysProcAttr{
		Setpgid: true, Pdeathsig: syscall.SIGKILL,
		UseCgroupFD: true, CgroupFD: int(cg.Fd()), // from the first instruction, so that all child processes are in the cgroup
	}
	if p.Cmd.SysProcAttr != nil {
		attr.AmbientCaps = p.Cmd.SysProcAttr.AmbientCaps
	}
	if p.User != "" {
		if attr.Credential, err = credential(p.User); err != nil {
			return err
		}
	}
	p.Cmd.SysProcAttr = attr

	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return errors.New("lab is closed")
	}
	result := make(chan error)
	l.starts <- func() {
		// The thread stays in the namespace of the previous start. Each start sets the namespace.
		err := netns.Enter(p.ns.file)
		if err == nil {
			err = p.startNice()
		}
		result <- err
	}
	if err := <-result; err != nil {
		return err
	}
	p.started = true
	l.processes = append(l.processes, p)
	go func() {
		p.err = p.Cmd.Wait()
		close(p.done)
	}()
	return nil
}

// startNice starts the command with the niceness, which a process inherits from the thread that starts it. Without
// CAP_SYS_NICE, it has the niceness of this process.
func (p *Process) startNice() error {
	const thisThread = 0
	before, err := unix.Getpriority(unix.PRIO_PROCESS, thisThread)
	if p.Nice != 0 && err == nil && unix.Setpriority(unix.PRIO_PROCESS, thisThread, p.Nice) == nil {
		defer func() { _ = unix.Setpriority(unix.PRIO_PROCESS, thisThread, 20-before) }() // the call returns 20 minus the niceness
	}
	return p.Cmd.Start()
}

// Pid returns the process id. Call it after Start.
func (p *Process) Pid() int { return p.Cmd.Process.Pid }

// LogPath returns the path of the program's output.
func (p *Process) LogPath() string { return p.logPath }

// CgroupDir returns the cgroup directory of the process and its descendants.
func (p *Process) CgroupDir() string { return filepath.Join(p.lab.cgroup, p.Name) }

// PIDs returns the running processes of the cgroup: the process and all descendants, also orphaned ones.
func (p *Process) PIDs() ([]int, error) { return cgroupPIDs(p.CgroupDir()) }

// Done returns a channel that is closed when the main process has exited.
func (p *Process) Done() <-chan struct{} { return p.done }

// Running reports whether the main process was started and has not exited.
func (p *Process) Running() bool {
	select {
	case <-p.done:
		return false
	default:
		return p.started
	}
}

// Err returns nil while the process runs, and afterwards its exit status with the end of its log.
func (p *Process) Err() error {
	if !p.started {
		return fmt.Errorf("%s was not started", p.Name)
	}
	select {
	case <-p.done:
		return fmt.Errorf("%s exited: %s; end of its log:\n%s", p.Name, p.Cmd.ProcessState, p.LogTail(15))
	default:
		return nil
	}
}

// Wait waits until the main process exits and returns its exit error.
func (p *Process) Wait() error {
	<-p.done
	return p.err
}

// Signal sends a signal to the main process only.
func (p *Process) Signal(s os.Signal) error { return p.Cmd.Process.Signal(s) }

// Stop sends SIGTERM to the main process, and after the grace period SIGKILL to all processes of the cgroup.
func (p *Process) Stop(grace time.Duration) error {
	if err := p.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("stop %s: %w", p.Name, err)
	}
	select {
	case <-p.done:
	case <-time.After(grace):
	}
	err := cgroup.Kill(p.CgroupDir())
	<-p.done
	return err
}

// Kill sends SIGKILL to the main process and waits until it exits. Child processes keep running, as after a crash.
func (p *Process) Kill() error {
	if err := p.Signal(syscall.SIGKILL); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("kill %s: %w", p.Name, err)
	}
	<-p.done
	return nil
}

// LogTail returns the last lines of the log.
func (p *Process) LogTail(lines int) string {
	b, err := os.ReadFile(p.logPath)
	if err != nil {
		return err.Error()
	}
	all := bytes.Split(bytes.TrimSpace(b), []byte("\n"))
	return string(bytes.Join(all[max(0, len(all)-lines):], []byte("\n")))
}

// CheckPrograms returns an error that names the missing programs of routers, exporters and collectors, and their Debian
// packages.
func CheckPrograms() error {
	var errs []error
	for _, f := range []func() (string, error){bgpdPath, pmacctdPath, nfacctdPath} {
		_, err := f()
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

func bgpdPath() (string, error) {
	path, err := FRR("bgpd")
	if err != nil {
		return "", err
	}
	if m, _ := filepath.Glob("/usr/lib/*/frr/modules/bgpd_bmp.so"); len(m) == 0 {
		return "", errors.New("find bgpd_bmp.so: not installed (Debian package frr: apt-get install frr)")
	}
	return path, nil
}

// FRR returns the path of a daemon of FRR.
func FRR(daemon string) (string, error) { return program(daemon, "frr", "/usr/lib/frr") }

func pmacctdPath() (string, error) { return program("pmacctd", "pmacct") }
func nfacctdPath() (string, error) { return program("nfacctd", "pmacct") }

// program finds an executable of a Debian package.
func program(name, pkg string, dirs ...string) (string, error) {
	if path, err := exec.LookPath(name); err == nil {
		return path, nil
	}
	for _, d := range append(dirs, "/usr/sbin") {
		path := filepath.Join(d, name)
		if fi, err := os.Stat(path); err == nil && fi.Mode()&0o111 != 0 {
			return path, nil
		}
	}
	return "", fmt.Errorf("find %s: not installed (Debian package %s: apt-get install %s)", name, pkg, pkg)
}

// WriteConfig writes the configuration of a program in a namespace as a file that the user can read, into a directory of the work
// directory, which belongs to the user and is created if necessary. It returns the path of the file.
func (l *Lab) WriteConfig(dir, name, userName string, lines ...string) (string, error) {
	return l.writeConfig(filepath.Join(l.dir, dir), name, userName, lines...)
}

// writeConfig writes a file that the user can read into a directory of the user.
func (l *Lab) writeConfig(dir, name, userName string, lines ...string) (string, error) {
	path := filepath.Join(dir, name)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	if userName != "" {
		c, err := credential(userName)
		if err != nil {
			return "", err
		}
		if err := os.Chown(dir, int(c.Uid), int(c.Gid)); err != nil {
			return "", err
		}
	}
	return path, os.WriteFile(path, []byte(strings.Join(lines, "\n")+"\n"), 0o644)
}

func credential(name string) (*syscall.Credential, error) {
	u, err := user.Lookup(name)
	if err != nil {
		if u, err = user.LookupId(name); err != nil {
			if n, perr := strconv.ParseUint(name, 10, 32); perr == nil { // a UID needs no entry in /etc/passwd
				return &syscall.Credential{Uid: uint32(n), Gid: uint32(n)}, nil
			}
			return nil, fmt.Errorf("find user %s: %w", name, err)
		}
	}
	ids, err := u.GroupIds()
	if err != nil {
		return nil, fmt.Errorf("find groups of user %s: %w", name, err)
	}
	c := &syscall.Credential{}
	for i, s := range append([]string{u.Uid, u.Gid}, ids...) {
		n, err := strconv.ParseUint(s, 10, 32)
		if err != nil {
			return nil, fmt.Errorf("find user %s: id %q: %w", name, s, err)
		}
		switch i {
		case 0:
			c.Uid = uint32(n)
		case 1:
			c.Gid = uint32(n)
		default:
			c.Groups = append(c.Groups, uint32(n))
		}
	}
	return c, nil
}
