// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"encoding/binary"
	"errors"
	"unsafe"

	"golang.org/x/sys/unix"
)

// gsoBatch is datagrams of a flow that came one behind the other in a turn. One call sends them,
// and the host's kernel takes them apart (UDP_SEGMENT, from Linux 4.18): all have one size, but for the
// last one, which may be smaller.
type gsoBatch struct {
	flow     *udpFlow
	segments []segment // of which the packets are there until the end of the turn
	vectors  [gsoMaxDatagrams]unix.Iovec
}

const (
	gsoMaxDatagrams = 64    // UDP_MAX_SEGMENTS before Linux 6.9
	gsoMaxBytes     = 65000 // of payload, at most
)

// add takes a datagram, and sends those before it if it does not fit behind them.
func (t *gsoBatch) add(u *udpFlow, s *segment) {
	if n := len(t.segments); n > 0 {
		first, last := &t.segments[0], &t.segments[n-1]
		size := len(first.payload)
		if t.flow != u || u.noGSO || n == gsoMaxDatagrams || (n+1)*size > gsoMaxBytes || len(last.payload) != size ||
			len(s.payload) > size || len(s.payload) == 0 || s.hops() != first.hops() {
			t.send()
		}
	}
	t.flow = u
	t.segments = append(t.segments, *s)
}

// send sends what there is.
func (t *gsoBatch) send() {
	switch {
	case len(t.segments) == 0:
		return
	case len(t.segments) == 1 || !t.sendSegmented():
		for i := range t.segments {
			t.flow.send(&t.segments[i])
		}
	}
	clear(t.segments)
	t.flow, t.segments = nil, t.segments[:0]
}

// sendSegmented is false if nothing was sent.
func (t *gsoBatch) sendSegmented() bool {
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
	if len(t.flow.destination) > 0 {
		h.Name, h.Namelen = &t.flow.destination[0], uint32(len(t.flow.destination))
	}
	t.flow.hopLimit().set(t.flow.fd, &t.segments[0])
	var err error
	for range sendTries {
		if _, err = sendMessage(t.flow.fd, &h); err == nil || !t.flow.passErrors() {
			break
		}
	}
	// Larger than the path's MTU, or a kernel or an interface that does not.
	t.flow.noGSO = errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EMSGSIZE) || errors.Is(err, unix.EIO)
	return err == nil
}

// sendTries is how often datagrams are sent for which a socket returns errors of others. Each has to come from the
// network in the microseconds between two tries.
const sendTries = 8

// send sends a datagram.
func (u *udpFlow) send(s *segment) {
	u.hopLimit().set(u.fd, s)
	for range sendTries {
		err := sendNamed(u.fd, s.payload, u.destination)
		if err == nil {
			return
		}
		if u.passErrors() {
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
