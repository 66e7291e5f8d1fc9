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
func (b *gsoBatch) add(u *udpFlow, s *packet.Segment) {
	if n := len(b.segments); n > 0 {
		first, last := &b.segments[0], &b.segments[n-1]
		size := len(first.Payload)
		if b.flow != u || u.noGSO || n == gsoMaxDatagrams || (n+1)*size > gsoMaxBytes || len(last.Payload) != size ||
			len(s.Payload) > size || len(s.Payload) == 0 || s.Hops() != first.Hops() {
			b.send()
		}
	}
	b.flow = u
	b.segments = append(b.segments, *s)
}

// send sends and empties the batch.
func (b *gsoBatch) send() {
	switch {
	case len(b.segments) == 0:
		return
	case len(b.segments) == 1 || !b.sendSegmented():
		for i := range b.segments {
			b.flow.send(&b.segments[i])
		}
	}
	clear(b.segments)
	b.flow, b.segments = nil, b.segments[:0]
}

// sendSegmented sends the batch by one system call. It returns false if nothing was sent.
func (b *gsoBatch) sendSegmented() bool {
	for i := range b.segments {
		p := b.segments[i].Payload
		b.vectors[i].Base = unsafe.SliceData(p)
		b.vectors[i].SetLen(len(p))
	}
	var size struct {
		unix.Cmsghdr
		bytes [8]byte // a multiple of a header's alignment
	}
	size.Level, size.Type = unix.IPPROTO_UDP, unix.UDP_SEGMENT
	size.SetLen(unix.CmsgLen(2))
	binary.NativeEndian.PutUint16(size.bytes[:], uint16(len(b.segments[0].Payload)))
	h := unix.Msghdr{Iov: &b.vectors[0], Control: (*byte)(unsafe.Pointer(&size))}
	h.SetIovlen(len(b.segments))
	h.SetControllen(int(unsafe.Sizeof(size)))
	if len(b.flow.destination) > 0 {
		h.Name, h.Namelen = &b.flow.destination[0], uint32(len(b.flow.destination))
	}
	b.flow.hopLimit().set(b.flow.fd, &b.segments[0])
	var err error
	for range sendTries {
		if _, err = sendMessage(b.flow.fd, &h); err == nil || !b.flow.forwardErrors() {
			break
		}
	}
	// The datagrams exceed the path's MTU, or the kernel or the interface does not support segmentation.
	b.flow.noGSO = errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EMSGSIZE) || errors.Is(err, unix.EIO)
	return err == nil
}

// sendTries bounds the retries of a send that returned the ICMP error of an earlier datagram. Each retry needs another ICMP error
// within microseconds.
const sendTries = 8

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

func (u *udpFlow) hopLimit() *hopLimit {
	if u.shared != nil {
		return &u.shared.hops
	}
	return &u.hops
}
