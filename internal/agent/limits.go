// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"encoding/json"
	"fmt"
	"net"
	"time"

	"sockeye/internal/api"
	"sockeye/internal/connlimit"
	"sockeye/internal/domain"
	"sockeye/internal/fault"
	"sockeye/internal/peer"
)

// Connection limits, as fractions of the descriptor limit of the agent. The sum of the limits leaves descriptors for
// members, whatever the number of callers.
const (
	apiShare, leastAPI, mostAPI             = 16, 8, 128 // each connection has a pidfd of its caller, too
	metricsShare, leastMetrics, mostMetrics = 16, 4, 64
	pageShare, leastPage, mostPage          = 16, 8, 128
)

// guardAPI limits the connections to the agent's socket.
func (a *Agent) guardAPI(s *server) *server {
	g := &connlimit.Listener{
		Listener: s.listener, Name: "API", Log: a.log, Limit: domain.ShareOfDescriptors(apiShare, leastAPI, mostAPI), UserOf: userOf,
		Refusal: refusalOf(api.Failure{Error: "the agent has too many connections", Hint: "try again; who has them: ss -xp", Code: fault.CodeFailed}),
	}
	g.Wrap(s.http)
	// Streams remove this deadline; all other answers are shorter.
	s.http.WriteTimeout = 2 * time.Minute
	s.listener = g
	return s
}

// userOf returns the user that connected to the agent's socket, or 2^32-1 for an unknown one.
func userOf(c net.Conn) uint32 {
	if k := c.(*peer.Conn).Caller; k != nil {
		return k.Cred.Uid
	}
	return ^uint32(0)
}

// refusalOf returns the HTTP answer to a connection that the listener refuses.
func refusalOf(f api.Failure) []byte {
	body, err := json.Marshal(f)
	if err != nil {
		return nil
	}
	return fmt.Appendf(nil, "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
}
