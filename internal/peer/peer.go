// SPDX-License-Identifier: Apache-2.0

// Package peer identifies the process that connected to the agent's socket, by what the kernel says.
package peer

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"net/http"
	"os"
	"strconv"

	"golang.org/x/sys/unix"

	"sockeye/internal/fault"
	"sockeye/internal/member"
)

// Caller is the process that connected to the agent's socket. Its number alone
// says nothing: a process can connect, hand the connection to a child and end,
// and another process gets its number. The handle is that of the process that
// called connect(2).
type Caller struct {
	Cred   unix.Ucred
	ID     member.ID
	handle *member.Handle
	// Stranger: it is in another user namespace than the agent.
	Stranger bool
}

// Attrs returns attributes of a log record that describe the caller: the process, its user, the user who has logged in
// (audit, "" if unknown), and the command line. The process chooses the command line itself.
func (k *Caller) Attrs() []any {
	attrs := []any{"pid", k.ID.PID, "user", member.UserName(k.Cred.Uid)}
	if data, err := os.ReadFile(fmt.Sprintf("/proc/%d/loginuid", k.ID.PID)); err == nil {
		if uid, err := strconv.ParseUint(string(data), 10, 32); err == nil && uid != math.MaxUint32 {
			attrs = append(attrs, "login", member.UserName(uint32(uid)))
		}
	}
	if p, err := member.Read(k.ID.PID); err == nil && p.StartTime == k.ID.StartTime {
		attrs = append(attrs, "command", p.Command())
	}
	return attrs
}

// Close closes the pidfd of the caller.
func (k *Caller) Close() {
	if k.handle != nil {
		k.handle.Close()
	}
}

// Conn closes what is kept of the caller with the connection.
type Conn struct {
	net.Conn
	Caller *Caller // nil: it had ended
}

// Close closes the connection and the pidfd of the caller.
func (c *Conn) Close() error {
	if c.Caller != nil {
		c.Caller.Close()
	}
	return c.Conn.Close()
}

// Listener finds out who connects, at once.
type Listener struct{ net.Listener }

// Accept accepts a connection and identifies the process that connected.
func (l Listener) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	// Without a caller every request is refused.
	k, err := of(conn)
	if err != nil {
		k = nil
	}
	return &Conn{conn, k}, nil
}

// of finds out who connected. It returns an error if that process has
// ended. The caller closes the result.
//
// Linux 6.5 and later tell by SO_PEERPIDFD. Earlier kernels have only the
// number: the process that has it when the agent accepts the connection is
// taken for the peer if it has the peer's user.
func of(c net.Conn) (*Caller, error) {
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
	k := &Caller{Cred: *cred}
	byNumber := err != nil
	if byNumber {
		k.handle, err = member.Open(int(cred.Pid))
	} else {
		k.handle, err = member.FromPidfd(handle, int(cred.Pid))
	}
	if err != nil {
		return nil, err
	}
	if err := k.identify(byNumber); err != nil {
		k.Close()
		return nil, err
	}
	return k, nil
}

// ErrGone is the error for a caller whose process has exited.
var ErrGone = &fault.Error{
	Err:  errors.New("the process that connected to the agent has ended"),
	Hint: "open a connection in the process that sends the request", Code: fault.CodeNotPermitted,
}

func (k *Caller) identify(byNumber bool) error {
	pid := int(k.Cred.Pid)
	p, err := member.Read(pid)
	if err != nil {
		return err
	}
	if byNumber && p.UIDs[1] != k.Cred.Uid { // the effective one
		return ErrGone
	}
	k.ID = member.ID{PID: p.PID, StartTime: p.StartTime}
	var theirs, ours unix.Stat_t
	k.Stranger = unix.Stat(fmt.Sprintf("/proc/%d/ns/user", pid), &theirs) != nil ||
		unix.Stat("/proc/self/ns/user", &ours) != nil || theirs.Dev != ours.Dev || theirs.Ino != ours.Ino
	return k.Alive() // so all of this was about the one that connected
}

// Alive returns an error once the process has ended: its number may be another
// one's from then on.
func (k *Caller) Alive() error {
	if k.handle == nil || k.handle.Ended() {
		return ErrGone
	}
	return nil
}

// Key is the key of the caller in the context of a request.
type Key struct{}

// WithCaller adds the caller of a connection to the context of its requests, see http.Server.ConnContext.
func WithCaller(ctx context.Context, c net.Conn) context.Context {
	return context.WithValue(ctx, Key{}, c.(*Conn).Caller)
}

// MustBeRoot fails unless the caller of a request is root.
func MustBeRoot(r *http.Request) error {
	if k := From(r); k == nil || k.Cred.Uid != 0 {
		return &fault.Error{Err: errors.New("only root may change the agent, or make it read a file"), Hint: "run it with sudo", Code: fault.CodeNotPermitted}
	}
	return nil
}

// From is who sent a request; nil if that is not known.
func From(r *http.Request) *Caller {
	k, _ := r.Context().Value(Key{}).(*Caller)
	return k
}
