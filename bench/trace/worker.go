// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"runtime"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"sockeye/bench/harness"
)

// The two ends of a load are processes, which move to the cgroup of an arm before they open the sockets of a run,
// because a socket belongs to the cgroup in which it was opened. All arms use the same processes.

const role = "trace-worker"

// traceTask is a run of a load for one end. The listening end answers {} when it listens and when the connection is
// closed; the connecting end answers with its pieces.
type traceTask struct {
	CPU     int            `json:"cpu"` // CPU of the process
	Listen  netip.AddrPort `json:"listen,omitzero"`
	Target  netip.AddrPort `json:"target,omitzero"`
	Message int            `json:"message"` // bytes
	Answers bool           `json:"answers"` // each message is answered with one of the same size
	// Stamped makes the application request timestamps by SO_TIMESTAMPING, and read them.
	Stamped  bool          `json:"stamped"`
	Warmup   time.Duration `json:"warmup_ns"`
	Duration time.Duration `json:"duration_ns"`    // of all pieces together
	PIDs     []int         `json:"pids,omitempty"` // processes whose CPU time is measured
}

// piece is a part of a run. An interruption distorts only one piece.
type piece struct {
	Messages int64         `json:"messages"`
	Elapsed  time.Duration `json:"elapsed_ns"`
	CPU      time.Duration `json:"cpu_ns"` // of all PIDs
	Stamps   int64         `json:"stamps"` // timestamps that this end has read
}

const tracePieces = 5

// worker runs tasks from stdin, one JSON object per line. System calls keep the processor of the Go runtime: releasing
// it costs more than the measured difference.
func worker([]string) error {
	runtime.LockOSThread()
	lines, answers := json.NewDecoder(os.Stdin), json.NewEncoder(os.Stdout)
	for {
		var t traceTask
		if err := lines.Decode(&t); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return fmt.Errorf("read task: %w", err)
		}
		var set unix.CPUSet
		set.Set(t.CPU)
		if err := unix.SchedSetaffinity(0, &set); err != nil {
			return fmt.Errorf("bind to CPU %d: %w", t.CPU, err)
		}
		var answer any = struct{}{}
		var err error
		if t.Target.IsValid() {
			answer, err = t.drive()
		} else {
			err = t.serve(answers)
		}
		if err != nil {
			return err
		}
		if err := answers.Encode(answer); err != nil {
			return err
		}
	}
}

// serve accepts one connection and serves it.
func (t *traceTask) serve(answers *json.Encoder) error {
	listener, err := t.socket()
	if err != nil {
		return err
	}
	defer unix.Close(listener)
	if err := unix.SetsockoptInt(listener, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1); err != nil {
		return fmt.Errorf("set SO_REUSEADDR: %w", err)
	}
	if err := unix.Bind(listener, &unix.SockaddrInet4{Addr: t.Listen.Addr().As4(), Port: int(t.Listen.Port())}); err != nil {
		return fmt.Errorf("bind %s: %w", t.Listen, err)
	}
	if err := unix.Listen(listener, 1); err != nil {
		return fmt.Errorf("listen: %w", err)
	}
	if err := answers.Encode(struct{}{}); err != nil {
		return err
	}
	fd, _, err := unix.Accept4(listener, unix.SOCK_CLOEXEC)
	if err != nil {
		return fmt.Errorf("accept: %w", err)
	}
	defer unix.Close(fd)
	e, err := t.end(fd)
	for err == nil {
		if err = e.receive(); err == nil && t.Answers {
			err = e.send()
		}
	}
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}

// drive runs the connecting end, which measures the time.
func (t *traceTask) drive() ([]piece, error) {
	fd, err := t.socket()
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	if err := unix.Connect(fd, &unix.SockaddrInet4{Addr: t.Target.Addr().As4(), Port: int(t.Target.Port())}); err != nil {
		return nil, fmt.Errorf("connect to %s: %w", t.Target, err)
	}
	e, err := t.end(fd)
	if err != nil {
		return nil, err
	}
	if _, err := e.exchange(t, t.Warmup); err != nil {
		return nil, err
	}
	pieces := make([]piece, tracePieces)
	for i := range pieces {
		if pieces[i], err = e.exchange(t, t.Duration/tracePieces); err != nil {
			return nil, err
		}
	}
	return pieces, nil
}

// buffer is the requested size of the socket buffers, which the kernel doubles. The auto-tuned size differs between
// connections, and changes the cost of a message by 10 % because of cache misses.
const buffer = 200 << 10

func (t *traceTask) socket() (int, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("open socket: %w", err)
	}
	for _, option := range []int{unix.SO_SNDBUF, unix.SO_RCVBUF} {
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, option, buffer); err != nil {
			unix.Close(fd)
			return -1, fmt.Errorf("set buffers: %w", err)
		}
	}
	if err := unix.SetsockoptString(fd, unix.IPPROTO_TCP, unix.TCP_CONGESTION, "cubic"); err != nil {
		unix.Close(fd)
		return -1, fmt.Errorf("choose cubic: %w", err)
	}
	return fd, nil
}

// traceEnd is one end of a connection.
type traceEnd struct {
	fd      int
	buf     []byte // one message
	control []byte // nil without timestamps
	stamps  int64
}

func (t *traceTask) end(fd int) (*traceEnd, error) {
	e := &traceEnd{fd: fd, buf: make([]byte, t.Message)}
	if err := unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1); err != nil {
		return nil, fmt.Errorf("set TCP_NODELAY: %w", err)
	}
	if !t.Stamped {
		return e, nil
	}
	const stamps = unix.SOF_TIMESTAMPING_SOFTWARE | unix.SOF_TIMESTAMPING_TX_SCHED | unix.SOF_TIMESTAMPING_TX_SOFTWARE |
		unix.SOF_TIMESTAMPING_TX_ACK | unix.SOF_TIMESTAMPING_OPT_ID | unix.SOF_TIMESTAMPING_OPT_TSONLY
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TIMESTAMPING, stamps); err != nil {
		return nil, fmt.Errorf("set SO_TIMESTAMPING: %w", err)
	}
	e.control = make([]byte, 512)
	return e, nil
}

// exchange sends messages for a duration.
func (e *traceEnd) exchange(t *traceTask, d time.Duration) (p piece, err error) {
	stamps := e.stamps
	cpu, err := harness.CPUTime(t.PIDs...)
	if err != nil {
		return p, err
	}
	start := time.Now()
	for end := start.Add(d); time.Now().Before(end); p.Messages++ {
		if err := e.send(); err != nil {
			return p, err
		}
		if !t.Answers {
			continue
		}
		if err := e.receive(); err != nil {
			return p, err
		}
	}
	p.Elapsed, p.Stamps = time.Since(start), e.stamps-stamps
	after, err := harness.CPUTime(t.PIDs...)
	p.CPU = after - cpu
	return p, err
}

// send sends a message, and reads the available timestamps.
func (e *traceEnd) send() error {
	for done := 0; done < len(e.buf); {
		n, errno := rawIO(unix.SYS_WRITE, e.fd, e.buf[done:])
		if errno != 0 && errno != unix.EINTR {
			return fmt.Errorf("send: %w", errno)
		}
		done += n
	}
	for e.control != nil {
		h := unix.Msghdr{Control: &e.control[0]}
		h.SetControllen(len(e.control))
		_, _, errno := unix.RawSyscall(unix.SYS_RECVMSG, uintptr(e.fd), uintptr(unsafe.Pointer(&h)), unix.MSG_ERRQUEUE|unix.MSG_DONTWAIT)
		switch errno {
		case 0:
			e.stamps++
		case unix.EINTR:
		case unix.EAGAIN:
			return nil
		default:
			return fmt.Errorf("read timestamps: %w", errno)
		}
	}
	return nil
}

// receive receives a message. It returns io.EOF if the peer has closed.
func (e *traceEnd) receive() error {
	for done := 0; done < len(e.buf); {
		n, errno := rawIO(unix.SYS_READ, e.fd, e.buf[done:])
		switch {
		case errno == unix.EINTR:
		case errno != 0:
			return fmt.Errorf("receive: %w", errno)
		case n == 0:
			return io.EOF
		}
		done += n
	}
	return nil
}

func rawIO(call uintptr, fd int, b []byte) (int, unix.Errno) {
	n, _, errno := unix.RawSyscall(call, uintptr(fd), uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)))
	if errno != 0 {
		return 0, errno
	}
	return int(n), 0
}
