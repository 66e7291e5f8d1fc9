// SPDX-License-Identifier: Apache-2.0

package ui

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/config"
	"sockeye/internal/fault"
	"sockeye/internal/owned"
)

// Listen opens the address of the page. The file of a Unix socket that an agent has left behind is replaced; the group
// may connect to the socket, unless gid is negative.
func Listen(c config.UI, gid int) (net.Listener, error) {
	path := c.SocketPath()
	if path == "" {
		l, err := net.Listen("tcp", c.Listen)
		if err != nil {
			return nil, fault.WithHint(fmt.Errorf("serve the web page: %w", err), "set ui.listen to a free address")
		}
		return l, nil
	}
	l, err := listenUnix(path, gid)
	if err != nil {
		return nil, fmt.Errorf("serve the web page: %w", err)
	}
	return l, nil
}

func listenUnix(path string, gid int) (net.Listener, error) {
	// A user who can replace the file would get the rights of the socket for another file.
	if err := owned.Check(filepath.Dir(path)); err != nil {
		if errors.Is(err, os.ErrNotExist) {
			return nil, fault.WithHint(err, "create the directory of ui.listen")
		}
		return nil, err
	}
	if other, err := net.DialTimeout("unix", path, time.Second); err == nil {
		other.Close()
		return nil, fault.Conflict(fmt.Errorf("another program listens on %s", path), "set ui.listen to another path")
	}
	switch info, err := os.Lstat(path); {
	case err == nil && info.Mode().Type() != os.ModeSocket:
		return nil, fault.Conflict(fmt.Errorf("%s is not a socket", path), "set ui.listen to another path")
	case err == nil:
		if err := os.Remove(path); err != nil {
			return nil, fmt.Errorf("replace socket: %w", err)
		}
	case !errors.Is(err, os.ErrNotExist):
		return nil, err
	}
	// The mode before bind is that of the file, so that nobody else can connect meanwhile. A umask would be in force for
	// all threads of the agent.
	lc := net.ListenConfig{Control: func(_, _ string, raw syscall.RawConn) error {
		var err error
		if failed := raw.Control(func(fd uintptr) { err = unix.Fchmod(int(fd), 0o600) }); failed != nil {
			return failed
		}
		return err
	}}
	l, err := lc.Listen(context.Background(), "unix", path)
	if err != nil {
		return nil, err
	}
	if gid >= 0 {
		if err := errors.Join(os.Lchown(path, -1, gid), os.Chmod(path, 0o660)); err != nil {
			l.Close()
			return nil, fmt.Errorf("give socket to the group: %w", err)
		}
	}
	return l, nil
}

// Listener returns a listener whose connections have TLS if the settings ask for it when they are accepted.
func (s *Server) Listener(l net.Listener) net.Listener { return &listener{l, s} }

type listener struct {
	net.Listener
	server *Server
}

// Accept returns the next connection. The server does the TLS handshake with its timeouts.
func (l *listener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	if config := l.server.settings.Load().tls.config; config != nil {
		return tls.Server(c, config), nil
	}
	return c, nil
}
