// SPDX-License-Identifier: Apache-2.0

package traffic

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"time"
)

const (
	bgpNotification = 3
	bgpKeepalive    = 4
	bgpHeaderLen    = 19
	// bgpTimeout limits each step of the opening of a session.
	bgpTimeout = 10 * time.Second
)

// BGPConfig configures a BGP session.
type BGPConfig struct {
	Local  Peer // Address is the source address and must be an address of the network namespace; ID defaults to it
	Target netip.AddrPort
	Routes []Route // announced once
}

// BGPSession is an established BGP session, which announces routes and ignores the routes of its peer.
type BGPSession struct {
	conn       net.Conn
	ended      chan struct{}
	background sync.WaitGroup
	err        error // valid when ended is closed
}

// DialBGP opens a BGP session (RFC 4271) as the connecting side, announces the routes, and sends End-of-RIB. The session
// stays open until Close, or until the peer closes it.
func DialBGP(ctx context.Context, c BGPConfig) (_ *BGPSession, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("open bgp session of %s with %s: %w", c.Local.Address, c.Target, err)
		}
	}()
	if !c.Local.ID.IsValid() {
		c.Local.ID = c.Local.Address
	}
	if !c.Local.ID.Is4() {
		return nil, fmt.Errorf("BGP identifier %s is not an IPv4 address", c.Local.ID)
	}
	var updates []byte
	for _, r := range c.Routes {
		if updates, err = AppendUpdate(updates, r); err != nil {
			return nil, err
		}
	}
	updates = appendEndOfRIB(updates)

	d := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(c.Local.Address, 0)), Timeout: bgpTimeout}
	conn, err := d.DialContext(ctx, "tcp", c.Target.String())
	if err != nil {
		return nil, err
	}
	s := &BGPSession{conn: conn, ended: make(chan struct{})}
	_ = conn.SetDeadline(time.Now().Add(bgpTimeout))
	_, err = conn.Write(appendOpen(nil, c.Local))
	for _, kind := range []byte{bgpOpen, bgpKeepalive} {
		if err == nil {
			err = readBGP(conn, kind)
		}
		if err == nil && kind == bgpOpen {
			_, err = conn.Write(appendKeepalive(nil))
		}
	}
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	_ = conn.SetDeadline(time.Time{})

	s.background.Go(func() {
		defer close(s.ended)
		for s.err == nil {
			s.err = readBGP(conn, 0)
		}
	})
	_ = conn.SetWriteDeadline(time.Now().Add(bgpHoldTime * time.Second))
	stop := context.AfterFunc(ctx, func() { _ = conn.SetWriteDeadline(time.Now()) })
	_, err = conn.Write(updates)
	if err == nil && !stop() {
		err = context.Cause(ctx)
	}
	if err != nil {
		return nil, errors.Join(err, s.Close())
	}
	_ = conn.SetWriteDeadline(time.Time{})
	s.background.Go(s.keepAlive)
	return s, nil
}

// keepAlive sends a KEEPALIVE in each third of the hold time.
func (s *BGPSession) keepAlive() {
	tick := time.NewTicker(bgpHoldTime * time.Second / 3)
	defer tick.Stop()
	for {
		select {
		case <-s.ended:
			return
		case <-tick.C:
			if _, err := s.conn.Write(appendKeepalive(nil)); err != nil {
				return // the reader notices the same
			}
		}
	}
}

// Announce announces routes.
func (s *BGPSession) Announce(routes ...Route) error {
	var updates []byte
	for _, r := range routes {
		var err error
		if updates, err = AppendUpdate(updates, r); err != nil {
			return err
		}
	}
	if _, err := s.conn.Write(updates); err != nil {
		return fmt.Errorf("announce routes: %w", err)
	}
	return nil
}

// Err returns nil while the session is open, and afterwards why it ended.
func (s *BGPSession) Err() error {
	select {
	case <-s.ended:
		return s.err
	default:
		return nil
	}
}

// Close closes the connection.
func (s *BGPSession) Close() error {
	err := s.conn.Close()
	s.background.Wait()
	return err
}

// readBGP reads one message. The message must be of a kind; 0: any but NOTIFICATION.
func readBGP(r io.Reader, kind byte) error {
	var header [bgpHeaderLen]byte
	if _, err := io.ReadFull(r, header[:]); err != nil {
		return err
	}
	length := int(binary.BigEndian.Uint16(header[16:]))
	if length < bgpHeaderLen || length > bgpMaxLen {
		return fmt.Errorf("the peer sent a message of %d bytes", length)
	}
	body := make([]byte, length-bgpHeaderLen)
	if _, err := io.ReadFull(r, body); err != nil {
		return err
	}
	switch got := header[18]; {
	case got == bgpNotification && len(body) >= 2:
		return fmt.Errorf("the peer closed the session: NOTIFICATION %d/%d (RFC 4271, 4.5)", body[0], body[1])
	case got == bgpNotification || kind != 0 && got != kind:
		return fmt.Errorf("the peer sent a message of type %d", got)
	}
	return nil
}

func appendKeepalive(b []byte) []byte {
	start := len(b)
	b = appendBGPHeader(b, bgpKeepalive)
	finishLength(b, start, 16)
	return b
}
