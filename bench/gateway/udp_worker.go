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
	"sockeye/internal/sockaddr"
)

// datagramRole is the role of a process that receives datagrams on a port, and sends datagrams.
const datagramRole = "gateway-datagrams"

// datagramBuffer is the requested receive buffer in bytes. Without CAP_NET_ADMIN, net.core.rmem_max limits it.
const datagramBuffer = 4 << 20

// A datagramTask with a target sends datagrams. A task with a run and no target starts counting the datagrams of this
// run and size. Any other task returns the count.
type datagramTask struct {
	Run    uint32         `json:"run,omitempty"`
	Bytes  int            `json:"bytes,omitempty"`
	Target netip.AddrPort `json:"target,omitzero"`
	Count  int            `json:"count,omitempty"`
	Rate   int            `json:"rate,omitempty"` // per second; 0: no limit
}

// datagramReady is the first answer of the process.
type datagramReady struct {
	Buffer int `json:"buffer"` // receive buffer of its socket in bytes, as the kernel counts them
}

// datagramCount answers tasks that start or return a count.
type datagramCount struct {
	Datagrams int `json:"datagrams"`
}

// datagramSent answers tasks with a target.
type datagramSent struct {
	Datagrams int           `json:"datagrams"`
	Elapsed   time.Duration `json:"elapsed_ns"`
}

// datagramReceiver counts the datagrams of a run.
type datagramReceiver struct {
	run, bytes atomic.Uint32
	count      atomic.Int64
}

// datagramWorker runs tasks until its stdin is closed.
func datagramWorker(args []string) error {
	fs := flag.NewFlagSet(datagramRole, flag.ContinueOnError)
	port := fs.Uint("port", 0, "port to receive on")
	if err := fs.Parse(args); err != nil {
		return err
	}
	// As in the receiver of bench steer: read blocks its thread in raw system calls, and garbage collection would wait
	// for it.
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

// isolateAsUser runs sockeye isolate without CAP_NET_ADMIN, like an ordinary user: receive buffers are limited to
// net.core.rmem_max. It returns only on failure.
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

// receiveBufferOf returns the SO_RCVBUF in bytes of the UDP socket of a process that is bound to a port.
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
			return 0, fmt.Errorf("duplicate descriptor of %d: %w", pid, err)
		}
		size, found := bufferOf(fd, port)
		unix.Close(fd)
		if found {
			return size, nil
		}
	}
	return 0, fmt.Errorf("find the socket of %d on port %d: no such socket", pid, port)
}

// bufferOf returns the receive buffer of a socket, and whether the socket is bound to the port.
func bufferOf(fd int, port uint16) (size int, found bool) {
	name, err := unix.Getsockname(fd)
	if err != nil {
		return 0, false
	}
	size, err = unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF)
	return size, err == nil && sockaddr.AddrPort(name).Port() == port
}

// read counts datagrams. It reads one datagram per call, as most collectors do.
func (r *datagramReceiver) read(fd int) {
	var b [2048]byte
	for {
		n, _, errno := unix.RawSyscall6(unix.SYS_RECVFROM, uintptr(fd), uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)), 0, 0, 0)
		if errno == 0 && uint32(n) == r.bytes.Load() && binary.BigEndian.Uint32(b[:]) == r.run.Load() {
			r.count.Add(1)
		}
	}
}

// datagramTick is the interval at which a sender sends the datagrams that are due.
const datagramTick = 500 * time.Microsecond

// send sends the datagrams of the task from a new socket, one per call.
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
			case 0, unix.ENOBUFS: // the kernel dropped it
				sent.Datagrams++
			case unix.EINTR:
			default:
				return sent, fmt.Errorf("send to %v: %w", t.Target, errno)
			}
		}
		if sent.Datagrams < t.Count {
			tick := unix.NsecToTimespec(int64(datagramTick))
			_ = unix.ClockNanosleep(unix.CLOCK_MONOTONIC, 0, &tick, nil) // an early wake-up is harmless: due is computed from the clock
		}
	}
	sent.Elapsed = time.Duration(monotonic() - start)
	return sent, nil
}
