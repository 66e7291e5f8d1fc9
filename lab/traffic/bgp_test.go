// SPDX-License-Identifier: Apache-2.0

package traffic

import (
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"
)

// bgpPeer accepts one BGP session, answers with these messages, and returns all that it receives until the session ends.
func bgpPeer(t *testing.T, answers ...[]byte) (netip.AddrPort, <-chan []byte) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	received := make(chan []byte, 1)
	go func() {
		defer close(received)
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(10 * time.Second))
		if _, err := c.Write(slices.Concat(answers...)); err != nil {
			return
		}
		b, _ := io.ReadAll(c) // a reset is an end, too
		received <- b
	}()
	return l.Addr().(*net.TCPAddr).AddrPort(), received
}

func TestBGPSession(t *testing.T) {
	speaker := Peer{Address: netip.MustParseAddr("127.0.0.1"), AS: 64900}
	neighbor := Peer{Address: speaker.Address, AS: 65001, ID: netip.MustParseAddr("192.0.2.9")}
	target, received := bgpPeer(t, appendOpen(nil, neighbor), appendKeepalive(nil))
	s, err := DialBGP(t.Context(), BGPConfig{Local: speaker, Target: target, Routes: []Route{route, route}})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Err(); err != nil {
		t.Errorf("open session: %v", err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if err := s.Err(); !errors.Is(err, net.ErrClosed) {
		t.Errorf("closed session: %v", err)
	}
	var kinds []byte
	for b := <-received; len(b) > 0; {
		kinds = append(kinds, b[18])
		b = b[binary.BigEndian.Uint16(b[16:]):]
	}
	if want := []byte{bgpOpen, bgpKeepalive, bgpUpdate, bgpUpdate, bgpUpdate}; !slices.Equal(kinds, want) {
		t.Errorf("messages %d, want %d", kinds, want)
	}
}

func TestBGPSessionRefused(t *testing.T) {
	speaker := Peer{Address: netip.MustParseAddr("127.0.0.1"), AS: 64900}
	notification := append(appendBGPHeader(nil, bgpNotification), 2, 2) // OPEN error, bad peer AS
	finishLength(notification, 0, 16)
	short := appendBGPHeader(nil, bgpOpen) // length 0
	for want, answer := range map[string][]byte{
		"NOTIFICATION 2/2": notification, "message of 0 bytes": short, "message of type 4": appendKeepalive(nil), "EOF": appendOpen(nil, local)[:25],
	} {
		t.Run(want, func(t *testing.T) {
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			go func() {
				c, err := l.Accept()
				if err != nil {
					return
				}
				_, _ = c.Write(answer)
				_ = c.(*net.TCPConn).CloseWrite()
				_, _ = io.Copy(io.Discard, c)
				c.Close()
			}()
			_, err = DialBGP(t.Context(), BGPConfig{Local: speaker, Target: l.Addr().(*net.TCPAddr).AddrPort()})
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%v, want %q", err, want)
			}
		})
	}
	if _, err := DialBGP(t.Context(), BGPConfig{Local: Peer{Address: netip.IPv6Loopback()}}); err == nil {
		t.Error("no error without an IPv4 identifier")
	}
}
