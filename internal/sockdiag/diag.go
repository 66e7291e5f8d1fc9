// SPDX-License-Identifier: Apache-2.0

// Package sockdiag reads the TCP and UDP sockets of a network namespace by sock_diag(7), without rights over their processes,
// and determines the bottleneck of each TCP connection.
package sockdiag

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"

	"sockeye/internal/nlattr"
	"sockeye/internal/sysctl"
)

// Conn is a sock_diag connection for one network namespace. It is not safe for concurrent use.
type Conn struct {
	fd     int
	seq    uint32
	buffer []byte
	names  map[string]string // names of congestion controls
	// Settings are the settings of the namespace at the time of Open.
	Settings Settings
}

// Settings are the socket defaults of a namespace in bytes; 0 if unknown.
type Settings struct {
	// WriteMemory is net.ipv4.tcp_wmem: minimum, default and maximum size of the send buffer.
	WriteMemory [3]int
	// NotSentLowat is net.ipv4.tcp_notsent_lowat.
	NotSentLowat int
}

// ErrUnsupported is returned on kernels without sock_diag for the protocol.
var ErrUnsupported = errors.New("this kernel does not support sock_diag for this protocol")

// ErrInterrupted is returned if the kernel could not return a consistent dump.
var ErrInterrupted = errors.New("the sockets changed during the dump")

// receiveTimeout is the timeout of a reply, which the kernel computes synchronously.
const receiveTimeout = 30 // seconds

// Open opens sock_diag in the network namespace of the calling thread. The Conn remains in this namespace.
func Open() (*Conn, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_SOCK_DIAG)
	if errors.Is(err, unix.EPROTONOSUPPORT) || errors.Is(err, unix.EAFNOSUPPORT) {
		return nil, fmt.Errorf("open diag socket: %w", ErrUnsupported)
	}
	if err != nil {
		return nil, fmt.Errorf("open diag socket: %w", err)
	}
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: receiveTimeout}); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("open diag socket: %w", err)
	}
	// The kernel fills messages of at most 32 KiB (netlink_dump).
	return &Conn{fd: fd, buffer: make([]byte, 64<<10), names: make(map[string]string), Settings: readSettings()}, nil
}

// Close closes the socket.
func (c *Conn) Close() error { return unix.Close(c.fd) }

// readSettings reads the settings that are readable.
func readSettings() (s Settings) {
	for i, n := range sysctl.Numbers("net.ipv4.tcp_wmem") {
		if i < len(s.WriteMemory) {
			s.WriteMemory[i] = int(n)
		}
	}
	if lowat, ok := sysctl.Number("net.ipv4.tcp_notsent_lowat"); ok {
		s.NotSentLowat = int(lowat)
	}
	return s
}

// Query selects sockets.
type Query struct {
	// Protocol is unix.IPPROTO_TCP or IPPROTO_UDP; 0 is TCP. A UDP socket without a peer has the state Closed.
	Protocol uint8
	States   States
	// Ports of both ends; 0 matches any.
	LocalPort, RemotePort uint16
	// Options also requests Socket.Options.
	Options bool
	// WithoutInfo leaves Socket.Info out. For TCP_INFO, the kernel waits for the lock of the socket (tcp_get_info, net/ipv4/tcp.c),
	// which the owner of the socket can hold for as long as it wants.
	WithoutInfo bool
	// Storage is the descriptor of an sk_storage map whose values are returned in Socket.Storage; 0 for none. It
	// needs CAP_BPF and Linux 5.7.
	Storage int
}

// mostTries is the maximum number of attempts of an interrupted dump.
const mostTries = 3

// States is a set of TCP states: bit 1 is TCP_ESTABLISHED, and so on.
type States uint32

// Dump visits the sockets of both families. It calls begin before each attempt; a new attempt replaces the results of
// the previous one. The socket is valid until visit returns. Sockets opened or closed during the dump may be visited or
// not.
func (c *Conn) Dump(q Query, begin func(), visit func(*Socket)) error {
	var err error
	for range mostTries {
		begin()
		for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
			if err = c.dump(family, q, visit); err != nil {
				break
			}
		}
		if !errors.Is(err, ErrInterrupted) {
			break
		}
	}
	if err != nil {
		if q.Protocol == unix.IPPROTO_UDP {
			return fmt.Errorf("read UDP sockets: %w", err)
		}
		return fmt.Errorf("read TCP sockets: %w", err)
	}
	return nil
}

func (c *Conn) dump(family uint8, q Query, visit func(*Socket)) error {
	c.seq++
	if err := c.send(dumpRequest(c.seq, family, q)); err != nil {
		return err
	}
	interrupted := false
	var s Socket
	for {
		n, flags, err := c.receive()
		if err != nil {
			return err
		}
		if flags&unix.MSG_TRUNC != 0 {
			return errors.New("reply exceeds the maximum size")
		}
		done, changed, err := c.messages(c.buffer[:n], &s, visit)
		interrupted = interrupted || changed
		switch {
		case err != nil:
			return err
		case done && interrupted:
			return ErrInterrupted
		case done:
			return nil
		}
	}
}

// dumpRequest encodes a request for all sockets of a family.
func dumpRequest(seq uint32, family uint8, q Query) []byte {
	r := tcpRequest(seq, family, unix.NLM_F_DUMP)
	r.States = q.States
	if q.Protocol != 0 {
		r.Protocol = q.Protocol
	}
	r.Source, r.Destination = netip.AddrPortFrom(netip.Addr{}, q.LocalPort), netip.AddrPortFrom(netip.Addr{}, q.RemotePort)
	if q.Options {
		r.Attributes |= 1<<(attrTOS-1) | 1<<(attrTrafficClass-1)
	}
	if q.WithoutInfo {
		r.Attributes &^= 1 << (attrInfo - 1)
	}
	b := r.Append(nil)
	if q.Storage == 0 {
		return b
	}
	b = nlattr.Append(b, requestStorages, nlattr.Append(nil, requestStorageMap, binary.NativeEndian.AppendUint32(nil, uint32(q.Storage))))
	binary.NativeEndian.PutUint32(b, uint32(len(b)))
	return b
}

// Find returns the socket with two addresses of the same family, or nil. ifindex is the interface index for link-local
// addresses.
func (c *Conn) Find(local, remote netip.AddrPort, ifindex int) (*Socket, error) {
	c.seq++
	found, err := c.one(exact(c.seq, local, remote, ifindex))
	if err != nil {
		return nil, fmt.Errorf("look up socket %s to %s: %w", local, remote, err)
	}
	return found, nil
}

// Get returns what the kernel knows of a connection now, with TCP_INFO, or nil if the connection has ended. The cookie distinguishes
// the connection from a later one with the same addresses. For a connection that has ended, the kernel looks for a listening socket, too,
// and runs a program for sk_lookup (inet_diag_find_one_icsk, net/ipv4/inet_diag.c).
func (c *Conn) Get(s *Socket) (*Socket, error) {
	c.seq++
	r := tcpRequest(c.seq, s.Family, 0)
	r.States, r.Source, r.Destination, r.Interface, r.Cookie = ^States(0), s.Local, s.Remote, s.Interface, s.Cookie
	found, err := c.one(r.Append(nil))
	if errors.Is(err, unix.ESTALE) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("look up socket %s to %s: %w", s.Local, s.Remote, err)
	}
	return found, nil
}

// one sends a request for one socket, and returns the socket, or nil if there is none.
func (c *Conn) one(request []byte) (*Socket, error) {
	if err := c.send(request); err != nil {
		return nil, err
	}
	var s Socket
	for seen, done := false, false; !seen; {
		n, _, err := c.receive()
		if err == nil {
			done, _, err = c.messages(c.buffer[:n], &s, func(*Socket) { seen = true })
		}
		if errors.Is(err, ErrUnsupported) || err == nil && done { // the kernel returns the same error for both
			return nil, nil
		}
		if err != nil {
			return nil, err
		}
	}
	return &s, nil
}

// exact encodes a request for one socket.
func exact(seq uint32, local, remote netip.AddrPort, ifindex int) []byte {
	family := uint8(unix.AF_INET)
	if local.Addr().Is6() {
		family = unix.AF_INET6
	}
	r := tcpRequest(seq, family, 0)
	r.States, r.Source, r.Destination, r.Cookie = ^States(0), local, remote, AnyCookie
	if local.Addr().IsLinkLocalUnicast() || remote.Addr().IsLinkLocalUnicast() {
		r.Interface = uint32(ifindex)
	}
	return r.Append(nil)
}

// tcpRequest returns a request for TCP sockets with the attributes of Socket.
func tcpRequest(seq uint32, family uint8, flags uint16) Request {
	return Request{
		Type: unix.SOCK_DIAG_BY_FAMILY, Flags: flags, Sequence: seq, Family: family, Protocol: unix.IPPROTO_TCP,
		Attributes: 1<<(attrInfo-1) | 1<<(attrCongestion-1) | 1<<(attrMemory-1),
	}
}

func (c *Conn) send(message []byte) error {
	for {
		_, err := unix.Write(c.fd, message) // to the kernel
		if !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// receive receives a datagram of the kernel. A process with CAP_NET_ADMIN in the network namespace can send some, too (netlink_sendmsg).
func (c *Conn) receive() (n, flags int, err error) {
	for {
		var from unix.Sockaddr
		n, _, flags, from, err = unix.Recvmsg(c.fd, c.buffer, nil, 0)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if sender, ok := from.(*unix.SockaddrNetlink); err != nil || !ok || sender.Pid == 0 {
			return n, flags, err
		}
	}
}

// messages parses the messages of one receive. Remaining messages of an earlier request are skipped.
func (c *Conn) messages(b []byte, s *Socket, visit func(*Socket)) (done, interrupted bool, err error) {
	for len(b) >= HeaderSize {
		m, rest, err := NextMessage(b)
		if err != nil {
			return false, interrupted, err
		}
		b = rest
		if m.Sequence != c.seq {
			continue
		}
		interrupted = interrupted || m.Flags&unix.NLM_F_DUMP_INTR != 0
		switch m.Type {
		case unix.NLMSG_DONE, unix.NLMSG_ERROR:
			return true, interrupted, failure(&m)
		case unix.SOCK_DIAG_BY_FAMILY:
			if err := c.parse(m.Body, s); err != nil {
				return false, interrupted, err
			}
			visit(s)
		}
	}
	return false, interrupted, nil
}

// failure returns the error of a message that ends the reply, or nil.
func failure(m *Message) error {
	switch errno := m.Errno(); errno {
	case 0:
		return nil
	case unix.ENOENT:
		return ErrUnsupported
	default:
		return errno
	}
}

var stateNames = []string{"", "established", "syn-sent", "syn-recv", "fin-wait-1", "fin-wait-2", "time-wait",
	"closed", "close-wait", "last-ack", "listening", "closing"}

// StateNames returns the names of all states, as in ss(8).
func StateNames() []string { return stateNames[1:] }

// State is a TCP state; TCP_ESTABLISHED is 1.
type State uint8

// The states of net/tcp_states.h.
const (
	Established State = iota + 1
	SynSent
	SynRecv
	FinWait1
	FinWait2
	TimeWait
	Closed
	CloseWait
	LastAck
	Listening
	Closing
)

// String returns the name of the state, or its number.
func (s State) String() string {
	if s > 0 && int(s) < len(stateNames) {
		return stateNames[s]
	}
	return fmt.Sprintf("state %d", uint8(s))
}

// StateOf returns the state with the given name, or 0.
func StateOf(name string) State {
	for i, known := range stateNames {
		if i > 0 && known == name {
			return State(i)
		}
	}
	return 0
}

// With returns the set with a state added.
func (s States) With(state State) States { return s | 1<<state }

// Has returns whether a state is in the set.
func (s States) Has(state State) bool { return s&(1<<state) != 0 }

const (
	// AllStates has all states with a name.
	AllStates = States(1<<(Closing+1) - 2)
	// Connected has the states of a socket with a peer, without TIME_WAIT and SYN_RECV.
	Connected = AllStates &^ (1<<Listening | 1<<Closed | 1<<TimeWait | 1<<SynRecv)
	// Sending has the states in which a process can send.
	Sending = States(1<<Established | 1<<CloseWait)
)
