// SPDX-License-Identifier: Apache-2.0

package gateway

import "log/slog"

// Reason is why something was counted.
type Reason int

// The reasons.
const (
	Malformed     Reason = iota // packets that are none, or of a protocol that is not joined
	NotAllowed                  // to where the guest may not go
	TooMany                     // connections, or no descriptor or port for another one
	PartialSend                 // a socket took less than it was given
	Retransmitted               // segments to the guest, again
	OutOfOrder                  // segments of the guest that were dropped, as one before is missing
	Opened                      // connections
	Refused                     // connections that the other end did not take
	Reset                       // connections that ended by RST or an error
	Closed                      // connections that ended in order
	TUNFull                     // packets that the guest's interface did not take
	UrgentData                  // connections ended for it
	Evicted                     // flows of UDP that others took the place of
	Unsolicited                 // datagrams from where the guest did not send to, or not for long
	reasons
)

var reasonNames = [reasons]string{
	Malformed: "malformed", NotAllowed: "not_allowed", TooMany: "too_many", PartialSend: "partial_sends",
	Retransmitted: "retransmitted", OutOfOrder: "out_of_order", Opened: "opened", Refused: "refused",
	Reset: "reset", Closed: "closed", TUNFull: "interface_full", UrgentData: "urgent_data",
	Evicted: "evicted", Unsolicited: "unsolicited",
}

// Counts are how often each thing happened.
func (g *Gateway) Counts() (c [reasons]uint64) {
	for i := range c {
		c[i] = g.counts[i].Load()
	}
	return c
}

func (g *Gateway) count(r Reason) { g.counts[r].Add(1) }

// LogCounts logs what was counted, and is not 0.
func (g *Gateway) LogCounts(log *slog.Logger, event string) {
	var counts []any
	for reason, n := range g.Counts() {
		if n > 0 {
			counts = append(counts, reasonNames[reason], n)
		}
	}
	log.Info(event, counts...)
}
