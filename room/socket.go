// SPDX-License-Identifier: Apache-2.0

//go:build linux

package room

import (
	"bytes"
	"fmt"
	"math"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// TCP states in which a socket accepts data (net/tcp_states.h).
const (
	established = 1
	closeWait   = 8
	open        = 0 // TCP_CA_Open: no SACK and no loss
)

// SK_MEMINFO_* of linux/sock_diag.h.
const (
	meminfoSndbuf     = 3
	meminfoWmemQueued = 5
	meminfoVars       = 9
)

// defaultLowat is net.ipv4.tcp_notsent_lowat of the network namespace of the first caller,
// in bytes; 0 if the file cannot be read.
var defaultLowat = sync.OnceValue(func() int {
	text, err := os.ReadFile("/proc/sys/net/ipv4/tcp_notsent_lowat")
	if err != nil {
		return 0
	}
	v, err := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 32)
	if err != nil {
		return 0
	}
	return int(v)
})

// Prepare reads what ReadSnapshot reads from files, once: net.ipv4.tcp_notsent_lowat of the network namespace of the calling
// thread. A program that gives up its access to files calls Prepare before.
func Prepare() { defaultLowat() }

// ReadSnapshotConn is ReadSnapshot for a connection of package net, or for any other value
// with a descriptor.
func ReadSnapshotConn(c syscall.Conn) (Snapshot, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return Snapshot{}, fmt.Errorf("get descriptor: %w", err)
	}
	return ReadSnapshotRaw(raw)
}

// ReadSnapshotRaw is ReadSnapshot for a descriptor of the runtime's poller.
func ReadSnapshotRaw(raw syscall.RawConn) (s Snapshot, err error) {
	err = control(raw, func(fd int) error {
		s, err = ReadSnapshot(fd)
		return err
	})
	return s, err
}

// ReadSnapshot reads the state of a TCP socket by four to six system calls. For a closed
// or listening socket, it only sets Closed and the fields from TCP_INFO. The error wraps
// the errno: ENOTSOCK, EOPNOTSUPP or ENOPROTOOPT if the descriptor is not a TCP socket. An
// MPTCP socket is not a TCP socket.
func ReadSnapshot(fd int) (Snapshot, error) {
	var s Snapshot
	var info unix.TCPInfo
	if _, errno := getsockopt(fd, unix.IPPROTO_TCP, unix.TCP_INFO, &info); errno != 0 {
		return s, fmt.Errorf("read TCP_INFO: %w", errno)
	}
	s = FromInfo(&info, 0, 0, 0)
	if s.Closed {
		return s, nil
	}
	var err error
	if s.NotSentLowat, err = lowat(fd); err != nil {
		return s, err
	}
	if err := s.memory(fd); err != nil {
		return s, err
	}
	var payload int32
	if _, _, errno := unix.RawSyscall(unix.SYS_IOCTL, uintptr(fd), unix.TIOCOUTQ, uintptr(unsafe.Pointer(&payload))); errno != 0 {
		return s, fmt.Errorf("read SIOCOUTQ: %w", errno)
	}
	s.Payload = int(payload)
	if s.Guessed {
		s.boundQueued()
	}
	return s, nil
}

// FromInfo returns a Snapshot of values that the caller has read: TCP_INFO and, from
// SO_MEMINFO or sock_diag(7), the send buffer, the memory of the send queue and its
// payload (SIOCOUTQ), in bytes. It does not set NotSentLowat.
func FromInfo(info *unix.TCPInfo, sendBuffer, queued, payload int) Snapshot {
	s := Snapshot{
		SendBuffer: sendBuffer, Queued: queued, Payload: payload,
		MSS: int(info.Snd_mss), SendWindow: int(info.Snd_wnd), Unsent: int(info.Notsent_bytes),
		Burst: burst(info), Closed: info.State != established && info.State != closeWait,
	}
	s.Recovering = info.Ca_state != open || info.Sacked > 0
	flying := int(info.Unacked+info.Retrans) - int(info.Sacked+info.Lost)
	s.Quota, s.Flying = max(int(info.Snd_cwnd)-flying, 0), max(flying, 0)
	s.Sendable = s.Quota * s.MSS
	if s.SendWindow > 0 {
		s.Sendable = min(s.Sendable, max(s.SendWindow-flying*s.MSS, 0))
	}
	return s
}

// burst computes the size of a burst in bytes like tcp_tso_autosize and tcp_cwnd_test,
// with the default pacing shift (10) and the default net.ipv4.tcp_tso_rtt_log (9).
func burst(info *unix.TCPInfo) int {
	bytes := info.Pacing_rate >> 10
	if r := info.Min_rtt >> 9; r < 32 {
		bytes += legacyGSO >> r
	}
	mss := uint64(info.Snd_mss)
	bytes = min(bytes, legacyGSO, uint64(max(info.Snd_cwnd/2, 1))*mss)
	return int(bytes - bytes%max(mss, 1))
}

// memory reads the send buffer and the memory of the send queue. The kernel reports
// sk_sndbuf, which is twice the value set by SO_SNDBUF.
func (s *Snapshot) memory(fd int) error {
	var values [meminfoVars]uint32
	size, errno := getsockopt(fd, unix.SOL_SOCKET, unix.SO_MEMINFO, &values)
	switch {
	case errno == unix.ENOPROTOOPT, errno == 0 && size < (meminfoWmemQueued+1)*4:
		s.Guessed = true
		var err error
		if s.SendBuffer, err = unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF); err != nil {
			return fmt.Errorf("read SO_SNDBUF: %w", err)
		}
		return nil
	case errno != 0:
		return fmt.Errorf("read SO_MEMINFO: %w", errno)
	}
	s.SendBuffer, s.Queued = int(values[meminfoSndbuf]), int(values[meminfoWmemQueued])
	return nil
}

// mostOverhead is an upper bound of Kernel.Overhead on any kernel, in bytes.
const mostOverhead = 1280

// boundQueued sets Queued on kernels without SO_MEMINFO: in the worst case, each segment
// is a separate packet.
func (s *Snapshot) boundQueued() {
	mss := max(s.MSS, 1)
	s.Queued = s.Payload + (s.Payload+mss-1)/mss*mostOverhead
}

// lowat returns the TCP_NOTSENT_LOWAT in force, in bytes.
func lowat(fd int) (int, error) {
	var v uint32
	if _, errno := getsockopt(fd, unix.IPPROTO_TCP, unix.TCP_NOTSENT_LOWAT, &v); errno != 0 {
		return 0, fmt.Errorf("read TCP_NOTSENT_LOWAT: %w", errno)
	}
	if v == 0 {
		return defaultLowat(), nil
	}
	return int(v), nil
}

// PacedConn is Paced for a connection of package net, or for any other value with a
// descriptor.
func PacedConn(c syscall.Conn) (paced bool, err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return false, fmt.Errorf("get descriptor: %w", err)
	}
	err = control(raw, func(fd int) error {
		paced, err = Paced(fd)
		return err
	})
	return paced, err
}

// Paced returns whether TCP itself paces a socket (SK_PACING_NEEDED): with any version of
// bbr, and if SO_MAX_PACING_RATE is set. The result is valid until the congestion control
// or the rate changes. The error wraps the errno.
func Paced(fd int) (bool, error) {
	rate, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MAX_PACING_RATE)
	if err != nil {
		return false, fmt.Errorf("read SO_MAX_PACING_RATE: %w", err)
	}
	if uint32(rate) != math.MaxUint32 {
		return true, nil
	}
	var name [16]byte // TCP_CA_NAME_MAX
	if _, errno := getsockopt(fd, unix.IPPROTO_TCP, unix.TCP_CONGESTION, &name); errno != 0 {
		return false, fmt.Errorf("read TCP_CONGESTION: %w", errno)
	}
	return bytes.HasPrefix(name[:], []byte("bbr")), nil
}

// getsockopt calls getsockopt(2), which does not block, and returns the size of the result in bytes. A raw system call does not
// release the Go runtime's processor, and does not wake the runtime's monitor (sysmon).
func getsockopt[T any](fd, level, name int, value *T) (size uint32, errno syscall.Errno) {
	size = uint32(unsafe.Sizeof(*value))
	_, _, errno = unix.RawSyscall6(unix.SYS_GETSOCKOPT, uintptr(fd), uintptr(level), uintptr(name),
		uintptr(unsafe.Pointer(value)), uintptr(unsafe.Pointer(&size)), 0)
	return size, errno
}

// ArmConn is Arm for a connection of package net, or for any other value with a
// descriptor.
func ArmConn(c syscall.Conn) (writable bool, err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return false, fmt.Errorf("get descriptor: %w", err)
	}
	return ArmRaw(raw)
}

// ArmRaw is Arm for a descriptor of the runtime's poller.
func ArmRaw(raw syscall.RawConn) (writable bool, err error) {
	err = control(raw, func(fd int) error {
		writable, err = Arm(fd)
		return err
	})
	return writable, err
}

// Arm makes the kernel grow the send buffer if the connection can use more
// (tcp_new_space). The kernel only grows it for a writer that waits for space; poll(2)
// with a timeout of 0 makes the caller such a writer, in about 150 ns and without a failed
// send. Arm returns whether the socket is writable.
//
// A writable socket is not armed: the kernel reports no event for space that became free
// after the Snapshot. In this case, read another Snapshot.
func Arm(fd int) (writable bool, err error) {
	p := unix.PollFd{Fd: int32(fd), Events: unix.POLLOUT}
	var now unix.Timespec
	_, _, errno := unix.RawSyscall6(unix.SYS_PPOLL, uintptr(unsafe.Pointer(&p)), 1, uintptr(unsafe.Pointer(&now)), 0, 0, 0)
	if errno != 0 && errno != unix.EINTR {
		return false, fmt.Errorf("poll: %w", errno)
	}
	if p.Revents&unix.POLLNVAL != 0 {
		return false, fmt.Errorf("poll: %w", unix.EBADF)
	}
	return p.Revents&unix.POLLOUT != 0, nil
}

func control(raw syscall.RawConn, f func(fd int) error) error {
	var inner error
	if err := raw.Control(func(fd uintptr) { inner = f(int(fd)) }); err != nil {
		return fmt.Errorf("use descriptor: %w", err)
	}
	return inner
}
