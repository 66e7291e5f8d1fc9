// SPDX-License-Identifier: Apache-2.0

package rooms

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"unsafe"

	"golang.org/x/sys/unix"

	"sockeye/internal/bpf"
	"sockeye/internal/config"
	"sockeye/internal/fault"
	"sockeye/internal/netns"
	"sockeye/internal/sockaddr"
	"sockeye/internal/steer/keeper"
	"sockeye/internal/steer/spoof"
)

// OpenSocket opens the waiting room of a listener with steering by sk_lookup.
func (r *Rooms) OpenSocket(row int) (fd int, err error) {
	l := r.Rows[row]
	filter := dropSYN
	if l.Protocol == unix.IPPROTO_UDP {
		filter = onlyPort(l.Address.Port())
	}
	err = netns.Do(r.SocketNetns(), func() error {
		fd, err = keeper.OpenAnywhere(l, func(fd int) error { return keeper.AttachFilter(fd, filter) })
		return err
	})
	return fd, err
}

// Prepare makes the keeper sockets waiting rooms, or ends that.
func (r *Rooms) Prepare() error {
	var errs []error
	if !r.Exist() {
		r.discardWaiting()
	}
	for row := range r.Rows {
		fd, open := r.KeeperSockets[row]
		if !open || !r.Exist() {
			if r.prepared[row] != nil && open {
				errs = append(errs, r.closeRoom(row, fd))
			}
			r.prepared[row] = nil
			if _, temporary := r.kept.temporary[row]; !temporary { // a member receives templates by that one
				errs = append(errs, r.Path.RemoveRoom(row))
			}
			continue
		}
		errs = append(errs, r.prepareRoom(row, fd))
	}
	return fault.Join(errs...)
}

// discardWaiting discards what waits under a policy that no longer has waiting rooms.
func (r *Rooms) discardWaiting() {
	before := r.countLost()
	if slices.ContainsFunc(r.prepared[:], func(p *prepared) bool { return p != nil }) {
		r.readyFilling()
	}
	r.emptyRooms()
	if lost := r.countLost() - before; lost > 0 {
		r.Log.Warn("the policy has no waiting room any more", "discarded", lost)
	}
	for slot := range r.Config.Slots {
		if r.filling[slot] == nil {
			r.markEmpty(slot)
		}
	}
}

// readyFilling makes the slots ready that are filling. Their members receive the rest as members of slots that are ready.
func (r *Rooms) readyFilling() {
	if len(r.filling) == 0 {
		return
	}
	ended := maps.Clone(r.filling)
	clear(r.filling)
	for slot, f := range ended {
		delete(r.vacated, slot)
		if err := r.SetReady(f.seat); err != nil {
			r.Log.Error("slot not ready", "slot", slot, "error", err)
			r.Actions.VacateSlot(slot, "socket closed")
		}
	}
	r.closeTemporaryRooms()
	if err := r.rotateRooms(); err != nil {
		r.Log.Error("waiting connections not released", "error", err)
	}
	r.ReplayMoved()
	if err := r.Actions.Advance(); err != nil {
		r.Log.Error("devices not moved", "error", err)
	}
	r.Actions.CheckSoon()
}

// closeRoom makes a waiting room a socket that only holds the port.
func (r *Rooms) closeRoom(row, fd int) error {
	if r.Listeners[row].Protocol == config.UDP {
		return errors.Join(keeper.RejectQueued(fd), unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, 0))
	}
	if r.acceptsWaiting() {
		return errors.Join(unix.Listen(fd, 1), keeper.RejectQueued(fd))
	}
	return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DETACH_FILTER, 0)
}

// IsPrepared reports whether the socket of a row is a waiting room.
func (r *Rooms) IsPrepared(row int) bool { return r.prepared[row] != nil }

func (r *Rooms) prepareRoom(row, fd int) error {
	cookie, err := socketCookie(fd)
	if err != nil {
		return err
	}
	want := prepared{cookie: cookie, room: r.Room(), slots: r.Config.Slots}
	if r.UsesLookup() && r.Listeners[row].Protocol == config.UDP {
		local, err := unix.Getsockname(fd)
		if err != nil {
			return fmt.Errorf("read the address of a waiting room: %w", err)
		}
		want.port = sockaddr.AddrPort(local).Port()
	}
	if is := r.prepared[row]; is == nil || *is != want {
		if r.Listeners[row].Protocol == config.TCP {
			err = r.prepareListener(fd)
		} else {
			err = prepareReceiver(fd, r.Rows[row], &want)
		}
		if err != nil {
			return fmt.Errorf("prepare the waiting room of %s: %w", r.Listeners[row], err)
		}
	}
	if registered, err := r.Path.RoomCookie(row); err != nil || registered != cookie {
		if err = errors.Join(err, r.Path.InsertRoom(row, fd, want.port)); err != nil {
			return err
		}
	}
	r.prepared[row] = &want
	return nil
}

func socketCookie(fd int) (uint64, error) {
	cookie, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_COOKIE)
	if err != nil {
		return 0, fmt.Errorf("read SO_COOKIE: %w", err)
	}
	return cookie, nil
}

// dropSYN is a socket filter that drops segments with the flag SYN, and passes others: peers of connections that no
// longer exist get a RST.
var dropSYN = []unix.SockFilter{
	{Code: unix.BPF_LD | unix.BPF_B | unix.BPF_ABS, K: 13}, // flags of the TCP header
	{Code: unix.BPF_JMP | unix.BPF_JSET | unix.BPF_K, K: 0x02, Jt: 0, Jf: 1},
	{Code: unix.BPF_RET | unix.BPF_K},
	{Code: unix.BPF_RET | unix.BPF_K, K: 0xffffffff},
}

// onlyPort returns a socket filter that drops datagrams to other ports: a room with sk_lookup has a port of its own, which
// other hosts can reach.
func onlyPort(port uint16) []unix.SockFilter {
	return []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_H | unix.BPF_ABS, K: 2}, // destination port of the UDP header
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: uint32(port), Jt: 0, Jf: 1},
		{Code: unix.BPF_RET | unix.BPF_K, K: 0xffffffff},
		{Code: unix.BPF_RET | unix.BPF_K},
	}
}

// prepareListener makes a listening socket accept connections, or drop SYNs.
func (r *Rooms) prepareListener(fd int) error {
	if r.acceptsWaiting() {
		if err := unix.Listen(fd, r.Backlog()); err != nil {
			return fmt.Errorf("listen: %w", err)
		}
		return nil
	}
	return keeper.AttachFilter(fd, dropSYN)
}

// prepareReceiver sizes the receive buffer for the datagrams of all slots, and makes the kernel report the destination of
// each datagram. The kernel doubles the size for its own memory (socket(7)) and limits the memory of all UDP sockets
// (net.ipv4.udp_mem).
func prepareReceiver(fd int, l bpf.Listener, p *prepared) error {
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, int(p.size())); err != nil {
		return fmt.Errorf("set SO_RCVBUFFORCE: %w", err)
	}
	if err := unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_RECVORIGDSTADDR, 1); err != nil {
		return fmt.Errorf("set IP_RECVORIGDSTADDR: %w", err)
	}
	if !l.Address.Addr().Is4() {
		if err := unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_RECVORIGDSTADDR, 1); err != nil {
			return fmt.Errorf("set IPV6_RECVORIGDSTADDR: %w", err)
		}
	}
	return nil
}

// size returns the size of the waiting room of a UDP listener, in bytes: half of the kernel's memory for the datagrams.
func (p *prepared) size() int64 {
	return min(min(p.room.Bytes+int64(p.room.Datagrams)*overhead/2, 1<<29)*int64(p.slots), 1<<30-1)
}

// send sends a datagram from the address of its sender.
func (r *Rooms) send(d spoof.Datagram) error {
	if r.sender == nil {
		err := netns.Do(r.SocketNetns(), func() (err error) {
			r.sender, err = spoof.Open(bpf.ReplayTTL)
			return err
		})
		if err != nil {
			return err
		}
	}
	return r.sender.Send(d)
}

// receiveWaiting reads a datagram from the room of a row. ok is false if there is none.
func (r *Rooms) receiveWaiting(row int) (d waitingDatagram, ok bool) {
	fd, open := r.KeeperSockets[row]
	if !open {
		return d, false
	}
	if r.buffer == nil {
		r.buffer = make([]byte, 1<<16)
	}
	control := make([]byte, 128)
	for {
		n, nc, _, from, err := unix.Recvmsg(fd, r.buffer, control, unix.MSG_DONTWAIT)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return d, false
		}
		source, destination := sockaddr.AddrPort(from), originalDestination(control[:nc])
		if !source.IsValid() || !destination.IsValid() {
			continue
		}
		mapping := r.Mapping
		if r.unread != nil {
			mapping = r.unread
		}
		stored, _ := mapping.Slot(source.Addr())
		return waitingDatagram{spoof.Datagram{From: source, To: destination, Payload: slices.Clone(r.buffer[:n])}, row, stored}, true
	}
}

// originalDestination returns the destination in the control messages of a datagram (IP_ORIGDSTADDR, IPV6_ORIGDSTADDR).
func originalDestination(control []byte) netip.AddrPort {
	messages, err := unix.ParseSocketControlMessage(control)
	if err != nil {
		return netip.AddrPort{}
	}
	for i := range messages {
		if sa, err := unix.ParseOrigDstAddr(&messages[i]); err == nil {
			return sockaddr.AddrPort(sa)
		}
	}
	return netip.AddrPort{}
}

// Words of SO_MEMINFO (SK_MEMINFO_RMEM_ALLOC, SK_MEMINFO_RCVBUF, SK_MEMINFO_DROPS).
const (
	allocatedWord = 0
	limitWord     = 1
	droppedWord   = 8
)

// socketMemory returns SO_MEMINFO of a socket.
func socketMemory(fd int) (info [9]uint32, err error) {
	size := uint32(unsafe.Sizeof(info))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), unix.SOL_SOCKET, unix.SO_MEMINFO,
		uintptr(unsafe.Pointer(&info)), uintptr(unsafe.Pointer(&size)), 0)
	if errno != 0 {
		return info, fmt.Errorf("read SO_MEMINFO: %w", errno)
	}
	return info, nil
}

func (r *Rooms) countLost() (sum uint64) {
	for _, n := range r.lost {
		sum += n
	}
	return sum
}
