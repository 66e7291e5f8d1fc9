// SPDX-License-Identifier: Apache-2.0

package gateway

import "log/slog"

// Reason is what is counted.
type Reason int

// The reasons.
const (
	Malformed     Reason = iota // packets of the guest that are broken, or of another protocol
	NotAllowed                  // packets to where the guest may not go
	TooMany                     // connections and flows beyond a bound, or without a descriptor or port
	PartialSend                 // calls of send(2) that accepted less than the window
	Retransmitted               // segments to the guest
	OutOfOrder                  // segments of the guest that were dropped because an earlier one is missing
	Opened                      // connections
	Refused                     // connections that the other end refused
	Reset                       // connections that ended by RST or an error
	Closed                      // connections that both ends closed by FIN
	TUNFull                     // packets that the queue of the guest's interface had no space for
	UrgentData                  // connections that were reset for urgent data of the guest
	Evicted                     // flows of UDP that were replaced by others
	Unsolicited                 // datagrams from where no flow leads to
	reasons
)

var reasonNames = [reasons]string{
	Malformed: "malformed", NotAllowed: "not_allowed", TooMany: "too_many", PartialSend: "partial_sends",
	Retransmitted: "retransmitted", OutOfOrder: "out_of_order", Opened: "opened", Refused: "refused",
	Reset: "reset", Closed: "closed", TUNFull: "interface_full", UrgentData: "urgent_data",
	Evicted: "evicted", Unsolicited: "unsolicited",
}

// Counts returns the counts by Reason. It may be called while Run runs.
func (g *Gateway) Counts() (c [reasons]uint64) {
	for i := range c {
		c[i] = g.counts[i].Load()
	}
	return c
}

func (g *Gateway) count(r Reason) { g.counts[r].Add(1) }

// LogCounts logs the counts that are not 0.
func (g *Gateway) LogCounts(log *slog.Logger, event string) {
	var counts []any
	for reason, n := range g.Counts() {
		if n > 0 {
			counts = append(counts, reasonNames[reason], n)
		}
	}
	log.Info(event, counts...)
}
