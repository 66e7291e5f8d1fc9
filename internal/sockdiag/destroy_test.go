// SPDX-License-Identifier: Apache-2.0

package sockdiag

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/testenv"
)

// TestDestroy checks that Destroy closes the connection with the given addresses and cookie, and no other, also for a
// connection of a dual-stack listener.
func TestDestroy(t *testing.T) {
	diag, err := Open()
	if err != nil {
		t.Fatal(err)
	}
	defer diag.Close()
	if err := diag.CanDestroy(); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ listen, dial string }{
		{"127.0.0.1:0", "127.0.0.1"}, {"[::1]:0", "::1"}, {"[::]:0", "127.0.0.1"}, {"[::]:0", "::1"},
	} {
		var config net.ListenConfig
		config.SetMultipathTCP(false)
		l, err := config.Listen(t.Context(), "tcp", c.listen)
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		port := uint16(l.Addr().(*net.TCPAddr).Port)
		var clients []net.Conn
		for range 2 {
			var d net.Dialer
			d.SetMultipathTCP(false)
			client, err := d.Dial("tcp", netip.AddrPortFrom(netip.MustParseAddr(c.dial), port).String())
			if err != nil {
				t.Fatal(err)
			}
			defer client.Close()
			server, err := l.Accept()
			if err != nil {
				t.Fatal(err)
			}
			defer server.Close()
			clients = append(clients, client)
		}
		lives := func(client net.Conn) bool {
			t.Helper()
			if err := client.SetReadDeadline(time.Now().Add(20 * time.Millisecond)); err != nil {
				t.Fatal(err)
			}
			_, err := client.Read(make([]byte, 1))
			if !errors.Is(err, os.ErrDeadlineExceeded) && !errors.Is(err, unix.ECONNRESET) && !errors.Is(err, io.EOF) {
				t.Fatal(err)
			}
			return errors.Is(err, os.ErrDeadlineExceeded)
		}
		var first *Socket
		peer := clients[0].LocalAddr().(*net.TCPAddr).AddrPort()
		err = diag.Dump(Query{States: States(0).With(Established), LocalPort: port}, func() { first = nil }, func(s *Socket) {
			if s.Remote == peer {
				found := *s
				first = &found
			}
		})
		if err != nil || first == nil {
			t.Fatalf("%v: not found: %v", c, err)
		}
		other := *first
		other.Cookie++
		if err := diag.Destroy(&other); err != nil || !lives(clients[0]) {
			t.Errorf("%v: another cookie: %v", c, err)
		}
		testenv.WithoutRights(t, func() {
			if err := diag.Destroy(first); !errors.Is(err, unix.EPERM) {
				t.Errorf("%v: without rights: %v", c, err)
			}
		})
		if err := diag.Destroy(first); err != nil || lives(clients[0]) || !lives(clients[1]) {
			t.Errorf("%v: %v, alive %v and %v", c, err, lives(clients[0]), lives(clients[1]))
		}
		if err := diag.Destroy(first); err != nil {
			t.Errorf("%v: second call: %v", c, err)
		}
		if client, err := net.Dial("tcp", netip.AddrPortFrom(netip.MustParseAddr(c.dial), port).String()); err != nil {
			t.Errorf("%v: the listener was closed: %v", c, err)
		} else {
			client.Close()
		}
	}
}
