// SPDX-License-Identifier: Apache-2.0

package packets_test

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"net"
	"net/netip"
	"reflect"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"sockeye/internal/testenv"
	"sockeye/internal/trace/capture"
	"sockeye/internal/trace/packets"
	"sockeye/lab"
)

func TestMain(m *testing.M) { testenv.MainWithMaps(m) }

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

var (
	linkA = []netip.Prefix{netip.MustParsePrefix("10.91.0.1/24"), netip.MustParsePrefix("fd91::1/64")}
	linkB = []netip.Prefix{netip.MustParsePrefix("10.91.0.2/24"), netip.MustParsePrefix("fd91::2/64")}
)

// world is two namespaces with a link between them.
type world struct {
	*lab.Link
	a, b *lab.Namespace
	ctx  context.Context
}

func newWorld(t testing.TB, o lab.LinkOptions) *world {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	t.Cleanup(cancel)
	l, err := lab.New(ctx, lab.Options{Dir: t.TempDir()})
	check(t, err)
	t.Cleanup(func() { check(t, l.Close()) })
	w := &world{ctx: ctx}
	for name, n := range map[string]**lab.Namespace{"a": &w.a, "b": &w.b} {
		*n, err = l.Namespace(name)
		check(t, err)
	}
	w.Link, err = l.Connect(w.a, w.b, o, linkA, linkB)
	check(t, err)
	// Disable tail loss probes: a busy host sends needless ones, and the acknowledgement would be ambiguous.
	check(t, w.a.Sysctl("ipv4.tcp_early_retrans", "0"))
	return w
}

// pair is a connection from a to b.
func (w *world) pair(t testing.TB, to netip.Addr) (client, server *net.TCPConn) {
	t.Helper()
	listen := net.ListenConfig{}
	listen.SetMultipathTCP(false)
	var l net.Listener
	check(t, w.b.Do(func() (err error) {
		l, err = listen.Listen(w.ctx, "tcp", netip.AddrPortFrom(to, 0).String())
		return err
	}))
	defer l.Close()
	dial := net.Dialer{}
	dial.SetMultipathTCP(false)
	var c net.Conn
	check(t, w.a.Do(func() (err error) {
		c, err = dial.DialContext(w.ctx, "tcp", l.Addr().String())
		return err
	}))
	s, err := l.Accept()
	check(t, err)
	t.Cleanup(func() { c.Close(); s.Close() })
	return c.(*net.TCPConn), s.(*net.TCPConn)
}

// captured captures a connection while f runs, until the connection ends.
func captured(t testing.TB, c *net.TCPConn, f func() error) ([]*packets.Packet, *packets.Summary) {
	t.Helper()
	p := open(t, c)
	done := make(chan error, 1)
	go func() { done <- f() }()
	var all []*packets.Packet
	summary, err := packets.Capture(t.Context(), p, packets.Options{Deadline: time.Now().Add(30 * time.Second)}, func(p *packets.Packet) error {
		all = append(all, p)
		return nil
	})
	check(t, errors.Join(err, <-done))
	if summary.LostEvents != 0 || summary.Unfinished != 0 || summary.Unreadable != 0 || len(summary.Missing) != 0 {
		t.Errorf("the capture is incomplete: %+v", summary)
	}
	return all, summary
}

func open(t testing.TB, c *net.TCPConn) *capture.Capture {
	t.Helper()
	p, err := capture.Open(testenv.Cookie(t, c), 8<<20)
	if err != nil {
		t.Fatalf("%+v", err)
	}
	t.Cleanup(func() { check(t, p.Close()) })
	return p
}

// transfer writes n bytes, closes the connection, and waits until the peer has received everything.
func transfer(client, server *net.TCPConn, n int) error {
	got := make(chan error, 1)
	go func() {
		_, err := io.Copy(io.Discard, server)
		got <- errors.Join(err, server.Close())
	}()
	_, err := client.Write(make([]byte, n))
	return errors.Join(err, client.Close(), <-got)
}

// segment is a TCP segment on the link.
type segment struct {
	seq    uint32
	length int
	fin    bool
}

func (s segment) String() string { return fmt.Sprintf("%d+%d fin=%v", s.seq, s.length, s.fin) }

func ports(header []byte) (tcp []byte, source, destination uint16) {
	tcp = header[40:]
	if header[0]>>4 == 4 {
		tcp = header[int(header[0]&15)*4:]
	}
	return tcp, binary.BigEndian.Uint16(tcp), binary.BigEndian.Uint16(tcp[2:])
}

// truth contains the traffic of a connection in one direction, as seen on the link.
type truth struct {
	source, destination uint16

	mu       sync.Mutex
	segments []segment
	lost     int // bytes of payload
	repeated int // segments
	next     uint32
	end      uint32 // sequence number after the FIN; 0: no FIN was sent
}

// after reports whether a segment is a pure acknowledgement after the FIN. Such a segment is often sent from the
// TIME_WAIT state, without the connection's socket.
func (r *truth) after(s segment) bool { return s.length == 0 && !s.fin && r.end != 0 && s.seq == r.end }

func (r *truth) see(packet []byte, drop bool) {
	tcp, source, destination := ports(packet)
	if source != r.source || destination != r.destination {
		return
	}
	s := segment{binary.BigEndian.Uint32(tcp[4:]), len(tcp) - int(tcp[12]>>4)*4, tcp[13]&1 != 0}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.after(s) {
		return
	}
	if s.fin {
		r.end = s.seq + uint32(s.length) + 1
	}
	if len(r.segments) == 0 {
		r.next = s.seq
	}
	if s.length > 0 || s.fin {
		end := s.seq + uint32(s.length)
		if s.fin {
			end++
		}
		if int32(s.seq-r.next) < 0 {
			r.repeated++
		}
		if int32(end-r.next) > 0 {
			r.next = end
		}
	}
	r.segments = append(r.segments, s)
	if drop {
		r.lost += s.length
	}
}

// segments returns the segments of a packet on the link.
func segments(p *packets.Packet) (all []segment) {
	size := max(1, p.Length)
	if p.Sent.Split != nil {
		size = p.Sent.Split.Size
	}
	for at := 0; at == 0 || at < p.Length; at += size {
		end := min(at+size, p.Length)
		all = append(all, segment{p.RawSeq + uint32(at), end - at, p.Flags&packets.FlagFIN != 0 && end == p.Length})
	}
	return all
}

// attempts is the maximum number of attempts of a test if the kernel does not report every event. The kernel may skip a
// raw tracepoint program, for example if it interrupts a run of the same program (bpf_prog_get_recursion_context).
// Packets sent at that time are not seen.
const attempts = 10

// TestTruth compares the events of a connection with the traffic captured on the link, while another connection is
// equally busy.
func TestTruth(t *testing.T) {
	const delay, share, size = 20 * time.Millisecond, 0.02, 300_000
	for i, name := range []string{"IPv4", "IPv6"} {
		t.Run(name, func(t *testing.T) {
			var r atomic.Pointer[truth]
			rnd := rand.New(rand.NewPCG(2, uint64(i)))
			w := newWorld(t, lab.LinkOptions{Delay: delay, Drop: func(d lab.Direction, packet []byte) bool {
				r := r.Load()
				if d != lab.AToB || r == nil {
					return false
				}
				drop := rnd.Float64() < share
				r.see(packet, drop)
				return drop
			}})
			// A busy host acknowledges later than the retransmission timer of 0.2 s allows, and what the timer repeats without
			// need is ambiguous. Before Linux 6.11, the timer cannot be changed.
			if err := w.a.Sysctl("ipv4.tcp_rto_min_us", "1000000"); !errors.Is(err, fs.ErrNotExist) {
				check(t, err)
			}
			for range attempts {
				client, server := w.pair(t, linkB[i].Addr())
				otherClient, otherServer := w.pair(t, linkB[i].Addr())
				seen := &truth{source: port(client.LocalAddr()), destination: port(client.RemoteAddr())}
				all, summary := captured(t, client, func() error {
					r.Store(seen)
					other := make(chan error)
					go func() { other <- transfer(otherClient, otherServer, size) }()
					return errors.Join(transfer(client, server, size), <-other)
				})
				if summary.Stopped != packets.StoppedClosed || summary.State != "CLOSE" {
					t.Errorf("capture stopped by %s, connection in state %s", summary.Stopped, summary.State)
				}
				seen.onlyOurs(t, all)
				if missing := seen.missing(t, all); missing > 0 {
					t.Logf("%d of %d segments were not reported", missing, len(seen.segments))
					if missing > len(seen.segments)/4 {
						t.Error("too many segments were not reported")
					}
					continue
				}
				seen.compare(t, all, summary)
				checkTimes(t, all, delay)
				roundTrip(t, all)
				return
			}
			t.Errorf("incomplete events in all of %d attempts", attempts)
		})
	}
}

// onlyOurs checks that there are no packets of another connection.
func (r *truth) onlyOurs(t *testing.T, all []*packets.Packet) {
	t.Helper()
	for _, p := range all {
		_, source, destination := ports(p.Header)
		if p.Received != nil {
			source, destination = destination, source
		}
		if source != r.source || destination != r.destination {
			t.Fatalf("packet %d belongs to another connection", p.Number)
		}
	}
}

// missing counts the segments on the link without a packet or a driver event, and those whose acknowledgement was not
// reported. There must be no other segments.
func (r *truth) missing(t *testing.T, all []*packets.Packet) (n int) {
	t.Helper()
	left := make(map[segment]int)
	for _, s := range r.segments {
		left[s]++
	}
	for _, p := range all {
		if p.Sent == nil {
			continue
		}
		parts := segments(p)
		if r.after(parts[0]) {
			continue
		}
		for _, s := range parts {
			if left[s]--; left[s] < 0 {
				t.Errorf("packet %d reports segment %v, which was not on the link", p.Number, s)
			}
		}
		if len(p.Sent.Hops) > 0 {
			n += len(parts) - p.Sent.Hops[0].Segments
		}
		if !p.Sent.Acked.IsZero() && p.Sent.AckedBy == 0 {
			n += len(parts)
		}
	}
	for _, count := range left {
		n += max(0, count)
	}
	return n
}

// compare checks the outcome of each packet.
func (r *truth) compare(t *testing.T, all []*packets.Packet, summary *packets.Summary) {
	t.Helper()
	lost, repeated, after := 0, 0, 0
	for i, p := range all {
		if p.Number != i+1 || i > 0 && p.Time.Before(all[i-1].Time) {
			t.Errorf("packet %d at %v: number %d", p.Number, p.Time, i+1)
		}
		if p.Sent == nil {
			continue
		}
		parts := segments(p)
		if r.after(parts[0]) {
			after++
		}
		lost += p.Sent.LostBytes
		if p.Sent.Retransmission != nil {
			repeated += len(parts)
			if p.Sent.Retransmission.Of == 0 || p.Sent.Retransmission.After <= 0 || p.Sent.Retransmission.Cause == "" {
				t.Errorf("packet %d: %s", p.Number, p.Comment())
			}
		}
		if s := p.Sent.Split; s != nil && (s.Segments != len(parts) || s.By != packets.ByHost) {
			t.Errorf("packet %d of %d bytes: %s", p.Number, p.Length, p.Comment())
		}
		if p.Sent.Driver.IsZero() || p.Sent.Qdisc < 0 || p.Sent.AckedBytes+p.Sent.LostBytes != p.Length && p.Sent.Fate != packets.Needless {
			t.Errorf("packet %d of %d bytes: %s", p.Number, p.Length, p.Comment())
		}
	}
	if lost != r.lost || repeated != r.repeated || summary.Segments-after != len(r.segments) || summary.Unseen != 0 || summary.Strays != 0 {
		t.Errorf("%d bytes lost, %d of %d segments retransmitted, want %d bytes, %d of %d; %+v", lost, repeated, summary.Segments, r.lost, r.repeated, len(r.segments), summary)
	}
	if r.repeated == 0 {
		t.Error("no segment was lost")
	}
}

// checkTimes compares the times with the link's delay.
func checkTimes(t *testing.T, all []*packets.Packet, delay time.Duration) {
	t.Helper()
	least := time.Hour
	for _, p := range all {
		if p.Sent == nil || p.Sent.Acked.IsZero() {
			continue
		}
		least = min(least, p.Sent.Network)
		if p.Sent.Network < 2*delay || p.Sent.Acked.Sub(p.Sent.Driver) != p.Sent.Network {
			t.Errorf("packet %d: %s", p.Number, p.Comment())
		}
		by := all[p.Sent.AckedBy-1]
		told := by.Received != nil && slices.ContainsFunc(by.Received.Packets, func(r packets.Range) bool {
			return r.First <= p.Number && p.Number <= r.Last
		})
		if by.Received == nil || !by.Time.Equal(p.Sent.Acked) || !told && p.Sent.Fate == packets.Acknowledged {
			t.Errorf("packet %d is acknowledged by %d, whose comment is: %s", p.Number, by.Number, by.Comment())
		}
	}
	if least > 3*slower*delay {
		t.Errorf("fastest acknowledgement after %v, want %v", least, 2*delay)
	}
}

// roundTrip encodes packets as JSON and decodes them.
func roundTrip(t *testing.T, all []*packets.Packet) {
	t.Helper()
	text, err := json.Marshal(all)
	check(t, err)
	var back []*packets.Packet
	check(t, json.Unmarshal(text, &back))
	if !reflect.DeepEqual(all, back) {
		t.Error("the decoded packets differ from the encoded ones")
	}
}

func port(a net.Addr) uint16 { return netip.MustParseAddrPort(a.String()).Port() }

// TestOffload passes large packets to the device.
func TestOffload(t *testing.T) {
	const size = 1 << 20
	w := newWorld(t, lab.LinkOptions{Delay: time.Millisecond, Offload: true})
	for range attempts {
		client, server := w.pair(t, linkB[0].Addr())
		all, summary := captured(t, client, func() error { return transfer(client, server, size) })
		largest, repeated := 0, int64(0) // bytes; a busy host sends needless retransmissions
		for _, p := range all {
			if p.Sent != nil && p.Sent.Retransmission != nil {
				repeated += int64(p.Length)
			}
			if p.Sent == nil || p.Sent.Split == nil {
				continue
			}
			largest = max(largest, p.Length)
			if p.Sent.Driver.IsZero() { // see attempts
				continue
			}
			if s := p.Sent.Split; s.By != packets.ByDevice || s.Segments != len(segments(p)) || p.Sent.Hops[0].Segments != 1 {
				t.Errorf("packet %d of %d bytes: %+v, hops %+v", p.Number, p.Length, s, p.Sent.Hops)
			}
		}
		if largest < 4*1448 {
			t.Errorf("largest packet: %d bytes", largest)
		}
		seen := summary.SentBytes - repeated + summary.Unseen
		if seen < size && summary.Strays > 0 {
			// The last packet was not seen, so no later packet reveals the gap.
			t.Logf("%d bytes at the end were not seen", size-seen)
			continue
		}
		unseen := int(summary.Unseen / 1448) // see attempts
		if seen != size || summary.Segments+unseen < 700 || summary.Segments < 2*summary.Sent {
			t.Errorf("%+v", summary)
		}
		return
	}
	t.Errorf("the last packet was not seen in any of %d attempts", attempts)
}

// slowQdisc adds a slow queueing discipline at a: rate in bytes per second, limit in queued bytes.
func (w *world) slowQdisc(t *testing.T, rate uint64, limit uint32) {
	t.Helper()
	dev, err := w.a.Netlink().LinkByName("link0")
	check(t, err)
	check(t, w.a.Netlink().LinkSetGSOMaxSegs(dev, 1))
	if err := w.a.Netlink().QdiscReplace(&netlink.Tbf{
		QdiscAttrs: netlink.QdiscAttrs{LinkIndex: dev.Attrs().Index, Handle: netlink.MakeHandle(1, 0), Parent: netlink.HANDLE_ROOT},
		Rate:       rate, Limit: limit, Buffer: netlink.Xmittime(rate, 1600),
	}); err != nil {
		t.Skipf("kernel: no tbf: %v", err)
	}
}

// TestQdisc sends behind datagrams that wait in a slow queueing discipline.
func TestQdisc(t *testing.T) {
	const delay, rate, datagram, ahead = 20 * time.Millisecond, 1 << 20, 1400, 20
	w := newWorld(t, lab.LinkOptions{Delay: delay})
	w.slowQdisc(t, rate, 1<<20)
	client, server := w.pair(t, linkB[0].Addr())
	var udp net.Conn
	check(t, w.a.Do(func() (err error) {
		udp, err = net.Dial("udp", netip.AddrPortFrom(linkB[0].Addr(), 9).String())
		return err
	}))
	defer udp.Close()
	all, _ := captured(t, client, func() error {
		b := make([]byte, datagram)
		for range 10 {
			for range ahead {
				// Write returns errors because no socket is bound to the port.
				_, _ = udp.Write(b)
			}
			if _, err := client.Write(b); err != nil {
				return err
			}
			if _, err := io.ReadFull(server, b); err != nil {
				return err
			}
		}
		return errors.Join(client.Close(), server.Close())
	})
	longest, least := time.Duration(0), time.Hour
	for _, p := range all {
		if p.Sent == nil || p.Sent.Driver.IsZero() || p.Sent.Acked.IsZero() {
			continue
		}
		longest = max(longest, p.Sent.Qdisc)
		least = min(least, p.Sent.Network)
	}
	const wait = ahead * datagram * time.Second / rate
	if longest < wait*3/4 || longest > wait*3*slower {
		t.Errorf("longest time in the queue: %v, want %v", longest, wait)
	}
	if least < 2*delay || least > 3*slower*delay {
		t.Errorf("shortest time in the network: %v, want %v", least, 2*delay)
	}
}

// TestDropped uses a queue of one packet, which drops the third packet of a burst.
func TestDropped(t *testing.T) {
	w := newWorld(t, lab.LinkOptions{Delay: 5 * time.Millisecond})
	w.slowQdisc(t, 1<<20, 1600)
	client, server := w.pair(t, linkB[0].Addr())
	all, summary := captured(t, client, func() error { return transfer(client, server, 1<<17) })
	for _, p := range all {
		if p.Sent == nil || p.Sent.Fate != packets.Dropped {
			continue
		}
		// TCP does not retransmit a dropped packet that was itself a needless retransmission.
		again := p.Sent.Again != 0 || p.Sent.Retransmission != nil
		if !p.Sent.Driver.IsZero() || p.Sent.AckedBytes > 0 || !again {
			t.Errorf("packet %d: %s", p.Number, p.Comment())
		}
	}
	if summary.Fates[packets.Dropped] == 0 || summary.Fates[packets.Lost] > 0 {
		t.Errorf("fates %v", summary.Fates)
	}
}

// TestHops sends through two devices of the host.
func TestHops(t *testing.T) {
	for _, test := range []struct {
		name string
		make func(lower int, local, remote net.IP) netlink.Link
	}{
		{"macvlan", func(lower int, _, _ net.IP) netlink.Link {
			return &netlink.Macvlan{LinkAttrs: netlink.LinkAttrs{Name: "upper", ParentIndex: lower}, Mode: netlink.MACVLAN_MODE_BRIDGE}
		}},
		{"vxlan", func(lower int, local, remote net.IP) netlink.Link {
			return &netlink.Vxlan{LinkAttrs: netlink.LinkAttrs{Name: "upper"}, VxlanId: 5, VtepDevIndex: lower, SrcAddr: local, Group: remote, Port: 4789}
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			l, err := lab.New(t.Context(), lab.Options{Dir: t.TempDir()})
			check(t, err)
			t.Cleanup(func() { check(t, l.Close()) })
			w := &world{ctx: t.Context()}
			lower := []netip.Prefix{netip.MustParsePrefix("10.77.0.201/24"), netip.MustParsePrefix("10.77.0.202/24")}
			for i, n := range []**lab.Namespace{&w.a, &w.b} {
				*n, err = l.Attach(fmt.Sprint("end", i), lower[i])
				check(t, err)
				dev, err := (*n).Netlink().LinkByName("eth0")
				check(t, err)
				upper := test.make(dev.Attrs().Index, lower[i].Addr().AsSlice(), lower[1-i].Addr().AsSlice())
				if err := (*n).Netlink().LinkAdd(upper); err != nil {
					t.Skipf("kernel: no %s: %v", test.name, err)
				}
				dev, err = (*n).Netlink().LinkByName("upper")
				check(t, err)
				check(t, (*n).Netlink().LinkSetUp(dev))
				check(t, (*n).AddAddress("upper", [][]netip.Prefix{linkA, linkB}[i][0]))
			}
			client, server := w.pair(t, linkB[0].Addr())
			const size = 300_000
			all, summary := captured(t, client, func() error { return transfer(client, server, size) })
			incomplete := 0
			for _, p := range all {
				if p.Sent == nil {
					continue
				}
				var names []string
				for i, h := range p.Sent.Hops {
					names = append(names, h.Interface)
					if h.Queued.IsZero() || !h.Driver.IsZero() && h.Driver.Before(h.Queued) || i > 0 && h.Queued.Before(p.Sent.Hops[i-1].Queued) {
						t.Errorf("packet %d: hops %+v", p.Number, p.Sent.Hops)
					}
				}
				// The lab's bridge between them is in another network namespace.
				if len(names) < 2 || names[0] != "upper" || names[1] != "eth0" {
					t.Logf("packet %d went through %v", p.Number, names)
					incomplete++
				}
				if p.Length > 0 && p.Sent.Acked.IsZero() && p.Sent.Again == 0 && p.Sent.Fate != packets.Needless {
					t.Errorf("packet %d: %s", p.Number, p.Comment())
				}
			}
			if summary.SentBytes+summary.Unseen < size || incomplete > summary.Sent/4 { // see attempts
				t.Errorf("%d packets are incomplete; %+v", incomplete, summary)
			}
		})
	}
}

// TestBounds ends captures of a connection that remains open.
func TestBounds(t *testing.T) {
	w := newWorld(t, lab.LinkOptions{})
	client, server := w.pair(t, linkB[0].Addr())
	var busy sync.WaitGroup
	defer busy.Wait()
	defer client.Close()
	busy.Go(func() {
		// Both end when the client closes.
		_, _ = io.Copy(io.Discard, server)
	})
	busy.Go(func() {
		for b := make([]byte, 100); ; {
			if _, err := client.Write(b); err != nil {
				return
			}
		}
	})
	for _, test := range []struct {
		want    packets.Reason
		options packets.Options
	}{
		{packets.StoppedEvents, packets.Options{Events: 2000}},
		{packets.StoppedDeadline, packets.Options{}},
		{packets.StoppedInterrupted, packets.Options{}},
	} {
		t.Run(string(test.want), func(t *testing.T) {
			p := open(t, client)
			test.options.Deadline = time.Now().Add(30 * time.Second)
			if test.want == packets.StoppedDeadline {
				test.options.Deadline = time.Now().Add(time.Second)
			}
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			emitted := 0
			start := time.Now()
			summary, err := packets.Capture(ctx, p, test.options, func(*packets.Packet) error {
				emitted++
				if test.want == packets.StoppedInterrupted {
					cancel()
				}
				return nil
			})
			check(t, err)
			if summary.Stopped != test.want || emitted == 0 || emitted != summary.Sent+summary.Received || time.Since(start) > 20*time.Second {
				t.Errorf("%d packets in %v, %+v", emitted, time.Since(start), summary)
			}
			if test.options.Events != 0 && summary.Events != test.options.Events {
				t.Errorf("%d events, want %d", summary.Events, test.options.Events)
			}
		})
	}
	t.Run("an error of emit", func(t *testing.T) {
		full := errors.New("full")
		_, err := packets.Capture(t.Context(), open(t, client), packets.Options{Deadline: time.Now().Add(30 * time.Second)}, func(*packets.Packet) error { return full })
		if !errors.Is(err, full) {
			t.Errorf("%v, want %v", err, full)
		}
	})
}
