// SPDX-License-Identifier: Apache-2.0

package bpf_test

import (
	"fmt"
	"io"
	"net"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/bpf"
)

// tcpPair is both ends of a connection through lo.
func tcpPair(t testing.TB, address string) (client, server *net.TCPConn) {
	t.Helper()
	listen := net.ListenConfig{}
	listen.SetMultipathTCP(false)
	l, err := listen.Listen(t.Context(), "tcp", address)
	check(t, err)
	defer l.Close()
	dial := net.Dialer{}
	dial.SetMultipathTCP(false)
	c, err := dial.DialContext(t.Context(), "tcp", l.Addr().String())
	check(t, err)
	s, err := l.Accept()
	check(t, err)
	t.Cleanup(func() { c.Close(); s.Close() })
	return c.(*net.TCPConn), s.(*net.TCPConn)
}

func cookieOf(t testing.TB, c *net.TCPConn) (cookie uint64) {
	t.Helper()
	raw, err := c.SyscallConn()
	check(t, err)
	check(t, raw.Control(func(fd uintptr) {
		cookie, err = unix.GetsockoptUint64(int(fd), unix.SOL_SOCKET, unix.SO_COOKIE)
	}))
	check(t, err)
	return cookie
}

func TestPackets(t *testing.T) {
	for _, a := range []string{"127.0.0.1:0", "[::1]:0"} {
		client, server := tcpPair(t, a)
		p, err := bpf.OpenPackets(cookieOf(t, client), 1<<20)
		if err != nil {
			t.Fatalf("%+v", err)
		}
		defer p.Close()
		go func() {
			client.Write([]byte("hello"))
			io.ReadFull(server, make([]byte, 5))
			server.Write([]byte("world!"))
			io.ReadFull(client, make([]byte, 6))
			client.CloseWrite()
			server.Read(make([]byte, 1))
			server.Write([]byte("again"))
			server.Close()
		}()
		var e bpf.PacketEvent
		for {
			err := p.Read(time.Now().Add(500*time.Millisecond), &e)
			if err == io.EOF {
				break
			}
			check(t, err)
			fmt.Printf("%+v %x\n", e.PacketHeader, e.Bytes)
		}
	}
}
