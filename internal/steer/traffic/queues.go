// SPDX-License-Identifier: Apache-2.0

package traffic

import (
	"errors"
	"maps"
	"slices"

	"golang.org/x/sys/unix"

	"sockeye/internal/config"
	"sockeye/internal/sockdiag"
	"sockeye/internal/steer/listener"
)

// Queue is the sum over the receive queues of a member's sockets of one protocol.
type Queue struct {
	// Dropped are the packets that the kernel has dropped at the sockets: datagrams without space in the receive buffer, and
	// connection requests beyond the backlog.
	Dropped uint64
	// Used and Limit are the sizes of the queues: bytes of datagrams, or connections that the member has not accepted.
	Used, Limit uint64
	// Smallest is the smallest limit of one socket.
	Smallest uint64
}

// Queues returns the queues of the members' sockets of a protocol by slot, or nil if the kernel has no sock_diag for
// the protocol. One dump reads all sockets: a request for one socket would run the steering program.
func (t *Traffic) Queues(protocol config.Protocol) (map[int]*Queue, error) {
	query := sockdiag.Query{Protocol: unix.IPPROTO_TCP, States: sockdiag.States(0).With(sockdiag.Listening)}
	if protocol == config.UDP {
		query = sockdiag.Query{Protocol: unix.IPPROTO_UDP, States: sockdiag.States(0).With(sockdiag.Closed)}
	}
	slots := make(map[uint64]int) // by cookie
	ports := make(map[uint16]bool)
	for slot, seat := range t.Seats {
		for row, socket := range seat.Sockets {
			l, ok := t.Listeners[row]
			if !ok || l.Protocol != protocol {
				continue
			}
			slots[socket.Cookie] = slot
			first, last := listener.MemberPorts(l)
			ports[first], ports[last] = true, true
		}
	}
	queues := make(map[int]*Queue)
	if len(slots) == 0 {
		return queues, nil
	}
	if len(ports) == 1 { // otherwise all sockets are read
		query.LocalPort = slices.Collect(maps.Keys(ports))[0]
	}
	conn, err := t.Diag()
	if err != nil {
		return nil, err
	}
	err = conn.Dump(query, func() { clear(queues) }, func(socket *sockdiag.Socket) {
		slot, ok := slots[socket.Cookie]
		if !ok {
			return
		}
		q := queues[slot]
		if q == nil {
			q = &Queue{}
			queues[slot] = q
		}
		q.Dropped += uint64(socket.Dropped)
		used, limit := uint64(socket.Unread), uint64(socket.Payload)
		if protocol == config.UDP {
			used, limit = uint64(socket.ReceiveQueued), uint64(socket.ReceiveBuffer)
		}
		q.Used, q.Limit = q.Used+used, q.Limit+limit
		if q.Smallest == 0 || limit < q.Smallest {
			q.Smallest = limit
		}
	})
	if errors.Is(err, sockdiag.ErrUnsupported) {
		return nil, nil
	}
	return queues, err
}
