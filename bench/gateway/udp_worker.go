// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/netip"
	"os"
	"runtime"
	"runtime/debug"
	"strconv"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"sockeye/internal/cli"
)

// datagramRole is a process that takes datagrams at a port, and sends them.
const datagramRole = "gateway-datagrams"

// datagramBuffer is what receivers ask for, in bytes, without any right to have more than
// net.core.rmem_max.
const datagramBuffer = 4 << 20

// A datagramTask with a target has datagrams sent, one with a run and no target begins to
// count those of this run and size, and any other asks how many came.
type datagramTask struct {
	Run    uint32         `json:"run,omitempty"`
	Bytes  int            `json:"bytes,omitempty"`
	Target netip.AddrPort `json:"target,omitzero"`
	Count  int            `json:"count,omitempty"`
	Rate   int            `json:"rate,omitempty"` // a second; 0: as fast as it goes
}

// datagramReady is what the process says when it is.
type datagramReady struct {
	Buffer int `json:"buffer"` // of its socket, bytes, as the kernel counts them
}

// datagramCount answers those that ask or begin to count.
type datagramCount struct {
	Datagrams int `json:"datagrams"`
}

// datagramSent answers those with a target.
type datagramSent struct {
	Datagrams int           `json:"datagrams"`
	Elapsed   time.Duration `json:"elapsed_ns"`
}

// datagramReceiver counts the datagrams of a run.
type datagramReceiver struct {
	run, bytes atomic.Uint32
	count      atomic.Int64
}

// datagramWorker does tasks until its stdin ends.
func datagramWorker(args []string) error {
	fs := flag.NewFlagSet(datagramRole, flag.ContinueOnError)
	port := fs.Uint("port", 0, "to receive at")
	if err := fs.Parse(args); err != nil {
		return err
	}
	// As in receiver: a loop keeps its thread in raw calls, for which garbage collection
	// would wait.
	debug.SetGCPercent(-1)
	runtime.GOMAXPROCS(4)
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open socket: %w", err)
	}
	var ready datagramReady
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, datagramBuffer); err != nil {
		return fmt.Errorf("set receive buffer: %w", err)
	}
	if ready.Buffer, err = unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF); err != nil {
		return fmt.Errorf("read receive buffer: %w", err)
	}
	if err := unix.Bind(fd, &unix.SockaddrInet4{Port: int(*port)}); err != nil {
		return fmt.Errorf("bind port %d: %w", *port, err)
	}
	var r datagramReceiver
	go r.read(fd)
	lines, answers := json.NewDecoder(os.Stdin), json.NewEncoder(os.Stdout)
	if err := answers.Encode(ready); err != nil {
		return err
	}
	for {
		var t datagramTask
		if err := lines.Decode(&t); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return fmt.Errorf("read task: %w", err)
		}
		var answer any
		switch {
		case t.Target.IsValid():
			sent, err := t.send()
			if err != nil {
				return err
			}
			answer = sent
		case t.Run != 0:
			r.run.Store(0)
			r.bytes.Store(uint32(t.Bytes))
			r.count.Store(0)
			r.run.Store(t.Run)
			answer = datagramCount{}
		default:
			answer = datagramCount{int(r.count.Load())}
		}
		if err := answers.Encode(answer); err != nil {
			return err
		}
	}
}

// isolateAsUser is sockeye isolate, without the capability to give sockets larger buffers
// than net.core.rmem_max, which an ordinary user has not. It does not return unless that fails.
func isolateAsUser([]string) error {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var caps [2]unix.CapUserData
	if err := unix.Capget(&header, &caps[0]); err != nil {
		return fmt.Errorf("read capabilities: %w", err)
	}
	caps[0].Effective &^= 1 << unix.CAP_NET_ADMIN
	caps[0].Permitted &^= 1 << unix.CAP_NET_ADMIN
	if _, _, errno := syscall.AllThreadsSyscall(unix.SYS_CAPSET, uintptr(unsafe.Pointer(&header)), uintptr(unsafe.Pointer(&caps[0])), 0); errno != 0 {
		return fmt.Errorf("drop CAP_NET_ADMIN: %w", errno)
	}
	return isolateAsItself(nil)
}

// isolateAsItself runs this program as sockeye. It does not return.
func isolateAsItself([]string) error {
	os.Exit(cli.Main(os.Args[1:], cli.Host()))
	return nil
}

// receiveBufferOf returns the receive buffer of the UDP socket of a process at a port, in bytes of SO_RCVBUF.
func receiveBufferOf(pid int, port uint16) (int, error) {
	process, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return 0, fmt.Errorf("open process %d: %w", pid, err)
	}
	defer unix.Close(process)
	list, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil {
		return 0, fmt.Errorf("list descriptors of %d: %w", pid, err)
	}
	for _, entry := range list {
		number, err := strconv.Atoi(entry.Name())
		if err != nil {
			continue
		}
		fd, err := unix.PidfdGetfd(process, number, 0)
		if err != nil {
			return 0, fmt.Errorf("take descriptor of %d: %w", pid, err)
		}
		size, found := bufferOf(fd, port)
		unix.Close(fd)
		if found {
			return size, nil
		}
	}
	return 0, fmt.Errorf("find the socket of %d at port %d: there is none", pid, port)
}

// bufferOf tells of what may be a socket of UDP at a port.
func bufferOf(fd int, port uint16) (size int, found bool) {
	name, err := unix.Getsockname(fd)
	if err != nil {
		return 0, false
	}
	var at int
	switch a := name.(type) {
	case *unix.SockaddrInet4:
		at = a.Port
	case *unix.SockaddrInet6:
		at = a.Port
	}
	size, err = unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF)
	return size, err == nil && at == int(port)
}

// read counts, one datagram a call, as most collectors read them.
func (r *datagramReceiver) read(fd int) {
	var b [2048]byte
	for {
		n, _, errno := unix.RawSyscall6(unix.SYS_RECVFROM, uintptr(fd), uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)), 0, 0, 0)
		if errno == 0 && uint32(n) == r.bytes.Load() && binary.BigEndian.Uint32(b[:]) == r.run.Load() {
			r.count.Add(1)
		}
	}
}

// datagramTick is how often a sender sends what is due at its rate.
const datagramTick = 500 * time.Microsecond

// send sends from a socket of its own, one datagram a call.
func (t *datagramTask) send() (sent datagramSent, err error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return sent, fmt.Errorf("open socket: %w", err)
	}
	defer unix.Close(fd)
	if err := unix.Connect(fd, &unix.SockaddrInet4{Port: int(t.Target.Port()), Addr: t.Target.Addr().As4()}); err != nil {
		return sent, fmt.Errorf("connect to %v: %w", t.Target, err)
	}
	b := make([]byte, t.Bytes)
	binary.BigEndian.PutUint32(b, t.Run)
	start := monotonic()
	for sent.Datagrams < t.Count {
		due := t.Count
		if t.Rate > 0 {
			due = min(due, int(float64(monotonic()-start)/1e9*float64(t.Rate))+1)
		}
		for sent.Datagrams < due {
			_, _, errno := unix.RawSyscall6(unix.SYS_SENDTO, uintptr(fd), uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)), unix.MSG_NOSIGNAL, 0, 0)
			switch errno {
			case 0, unix.ENOBUFS: // which is a drop
				sent.Datagrams++
			case unix.EINTR:
			default:
				return sent, fmt.Errorf("send to %v: %w", t.Target, errno)
			}
		}
		if sent.Datagrams < t.Count {
			tick := unix.NsecToTimespec(int64(datagramTick))
			_ = unix.ClockNanosleep(unix.CLOCK_MONOTONIC, 0, &tick, nil) // what is due is what counts
		}
	}
	sent.Elapsed = time.Duration(monotonic() - start)
	return sent, nil
}
