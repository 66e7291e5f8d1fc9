// SPDX-License-Identifier: Apache-2.0

// Package packets follows the packets of one TCP connection from the queueing discipline to the acknowledgement of the
// peer, and those of one UDP socket to the driver and from the socket to the application, using the events of package
// capture. It writes pcapng files.
package packets

import (
	"fmt"
	"net/netip"
	"strings"
	"time"
)

// Packet is a packet that the connection or the UDP socket sent or received: one socket buffer, which may be several
// segments on the wire. Either Sent or Received is set.
//
// Sequence numbers are relative: 1 is the first one seen in its direction. They do not wrap, and are negative for
// earlier data. UDP has no sequence numbers, flags and window: they are 0.
type Packet struct {
	Number    int       `json:"number"` // starts at 1, in the order of Time
	Time      time.Time `json:"time"`   // arrival at the first queueing discipline, at TCP, or at the UDP socket
	Interface string    `json:"interface"`
	Index     int       `json:"ifindex"` // interface index; 0 if unknown
	Seq       int64     `json:"seq"`
	Ack       int64     `json:"ack"` // 0 without FlagACK
	RawSeq    uint32    `json:"raw_seq"`
	RawAck    uint32    `json:"raw_ack"`
	Length    int       `json:"length"` // payload in bytes
	Size      int       `json:"size"`   // size of the IP packet in bytes
	Flags     Flags     `json:"flags"`
	Window    int       `json:"window"` // bytes
	// Header is the start of the IP packet: the headers and a few bytes of payload.
	Header []byte `json:"header,omitempty"`
	// Peer is the other end of a datagram, Fragment is set for a fragment of one. The port of a later fragment is 0.
	Peer     netip.AddrPort `json:"peer,omitzero"`
	Fragment *Fragment      `json:"fragment,omitempty"`

	Sent     *Sent     `json:"sent,omitempty"`
	Received *Received `json:"received,omitempty"`
}

// Fragment describes a fragment of a datagram.
type Fragment struct {
	Of     int `json:"of"`     // number of the first fragment; 0 if not seen
	Offset int `json:"offset"` // in the datagram, which starts with the UDP header, in bytes
}

// Sent describes a sent packet.
type Sent struct {
	Fate Fate `json:"fate,omitempty"`
	// Reason is the reason for which the host dropped a datagram (enum skb_drop_reason); "" if unknown.
	Reason string `json:"reason,omitempty"`
	// Driver is the time at which the last part reached the last driver; zero if no part did.
	Driver time.Time `json:"driver,omitzero"`
	// FirstAcked and Acked are the times of the first and the last acknowledgement of the bytes that were not
	// lost.
	FirstAcked time.Time `json:"first_acked,omitzero"`
	Acked      time.Time `json:"acked,omitzero"`
	AckedBy    int       `json:"acked_by,omitempty"` // number of the acknowledging packet; 0 if not seen
	// Qdisc is the time from Packet.Time to Driver, Network the time from Driver to Acked.
	Qdisc   time.Duration `json:"qdisc_ns,omitempty"`
	Network time.Duration `json:"network_ns,omitempty"`
	// AckedBytes and LostBytes count payload. LostBytes is an estimate: bytes that were retransmitted, and whose
	// acknowledgement is attributed to a later transmission.
	AckedBytes int `json:"acked_bytes"`
	LostBytes  int `json:"lost_bytes,omitempty"`
	// Sacked is set if a part was first acknowledged by SACK.
	Sacked bool `json:"sacked,omitempty"`
	// Twice is set if the peer received a part more than once (D-SACK, RFC 2883).
	Twice bool `json:"twice,omitempty"`
	// Again is the number of the first packet that repeats a part; 0 for none.
	Again          int             `json:"again,omitempty"`
	Retransmission *Retransmission `json:"retransmission,omitempty"`
	Split          *Split          `json:"split,omitempty"`
	// Hops are the interfaces of this host on the path, in order. VLANs, bonds and tunnels have more than one.
	Hops []Hop `json:"hops,omitempty"`
}

// Received describes a received packet.
type Received struct {
	// Acked is the number of bytes of seen packets that this packet acknowledges first. Packets are the packets that it
	// acknowledges completely.
	Acked   int     `json:"acked"`
	Packets []Range `json:"packets,omitempty"`
	// Selective are the SACK blocks, and Twice the D-SACK block.
	Selective []Block `json:"selective,omitempty"`
	Twice     *Block  `json:"twice,omitempty"`
	// Duplicate is set for a duplicate acknowledgement (RFC 5681).
	Duplicate bool `json:"duplicate,omitempty"`
	// Early is set if the packet was seen when the host received it instead of when TCP did, because one side has
	// closed the connection.
	Early bool `json:"early,omitempty"`
	// Read is the time at which the application received a datagram, Waited the time from Packet.Time to Read. Dropped is
	// set if the host dropped the datagram instead, for a Reason as in Sent.
	Read    time.Time     `json:"read,omitzero"`
	Waited  time.Duration `json:"waited_ns,omitempty"`
	Dropped bool          `json:"dropped,omitempty"`
	Reason  string        `json:"reason,omitempty"`
	// Unseen is set if a datagram has left the queue of the socket, and the event that says how was lost.
	Unseen bool `json:"unseen,omitempty"`
}

// Range is a range of packet numbers that includes both ends.
type Range struct {
	First int `json:"first"`
	Last  int `json:"last"`
}

// Block is a range of relative sequence numbers that excludes End.
type Block struct {
	Start int64 `json:"start"`
	End   int64 `json:"end"`
}

// Retransmission describes a packet that repeats bytes.
type Retransmission struct {
	Ordinal int `json:"ordinal"` // 1 for the first retransmission seen
	// Of is the number of the packet that first sent its first byte; 0 if not seen. After is the time since the last
	// transmission of that byte; unknown if Of is 0.
	Of    int           `json:"of,omitempty"`
	After time.Duration `json:"after_ns,omitempty"`
	Cause Cause         `json:"cause,omitempty"` // "": unknown
}

// Cause is the reason of a retransmission.
type Cause string

// The causes.
const (
	CauseTimeout Cause = "timeout" // retransmission timeout, and the retransmissions after it
	CauseFast    Cause = "fast"    // fast retransmit: later packets were acknowledged
	CauseProbe   Cause = "probe"   // tail loss probe
)

// Split describes how a packet was split into segments.
type Split struct {
	Segments int     `json:"segments"` // segments that reached drivers
	Size     int     `json:"size"`     // payload of each segment except the last, in bytes
	By       Divider `json:"by"`
}

// Divider is the part of the host that splits a packet.
type Divider string

// The dividers.
const (
	ByHost   Divider = "host"   // the kernel (GSO), before the driver
	ByDevice Divider = "device" // the interface (TSO), or the receiver on a virtual interface
)

// Hop is an interface on the path of a sent packet.
type Hop struct {
	Interface string    `json:"interface"`
	Index     int       `json:"ifindex"`
	Queued    time.Time `json:"queued,omitzero"` // time of the first part; zero without a queueing discipline
	Driver    time.Time `json:"driver,omitzero"` // time of the last part; zero if none arrived
	Segments  int       `json:"segments"`        // packets that reached the driver
}

// Fate is the fate of a sent packet. Lost and Needless are estimates from the order and the times of events, and from
// the peer's timestamps.
type Fate string

// The fates. A packet that needs no acknowledgement, such as a pure acknowledgement, has no fate unless it was dropped.
const (
	Acknowledged   Fate = "acknowledged"
	PartlyLost     Fate = "partly_lost"
	Lost           Fate = "lost"
	Dropped        Fate = "dropped"        // dropped by this host before a driver
	Needless       Fate = "needless"       // retransmission of bytes that the peer had received
	Unacknowledged Fate = "unacknowledged" // not completely acknowledged at the end
)

// Flags are the flags of a TCP header.
type Flags uint8

// The flags.
const (
	FlagFIN Flags = 1 << iota
	FlagSYN
	FlagRST
	FlagPSH
	FlagACK
	FlagURG
	FlagECE
	FlagCWR
)

var flagNames = [...]string{"FIN", "SYN", "RST", "PSH", "ACK", "URG", "ECE", "CWR"}

// MarshalText implements encoding.TextMarshaler by String.
func (f Flags) MarshalText() ([]byte, error) { return []byte(f.String()), nil }

// String formats the flags as PSH,ACK.
func (f Flags) String() string {
	var names []string
	for i, name := range flagNames {
		if f&(1<<i) != 0 {
			names = append(names, name)
		}
	}
	return strings.Join(names, ",")
}

// UnmarshalText parses the result of MarshalText.
func (f *Flags) UnmarshalText(text []byte) error {
	*f = 0
names:
	for name := range strings.FieldsFuncSeq(string(text), func(r rune) bool { return r == ',' }) {
		for i, known := range flagNames {
			if name == known {
				*f |= 1 << i
				continue names
			}
		}
		return fmt.Errorf("read TCP flags: unknown flag %q", name)
	}
	return nil
}

// Reason is the reason of the end of a capture.
type Reason string

// The reasons.
const (
	StoppedDeadline    Reason = "deadline"
	StoppedEvents      Reason = "events"      // requested number of events
	StoppedClosed      Reason = "closed"      // connection closed
	StoppedInterrupted Reason = "interrupted" // interrupted by the user
)
