// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"crypto/hmac"
	"crypto/subtle"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/bigtcp/netif"
	"sockeye/internal/bigtcp/sizing"
)

// maxWaiting are the connections that have not yet said what they are for.
const maxWaiting = 16

// A Server is the other end of a bench, for one client at a time.
type Server struct {
	network  *netif.Network
	store    *sizing.Store
	listener net.Listener
	key      key
	cpu      int
	log      func(format string, args ...any)
	// setter replaces changing the interface towards the client.
	setter setter
	beside bool // the client is on the same CPU

	waiting chan struct{} // full when maxWaiting do
	busy    chan struct{} // full while there is a client

	mu      sync.Mutex
	awaited *awaited
}

// awaited is a connection for data that a client is to open.
type awaited struct {
	token string
	conns chan net.Conn
}

// Listen makes a server in a network, which records in the store what it changes
// there. It tells log of each client that comes and goes.
func Listen(n *netif.Network, store *sizing.Store, address string, log func(format string, args ...any)) (*Server, error) {
	s := &Server{network: n, store: store, key: newKey(), log: log, waiting: make(chan struct{}, maxWaiting), busy: make(chan struct{}, 1)}
	var err error
	if s.cpu, _, err = lastCPUs(); err != nil {
		return nil, err
	}
	err = n.Do(func() error {
		var c net.ListenConfig
		c.SetMultipathTCP(false)
		s.listener, err = c.Listen(context.Background(), "tcp", address)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("listen for a client: %w", err)
	}
	return s, nil
}

// Address is where the server listens.
func (s *Server) Address() net.Addr { return s.listener.Addr() }

// Key is what a client needs to know.
func (s *Server) Key() string { return s.key.String() }

// Serve serves until ctx ends, and then has given back what it changed.
func (s *Server) Serve(ctx context.Context) error {
	var clients sync.WaitGroup
	defer clients.Wait()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(errors.New("the server ends"))
	defer s.listener.Close()
	defer context.AfterFunc(ctx, func() { s.listener.Close() })()
	for {
		select {
		case s.waiting <- struct{}{}:
		case <-ctx.Done():
			return nil
		}
		conn, err := s.listener.Accept()
		if err != nil && ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return fmt.Errorf("accept a client: %w", err)
		}
		clients.Go(func() { s.receive(ctx, conn) })
	}
}

// receive finds out what a connection is for.
func (s *Server) receive(ctx context.Context, conn net.Conn) {
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	known := sync.OnceFunc(func() { <-s.waiting })
	defer known()
	hello := greeting{protocol, newNonce()}
	w := newWire(conn)
	err := w.write(hello)
	var line []byte
	if err == nil {
		line, err = w.readLine(patience)
	}
	if err != nil {
		conn.Close()
		return
	}
	if token := dataToken(line); token != "" {
		if !s.hand(token, conn) {
			conn.Close()
		}
		return
	}
	defer conn.Close()
	r, err := decodeRequest(line)
	switch {
	case err != nil:
	case r.Op != opHello:
		err = errors.New("this is not how one begins")
	case !hmac.Equal([]byte(r.MAC), []byte(s.key.mac(hello.Nonce, r.Nonce))):
		err = usage("it is what sockeye bigtcp bench --serve printed", "the key is wrong")
	default:
		known()
		if s.claim(ctx) {
			defer s.release()
			s.log("%s: begins", conn.RemoteAddr())
			err = s.session(ctx, w, r)
			if err != nil {
				s.log("%s: %s", conn.RemoteAddr(), plain(err.Error()))
			} else {
				s.log("%s: is done", conn.RemoteAddr())
			}
			return
		}
		err = &netif.Error{Kind: netif.KindConflict, Err: errors.New("it measures with another client"), Hint: "try again when that is done"}
	}
	s.log("%s: refused: %s", conn.RemoteAddr(), plain(err.Error()))
	// Who is refused may be gone.
	_ = w.write(refusal(err))
}

// leaving is what a client is given to be done, when the next one comes.
const leaving = 3 * time.Second

func (s *Server) claim(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, leaving)
	defer cancel()
	select {
	case s.busy <- struct{}{}:
		return true
	case <-ctx.Done():
		return false
	}
}

func (s *Server) release() { <-s.busy }

// hand gives a connection to the session that waits for its token.
func (s *Server) hand(token string, conn net.Conn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.awaited == nil || subtle.ConstantTimeCompare([]byte(s.awaited.token), []byte(token)) == 0 {
		return false
	}
	s.awaited.conns <- conn
	s.awaited = nil
	return true
}

func (s *Server) await(a *awaited) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.awaited = a
}

// session serves a client that knows the key.
func (s *Server) session(ctx context.Context, w *wire, hello request) (err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	if err := notice(w.Conn); err != nil {
		return err
	}
	host, sizes, err := s.prepare(w.RemoteAddr(), hello.Size)
	if sizes != nil {
		defer func() {
			if restored := sizes.restore(); restored != nil {
				err = joined(err, restored)
			}
		}()
	}
	if err != nil {
		_ = w.write(refusal(err))
		return err
	}
	if err := w.write(reply{Host: host.plain()}); err != nil {
		return err
	}
	requests := make(chan request)
	go func() {
		// While a run goes on, too: a client that goes ends it.
		for {
			line, err := w.readLine(idle + maxWarmup + maxFor)
			var r request
			if err == nil {
				r, err = decodeRequest(line)
			}
			if err != nil {
				cancel(err)
				return
			}
			select {
			case requests <- r:
			case <-ctx.Done():
				return
			}
		}
	}()
	for runs := 0; ; {
		select {
		case <-ctx.Done():
			err := context.Cause(ctx)
			if errors.Is(err, io.EOF) {
				err = errors.New("the client has gone")
			}
			return err
		case r := <-requests:
			var answer reply
			switch r.Op {
			case opRun:
				if runs++; runs > maxRounds*runsOfRound {
					return errors.New("the client wants more runs than there are")
				}
				m, err := s.run(ctx, w, sizes, r)
				if ctx.Err() != nil {
					continue
				}
				if err != nil {
					_ = w.write(refusal(err))
					return err
				}
				answer = reply{Count: m.Count, Bytes: m.Bytes, ElapsedNS: m.Elapsed.Nanoseconds(), CPUNS: m.CPU.Nanoseconds()}
			case opBye:
				if err := sizes.restore(); err != nil {
					_ = w.write(refusal(err))
					return err
				}
				return w.write(answer)
			default:
				return errors.New("the client says hello twice")
			}
			if err := w.write(answer); err != nil {
				return err
			}
		}
	}
}

// silence is how long a peer may vanish without a word.
const silence = 15 * time.Second

// notice has a peer that vanished noticed, whether or not it was to say something.
func notice(conn net.Conn) error {
	c, ok := conn.(*net.TCPConn)
	if !ok {
		return errors.New("this is no TCP connection")
	}
	err := c.SetKeepAliveConfig(net.KeepAliveConfig{Enable: true, Idle: 5 * time.Second, Interval: 2 * time.Second, Count: 5})
	if err != nil {
		return fmt.Errorf("watch the peer: %w", err)
	}
	raw, err := c.SyscallConn()
	if err != nil {
		return fmt.Errorf("watch the peer: %w", err)
	}
	var option error
	err = raw.Control(func(fd uintptr) {
		option = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(silence.Milliseconds()))
	})
	if err = joined(err, option); err != nil {
		return fmt.Errorf("watch the peer: %w", err)
	}
	return nil
}

// prepare finds the interface to the client, and tries to turn BIG TCP on there.
func (s *Server) prepare(client net.Addr, size uint32) (*Host, setter, error) {
	host := &Host{Kernel: kernelRelease(), CPU: s.cpu}
	address, err := addressOf(client)
	if err != nil {
		return nil, nil, err
	}
	if s.setter != nil {
		host.Changed = true
		return host, s.setter, nil
	}
	if err := lacks(s.network, familyOf(address)); err != nil {
		return nil, nil, err
	}
	if host.Interface, err = towards(s.network, address); err != nil {
		return nil, nil, err
	}
	r := &recorded{network: s.network, store: s.store, name: host.Interface, size: size}
	switch err := r.begin(); {
	case err == nil:
		host.Changed, host.Notes = true, r.notes()
		return host, r, nil
	case notPermitted(err):
		return host, fixed{}, nil
	default:
		return nil, r, err
	}
}

// run is the server's part of a run.
func (s *Server) run(ctx context.Context, w *wire, sizes setter, r request) (m measured, err error) {
	if err := sizes.set(r.On); err != nil {
		return m, err
	}
	a := &awaited{newNonce(), make(chan net.Conn, 1)}
	s.await(a)
	defer func() {
		s.await(nil)
		select {
		case conn := <-a.conns:
			conn.Close()
		default:
		}
	}()
	if err := w.write(reply{Token: a.token}); err != nil {
		return m, err
	}
	var conn net.Conn
	timeout := time.NewTimer(patience)
	defer timeout.Stop()
	select {
	case conn = <-a.conns:
	case <-timeout.C:
		return m, errors.New("the client opens no connection for data")
	case <-ctx.Done():
		return m, context.Cause(ctx)
	}
	fd, err := take(conn)
	if err != nil {
		return m, err
	}
	defer unix.Close(fd)
	l := &load{Kind: r.Load, Message: r.Message, Warmup: time.Duration(r.WarmupNS), For: time.Duration(r.ForNS), Seed: a.token, CPU: s.cpu, Beside: s.beside}
	return l.on(ctx, fd, func(e *end) (measured, error) {
		if err := e.send([]byte{'\n'}); err != nil {
			return measured{}, err
		}
		if l.Kind == loadRR {
			return e.answer()
		}
		return e.drain()
	})
}

// take gets the descriptor of a connection, which it closes, out of the runtime's
// hands.
func take(conn net.Conn) (int, error) {
	defer conn.Close()
	c, ok := conn.(*net.TCPConn)
	if !ok {
		return -1, errors.New("this is no TCP connection")
	}
	raw, err := c.SyscallConn()
	if err != nil {
		return -1, fmt.Errorf("take the connection: %w", err)
	}
	var fd int
	var dup error
	err = raw.Control(func(own uintptr) { fd, dup = unix.FcntlInt(own, unix.F_DUPFD_CLOEXEC, 0) })
	if err = joined(err, dup); err != nil {
		return -1, fmt.Errorf("take the connection: %w", err)
	}
	return fd, nil
}

func addressOf(a net.Addr) (netip.Addr, error) {
	ap, err := netip.ParseAddrPort(a.String())
	if err != nil {
		return netip.Addr{}, fmt.Errorf("read the peer's address: %w", err)
	}
	return ap.Addr().Unmap(), nil
}

func familyOf(a netip.Addr) string {
	if a.Is4() {
		return IPv4
	}
	return IPv6
}

func kernelRelease() string {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return "unknown"
	}
	return unix.ByteSliceToString(u.Release[:])
}
