// SPDX-License-Identifier: Apache-2.0

// Package capture reports the packets of one TCP connection or UDP socket, from BPF programs at the tracepoints of the kernel.
package capture

import (
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/cilium/ebpf/ringbuf"
	"golang.org/x/sys/unix"

	"sockeye/internal/bpf/load"
)

// Kinds and flags of Event (bpf/include/packets.h).
//
//revive:disable:exported
const (
	Queue      = uint8(tracePacketsPacketsKindPACKETS_QUEUE)
	Driver     = uint8(tracePacketsPacketsKindPACKETS_DRIVER)
	Retransmit = uint8(tracePacketsPacketsKindPACKETS_RETRANSMIT)
	Receive    = uint8(tracePacketsPacketsKindPACKETS_RECEIVE)
	State      = uint8(tracePacketsPacketsKindPACKETS_STATE)
	Drop       = uint8(tracePacketsPacketsKindPACKETS_DROP)
	Read       = uint8(tracePacketsPacketsKindPACKETS_READ)

	TCP   = uint8(tracePacketsPacketsFlagPACKETS_TCP)
	Inner = uint8(tracePacketsPacketsFlagPACKETS_INNER)
	Early = uint8(tracePacketsPacketsFlagPACKETS_EARLY)

	UDP      = uint8(tracePacketsPacketsFlagPACKETS_UDP)
	Fragment = uint8(tracePacketsPacketsFlagPACKETS_FRAGMENT)
	Inward   = uint8(tracePacketsPacketsFlagPACKETS_INWARD)
	Left     = uint8(tracePacketsPacketsFlagPACKETS_LEFT)

	Bytes = int(tracePacketsPacketsLimitPACKETS_BYTES)
)

//revive:enable:exported

// Header is the common part of all events.
type Header = tracePacketsPacketsEvent

// Event is an event of a connection or of one of its packets. Bytes are the first bytes of the packet from the
// network header; Queue, Receive, and Drop of a sent packet have them.
type Event struct {
	Header
	Bytes []byte
}

// Capture follows the packets of one socket. Nothing is pinned: the programs end with this process.
type Capture struct {
	missing []string
	stopped atomic.Bool
	wake    *os.File // ring buffer, for poll

	reading sync.Mutex
	reader  *ringbuf.Reader
	record  ringbuf.Record

	mu         sync.Mutex
	collection *ebpf.Collection
	links      []link.Link
	lost       uint64 // lost events, when the collection is closed
}

type tracepoint struct {
	program, tracepoint string
	needed              bool
}

// tracepoints of a TCP connection, in the order of attachment: the start of a packet's path is attached last, so that
// no later event is missed.
var tracepoints = []tracepoint{
	{"packets_state", "inet_sock_set_state", false},
	{"packets_state_2", "inet_sock_set_state", false},
	{"packets_early", "netif_receive_skb", false},
	{"packets_receive", "tcp_probe", false},
	{"packets_receive_2", "tcp_probe", false},
	{"packets_resend", "tcp_retransmit_skb", false},
	{"packets_resend_2", "tcp_retransmit_skb", false},
	{"packets_driver", "net_dev_start_xmit", true},
	{"packets_queue", "net_dev_queue", true},
}

// Open follows the connection with a SO_COOKIE, through a ring buffer of buffer bytes: a power of two, at
// least a page. It needs CAP_BPF and CAP_PERFMON.
//
// The error is a *load.BufferError for an invalid buffer, or wraps ebpf.ErrNotSupported if the kernel has no such
// tracepoints, no BTF, or forbids programs to read its memory.
func Open(cookie uint64, buffer int) (_ *Capture, err error) {
	if cookie == 0 {
		return nil, errors.New("follow packets: a socket has no cookie 0")
	}
	spec, err := loadTracePackets()
	if err != nil {
		return nil, err
	}
	return open(spec, tracepoints, "", cookie, buffer)
}

// open loads the programs, and attaches them to the tracepoints and to the directory of a cgroup, unless it is "".
func open(spec *ebpf.CollectionSpec, tracepoints []tracepoint, cgroup string, cookie uint64, buffer int) (_ *Capture, err error) {
	p := &Capture{}
	defer func() {
		if err != nil {
			p.Close()
		}
	}()
	events, err := load.NewRing(spec.Maps["events"], buffer)
	if err != nil {
		return nil, err
	}
	defer events.Close()
	if err := spec.Variables["cookie"].Set(cookie); err != nil {
		return nil, err
	}
	p.collection, err = load.Collection(spec, map[string]*ebpf.Map{"events": events})
	if load.LacksHelper(err) {
		return nil, fmt.Errorf("load programs for packets: %w: lockdown keeps the kernel's memory from programs: %w", ebpf.ErrNotSupported, err)
	}
	if err != nil {
		return nil, fmt.Errorf("load programs for packets: %w", err)
	}
	if err := p.openRing(events); err != nil {
		return nil, fmt.Errorf("open ring of packets: %w", err)
	}
	for _, t := range tracepoints {
		l, err := link.AttachRawTracepoint(link.RawTracepointOptions{
			Name: t.tracepoint, Program: p.collection.Programs[t.program],
		})
		switch {
		case err == nil:
			p.links = append(p.links, l)
		case !errors.Is(err, unix.ENOENT):
			return nil, fmt.Errorf("attach %s to tracepoint %s: %w", t.program, t.tracepoint, err)
		case t.needed:
			return nil, fmt.Errorf("attach %s: %w: the kernel has no tracepoint %s", t.program, ebpf.ErrNotSupported, t.tracepoint)
		default:
			p.missing = append(p.missing, t.tracepoint)
		}
	}
	if cgroup != "" {
		l, err := link.AttachCgroup(link.CgroupOptions{Path: cgroup, Attach: ebpf.AttachCGroupInetIngress, Program: p.collection.Programs["udp_arrive"]})
		if err != nil {
			return nil, fmt.Errorf("attach udp_arrive to cgroup %s: %w", cgroup, err)
		}
		p.links = append(p.links, l)
	}
	return p, nil
}

// openRing prepares to wait for events in the network poller instead of a blocking system call (see Events.Next).
func (p *Capture) openRing(events *ebpf.Map) (err error) {
	if p.reader, err = ringbuf.NewReader(events); err != nil {
		return err
	}
	p.reader.SetDeadline(time.Unix(1, 0))
	fd, err := unix.FcntlInt(uintptr(events.FD()), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return err
	}
	if err := unix.SetNonblock(fd, true); err != nil {
		unix.Close(fd)
		return err
	}
	p.wake = os.NewFile(uintptr(fd), "events")
	return nil
}

// Missing returns the tracepoints that the kernel lacks. tcp_probe reports received packets of established
// connections, netif_receive_skb those of closing connections, tcp_retransmit_skb the causes of retransmissions, and
// inet_sock_set_state the end of the connection.
func (p *Capture) Missing() []string { return slices.Clone(p.missing) }

// Read waits for the next event. At the deadline, Read calls Stop. After Stop, Read returns the remaining events and
// then io.EOF. After Close, the error is os.ErrClosed. The next Read overwrites e.Bytes.
func (p *Capture) Read(deadline time.Time, e *Event) error {
	p.reading.Lock()
	defer p.reading.Unlock()
	if err := p.next(deadline); err != nil {
		return err
	}
	raw := p.record.RawSample
	const size = int(unsafe.Sizeof(Header{}))
	if len(raw) < size {
		return fmt.Errorf("read packet: %d bytes, want %d", len(raw), size)
	}
	copy(unsafe.Slice((*byte)(unsafe.Pointer(&e.Header)), size), raw)
	e.Bytes = raw[size:min(len(raw), size+int(e.Captured))]
	return nil
}

func (p *Capture) next(deadline time.Time) error {
	for {
		if !time.Now().Before(deadline) {
			if err := p.Stop(); err != nil {
				return err
			}
		}
		stopped := p.stopped.Load()
		err := p.reader.ReadInto(&p.record)
		switch {
		case !errors.Is(err, os.ErrDeadlineExceeded):
			return err
		case stopped:
			return io.EOF
		}
		if err := p.wait(deadline); err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			return err
		}
	}
}

// wait waits for an event, the deadline or Stop.
func (p *Capture) wait(deadline time.Time) error {
	if err := p.wake.SetReadDeadline(deadline); err != nil {
		return fmt.Errorf("wait for packets: %w", err)
	}
	// Stop sets stopped first and the deadline afterwards.
	if p.stopped.Load() {
		return nil
	}
	conn, err := p.wake.SyscallConn()
	if err != nil {
		return err
	}
	return conn.Read(func(uintptr) bool { return p.reader.AvailableBytes() > 0 })
}

// Lost returns the number of events that were lost because the ring buffer was full.
func (p *Capture) Lost() (uint64, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.lostSoFar()
}

// Close stops the capture and ends Read. Lost still works.
func (p *Capture) Close() error {
	errs := []error{p.Stop()}
	p.reading.Lock()
	defer p.reading.Unlock()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.reader != nil {
		errs = append(errs, p.reader.Close())
	}
	if p.wake != nil {
		errs = append(errs, p.wake.Close())
		p.wake = nil
	}
	if p.collection != nil {
		_, err := p.lostSoFar()
		errs = append(errs, err)
		p.collection.Close()
		p.collection = nil
	}
	return errors.Join(errs...)
}

// Stop detaches the programs. It may be called from any goroutine, and more than once.
func (p *Capture) Stop() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	var errs []error
	for _, l := range slices.Backward(p.links) {
		errs = append(errs, l.Close())
	}
	p.links = nil
	p.stopped.Store(true)
	if p.wake != nil {
		if err := p.wake.SetReadDeadline(time.Unix(1, 0)); !errors.Is(err, os.ErrClosed) {
			errs = append(errs, err)
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("stop following packets: %w", err)
	}
	return nil
}

func (p *Capture) lostSoFar() (uint64, error) {
	if p.collection == nil {
		return p.lost, nil
	}
	if err := p.collection.Variables["lost"].Get(&p.lost); err != nil {
		return 0, fmt.Errorf("read lost events: %w", err)
	}
	return p.lost, nil
}
