// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"

	"sockeye/internal/api"
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
	// warnInterval is the minimum time between two warnings about closed connections.
	warnInterval = time.Minute
	// idleTimeout is the time after which the server closes a connection without a request.
	idleTimeout = 30 * time.Second
	// requestTime is the time that a client has for sending a request before its connection may be closed for another one.
	requestTime = 10 * time.Millisecond
	// sendTime is the time that one write of an answer waits for its client before the connection may be closed for another
	// one.
	sendTime = 100 * time.Millisecond
)

// gate limits the connections of a server. At the limit, the gate closes the oldest idle connection; if no connection
// is idle, the gate refuses the new one.
type gate struct {
	net.Listener
	name  string
	log   *slog.Logger
	limit int
	// userOf returns the user of a connection; nil if the gate does not distinguish users. All users other than root
	// together have half of the connections, and each of them a quarter.
	userOf func(net.Conn) uint32
	// evictsOldest makes the gate close the oldest connection whose client does not read the answer where none is idle, instead
	// of refusing the new one. Where there is none either, the new one waits: a request whose answer is not known yet is not
	// interrupted, because a flood of requests would interrupt all of them; nor is a connection that is too young to have
	// sent its request.
	evictsOldest bool
	// refusal is written to a connection before the gate closes it.
	refusal []byte

	mu     sync.Mutex
	conns  []*gateConn // oldest first
	warned time.Time
}

type gateConn struct {
	net.Conn
	uid     uint32
	since   time.Time // when the gate admitted the connection
	serving int       // requests in progress, until the server has sent their answers
	sending time.Time // since when a write of the answer waits for the client; zero while none does
}

type gateConnKey struct{}

// wrap installs the gate in a server. Call wrap after all other settings of the server and before Serve.
func (g *gate) wrap(server *http.Server) {
	handler, connContext, connState := server.Handler, server.ConnContext, server.ConnState
	server.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if e, ok := r.Context().Value(gateConnKey{}).(*gateConn); ok {
			g.beginRequest(e)
			defer g.endRequest(e)
			if g.evictsOldest {
				w = &sendingWriter{ResponseWriter: w, gate: g, conn: e}
			}
		}
		handler.ServeHTTP(w, r)
	})
	server.ConnContext = func(ctx context.Context, c net.Conn) context.Context {
		if connContext != nil {
			ctx = connContext(ctx, c)
		}
		return context.WithValue(ctx, gateConnKey{}, g.find(c))
	}
	server.ConnState = func(c net.Conn, s http.ConnState) {
		if connState != nil {
			connState(c, s)
		}
		switch s {
		case http.StateIdle:
			g.setIdle(c)
		case http.StateClosed, http.StateHijacked:
			g.remove(c)
		}
	}
	server.IdleTimeout = idleTimeout
}

// Accept returns the next connection that the limits admit.
func (g *gate) Accept() (net.Conn, error) {
	for {
		c, err := g.Listener.Accept()
		if err != nil {
			return nil, err
		}
		e := &gateConn{Conn: c}
		if g.userOf != nil {
			e.uid = g.userOf(c)
		}
		admitted := g.admit(e)
		for ; !admitted && g.evictsOldest; admitted = g.admit(e) {
			time.Sleep(requestTime)
		}
		if admitted {
			return c, nil
		}
		// The refusal is smaller than any socket buffer, so the write does not block.
		_ = c.SetWriteDeadline(time.Now().Add(10 * time.Millisecond))
		_, _ = c.Write(g.refusal)
		c.Close()
	}
}

func (g *gate) admit(e *gateConn) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.userOf != nil && e.uid != 0 {
		own := func(o *gateConn) bool { return o.uid == e.uid }
		others := func(o *gateConn) bool { return o.uid != 0 }
		if !g.makeRoom(own, max(g.limit/4, 1)) || !g.makeRoom(others, max(g.limit/2, 1)) {
			return false
		}
	}
	if !g.makeRoom(func(*gateConn) bool { return true }, g.limit) {
		return false
	}
	e.since = time.Now()
	g.conns = append(g.conns, e)
	return true
}

// makeRoom reports whether one more connection of a kind is within the limit. At the limit, makeRoom closes an idle
// connection of that kind or, with evictsOldest, the oldest one whose client does not read.
func (g *gate) makeRoom(kind func(*gateConn) bool, most int) bool {
	n, waits, sends := 0, -1, -1
	for i, e := range g.conns {
		if !kind(e) {
			continue
		}
		n++
		if e.serving == 0 && waits < 0 && (!g.evictsOldest || time.Since(e.since) > requestTime) {
			waits = i
		}
		if !e.sending.IsZero() && time.Since(e.sending) > sendTime && sends < 0 {
			sends = i
		}
	}
	if n < most {
		return true
	}
	if now := time.Now(); now.Sub(g.warned) >= warnInterval {
		g.warned = now
		g.log.Warn("too many connections, some are closed", "to", g.name, "most", most)
	}
	if waits < 0 && g.evictsOldest {
		waits = sends
	}
	if waits < 0 {
		return false
	}
	g.conns[waits].Close()
	g.conns = append(g.conns[:waits], g.conns[waits+1:]...)
	return true
}

// closeAll closes all connections.
func (g *gate) closeAll() {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, e := range g.conns {
		e.Close()
	}
}

func (g *gate) beginRequest(e *gateConn) {
	g.mu.Lock()
	defer g.mu.Unlock()
	e.serving++
}

// endRequest notes that a handler has returned. The server writes the rest of the answer afterwards.
func (g *gate) endRequest(e *gateConn) {
	g.mu.Lock()
	defer g.mu.Unlock()
	e.sending = time.Now()
}

// setIdle notes that the server has sent the answers to all requests of a connection.
func (g *gate) setIdle(c net.Conn) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, e := range g.conns {
		if e.Conn == c {
			e.serving, e.sending = 0, time.Time{}
		}
	}
}

// sendingWriter notes since when a write waits for the client.
type sendingWriter struct {
	http.ResponseWriter
	gate *gate
	conn *gateConn
}

// Write writes a part of the answer.
func (w *sendingWriter) Write(p []byte) (int, error) {
	w.setSending(time.Now())
	defer w.setSending(time.Time{})
	return w.ResponseWriter.Write(p)
}

func (w *sendingWriter) setSending(since time.Time) {
	w.gate.mu.Lock()
	defer w.gate.mu.Unlock()
	w.conn.sending = since
}

func (g *gate) find(c net.Conn) *gateConn {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, e := range g.conns {
		if e.Conn == c {
			return e
		}
	}
	return &gateConn{Conn: c} // already removed
}

func (g *gate) remove(c net.Conn) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for i, e := range g.conns {
		if e.Conn == c {
			g.conns = append(g.conns[:i], g.conns[i+1:]...)
			return
		}
	}
}

// guardAPI limits the connections to the agent's socket.
func (a *Agent) guardAPI(s *server) *server {
	g := &gate{
		Listener: s.listener, name: "API", log: a.log, limit: domain.ShareOfDescriptors(apiShare, leastAPI, mostAPI), userOf: userOf,
		refusal: refusalOf(api.Failure{Error: "the agent has too many connections", Hint: "try again; who has them: ss -xp", Code: fault.CodeFailed}),
	}
	g.wrap(s.http)
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

// refusalOf returns the HTTP answer to a connection that the gate refuses.
func refusalOf(f api.Failure) []byte {
	body, err := json.Marshal(f)
	if err != nil {
		return nil
	}
	return fmt.Appendf(nil, "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
}
