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

// Bounds of connections, by the descriptors that the agent may have. All together are a
// fraction of those, so that no number of callers keeps members out.
const (
	apiShare, leastAPI, mostAPI             = 16, 8, 128 // each has a handle of its caller, too
	metricsShare, leastMetrics, mostMetrics = 16, 4, 64
	// warnEvery bounds how often the log tells that callers are turned away.
	warnInterval = time.Minute
	// idleTime is how long a connection stays open without a request.
	idleTime = 30 * time.Second
)

// gate bounds the connections of a server. At the bound, the oldest connection goes that
// waits for a request, or else a new one is refused.
type gate struct {
	net.Listener
	name  string
	log   *slog.Logger
	limit int
	// user tells whose connection it is; nil: nobody's in particular. Users but root have a half
	// of the connections, each of them a quarter.
	userOf func(net.Conn) uint32
	// pushes: a new connection is never refused, and pushes out the oldest of all.
	evictsOldest bool
	// refusal is sent before a connection is refused.
	refusal []byte

	mu     sync.Mutex
	conns  []*gateConn // the oldest first
	warned time.Time
}

type gateConn struct {
	net.Conn
	uid     uint32
	serving int // requests: 0 or 1
}

type gateConnKey struct{}

// guard has a server's connections come through a gate. It is to be called before the
// server serves, and after all else of it is set.
func (g *gate) wrap(server *http.Server) {
	handler, with, told := server.Handler, server.ConnContext, server.ConnState
	server.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if e, ok := r.Context().Value(gateConnKey{}).(*gateConn); ok {
			g.addServing(e, 1)
			defer g.addServing(e, -1)
		}
		handler.ServeHTTP(w, r)
	})
	server.ConnContext = func(ctx context.Context, c net.Conn) context.Context {
		if with != nil {
			ctx = with(ctx, c)
		}
		return context.WithValue(ctx, gateConnKey{}, g.find(c))
	}
	server.ConnState = func(c net.Conn, s http.ConnState) {
		if told != nil {
			told(c, s)
		}
		if s == http.StateClosed || s == http.StateHijacked {
			g.remove(c)
		}
	}
	server.IdleTimeout = idleTime
}

// Accept waits for the next connection that may come in.
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
		if g.admit(e) {
			return c, nil
		}
		// It is small enough for any socket's buffer.
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
	g.conns = append(g.conns, e)
	return true
}

// room closes a connection if one more of its kind would be too many. It is false if none
// may be closed.
func (g *gate) makeRoom(kind func(*gateConn) bool, most int) bool {
	n, oldest, waits := 0, -1, -1
	for i, e := range g.conns {
		if !kind(e) {
			continue
		}
		if n++; oldest < 0 {
			oldest = i
		}
		if e.serving == 0 && waits < 0 {
			waits = i
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
		waits = oldest
	}
	if waits < 0 {
		return false
	}
	g.conns[waits].Close()
	g.conns = append(g.conns[:waits], g.conns[waits+1:]...)
	return true
}

func (g *gate) addServing(e *gateConn, by int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	e.serving += by
}

func (g *gate) find(c net.Conn) *gateConn {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, e := range g.conns {
		if e.Conn == c {
			return e
		}
	}
	return &gateConn{Conn: c} // closed meanwhile
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

// guardAPI bounds the connections to the agent's socket.
func (a *Agent) guardAPI(s *server) *server {
	g := &gate{
		Listener: s.listener, name: "API", log: a.log, limit: domain.ShareOfDescriptors(apiShare, leastAPI, mostAPI), userOf: userOf,
		refusal: refusalOf(api.Failure{Error: "the agent has too many connections", Hint: "try again; who has them: ss -xp", Code: fault.CodeFailed}),
	}
	g.wrap(s.http)
	// No answer takes so long but those that go on, which lift it.
	s.http.WriteTimeout = 2 * time.Minute
	s.listener = g
	return s
}

// userOf is who connected to the agent's socket.
func userOf(c net.Conn) uint32 {
	if k := c.(*peer.Conn).Caller; k != nil {
		return k.Cred.Uid
	}
	return ^uint32(0)
}

// refusalOf is an answer of the API to whoever cannot come in.
func refusalOf(f api.Failure) []byte {
	body, err := json.Marshal(f)
	if err != nil {
		return nil
	}
	return fmt.Appendf(nil, "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
}
