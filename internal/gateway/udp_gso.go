// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"encoding/binary"
	"errors"
	"unsafe"

	"golang.org/x/sys/unix"

	"sockeye/internal/gateway/packet"
)

// gsoBatch collects consecutive datagrams of a flow in a turn. One system call sends the batch, and the host's kernel splits it
// (generic segmentation offload, UDP_SEGMENT, since Linux 4.18). All datagrams but the last, which may be smaller, have one size.
type gsoBatch struct {
	flow     *udpFlow
	segments []packet.Segment // their payload is valid until the end of the turn
	vectors  [gsoMaxDatagrams]unix.Iovec
}

const (
	gsoMaxDatagrams = 64    // UDP_MAX_SEGMENTS before Linux 6.9
	gsoMaxBytes     = 65000 // bytes of payload
)

// add adds a datagram. If the datagram does not fit into the batch, add sends the batch first.
func (t *gsoBatch) add(u *udpFlow, s *packet.Segment) {
	if n := len(t.segments); n > 0 {
		first, last := &t.segments[0], &t.segments[n-1]
		size := len(first.Payload)
		if t.flow != u || u.noGSO || n == gsoMaxDatagrams || (n+1)*size > gsoMaxBytes || len(last.Payload) != size ||
			len(s.Payload) > size || len(s.Payload) == 0 || s.Hops() != first.Hops() {
			t.send()
		}
	}
	t.flow = u
	t.segments = append(t.segments, *s)
}

// send sends and empties the batch.
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

// sendSegmented sends the batch by one system call. It returns false if nothing was sent.
func (t *gsoBatch) sendSegmented() bool {
	for i := range t.segments {
		p := t.segments[i].Payload
		t.vectors[i].Base = unsafe.SliceData(p)
		t.vectors[i].SetLen(len(p))
	}
	var size struct {
		unix.Cmsghdr
		bytes [8]byte // a multiple of a header's alignment
	}
	size.Level, size.Type = unix.IPPROTO_UDP, unix.UDP_SEGMENT
	size.SetLen(unix.CmsgLen(2))
	binary.NativeEndian.PutUint16(size.bytes[:], uint16(len(t.segments[0].Payload)))
	h := unix.Msghdr{Iov: &t.vectors[0], Control: (*byte)(unsafe.Pointer(&size))}
	h.SetIovlen(len(t.segments))
	h.SetControllen(int(unsafe.Sizeof(size)))
	if len(t.flow.destination) > 0 {
		h.Name, h.Namelen = &t.flow.destination[0], uint32(len(t.flow.destination))
	}
	t.flow.hopLimit().set(t.flow.fd, &t.segments[0])
	var err error
	for range sendTries {
		if _, err = sendMessage(t.flow.fd, &h); err == nil || !t.flow.forwardErrors() {
			break
		}
	}
	// The datagrams exceed the path's MTU, or the kernel or the interface does not support segmentation.
	t.flow.noGSO = errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EMSGSIZE) || errors.Is(err, unix.EIO)
	return err == nil
}

// sendTries bounds the retries of a send that returned the ICMP error of an earlier datagram. Each retry needs another ICMP error
// within microseconds.
const sendTries = 8

// send sends one datagram.
func (u *udpFlow) send(s *packet.Segment) {
	u.hopLimit().set(u.fd, s)
	for range sendTries {
		err := sendNamed(u.fd, s.Payload, u.destination)
		if err == nil {
			return
		}
		if u.forwardErrors() {
			continue // the error was of an earlier datagram, of this or another flow
		}
		if u.shared != nil && errors.Is(err, unix.EAGAIN) && !hasPort(u.fd) {
			u.g.count(TooMany) // the host has no free port
		}
		u.g.refuseDatagram(s, err)
		return
	}
}

// hopLimit returns the hop limit of the flow's socket.
func (u *udpFlow) hopLimit() *hopLimit {
	if u.shared != nil {
		return &u.shared.hops
	}
	return &u.hops
}
