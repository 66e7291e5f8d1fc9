// SPDX-License-Identifier: Apache-2.0

// Package connlimit limits the connections of an HTTP server.
package connlimit

import (
	"context"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"
)

const (
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

// Listener is a listener that limits the connections of a server. At the limit, the listener closes the oldest idle connection; if no
// connection is idle, the listener refuses the new one.
type Listener struct {
	net.Listener
	Name  string // of the server, for the log
	Log   *slog.Logger
	Limit int
	// UserOf returns the user of a connection; nil if the listener does not distinguish users. All users other than root
	// together have half of the connections, and each of them a quarter.
	UserOf func(net.Conn) uint32
	// EvictsOldest makes the listener close the oldest connection whose client does not read the answer where none is idle, instead
	// of refusing the new one. Where there is none either, the new one waits: a request whose answer is not known yet is not
	// interrupted, because a flood of requests would interrupt all of them; nor is a connection that is too young to have
	// sent its request.
	EvictsOldest bool
	// Refusal is written to a connection before the listener closes it.
	Refusal []byte

	mu     sync.Mutex
	conns  []*conn // oldest first
	warned time.Time
}

type conn struct {
	net.Conn
	uid     uint32
	since   time.Time // when the listener admitted the connection
	serving int       // requests in progress, until the server has sent their answers
	sending time.Time // since when a write of the answer waits for the client; zero while none does
}

type connKey struct{}

// Wrap installs the listener in a server. Call Wrap after all other settings of the server and before Serve.
func (g *Listener) Wrap(server *http.Server) {
	handler, connContext, connState := server.Handler, server.ConnContext, server.ConnState
	server.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if e, ok := r.Context().Value(connKey{}).(*conn); ok {
			g.beginRequest(e)
			defer g.endRequest(e)
			if g.EvictsOldest {
				w = &sendingWriter{ResponseWriter: w, listener: g, conn: e}
			}
		}
		handler.ServeHTTP(w, r)
	})
	server.ConnContext = func(ctx context.Context, c net.Conn) context.Context {
		if connContext != nil {
			ctx = connContext(ctx, c)
		}
		return context.WithValue(ctx, connKey{}, g.find(c))
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
func (g *Listener) Accept() (net.Conn, error) {
	for {
		c, err := g.Listener.Accept()
		if err != nil {
			return nil, err
		}
		e := &conn{Conn: c}
		if g.UserOf != nil {
			e.uid = g.UserOf(c)
		}
		admitted := g.admit(e)
		for ; !admitted && g.EvictsOldest; admitted = g.admit(e) {
			time.Sleep(requestTime)
		}
		if admitted {
			return c, nil
		}
		// The refusal is smaller than any socket buffer, so the write does not block.
		_ = c.SetWriteDeadline(time.Now().Add(10 * time.Millisecond))
		_, _ = c.Write(g.Refusal)
		c.Close()
	}
}

func (g *Listener) admit(e *conn) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.UserOf != nil && e.uid != 0 {
		own := func(o *conn) bool { return o.uid == e.uid }
		others := func(o *conn) bool { return o.uid != 0 }
		if !g.makeRoom(own, max(g.Limit/4, 1)) || !g.makeRoom(others, max(g.Limit/2, 1)) {
			return false
		}
	}
	if !g.makeRoom(func(*conn) bool { return true }, g.Limit) {
		return false
	}
	e.since = time.Now()
	g.conns = append(g.conns, e)
	return true
}

// makeRoom reports whether one more connection of a kind is within the limit. At the limit, makeRoom closes an idle
// connection of that kind or, with EvictsOldest, the oldest one whose client does not read.
func (g *Listener) makeRoom(kind func(*conn) bool, most int) bool {
	n, waits, sends := 0, -1, -1
	for i, e := range g.conns {
		if !kind(e) {
			continue
		}
		n++
		if e.serving == 0 && waits < 0 && (!g.EvictsOldest || time.Since(e.since) > requestTime) {
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
		g.Log.Warn("too many connections, some are closed", "to", g.Name, "most", most)
	}
	if waits < 0 && g.EvictsOldest {
		waits = sends
	}
	if waits < 0 {
		return false
	}
	g.conns[waits].Close()
	g.conns = append(g.conns[:waits], g.conns[waits+1:]...)
	return true
}

// CloseAll closes all connections.
func (g *Listener) CloseAll() {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, e := range g.conns {
		e.Close()
	}
}

func (g *Listener) beginRequest(e *conn) {
	g.mu.Lock()
	defer g.mu.Unlock()
	e.serving++
}

// endRequest notes that a handler has returned. The server writes the rest of the answer afterwards.
func (g *Listener) endRequest(e *conn) {
	g.mu.Lock()
	defer g.mu.Unlock()
	e.sending = time.Now()
}

// setIdle notes that the server has sent the answers to all requests of a connection.
func (g *Listener) setIdle(c net.Conn) {
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
	listener *Listener
	conn     *conn
}

// Write writes a part of the answer.
func (w *sendingWriter) Write(p []byte) (int, error) {
	w.setSending(time.Now())
	defer w.setSending(time.Time{})
	return w.ResponseWriter.Write(p)
}

func (w *sendingWriter) setSending(since time.Time) {
	w.listener.mu.Lock()
	defer w.listener.mu.Unlock()
	w.conn.sending = since
}

func (g *Listener) find(c net.Conn) *conn {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, e := range g.conns {
		if e.Conn == c {
			return e
		}
	}
	return &conn{Conn: c} // already removed
}

func (g *Listener) remove(c net.Conn) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for i, e := range g.conns {
		if e.Conn == c {
			g.conns = append(g.conns[:i], g.conns[i+1:]...)
			return
		}
	}
}
