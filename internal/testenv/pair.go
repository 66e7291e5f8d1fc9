// SPDX-License-Identifier: Apache-2.0

package testenv

import (
	"errors"
	"net"
	"testing"
	"time"
)

// TCPPair returns both ends of a connection through lo, to an address of a listening socket. Each call of the ends fails
// after a minute.
func TCPPair(t testing.TB, listener, to string) (client, server *net.TCPConn) {
	t.Helper()
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	listen := net.ListenConfig{}
	listen.SetMultipathTCP(false)
	l, err := listen.Listen(t.Context(), "tcp", net.JoinHostPort(listener, "0"))
	check(err)
	defer l.Close()
	_, port, err := net.SplitHostPort(l.Addr().String())
	check(err)
	dial := net.Dialer{}
	dial.SetMultipathTCP(false)
	c, err := dial.DialContext(t.Context(), "tcp", net.JoinHostPort(to, port))
	check(err)
	s, err := l.Accept()
	check(err)
	t.Cleanup(func() { c.Close(); s.Close() })
	deadline := time.Now().Add(time.Minute)
	check(errors.Join(c.SetDeadline(deadline), s.SetDeadline(deadline)))
	return c.(*net.TCPConn), s.(*net.TCPConn)
}
