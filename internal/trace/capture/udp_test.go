// SPDX-License-Identifier: Apache-2.0

package capture_test

import (
	"net"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/testenv"
	"sockeye/internal/trace/capture"
)

// TestUDP checks the events of a socket that sends datagrams to itself, in each family, and that those of another socket
// are left out.
func TestUDP(t *testing.T) {
	reasons, err := capture.DropReasons()
	check(t, err)
	for _, address := range []string{"127.0.0.1", "::1"} {
		t.Run(address, func(t *testing.T) {
			open := func() *net.UDPConn {
				c, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.ParseIP(address)})
				check(t, err)
				t.Cleanup(func() { c.Close() })
				return c
			}
			c, other := open(), open()
			p, err := capture.OpenUDP(testenv.Cookie(t, c), testenv.Cgroup(), 1<<20)
			if err != nil {
				t.Fatalf("%+v", err)
			}
			t.Cleanup(func() { check(t, p.Close()) })
			send := func(from, to *net.UDPConn, n int) {
				t.Helper()
				_, err := from.WriteTo(make([]byte, n), to.LocalAddr())
				check(t, err)
			}
			read := func(from *net.UDPConn, n int) {
				t.Helper()
				check(t, from.SetReadDeadline(time.Now().Add(patience)))
				if got, _, err := from.ReadFrom(make([]byte, 65536)); err != nil || got != n {
					t.Fatalf("%d bytes, %v", got, err)
				}
			}
			send(other, other, 50)
			read(other, 50)
			send(c, c, 100)
			read(c, 100)
			control(t, c, func(fd int) error { return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, 1) })
			const most = 10
			for range most {
				send(c, c, 3000)
			}

			counts := map[uint8]int{}
			var header int
			for _, e := range rest(t, p) {
				counts[e.Kind]++
				switch e.Kind {
				case capture.Queue, capture.Driver:
					header = int(e.Size - e.Length)
					if e.Flags&capture.UDP == 0 || e.Flags&capture.Fragment != 0 || e.Length != 100 && e.Length != 3000 || e.Peer == 0 || e.Kind == capture.Queue && len(e.Bytes) != min(int(e.Size), capture.Bytes) {
						t.Errorf("sent: %+v", e)
					}
				case capture.Receive:
					if n := int(e.Size) - header; n != 100 && n != 3000 || len(e.Bytes) != min(int(e.Size), capture.Bytes) {
						t.Errorf("received: %+v", e)
					}
				case capture.Read:
					if e.Flags&capture.Left != 0 && (e.Length != 100 || e.Skb != 0) || e.Flags&capture.Left == 0 && e.Flags&capture.Inward == 0 {
						t.Errorf("read: %+v", e)
					}
				case capture.Drop:
					if e.Flags&capture.Inward == 0 || len(reasons) > 0 && reasons[e.Reason] != "socket_rcvbuff" && reasons[e.Reason] != "proto_mem" {
						t.Errorf("dropped: %+v, %q", e, reasons[e.Reason])
					}
				}
			}
			if counts[capture.Queue] != most+1 || counts[capture.Driver] != most+1 || counts[capture.Receive] != most+1 || counts[capture.Read] != 1 ||
				counts[capture.Drop] == 0 || counts[capture.Drop] >= most {
				t.Errorf("events by kind: %v", counts)
			}
		})
	}
}
