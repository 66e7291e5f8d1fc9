// SPDX-License-Identifier: Apache-2.0

package spoof

import (
	"bytes"
	"errors"
	"net"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/netns"
	"sockeye/internal/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

// TestSend sends datagrams from addresses that this host does not have. The receiver gets them complete, which includes
// a correct checksum, from the address and port of the sender.
func TestSend(t *testing.T) {
	err := netns.Thread(func() error {
		s, err := Open(1)
		if err != nil {
			return err
		}
		defer s.Close()
		for from, to := range map[string]string{"192.0.2.1:2055": "127.0.0.1:0", "[2001:db8::1]:65535": "[::1]:0"} {
			c, err := net.ListenPacket("udp", to)
			if err != nil {
				return err
			}
			defer c.Close()
			d := Datagram{From: netip.MustParseAddrPort(from), To: c.LocalAddr().(*net.UDPAddr).AddrPort()}
			for _, size := range []int{0, 1, 2, 3, 1399, 1400, 9001, 60000} {
				d.Payload = bytes.Repeat([]byte{0xff, byte(size), 0x01}, size)[:size]
				if err := s.Send(d); err != nil {
					return err
				}
				if err := c.SetReadDeadline(time.Now().Add(10 * time.Second)); err != nil {
					return err
				}
				got := make([]byte, 1<<16)
				n, sender, err := c.ReadFrom(got)
				if err != nil || sender.(*net.UDPAddr).AddrPort() != d.From || !bytes.Equal(got[:n], d.Payload) {
					t.Errorf("%d bytes from %s: got %d from %v, %v", size, from, n, sender, err)
				}
			}
			d.Payload = make([]byte, 1<<16)
			if err := s.Send(d); !errors.Is(err, unix.EMSGSIZE) {
				t.Errorf("64 KiB from %s: %v", from, err)
			}
		}
		mixed := Datagram{From: netip.MustParseAddrPort("192.0.2.1:1"), To: netip.MustParseAddrPort("[::1]:1")}
		if s.Send(mixed) == nil || s.Send(Datagram{}) == nil {
			t.Error("no error for invalid addresses")
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// TestChecksum checks that a sum of 0 is sent as 0xffff: 0 means that there is no checksum (RFC 768).
func TestChecksum(t *testing.T) {
	d := Datagram{From: netip.MustParseAddrPort("0.0.0.1:1"), To: netip.MustParseAddrPort("0.0.0.2:1")}
	for low := range 1 << 16 {
		d.Payload = []byte{byte(low >> 8), byte(low)}
		if b := appendUDP(nil, d); b[6] == 0 && b[7] == 0 {
			t.Fatalf("payload %x: checksum 0", d.Payload)
		}
	}
}
