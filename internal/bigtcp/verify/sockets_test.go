// SPDX-License-Identifier: Apache-2.0

package verify

import (
	"net"
	"net/netip"
	"testing"
)

// TestDiagFind finds both ends of connections of each family, and no connection that does not exist. A link-local
// address needs its interface.
func TestDiagFind(t *testing.T) {
	d, err := openDiag()
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	for _, test := range []struct{ listen, dial string }{
		{"127.0.0.1:0", "127.0.0.1"}, {"[::1]:0", "::1"}, {"[::]:0", "127.0.0.1"},
	} {
		t.Run(test.listen+" from "+test.dial, func(t *testing.T) {
			var c net.ListenConfig
			c.SetMultipathTCP(false)
			l, err := c.Listen(t.Context(), "tcp", test.listen)
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			_, port, err := net.SplitHostPort(l.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			conn, err := net.Dial("tcp", net.JoinHostPort(test.dial, port))
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			a, b := plainEnd(conn.LocalAddr()), plainEnd(conn.RemoteAddr())
			for _, ends := range [][2]netip.AddrPort{{a, b}, {b, a}} {
				i, err := d.find(ends[0], ends[1], 1)
				if err != nil || i == nil || i.Snd_mss == 0 || i.Snd_cwnd == 0 || i.Pmtu == 0 {
					t.Errorf("%s to %s: %+v, %v", ends[0], ends[1], i, err)
				}
			}
			none := netip.AddrPortFrom(a.Addr(), 1)
			if i, err := d.find(none, b, 1); i != nil || err != nil {
				t.Errorf("%s to %s: %+v, %v", none, b, i, err)
			}
		})
	}
}

func plainEnd(a net.Addr) netip.AddrPort {
	end := netip.MustParseAddrPort(a.String())
	return netip.AddrPortFrom(end.Addr().Unmap(), end.Port())
}
