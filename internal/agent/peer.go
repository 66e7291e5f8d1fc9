// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"

	"golang.org/x/sys/unix"

	"sockeye/internal/fault"
	"sockeye/internal/member"
)

// caller is the process that connected to the agent's socket. Its number alone
// says nothing: a process can connect, hand the connection to a child and end,
// and another process gets its number. The handle is that of the process that
// called connect(2).
type caller struct {
	cred   unix.Ucred
	self   process
	handle *member.Handle
	// stranger: it is in another user namespace than the agent.
	stranger bool
}

// callerOf finds out who connected. It returns an error if that process has
// ended. The caller closes the result.
//
// Linux 6.5 and later tell by SO_PEERPIDFD. Earlier kernels have only the
// number: the process that has it when the agent accepts the connection is
// taken for the peer if it has the peer's user.
func callerOf(c net.Conn) (*caller, error) {
	conn, err := c.(*net.UnixConn).SyscallConn()
	if err != nil {
		return nil, err
	}
	var cred *unix.Ucred
	handle := -1
	var asked error
	err = conn.Control(func(fd uintptr) {
		if cred, asked = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); asked == nil {
			handle, asked = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_PEERPIDFD)
		}
	})
	if err = errors.Join(err, asked); err != nil && (cred == nil || !errors.Is(err, unix.ENOPROTOOPT)) {
		return nil, fmt.Errorf("read the caller's credentials: %w", err)
	}
	k := &caller{cred: *cred}
	byNumber := err != nil
	if byNumber {
		k.handle, err = member.Open(int(cred.Pid))
	} else {
		k.handle, err = member.Adopt(handle, int(cred.Pid))
	}
	if err != nil {
		return nil, err
	}
	if err := k.identify(byNumber); err != nil {
		k.close()
		return nil, err
	}
	return k, nil
}

func (k *caller) identify(byNumber bool) error {
	pid := int(k.cred.Pid)
	p, err := member.Read(pid)
	if err != nil {
		return err
	}
	if byNumber && p.UIDs[1] != k.cred.Uid { // the effective one
		return errCallerGone
	}
	k.self = process{p.PID, p.StartTime}
	var theirs, ours unix.Stat_t
	k.stranger = unix.Stat(fmt.Sprintf("/proc/%d/ns/user", pid), &theirs) != nil ||
		unix.Stat("/proc/self/ns/user", &ours) != nil || theirs.Dev != ours.Dev || theirs.Ino != ours.Ino
	return k.alive() // so all of this was about the one that connected
}

var errCallerGone = &fault.Error{
	Err:  errors.New("the process that connected to the agent has ended"),
	Hint: "send a request over a connection of one's own", Code: fault.CodeNotPermitted,
}

// alive returns an error once the process has ended: its number may be another
// one's from then on.
func (k *caller) alive() error {
	if k.handle == nil || k.handle.Ended() {
		return errCallerGone
	}
	return nil
}

func (k *caller) close() {
	if k.handle != nil {
		k.handle.Close()
	}
}

// callerConn closes what is kept of the caller with the connection.
type callerConn struct {
	net.Conn
	caller *caller // nil: it had ended
}

func (c *callerConn) Close() error {
	if c.caller != nil {
		c.caller.close()
	}
	return c.Conn.Close()
}

// callerListener finds out who connects, at once.
type callerListener struct{ net.Listener }

func (l callerListener) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	// Without a caller every request is refused.
	k, err := callerOf(conn)
	if err != nil {
		k = nil
	}
	return &callerConn{conn, k}, nil
}

type callerKey struct{}

func withCaller(ctx context.Context, c net.Conn) context.Context {
	return context.WithValue(ctx, callerKey{}, c.(*callerConn).caller)
}

// callerFrom is who sent a request; nil if that is not known.
func callerFrom(r *http.Request) *caller {
	k, _ := r.Context().Value(callerKey{}).(*caller)
	return k
}

// mustBeRoot fails unless the caller of a request is root.
func mustBeRoot(r *http.Request) error {
	if k := callerFrom(r); k == nil || k.cred.Uid != 0 {
		return &fault.Error{Err: errors.New("only root may change what the agent does, or have it read a file"), Hint: "run it with sudo", Code: fault.CodeNotPermitted}
	}
	return nil
}
