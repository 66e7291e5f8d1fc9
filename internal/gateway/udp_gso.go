// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"encoding/binary"
	"errors"
	"unsafe"

	"golang.org/x/sys/unix"
)

// train is datagrams of a flow that came one behind the other in a turn. One call sends them,
// and the host's kernel takes them apart (UDP_SEGMENT, from Linux 4.18): all have one size, but for the
// last one, which may be smaller.
type train struct {
	of       *udpFlow
	segments []segment // of which the packets are there until the end of the turn
	vectors  [trainDatagrams]unix.Iovec
}

const (
	trainDatagrams = 64    // UDP_MAX_SEGMENTS before Linux 6.9
	trainBytes     = 65000 // of payload, at most
)

// add takes a datagram, and sends those before it if it does not fit behind them.
func (t *train) add(u *udpFlow, s *segment) {
	if n := len(t.segments); n > 0 {
		first, last := &t.segments[0], &t.segments[n-1]
		size := len(first.payload)
		if t.of != u || u.apart || n == trainDatagrams || (n+1)*size > trainBytes || len(last.payload) != size ||
			len(s.payload) > size || len(s.payload) == 0 || s.hops() != first.hops() {
			t.send()
		}
	}
	t.of = u
	t.segments = append(t.segments, *s)
}

// send sends what there is.
func (t *train) send() {
	switch {
	case len(t.segments) == 0:
		return
	case len(t.segments) == 1 || !t.sendAtOnce():
		for i := range t.segments {
			t.of.send(&t.segments[i])
		}
	}
	clear(t.segments)
	t.of, t.segments = nil, t.segments[:0]
}

// sendAtOnce is false if nothing was sent.
func (t *train) sendAtOnce() bool {
	for i := range t.segments {
		p := t.segments[i].payload
		t.vectors[i].Base = unsafe.SliceData(p)
		t.vectors[i].SetLen(len(p))
	}
	var size struct {
		unix.Cmsghdr
		bytes [8]byte // a multiple of a header's alignment
	}
	size.Level, size.Type = unix.IPPROTO_UDP, unix.UDP_SEGMENT
	size.SetLen(unix.CmsgLen(2))
	binary.NativeEndian.PutUint16(size.bytes[:], uint16(len(t.segments[0].payload)))
	h := unix.Msghdr{Iov: &t.vectors[0], Control: (*byte)(unsafe.Pointer(&size))}
	h.SetIovlen(len(t.segments))
	h.SetControllen(int(unsafe.Sizeof(size)))
	if len(t.of.name) > 0 {
		h.Name, h.Namelen = &t.of.name[0], uint32(len(t.of.name))
	}
	t.of.hopLimit().set(t.of.fd, &t.segments[0])
	var err error
	for range sendTries {
		if _, err = sendMessage(t.of.fd, &h); err == nil || !t.of.errors() {
			break
		}
	}
	// Larger than the path's MTU, or a kernel or an interface that does not.
	t.of.apart = errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EMSGSIZE) || errors.Is(err, unix.EIO)
	return err == nil
}

// sendTries is how often datagrams are sent for which a socket returns errors of others. Each has to come from the
// network in the microseconds between two tries.
const sendTries = 8

// send sends a datagram.
func (u *udpFlow) send(s *segment) {
	u.hopLimit().set(u.fd, s)
	for range sendTries {
		err := sendNamed(u.fd, s.payload, u.name)
		if err == nil {
			return
		}
		if u.errors() {
			continue // that was of one before, maybe of another flow
		}
		if u.shared != nil && errors.Is(err, unix.EAGAIN) && !hasPort(u.fd) {
			u.g.count(TooMany) // the host has no port
		}
		u.g.refuseDatagram(s, err)
		return
	}
}

// hopLimit is that of the flow's socket.
func (u *udpFlow) hopLimit() *hopLimit {
	if u.shared != nil {
		return &u.shared.hops
	}
	return &u.hops
}
