// SPDX-License-Identifier: Apache-2.0

// Package packets follows the packets of one TCP connection: it makes of the
// events of bpf.Packets what became of each packet, from the queueing
// discipline to the peer's acknowledgement, and writes it as pcapng.
package packets

import (
	"fmt"
	"strings"
	"time"
)

// Packet is a packet that the connection sent or received: one that is handed
// through the host in one piece, however many segments are on the wire. Either
// Sent or Received is set.
//
// Sequence numbers are relative: 1 is the first that was seen of its direction.
// They do not wrap, and are negative of what was sent before.
type Packet struct {
	Number    int       `json:"number"` // from 1, in the order of Time
	Time      time.Time `json:"time"`   // it reached the first queueing discipline; or TCP
	Interface string    `json:"interface"`
	Index     int       `json:"ifindex"` // of the interface; 0 if it is not known
	Seq       int64     `json:"seq"`
	Ack       int64     `json:"ack"` // 0 without FlagACK
	RawSeq    uint32    `json:"raw_seq"`
	RawAck    uint32    `json:"raw_ack"`
	Length    int       `json:"length"` // of the payload, bytes
	Size      int       `json:"size"`   // of the IP packet, bytes
	Flags     Flags     `json:"flags"`
	Window    int       `json:"window"` // bytes
	// Header is how the IP packet begins: its headers, and not much of the payload.
	Header []byte `json:"header,omitempty"`

	Sent     *Sent     `json:"sent,omitempty"`
	Received *Received `json:"received,omitempty"`
}

// Sent is what became of a packet that was sent.
type Sent struct {
	Fate Fate `json:"fate,omitempty"`
	// Driver is when the last of it reached the last driver. Zero: it did not.
	Driver time.Time `json:"driver,omitzero"`
	// FirstAcked and Acked are when the first and the last acknowledgement of it
	// came, of those of its bytes that were not lost.
	FirstAcked time.Time `json:"first_acked,omitzero"`
	Acked      time.Time `json:"acked,omitzero"`
	AckedBy    int       `json:"acked_by,omitempty"` // the packet received; 0: it was not seen
	// Qdisc is from Packet.Time to Driver, Network from there to Acked.
	Qdisc   time.Duration `json:"qdisc_ns,omitempty"`
	Network time.Duration `json:"network_ns,omitempty"`
	// AckedBytes and LostBytes are of the payload. Lost is a guess: these were sent
	// again, and what came then acknowledges the later ones.
	AckedBytes int `json:"acked_bytes"`
	LostBytes  int `json:"lost_bytes,omitempty"`
	// Sacked tells that a selective acknowledgement of some of it came first.
	Sacked bool `json:"sacked,omitempty"`
	// Twice tells that the peer got some of it more than once, by its own account.
	Twice bool `json:"twice,omitempty"`
	// Again is the first packet that repeats some of it; 0: none.
	Again          int             `json:"again,omitempty"`
	Retransmission *Retransmission `json:"retransmission,omitempty"`
	Split          *Split          `json:"split,omitempty"`
	// Hops are the interfaces that it went through on this host, from first to last:
	// more than one with VLANs, bonds, tunnels.
	Hops []Hop `json:"hops,omitempty"`
}

// Received is what a packet that was received tells.
type Received struct {
	// Acked are the bytes that it is the first to acknowledge, of packets that were
	// seen; Packets are those of which nothing is left to acknowledge then.
	Acked   int     `json:"acked"`
	Packets []Range `json:"packets,omitempty"`
	// Selective are the blocks of a selective acknowledgement, Twice the one that
	// says what came more than once.
	Selective []Block `json:"selective,omitempty"`
	Twice     *Block  `json:"twice,omitempty"`
	// Duplicate tells that it repeats the last acknowledgement while more is under
	// way.
	Duplicate bool `json:"duplicate,omitempty"`
	// Early tells that it was seen when the host, not when TCP received it: one side
	// has closed the connection.
	Early bool `json:"early,omitempty"`
}

// Range is a range of Packet.Number, both ends included.
type Range struct {
	First int `json:"first"`
	Last  int `json:"last"`
}

// Block is a range of relative sequence numbers; End is not included.
type Block struct {
	Start int64 `json:"start"`
	End   int64 `json:"end"`
}

// Retransmission is about a packet whose bytes, or some of them, were sent before.
type Retransmission struct {
	Ordinal int `json:"ordinal"` // 1: for the first time again, as far as seen
	// Of is the packet that sent its first byte first; 0: it was not seen. After is
	// since that byte was sent last, and is not known then.
	Of    int           `json:"of,omitempty"`
	After time.Duration `json:"after_ns,omitempty"`
	Cause Cause         `json:"cause,omitempty"` // "": not known
}

// Cause is why TCP sends again.
type Cause string

// The causes.
const (
	CauseTimeout Cause = "timeout" // and what is repeated after one
	CauseFast    Cause = "fast"    // later packets were acknowledged
	CauseProbe   Cause = "probe"   // of a lost tail
)

// Split is how a packet became segments.
type Split struct {
	Segments int     `json:"segments"` // as far as drivers have them
	Size     int     `json:"size"`     // payload of each but the last, bytes
	By       Divider `json:"by"`
}

// Divider is who divides a packet into segments.
type Divider string

// The dividers.
const (
	ByHost   Divider = "host"   // the kernel, before the driver
	ByDevice Divider = "device" // or whoever gets it from the driver
)

// Hop is an interface on a packet's way out.
type Hop struct {
	Interface string    `json:"interface"`
	Index     int       `json:"ifindex"`
	Queued    time.Time `json:"queued,omitzero"` // the first of it; zero: it has no queueing discipline
	Driver    time.Time `json:"driver,omitzero"` // the last of it; zero: it did not get there
	Segments  int       `json:"segments"`        // packets that the driver got
}

// Fate is what became of a packet that was sent. Lost and needless are guesses:
// by the order of events, their times, and the peer's timestamps.
type Fate string

// The fates. A packet that nobody acknowledges, such as an acknowledgement, has
// none, unless it was dropped.
const (
	Acknowledged   Fate = "acknowledged"
	PartlyLost     Fate = "partly_lost"
	Lost           Fate = "lost"
	Dropped        Fate = "dropped"        // by this host: no driver got it
	Needless       Fate = "needless"       // a retransmission of what had arrived
	Unacknowledged Fate = "unacknowledged" // or only in part, until the end
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

// String names the flags, as PSH,ACK.
func (f Flags) String() string {
	var names []string
	for i, name := range flagNames {
		if f&(1<<i) != 0 {
			names = append(names, name)
		}
	}
	return strings.Join(names, ",")
}

// MarshalText is String.
func (f Flags) MarshalText() ([]byte, error) { return []byte(f.String()), nil }

// UnmarshalText reads what MarshalText wrote.
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
		return fmt.Errorf("read TCP flags: there is no flag %q", name)
	}
	return nil
}

// Reason is why a capture ended.
type Reason string

// The reasons.
const (
	StoppedDeadline    Reason = "deadline"
	StoppedEvents      Reason = "events"      // as many as were asked for
	StoppedClosed      Reason = "closed"      // the connection
	StoppedInterrupted Reason = "interrupted" // by somebody
)
