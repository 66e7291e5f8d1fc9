// SPDX-License-Identifier: Apache-2.0

package gateway

import "log/slog"

var reasonNames = [reasons]string{
	Malformed: "malformed", NotAllowed: "not_allowed", TooMany: "too_many", PartialSend: "partial_sends",
	Retransmitted: "retransmitted", OutOfOrder: "out_of_order", Opened: "opened", Refused: "refused",
	Reset: "reset", Closed: "closed", TUNFull: "interface_full", UrgentData: "urgent_data",
	Evicted: "evicted", Unsolicited: "unsolicited",
}

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
