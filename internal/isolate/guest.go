// SPDX-License-Identifier: Apache-2.0

// Package isolate runs a program in new user, network, mount, PID and IPC namespaces, or joins an existing network namespace. It
// creates the namespaces and the TUN interface, confines the program and its gateway, and connects the TUN interface to a gateway
// (internal/gateway), which does not depend on namespaces.
package isolate

import (
	"bytes"
	"context"
	"encoding/gob"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/room"
)

// Guest is a program in new namespaces, or an existing network namespace.
type Guest struct {
	Setup
	// Existing is the namespace to join; nil: new namespaces are created.
	Existing *Namespace
}

// insideCaps are the capabilities, in the new user namespace, that the process inside needs to prepare the guest.
var insideCaps = []uintptr{unix.CAP_NET_ADMIN, unix.CAP_SYS_ADMIN, unix.CAP_SYS_RESOURCE}

// Prepared is a guest that is ready for its gateway.
type Prepared struct {
	TUN    int
	Diag   int // for gateway.Config.Diag; 0: none
	Kernel room.Kernel
	// Warnings are features that are not available to the program, one line each.
	Warnings []string
	// Missing are restrictions that the kernel or a container does not support, one line each.
	Missing []string

	process *exec.Cmd
	socket  *os.File
	done    chan error // receives the result of the process's exit, once
}

// prepareTime limits the preparation by the process inside.
const prepareTime = 20 * time.Second

// Step is a step of the preparation of a guest.
type Step int

// Steps of a preparation. The command derives hints from them.
const (
	StepNamespaces Step = iota + 1 // create the namespaces
	StepRights                     // set sysctls in them
	StepDevice                     // open /dev/net/tun
	StepInterface                  // create and configure the interface
	StepResolver                   // replace /etc/resolv.conf
	StepJoin                       // enter an existing namespace
	StepMounts                     // mount /proc, and hide directories of sockets
	StepExpose                     // open the paths of Expose
	StepFiles                      // open the paths of Read and Write
	StepLandlock                   // restrict files by landlock
	StepUser                       // change the user
	StepListen                     // open the ports of the host
	StepPrepare                    // everything else
)

// StepError is the failure of a step.
type StepError struct {
	Step Step
	Err  error
}

func (e *StepError) Error() string { return e.Err.Error() }
func (e *StepError) Unwrap() error { return e.Err }

// EndedError is returned if a signal terminated the process inside before the program started.
type EndedError struct{ Signal unix.Signal }

func (e *EndedError) Error() string {
	return fmt.Sprintf("prepare the guest: its process was terminated: %v", e.Signal)
}

// Prepare creates the guest's namespaces and interface, or joins the existing namespace. The command must call Inside; its process is
// terminated with this process. Most errors are a StepError.
func (g *Guest) Prepare(command []string) (p *Prepared, err error) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("create socket pair: %w", err)
	}
	ours, theirs := os.NewFile(uintptr(pair[0]), "guest"), os.NewFile(uintptr(pair[1]), "gateway")
	defer theirs.Close()
	defer func() {
		if err != nil {
			ours.Close()
		}
	}()
	cmd := exec.Command(command[0], command[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.ExtraFiles = []*os.File{theirs}
	var stderr bytes.Buffer // of nsenter
	if g.Existing != nil {
		cmd.Stdin, cmd.Stdout, cmd.Stderr = nil, nil, &stderr
		if err := g.Existing.enter(cmd); err != nil {
			return nil, err
		}
	} else {
		uid, gid := os.Geteuid(), os.Getegid()
		cmd.SysProcAttr = &syscall.SysProcAttr{
			Cloneflags:  unix.CLONE_NEWUSER | unix.CLONE_NEWNET | unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWIPC,
			UidMappings: []syscall.SysProcIDMap{{ContainerID: uid, HostID: uid, Size: 1}},
			GidMappings: []syscall.SysProcIDMap{{ContainerID: gid, HostID: gid, Size: 1}},
			AmbientCaps: insideCaps,
		}
	}
	p = &Prepared{TUN: -1, process: cmd, socket: ours, done: make(chan error, 1)}
	if err := p.start(); err != nil {
		if e := new(os.PathError); errors.As(err, &e) {
			err = e.Err
		}
		return nil, &StepError{StepNamespaces, fmt.Errorf("create namespaces: %w", err)}
	}
	theirs.Close()
	if err := p.prepare(&g.Setup); err != nil {
		p.Kill()
		code, _ := p.Wait(context.Background(), nil)
		if s := unix.Signal(code - 128); s > 0 && s != unix.SIGKILL {
			return nil, &EndedError{s}
		}
		if text := lastLine(stderr.String()); text != "" {
			err = &StepError{StepJoin, fmt.Errorf("join the namespace: %s", text)}
		}
		return nil, err
	}
	if g.Program == "" {
		if err := <-p.done; err != nil {
			unix.Close(p.TUN)
			return nil, fmt.Errorf("prepare namespace: %w", err)
		}
	}
	return p, nil
}

// lastLine returns the last line of a program's output.
func lastLine(text string) string {
	text = strings.TrimSpace(text)
	return text[strings.LastIndexByte(text, '\n')+1:]
}

// start starts the process from a thread that exists until the process has exited, because PR_SET_PDEATHSIG refers to the thread, not
// to the process.
func (p *Prepared) start() error {
	if p.process.SysProcAttr == nil {
		p.process.SysProcAttr = &syscall.SysProcAttr{}
	}
	p.process.SysProcAttr.Pdeathsig = unix.SIGKILL
	started := make(chan error)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := p.process.Start()
		started <- err
		if err == nil {
			p.done <- p.process.Wait()
		}
	}()
	return <-started
}

// PID returns the PID of the first process inside, the parent of the program.
func (p *Prepared) PID() int { return p.process.Process.Pid }

// prepare sends the Setup to the process inside, and receives the descriptors of the TUN interface and of sock_diag.
func (p *Prepared) prepare(s *Setup) error {
	var text bytes.Buffer
	if err := gob.NewEncoder(&text).Encode(s); err != nil {
		return err
	}
	socket := int(p.socket.Fd())
	timeout := unix.NsecToTimeval(int64(prepareTime))
	for _, option := range []int{unix.SO_RCVTIMEO, unix.SO_SNDTIMEO} {
		if err := unix.SetsockoptTimeval(socket, unix.SOL_SOCKET, option, &timeout); err != nil {
			return fmt.Errorf("set deadline: %w", err)
		}
	}
	if _, err := p.socket.Write(text.Bytes()); err != nil {
		return fmt.Errorf("send the setup to the guest: %w", err)
	}
	answer, rights := make([]byte, 1<<16), make([]byte, unix.CmsgSpace(2*4))
	n, oobn, _, _, err := receiveMessage(socket, answer, rights)
	if err != nil {
		return fmt.Errorf("wait for the guest: %w", err)
	}
	var fds []int // of the TUN, and of sock_diag
	if messages, err := unix.ParseSocketControlMessage(rights[:oobn]); err == nil && len(messages) == 1 {
		fds, _ = unix.ParseUnixRights(&messages[0])
	}
	var reply setupReply
	err = json.Unmarshal(answer[:n], &reply)
	switch {
	case n == 0:
		err = errors.New("prepare the guest: its process exited")
	case err != nil:
		err = fmt.Errorf("prepare the guest: %w", err)
	case reply.Error != "":
		err = &StepError{reply.Step, &insideError{reply.Error, reply.Errno}}
	case len(fds) == 0 || len(fds) == 1 && s.Watched:
		err = errors.New("prepare the guest: descriptors are missing in its reply")
	}
	if err != nil {
		for _, fd := range fds {
			unix.Close(fd)
		}
		return err
	}
	p.TUN, p.Kernel, p.Warnings, p.Missing = fds[0], reply.Kernel, reply.Warnings, reply.Missing
	if len(fds) > 1 {
		p.Diag = fds[1]
	}
	return nil
}

func receiveMessage(fd int, p, oob []byte) (n, oobn, flags int, from unix.Sockaddr, err error) {
	for {
		n, oobn, flags, from, err = unix.Recvmsg(fd, p, oob, unix.MSG_CMSG_CLOEXEC)
		if !errors.Is(err, unix.EINTR) {
			return n, oobn, flags, from, err
		}
	}
}

// insideError is an error of the process inside.
type insideError struct {
	text  string
	errno syscall.Errno
}

func (e *insideError) Error() string { return e.text }

func (e *insideError) Unwrap() error {
	if e.errno == 0 {
		return nil
	}
	return e.errno
}

// Go starts the program, and returns when it has started or failed to start.
func (p *Prepared) Go() error {
	if _, err := p.socket.Write([]byte{1}); err != nil {
		return fmt.Errorf("start the program: %w", err)
	}
	// The process inside replies or exits. Wait reports the exit.
	_, _ = p.socket.Read(make([]byte, 1))
	return nil
}

// Wait waits for the program's exit, forwards signals from the channel, and kills the program when ctx ends. It returns the exit code,
// or 128 plus the number of the signal that terminated the program.
func (p *Prepared) Wait(ctx context.Context, signals <-chan os.Signal) (code int, err error) {
	defer p.socket.Close()
	done := ctx.Done()
	for {
		select {
		case <-done:
			p.Kill()
			done = nil
		case s := <-signals:
			// The process inside sends the signal, because the program's PID in the PID namespace is not known here.
			if number, ok := s.(syscall.Signal); ok {
				_, _ = p.socket.Write([]byte{byte(number)})
			}
		case err := <-p.done:
			var exit *exec.ExitError
			if err != nil && !errors.As(err, &exit) {
				return 0, fmt.Errorf("wait for the program: %w", err)
			}
			status, _ := p.process.ProcessState.Sys().(syscall.WaitStatus)
			if status.Signaled() {
				return 128 + int(status.Signal()), nil
			}
			return status.ExitStatus(), nil
		}
	}
}

// Kill kills the process inside, and thereby all processes of the PID namespace.
func (p *Prepared) Kill() { _ = p.process.Process.Kill() }
