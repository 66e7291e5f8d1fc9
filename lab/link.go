// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Direction is one of the two directions of a link.
type Direction int

// Directions by the order of the namespaces in Connect.
const (
	AToB Direction = iota
	BToA
)

// LinkOptions configures each direction of a link.
type LinkOptions struct {
	Name  string        // of the interface on both sides; default: link0
	MTU   int           // 68 to 65535 bytes, for IPv6 at least 1280; default 1500
	Delay time.Duration // one way. A shorter delay does not reorder packets; see Reorder
	Rate  int64         // bits/s, counted in bytes of IP packets; 0: no limit
	// Limit is the size of the rate limiter's queue in bytes, including the packet that is being sent. Packets that
	// exceed the limit are dropped, except for the first packet on an idle link. Packets in transit do not count.
	// Default: 50 ms of the rate, at least 64 KiB.
	Limit int
	Loss  float64 // share of the packets that is lost at random, 0 to 1
	// Reorder is the share of packets, 0 to 1, that overtake packets in transit, at most 8. Without a delay or a rate,
	// no packets are in transit.
	Reorder float64
	Seed    uint64 // of the losses. With the same seed and loss, the same packets are lost, counted from the first packet
	// Offload passes GSO packets of up to 64 KB unsegmented, which increases the throughput. Loss, limit and counts
	// then apply to GSO packets. Without Offload, no packet exceeds the MTU.
	Offload bool
	// Drop is called for each IP packet first, and drops the packet by returning true. Each direction calls it from its
	// own goroutine. It must not retain or modify the packet, block, or call Set or Close. The transport checksum of
	// the packet is not filled in.
	Drop func(d Direction, packet []byte) bool
}

// DirectionCounts counts the packets of one direction. The packets in transit are Sent minus all other counts. A packet
// is counted as delivered shortly after the receiver has received it.
type DirectionCounts struct {
	Sent       uint64 // packets that entered
	Delivered  uint64 // packets
	Bytes      uint64 // of the delivered IP packets
	Lost       uint64 // packets lost at random
	Overflowed uint64 // packets dropped by Limit
	Dropped    uint64 // packets dropped by Drop
	Refused    uint64 // packets that the receiving interface refused, because it is down
}

// LinkCounts has the counts of both directions since the creation of the link.
type LinkCounts struct{ AToB, BToA DirectionCounts }

// Link is a link between two namespaces with a delay, a rate, a queue and losses. It forwards packets between two TUN
// interfaces in this process, so that it needs neither netem nor another qdisc. Its methods are safe for concurrent
// use.
//
// Packets are never delivered early. They are late by the wake-up time of the process: about 0.1 ms, or more if the
// process does not get CPU time. If the process is too slow, the sending interface drops packets and counts them as
// tx_dropped.
type Link struct {
	start   time.Time // of the link's clock
	options atomic.Pointer[LinkOptions]
	ways    [2]*way
	files   []*os.File
	ends    []*Namespace // that have an interface
	moving  sync.WaitGroup

	mu     sync.Mutex
	failed []error // of the goroutines
	close  func() error
}

// Connect creates a link between two namespaces of the lab, adds the addresses, and sets the interfaces up. The
// interfaces have no link-local address, so that the kernel sends no packets of its own. The lab closes the link.
func (l *Lab) Connect(a, b *Namespace, o LinkOptions, addrA, addrB []netip.Prefix) (_ *Link, err error) {
	if o.Name == "" {
		o.Name = "link0"
	}
	if o.MTU == 0 {
		o.MTU = 1500
	}
	defer func() {
		if err != nil {
			err = fmt.Errorf("connect %s and %s: %w", a.name, b.name, err)
		}
	}()
	if err := o.check(); err != nil {
		return nil, err
	}
	l.mu.Lock() // Close waits for the lock before it closes the namespaces
	defer l.mu.Unlock()
	if l.closed {
		return nil, errors.New("lab is closed")
	}
	k := &Link{start: time.Now()}
	k.options.Store(&o)
	k.close = sync.OnceValue(k.end)
	defer func() {
		if err != nil {
			err = errors.Join(err, k.Close())
		}
	}()
	var ends [2]*os.File
	for i, n := range []*Namespace{a, b} {
		if ends[i], err = n.openTUN(o); err != nil {
			return nil, err
		}
		k.files, k.ends = append(k.files, ends[i]), append(k.ends, n)
		if err := n.setTUN(o, [][]netip.Prefix{addrA, addrB}[i]); err != nil {
			return nil, err
		}
	}
	for i := range k.ways {
		if k.ways[i], err = newWay(k, Direction(i), ends[i], ends[1-i]); err != nil {
			return nil, err
		}
		k.files = append(k.files, k.ways[i].timer)
	}
	for _, w := range k.ways {
		k.move(w.read)
		k.move(w.deliver)
	}
	l.closers = append(l.closers, k.Close)
	return k, nil
}

// openTUN creates a TUN interface, which exists as long as the file is open.
func (n *Namespace) openTUN(o LinkOptions) (*os.File, error) {
	fd := -1
	err := n.Do(func() (err error) {
		if fd, err = unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_NONBLOCK|unix.O_CLOEXEC, 0); err != nil {
			return err
		}
		request, err := unix.NewIfreq(o.Name)
		if err != nil {
			return err
		}
		request.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI | unix.IFF_VNET_HDR)
		if err := unix.IoctlIfreq(fd, unix.TUNSETIFF, request); err != nil {
			return err
		}
		// struct virtio_net_hdr preserves the states "checksum not computed" and "checksum verified".
		offload := unix.TUN_F_CSUM
		if o.Offload {
			offload |= unix.TUN_F_TSO4 | unix.TUN_F_TSO6 | unix.TUN_F_TSO_ECN
		}
		if err := unix.IoctlSetInt(fd, unix.TUNSETOFFLOAD, offload); err != nil {
			return fmt.Errorf("set offload: %w", err)
		}
		// An interface with a link-local address sends router solicitations.
		return sysctl("ipv6/conf/"+o.Name+"/addr_gen_mode", "1")
	})
	if err != nil {
		if fd >= 0 {
			_ = unix.Close(fd)
		}
		return nil, fmt.Errorf("make tun %s in %s: %w", o.Name, n.name, err)
	}
	return os.NewFile(uintptr(fd), o.Name), nil
}

const (
	vnetHeader = 10 // bytes of struct virtio_net_hdr before each packet
	// tunQueue is the queue length of a TUN interface in packets. The default of 500 is less than a window of a fast
	// sender.
	tunQueue = 10000
	// maxOvertaken exceeds the three packets after which TCP declares a packet lost.
	maxOvertaken = 8
)

func (n *Namespace) setTUN(o LinkOptions, addresses []netip.Prefix) error {
	dev, err := n.nl.LinkByName(o.Name)
	if err == nil {
		err = n.nl.LinkSetMTU(dev, o.MTU)
	}
	if err == nil {
		err = n.nl.LinkSetTxQLen(dev, tunQueue)
	}
	if err != nil {
		return fmt.Errorf("set up %s in %s: %w", o.Name, n.name, err)
	}
	if err := n.up(o.Name); err != nil {
		return err
	}
	for _, a := range addresses {
		if err := n.AddAddress(o.Name, a); err != nil {
			return err
		}
	}
	return nil
}

// Options returns the current options with all defaults except that of Limit.
func (k *Link) Options() LinkOptions { return *k.options.Load() }

// Set changes Delay, Rate, Limit, Loss, Reorder and Drop; other options cannot change. Queued packets are sent at the
// new rate, and the transmission of the current packet restarts. Packets in transit keep their delay.
func (k *Link) Set(o LinkOptions) error {
	if err := o.check(); err != nil {
		return fmt.Errorf("set link: %w", err)
	}
	for _, w := range k.ways {
		w.mu.Lock()
		defer w.mu.Unlock()
	}
	old := k.options.Load()
	if o.Name != old.Name || o.MTU != old.MTU || o.Seed != old.Seed || o.Offload != old.Offload {
		return errors.New("set link: name, MTU, seed and offload cannot change")
	}
	now := k.now()
	for _, w := range k.ways {
		w.advance(now)
		if o.Rate != old.Rate {
			w.free = max(w.free, now)
		}
	}
	k.options.Store(&o)
	for _, w := range k.ways {
		w.arm(now)
	}
	return nil
}

func (o *LinkOptions) check() error {
	switch {
	case o.MTU < 68 || o.MTU > 65535:
		return fmt.Errorf("MTU %d, not 68 to 65535", o.MTU)
	case o.Delay < 0:
		return fmt.Errorf("delay %v is negative", o.Delay)
	case o.Rate < 0:
		return fmt.Errorf("rate %d is negative", o.Rate)
	case o.Limit < 0:
		return fmt.Errorf("limit %d is negative", o.Limit)
	case !(o.Loss >= 0 && o.Loss <= 1): // NaN is neither
		return fmt.Errorf("loss %v, not 0 to 1", o.Loss)
	case !(o.Reorder >= 0 && o.Reorder <= 1):
		return fmt.Errorf("reorder %v, not 0 to 1", o.Reorder)
	}
	return nil
}

// Counts returns the counts until now, also for a closed link.
func (k *Link) Counts() LinkCounts {
	return LinkCounts{AToB: k.ways[AToB].count(), BToA: k.ways[BToA].count()}
}

// Close removes the interfaces; packets in transit are lost. It returns the error that stopped the link before, if any.
// Further calls return the result of the first one.
func (k *Link) Close() error { return k.close() }

func (k *Link) end() error {
	errs := []error{}
	for _, f := range k.files {
		errs = append(errs, f.Close())
	}
	k.moving.Wait()
	// A process that another goroutine has just forked has the descriptors until it executes its program.
	for _, n := range k.ends {
		errs = append(errs, n.removeLink(k.Options().Name))
	}
	if err := errors.Join(append(errs, k.failed...)...); err != nil {
		return fmt.Errorf("close link: %w", err)
	}
	return nil
}

// removeLink removes an interface, if it exists.
func (n *Namespace) removeLink(name string) error {
	dev, err := n.nl.LinkByName(name)
	if err == nil {
		err = n.nl.LinkDel(dev)
	}
	if errors.As(err, new(netlink.LinkNotFoundError)) || errors.Is(err, unix.ENODEV) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("remove %s in %s: %w", name, n.name, err)
	}
	return nil
}

func (k *Link) now() time.Duration { return time.Since(k.start) }

func (k *Link) move(f func() error) {
	k.moving.Go(func() {
		if err := f(); !errors.Is(err, os.ErrClosed) {
			k.mu.Lock()
			defer k.mu.Unlock()
			k.failed = append(k.failed, err)
		}
	})
}

// chunk is a buffer for many packets, which avoids an allocation for each packet.
type chunk [1 << 20]byte

type packet struct {
	data  []byte // with the header
	chunk *chunk // where data is
	at    time.Duration
}

func (p *packet) size() int { return len(p.data) - vnetHeader }

// way is one direction of a link. One goroutine reads and queues packets, another one delivers them.
type way struct {
	link      *Link
	direction Direction
	from, to  *os.File
	largest   int        // packet, in bytes, with the header
	random    *rand.Rand // of losses
	overtakes *rand.Rand
	timer     *os.File // a timerfd: Go's own timers are late by up to 1 ms in an idle process
	timerConn syscall.RawConn
	setTimer  func(fd uintptr)

	mu     sync.Mutex
	counts DirectionCounts
	// The queue. Packets from head to rated are in transit, and their field at is the time of delivery. Packets from
	// rated on wait for the rate limiter, and their field at is the time of arrival. The numbers increase without limit;
	// the index in packets is the number modulo its length.
	packets           []packet // its length is a power of two
	head, rated, tail uint64
	waiting           int           // bytes of the packets from rated on
	free              time.Duration // end of the transmission of the packet before rated
	idle              bool          // deliver waits for the timer, which is not set
	wait              unix.ItimerSpec
	draining          *chunk   // chunk of the last delivered packet
	spare             []*chunk // without packets
}

func newWay(k *Link, d Direction, from, to *os.File) (*way, error) {
	o := k.options.Load()
	w := &way{
		link: k, direction: d, from: from, to: to,
		largest: vnetHeader + o.MTU, random: rand.New(rand.NewPCG(o.Seed, uint64(d))),
		overtakes: rand.New(rand.NewPCG(o.Seed, uint64(d)+2)),
		packets:   make([]packet, 1024),
	}
	if o.Offload {
		w.largest = vnetHeader + 65536
	}
	fd, err := unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_NONBLOCK|unix.TFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("make timer: %w", err)
	}
	w.timer = os.NewFile(uintptr(fd), "timer")
	if w.timerConn, err = w.timer.SyscallConn(); err != nil {
		return nil, errors.Join(fmt.Errorf("make timer: %w", err), w.timer.Close())
	}
	w.setTimer = func(fd uintptr) { _ = unix.TimerfdSettime(int(fd), 0, &w.wait, nil) } // fails only for invalid arguments
	return w, nil
}

func (w *way) count() DirectionCounts {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.counts
}

// read queues the packets of the sending namespace.
func (w *way) read() error {
	c, used := w.chunk(), 0
	for {
		// A full chunk has a packet in the queue, and is reused after the delivery of that packet.
		if len(c)-used < w.largest {
			c, used = w.chunk(), 0
		}
		n, err := w.from.Read(c[used : used+w.largest])
		if err != nil {
			return fmt.Errorf("read packet: %w", err)
		}
		if w.offer(packet{data: c[used : used+n], chunk: c, at: w.link.now()}) {
			used += n
		}
	}
}

func (w *way) chunk() *chunk {
	w.mu.Lock()
	defer w.mu.Unlock()
	if n := len(w.spare); n > 0 {
		c := w.spare[n-1]
		w.spare = w.spare[:n-1]
		return c
	}
	return new(chunk)
}

// offer queues or drops a packet.
func (w *way) offer(p packet) (queued bool) {
	o := w.link.options.Load()
	dropped := o.Drop != nil && o.Drop(w.direction, p.data[vnetHeader:])
	lost := w.random.Float64() < o.Loss // computed for each packet, so that losses do not depend on Drop

	w.mu.Lock()
	defer w.mu.Unlock()
	o = w.link.options.Load()
	w.counts.Sent++
	w.advance(p.at)
	switch {
	case dropped:
		w.counts.Dropped++
		return false
	case lost:
		w.counts.Lost++
		return false
	case w.rated != w.tail && w.waiting+p.size() > o.limit():
		w.counts.Overflowed++
		return false
	}
	if w.tail-w.head == uint64(len(w.packets)) {
		larger := make([]packet, 2*len(w.packets))
		for i := w.head; i != w.tail; i++ {
			larger[i%uint64(len(larger))] = *w.packet(i)
		}
		w.packets = larger
	}
	*w.packet(w.tail) = p
	w.tail++
	w.waiting += p.size()
	w.advance(p.at)
	if w.overtakes.Float64() < o.Reorder {
		w.overtake()
	}
	if w.idle {
		w.arm(p.at)
	}
	return true
}

func (o *LinkOptions) limit() int {
	if o.Limit > 0 {
		return o.Limit
	}
	return max(64<<10, int(o.Rate/8/20))
}

// overtake moves the last packet in front of other packets in transit and exchanges the delivery times. The caller must
// hold mu.
func (w *way) overtake() {
	first := w.head
	if w.rated != w.tail {
		first = w.rated + 1 // packet w.rated is being sent
	}
	for i := w.tail - 1; i > first && w.tail-i <= maxOvertaken; i-- {
		p, before := w.packet(i), w.packet(i-1)
		// Chunks are reused in order.
		if p.chunk != before.chunk {
			return
		}
		p.data, before.data = before.data, p.data
	}
}

func (w *way) packet(i uint64) *packet { return &w.packets[i&uint64(len(w.packets)-1)] }

// deliver writes due packets to the receiving namespace.
func (w *way) deliver() error {
	var batch [64]packet
	var expirations [8]byte
	for {
		n := w.dequeue(batch[:])
		if n == 0 {
			if _, err := w.timer.Read(expirations[:]); err != nil {
				return fmt.Errorf("wait for timer: %w", err)
			}
			continue
		}
		var delivered DirectionCounts
		for _, p := range batch[:n] {
			switch _, err := w.to.Write(p.data); {
			case errors.Is(err, os.ErrClosed):
				return err
			case err != nil:
				delivered.Refused++
			default:
				delivered.Delivered++
				delivered.Bytes += uint64(p.size())
			}
		}
		w.release(batch[:n], delivered)
	}
}

// dequeue moves the due packets to batch. If no packet is due, dequeue sets the timer.
func (w *way) dequeue(batch []packet) (n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	now := w.link.now()
	w.advance(now)
	for ; n < len(batch) && w.head != w.rated && w.packet(w.head).at <= now; n++ {
		batch[n] = *w.packet(w.head)
		w.head++
	}
	if n == 0 {
		w.arm(now)
	}
	return n
}

// advance moves the packets whose transmission has ended into transit. The caller of advance, times and arm must hold mu.
func (w *way) advance(now time.Duration) {
	for ; w.rated != w.tail; w.rated++ {
		sent, due := w.times()
		if sent > now {
			return
		}
		p := w.packet(w.rated)
		w.waiting -= p.size()
		w.free, p.at = sent, due
	}
}

// arm sets the timer for the first packet of the queue, if any.
func (w *way) arm(now time.Duration) {
	var due time.Duration
	switch {
	case w.head != w.rated:
		due = w.packet(w.head).at
	case w.rated != w.tail:
		_, due = w.times()
	default:
		w.idle = true
		return
	}
	w.idle = false
	w.wait.Value = unix.NsecToTimespec(int64(max(1, due-now))) // 0 would disarm the timer
	_ = w.timerConn.Control(w.setTimer)                        // fails if the timer is closed; deliver handles this
}

// times returns the end of the transmission and the delivery time of the first packet that waits for the rate.
func (w *way) times() (sent, due time.Duration) {
	o, p := w.link.options.Load(), w.packet(w.rated)
	sent = max(w.free, p.at)
	if o.Rate > 0 {
		bits := int64(p.size()) * 8
		sent += time.Duration((bits*int64(time.Second)-1)/o.Rate + 1) // rounded up
	}
	return sent, sent + o.Delay
}

// release returns the buffers of packets.
func (w *way) release(batch []packet, delivered DirectionCounts) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.counts.Delivered += delivered.Delivered
	w.counts.Bytes += delivered.Bytes
	w.counts.Refused += delivered.Refused
	for _, p := range batch {
		if w.draining != p.chunk {
			if w.draining != nil {
				w.spare = append(w.spare, w.draining)
			}
			w.draining = p.chunk
		}
	}
}
