// SPDX-License-Identifier: Apache-2.0

package transfers

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"
)

// runsPerRound counts the runs of a round: both loads, off and on.
const runsPerRound = 4

// A measurement is the rounds of one IP family.
type measurement struct {
	Options
	lab                  *lab
	family               string
	clientCPU, serverCPU int
	listener             *net.TCPListener // of the server
	done, runs           int              // for Progress, over all families
}

// measure runs all rounds. Within a round off and on take turns in being first.
func (m *measurement) measure(ctx context.Context) (*Family, error) {
	var err error
	if m.listener, err = m.lab.listen(m.family); err != nil {
		return nil, err
	}
	defer m.listener.Close()
	f := &Family{Family: m.family}
	for round := range m.Rounds {
		for l, kind := range []string{loadRR, loadStream} {
			for turn := range 2 {
				on := (round+l+turn)%2 == 1
				if ctx.Err() != nil {
					return nil, context.Cause(ctx)
				}
				s, err := m.run(ctx, kind, on)
				if ctx.Err() != nil {
					return nil, context.Cause(ctx)
				}
				if err != nil {
					return nil, fmt.Errorf("%s, %s, %s: %w", familyName(m.family), kind, onOff(on), err)
				}
				s.Round, s.Load, s.On = round, kind, on
				f.Runs = append(f.Runs, *s)
				if m.done++; m.Progress != nil {
					m.Progress(m.done, m.runs)
				}
			}
		}
	}
	f.Rows = rows(f.Runs, m.Message)
	return f, nil
}

func onOff(on bool) string {
	if on {
		return "on"
	}
	return "off"
}

// run runs a load once, on a connection of its own: a connection keeps the sizes with
// which it was established.
func (m *measurement) run(ctx context.Context, kind string, on bool) (*Sample, error) {
	if err := m.lab.set(on); err != nil {
		return nil, err
	}
	client, server, err := m.connect(ctx)
	if err != nil {
		return nil, err
	}
	defer unix.Close(client)
	before, err := m.lab.countPackets()
	if err != nil {
		unix.Close(server)
		return nil, err
	}
	l := load{Kind: kind, Message: m.Message, Warmup: m.Warmup, For: m.For, Seed: rand.Text(), CPU: m.clientCPU}
	atServer := l
	atServer.CPU, atServer.SharesCPU = m.serverCPU, m.serverCPU == m.clientCPU
	// The failure of one end ends the other.
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var peer measured
	served := make(chan struct{})
	go func() {
		defer close(served)
		defer unix.Close(server)
		var err error
		if peer, err = atServer.on(ctx, server, (*end).serve); err != nil {
			cancel(err)
		}
	}()
	own, err := l.on(ctx, client, (*end).drive)
	if err != nil {
		cancel(err)
	}
	<-served
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	after, err := m.lab.countPackets()
	if err != nil {
		return nil, err
	}
	s, err := sample(kind, &own, &peer)
	if err != nil {
		return nil, err
	}
	sent := after.sent - before.sent
	if kind == loadStream {
		s.PacketBytes = float64(after.sentBytes-before.sentBytes) / float64(max(1, sent))
	} else {
		s.Packets = float64(sent+after.received-before.received) / float64(own.all)
	}
	return s, nil
}

// connectTimeout bounds the handshake of a connection.
const connectTimeout = 10 * time.Second

// listen listens in the server's namespace, on a port of the kernel's choice.
func (l *lab) listen(family string) (*net.TCPListener, error) {
	var listener net.Listener
	err := l.namespaces[1].network.Do(func() (err error) {
		var c net.ListenConfig
		c.SetMultipathTCP(false)
		listener, err = c.Listen(context.Background(), "tcp", netip.AddrPortFrom(l.address(family), 0).String())
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("listen in the server's namespace: %w", err)
	}
	return listener.(*net.TCPListener), nil
}

// connect establishes a connection, and returns the descriptors of both ends.
func (m *measurement) connect(ctx context.Context) (client, server int, err error) {
	var dialed net.Conn
	err = m.lab.namespaces[0].network.Do(func() (err error) {
		d := net.Dialer{Timeout: connectTimeout}
		d.SetMultipathTCP(false)
		dialed, err = d.DialContext(ctx, "tcp", m.listener.Addr().String())
		return err
	})
	if err != nil {
		return -1, -1, fmt.Errorf("connect to the server: %w", err)
	}
	if client, err = detach(dialed); err != nil {
		return -1, -1, err
	}
	accepted, err := m.accept()
	if err == nil {
		server, err = detach(accepted)
	}
	if err != nil {
		unix.Close(client)
		return -1, -1, err
	}
	return client, server, nil
}

func (m *measurement) accept() (net.Conn, error) {
	if err := m.listener.SetDeadline(time.Now().Add(connectTimeout)); err != nil {
		return nil, fmt.Errorf("accept the client: %w", err)
	}
	conn, err := m.listener.Accept()
	if err != nil {
		return nil, fmt.Errorf("accept the client: %w", err)
	}
	return conn, nil
}

// detach returns a duplicate of the descriptor of a TCP connection, which the Go
// runtime does not poll, and closes the connection.
func detach(conn net.Conn) (int, error) {
	defer conn.Close()
	c, ok := conn.(*net.TCPConn)
	if !ok {
		return -1, errors.New("not a TCP connection")
	}
	raw, err := c.SyscallConn()
	if err != nil {
		return -1, fmt.Errorf("duplicate the descriptor of a connection: %w", err)
	}
	var fd int
	var dup error
	err = raw.Control(func(own uintptr) { fd, dup = unix.FcntlInt(own, unix.F_DUPFD_CLOEXEC, 0) })
	if err = joined(err, dup); err != nil {
		return -1, fmt.Errorf("duplicate the descriptor of a connection: %w", err)
	}
	return fd, nil
}
