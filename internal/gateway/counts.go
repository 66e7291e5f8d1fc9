// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"log/slog"
	"time"
)

// Reason identifies a counter.
type Reason int

// The counters.
const (
	Malformed     Reason = iota // packets of the guest that are malformed, or of an unsupported protocol
	NotAllowed                  // packets to destinations that access.Outbound does not allow
	TooMany                     // connections and flows beyond a limit, or without a descriptor or port
	PartialSend                 // calls of send(2) that accepted less than the advertised window
	Retransmitted               // segments retransmitted to the guest
	OutOfOrder                  // out-of-order segments of the guest, which are dropped
	Opened                      // connections
	Refused                     // connections that the other end refused
	Reset                       // connections closed by RST or an error
	Closed                      // connections that both ends closed by FIN
	TUNFull                     // packets dropped because the queue of the guest's interface was full
	UrgentData                  // connections reset because of urgent data of the guest
	Evicted                     // UDP flows evicted by others
	Unsolicited                 // datagrams from peers without a flow
	reasons
)

var reasonNames = [reasons]string{
	Malformed: "malformed", NotAllowed: "not_allowed", TooMany: "too_many", PartialSend: "partial_sends",
	Retransmitted: "retransmitted", OutOfOrder: "out_of_order", Opened: "opened", Refused: "refused",
	Reset: "reset", Closed: "closed", TUNFull: "interface_full", UrgentData: "urgent_data",
	Evicted: "evicted", Unsolicited: "unsolicited",
}

func (g *Gateway) count(r Reason) { g.counts[r].Add(1) }

// LogCounts logs the counters that are not 0.
func (g *Gateway) LogCounts(log *slog.Logger, event string) {
	var counts []any
	for reason, n := range g.Counts() {
		if n > 0 {
			counts = append(counts, reasonNames[reason], n)
		}
	}
	log.Info(event, counts...)
}

// Counts returns the counters by Reason. It may be called concurrently with Run.
func (g *Gateway) Counts() (c [reasons]uint64) {
	for i := range c {
		c[i] = g.counts[i].Load()
	}
	return c
}

// warning is a kind of warning.
type warning int

const (
	warnEvicted warning = iota
	warnOpening
	warnRefused
	warnFiles
	warnEcho
	warnings
)

// warnEvery is the minimum time between two warnings of a kind.
const warnEvery = time.Minute

// warn logs a warning, at most once per warnEvery and kind.
func (g *Gateway) warn(kind warning, text string, args ...any) {
	if last := g.warned[kind]; !last.IsZero() && g.now.Sub(last) < warnEvery {
		return
	}
	g.warned[kind] = g.now
	g.log.Warn(text, args...)
}
