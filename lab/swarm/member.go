// SPDX-License-Identifier: Apache-2.0

package swarm

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Member is a minimal collector. It binds its ports for all addresses, accepts connections and reads.
type Member struct {
	Slot     int    `json:"slot"`
	TCP, UDP uint16 // ports
	// Plain members do not set SO_REUSEPORT.
	Plain bool `json:"plain"`
	// Process is the number of BMP messages that the member processes per second. Messages that it has read and not yet
	// processed wait in its memory. 0: no limit.
	Process float64 `json:"process"`
	// Resets records a connection as closed when the kernel sends its RST: the kernel sends it before it closes the connection (tcp_abort),
	// and the device receives it later. It needs CAP_NET_RAW.
	Resets bool `json:"resets,omitempty"`
	// Pause is the time for which the member accepts no connection.
	Pause time.Duration `json:"pause"`
}

// MemberState is the answer of a member to each line on its standard input.
type MemberState struct {
	Messages  uint64 `json:"messages"`   // BMP messages processed
	QueuePeak int    `json:"queue_peak"` // most bytes that waited to be processed
	Queue     int    `json:"queue"`      // bytes that wait
}

// receiveBuffer is the size of the UDP receive buffer in bytes. A burst must not be lost while the member does not run.
const receiveBuffer = 8 << 20

type collector struct {
	Member
	records recorder

	mu    sync.Mutex
	state MemberState
	known map[connectionKey]bool // connections that the member has accepted, also those whose RST is read late
	queue []message
	fresh sync.Cond // a message was added to the queue
}

// connectionKey names a connection by its device and the port of the device.
type connectionKey struct {
	device int
	port   uint16
}

// message is a BMP message of a session.
type message struct {
	session *collected
	bytes   []byte
}

// collected is a session at a member.
type collected struct {
	session
	port uint16
}

func (m *Member) run(records recorder) error {
	c := &collector{Member: *m, records: records, known: map[connectionKey]bool{}}
	c.fresh.L = &c.mu
	l, p, err := c.listen()
	if err != nil {
		return err
	}
	raw, err := p.SyscallConn()
	if err != nil {
		return fmt.Errorf("open UDP port: %w", err)
	}
	answers := json.NewEncoder(os.Stdout)
	if err := answers.Encode(MemberState{}); err != nil {
		return err
	}
	failed := make(chan error, 4)
	if m.Resets {
		packets, err := openResets()
		if err != nil {
			return err
		}
		go func() { failed <- watchResets(packets, records, c.accepted) }()
	}
	go func() { failed <- c.receive(raw) }()
	go func() {
		time.Sleep(c.Pause)
		failed <- c.accept(l, failed)
	}()
	if c.Process > 0 {
		go func() { failed <- c.process() }()
	}
	asked := make(chan bool)
	go func() {
		for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
			asked <- true
		}
		close(asked)
	}()
	for {
		select {
		case err := <-failed:
			return err
		case _, more := <-asked:
			if !more {
				return nil
			}
		}
		c.mu.Lock()
		state := c.state
		c.mu.Unlock()
		if err := answers.Encode(state); err != nil {
			return err
		}
	}
}

// bindTimeout is the time for which a member without SO_REUSEPORT waits for the ports of its predecessor.
const bindTimeout = 10 * time.Second

// listen opens the ports.
func (c *collector) listen() (l *net.TCPListener, p *net.UDPConn, err error) {
	config := net.ListenConfig{Control: c.options}
	config.SetMultipathTCP(false)
	for deadline := time.Now().Add(bindTimeout); ; time.Sleep(5 * time.Millisecond) {
		if l == nil {
			var listener net.Listener
			if listener, err = config.Listen(context.Background(), "tcp", fmt.Sprintf("[::]:%d", c.TCP)); err == nil {
				l = listener.(*net.TCPListener)
			}
		}
		if err == nil {
			var socket net.PacketConn
			if socket, err = config.ListenPacket(context.Background(), "udp", fmt.Sprintf("[::]:%d", c.UDP)); err == nil {
				return l, socket.(*net.UDPConn), nil
			}
		}
		if !c.Plain || !errors.Is(err, unix.EADDRINUSE) || time.Now().After(deadline) {
			return nil, nil, fmt.Errorf("open ports: %w", err)
		}
	}
}

// options sets the options of a listener before it is bound.
func (c *collector) options(network, _ string, raw syscall.RawConn) error {
	var err error
	set := func(fd uintptr) {
		for _, o := range []struct {
			level, option, value int
			wanted               bool
		}{
			{unix.SOL_SOCKET, unix.SO_REUSEPORT, 1, !c.Plain},
			{unix.SOL_SOCKET, unix.SO_TIMESTAMPNS, 1, network == "udp6"},
			{unix.SOL_SOCKET, unix.SO_RCVBUF, receiveBuffer, network == "udp6"},
		} {
			if err == nil && o.wanted {
				err = os.NewSyscallError("setsockopt", unix.SetsockoptInt(int(fd), o.level, o.option, o.value))
			}
		}
		if network == "udp6" {
			_ = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, receiveBuffer) // needs CAP_NET_ADMIN
		}
	}
	return errors.Join(raw.Control(set), err)
}

// receive reads datagrams.
func (c *collector) receive(raw syscall.RawConn) error {
	b, control, known := make([]byte, 2048), make([]byte, 128), knowledge{}
	records := make([]Record, 0, 64)
	var failed error
	err := raw.Read(func(fd uintptr) bool {
		// Reads until the socket is empty, then waits.
		for {
			n, controlLen, _, from, err := unix.Recvmsg(int(fd), b, control, unix.MSG_DONTWAIT)
			if errors.Is(err, unix.EINTR) {
				continue
			}
			if err == nil {
				var r Record
				if r, err = datagram(known, b[:n], control[:controlLen], from); err == nil && r.Kind != 0 {
					records = append(records, r)
				}
			}
			if err != nil || len(records) == cap(records) {
				if len(records) > 0 {
					if failed = c.records.note(records...); failed != nil {
						return true
					}
				}
				records = records[:0]
			}
			if errors.Is(err, unix.EAGAIN) {
				return false
			}
			if err != nil {
				failed = fmt.Errorf("receive datagrams: %w", err)
				return true
			}
		}
	})
	return errors.Join(err, failed)
}

// datagram returns the record of a datagram, or a record without a kind for a datagram without data.
func datagram(known knowledge, b, control []byte, from unix.Sockaddr) (r Record, err error) {
	peer, ok := from.(*unix.SockaddrInet6)
	if !ok {
		return r, fmt.Errorf("unexpected datagram of %d bytes from %v", len(b), from)
	}
	source := netip.AddrPortFrom(netip.AddrFrom16(peer.Addr), uint16(peer.Port))
	device, ok := Device(source.Addr())
	if !ok {
		return r, fmt.Errorf("unexpected datagram from %v", source)
	}
	data, decodable, err := known.message(source, b)
	if err != nil || !data {
		return r, err
	}
	r = Record{Device: uint32(device), Value: binary.BigEndian.Uint32(b[ipfixSequenceAt:]), Port: source.Port(), Kind: Datagram}
	if !decodable {
		r.Kind = Undecodable
	}
	r.At, err = received(control)
	return r, err
}

// received returns the time of SO_TIMESTAMPNS, in CLOCK_MONOTONIC.
func received(control []byte) (time.Duration, error) {
	messages, err := unix.ParseSocketControlMessage(control)
	if err != nil {
		return 0, fmt.Errorf("read timestamp: %w", err)
	}
	for _, m := range messages {
		if m.Header.Level != unix.SOL_SOCKET || m.Header.Type != unix.SCM_TIMESTAMPNS || len(m.Data) < int(unsafe.Sizeof(unix.Timespec{})) {
			continue
		}
		stamp := *(*unix.Timespec)(unsafe.Pointer(&m.Data[0]))
		var wall unix.Timespec
		_ = unix.ClockGettime(unix.CLOCK_REALTIME, &wall)
		return Now() - time.Duration(wall.Nano()-stamp.Nano()), nil
	}
	return 0, errors.New("read timestamp: the kernel gave none")
}

// accept accepts connections and reads each in a goroutine.
func (c *collector) accept(l *net.TCPListener, failed chan<- error) error {
	for {
		conn, err := l.AcceptTCP()
		if errors.Is(err, unix.ECONNABORTED) {
			continue
		}
		if err != nil {
			return fmt.Errorf("accept: %w", err)
		}
		at := Now()
		peer := conn.RemoteAddr().(*net.TCPAddr).AddrPort()
		device, ok := Device(peer.Addr())
		if !ok {
			return fmt.Errorf("accept: unexpected connection from %v", peer)
		}
		s := &collected{session{device: device}, peer.Port()}
		c.mu.Lock()
		c.known[connectionKey{device, s.port}] = true
		c.mu.Unlock()
		if err := c.records.note(Record{At: at, Device: uint32(device), Port: s.port, Kind: Accepted}); err != nil {
			return err
		}
		go func() {
			defer conn.Close()
			if err := c.read(conn, s); err != nil {
				failed <- err
			}
		}()
	}
}

// stampedReader records the time at which its last Read has returned. A process that does not run for a while has read
// data, as the kernel shows, long before it has processed them.
type stampedReader struct {
	io.Reader
	at time.Duration
}

// read reads a connection until it is closed.
func (c *collector) read(conn net.Conn, s *collected) error {
	stamped := &stampedReader{Reader: conn}
	in := bufio.NewReaderSize(stamped, 64<<10)
	for {
		b, err := readBMP(in)
		if err != nil {
			return c.records.note(Record{At: Now(), Device: uint32(s.device), Value: errno(err), Port: s.port, Kind: Closed})
		}
		if c.Process == 0 {
			if err := c.handle(message{s, b}, stamped.at); err != nil {
				return err
			}
			continue
		}
		c.mu.Lock()
		c.queue = append(c.queue, message{s, b})
		c.state.Queue += len(b)
		c.state.QueuePeak = max(c.state.QueuePeak, c.state.Queue)
		c.fresh.Signal()
		c.mu.Unlock()
	}
}

// accepted reports whether the member has accepted a connection.
func (c *collector) accepted(device int, port uint16) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.known[connectionKey{device, port}]
}

func (r *stampedReader) Read(p []byte) (int, error) {
	n, err := r.Reader.Read(p)
	r.at = Now()
	return n, err
}

func errno(err error) uint32 {
	var number unix.Errno
	errors.As(err, &number)
	return uint32(number)
}

// process processes the messages of the queue at the limited rate.
func (c *collector) process() error {
	const pause = 2 * time.Millisecond
	share := max(1, int(c.Process*pause.Seconds()))
	for {
		c.mu.Lock()
		for len(c.queue) == 0 {
			c.fresh.Wait()
		}
		n := min(share, len(c.queue))
		batch := c.queue[:n]
		c.queue = c.queue[n:]
		for _, m := range batch {
			c.state.Queue -= len(m.bytes)
		}
		c.mu.Unlock()
		for i, m := range batch {
			if err := c.handle(m, Now()); err != nil {
				return err
			}
			batch[i] = message{} // the queue's array must not keep processed messages
		}
		time.Sleep(pause)
	}
}

// handle processes a message. at is the time of the read, or with Process that of the processing.
func (c *collector) handle(m message, at time.Duration) error {
	dumped, err := m.session.next(m.bytes)
	if err == nil && dumped {
		err = c.records.note(Record{At: at, Device: uint32(m.session.device), Value: m.session.routes, Port: m.session.port, Kind: Dumped})
	}
	c.mu.Lock()
	c.state.Messages++
	c.mu.Unlock()
	return err
}
