// SPDX-License-Identifier: Apache-2.0

package table

// Packet is what the decision about a packet to a service depends on, besides the table.
type Packet struct {
	// Bucket is that of the device.
	Bucket int
	// From is the name of the host that has forwarded the packet, or "".
	From string
	// Segment is set for a TCP segment without SYN.
	Segment bool
	// Socket is set if this host has a socket for the connection of the segment.
	Socket bool
	// Leaving is set for a datagram whose device has a connection with this host that this host is about to close.
	Leaving bool
}

// Verdict is what a host does with a packet.
type Verdict int

// The verdicts.
const (
	// Serve passes the packet to the services of this host.
	Serve Verdict = iota
	// Forward sends the packet to the owner of its bucket.
	Forward
	// Chance sends a segment without a socket to the other owner of a bucket that moves.
	Chance
	// Disagree passes a packet that a host sent here in error.
	Disagree
	// Drop drops a packet whose bucket has no owner.
	Drop
)

// Decide returns what a host does with a packet, and the name of the host that it sends the packet to, if any. It is the
// reference model of the program fleet_ingress: see decide_moving of bpf/fleet_forward.bpf.c for the reasons.
func (t *Table) Decide(self string, p Packet) (v Verdict, to string) {
	name := func(i uint16) string {
		if i == None {
			return ""
		}
		return t.Hosts[i].Name
	}
	owner, previous, next := name(t.Owner[p.Bucket]), name(t.Previous[p.Bucket]), name(t.Next[p.Bucket])
	other := previous + next // at most one of them
	peer := p.From != "" && p.From != self && t.Index(p.From) != None
	switch {
	case owner == "":
		return Drop, ""
	case self == owner && other == "", self == owner && !p.Segment, p.Segment && p.Socket && (self == owner || self == other):
		return Serve, ""
	case self == owner && peer && p.From == other:
		return Serve, ""
	case self == owner:
		return Chance, other
	case self == other && peer && p.From == owner && (self == next || p.Segment), self != "" && self == previous && p.Leaving:
		return Serve, ""
	case self == other || !peer:
		return Forward, owner
	}
	return Disagree, ""
}
