// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"net/url"
	"os"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"sockeye/internal/api"
	"sockeye/internal/config"
	"sockeye/internal/trace/measure"
	"sockeye/lab"
)

const tracePort = 6000

// traceOrder has the additional fields of orders for trace tests.
type traceOrder struct {
	// Count is the number of messages of Size bytes on each connection, Gap the pause after each message.
	Count, Size int
	Gap         time.Duration
	// Answered makes each message wait for the answer to the previous one.
	Answered bool
}

// carryOutTrace carries out the orders of trace tests: send, exchanges, bind and datagrams.
func (p *peerProcess) carryOutTrace(o order) error {
	switch o.Do {
	case "send":
		return p.each(o, func(c *peerConnection) error { return c.send(o) })
	case "exchanges":
		return p.each(o, func(c *peerConnection) error {
			for range o.Count {
				if err := c.exchange(o); err != nil {
					return err
				}
				time.Sleep(o.Gap)
			}
			return nil
		})
	case "bind":
		return bind(o)
	case "datagrams":
		return sendDatagrams(o)
	}
	return fmt.Errorf("unknown order %q", o.Do)
}

// bind reads all datagrams to an address. If Size is not 0, it is the receive buffer size in bytes.
func bind(o order) error {
	c, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(o.At))
	if err != nil {
		return err
	}
	if o.Size > 0 {
		if err := c.SetReadBuffer(o.Size); err != nil {
			return err
		}
	}
	go func() {
		datagram := make([]byte, 65536)
		for {
			if _, _, err := c.ReadFromUDPAddrPort(datagram); err != nil {
				fmt.Fprintln(os.Stderr, "read datagram:", err)
				return
			}
		}
	}()
	return nil
}

// sendDatagrams sends datagrams to each address, with one socket per address.
func sendDatagrams(o order) error {
	for _, to := range o.To {
		c, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(to))
		if err != nil {
			return err
		}
		defer c.Close()
		for range o.Count {
			if _, err := c.Write(make([]byte, o.Size)); err != nil {
				return err
			}
			time.Sleep(o.Gap)
		}
	}
	return nil
}

// send sends messages without answers. Each message must be a single sendmsg(2); otherwise send returns an error.
func (c *peerConnection) send(o order) error {
	message := make([]byte, o.Size)
	for range o.Count {
		var n int
		var err error
		failed := c.raw.Write(func(fd uintptr) bool {
			n, err = unix.Write(int(fd), message)
			return !errors.Is(err, unix.EAGAIN)
		})
		if err := errors.Join(failed, err); err != nil {
			return err
		}
		if n < len(message) {
			return fmt.Errorf("sendmsg accepted %d of %d bytes", n, len(message))
		}
		time.Sleep(o.Gap)
	}
	return nil
}

// newTraced creates a host with a link with a delay and a policy with trace rules.
func newTraced(t *testing.T, delay time.Duration, rules ...string) *tuned {
	t.Helper()
	h := newTuned(t, lab.LinkOptions{Delay: delay})
	h.makeGroup("near")
	h.setTrace(rules...)
	return h
}

// setTrace writes a policy of trace rules, each in YAML's flow style.
func (h *tuned) setTrace(rules ...string) {
	h.Helper()
	h.setPolicyText(traceText(rules...))
}

func traceText(rules ...string) string { return policySection("trace", rules...) }

// policySection is a part of a policy, with rules in YAML's flow style.
func policySection(name string, rules ...string) string {
	text := name + ":\n"
	for _, rule := range rules {
		text += "  - " + rule + "\n"
	}
	return text
}

// applyTrace applies trace rules.
func (h *tuned) applyTrace(rules ...string) (plan api.Plan) {
	h.Helper()
	h.setTrace(rules...)
	h.show(&plan, "apply")
	return plan
}

// query sends a request to the agent.
func (h *tuned) query(path string, into any, args ...string) {
	h.Helper()
	h.must(h.tryQuery(path, into, args...))
}

func (h *tuned) tryQuery(path string, into any, args ...string) error {
	ctx, cancel := context.WithTimeout(h.Context(), patience)
	defer cancel()
	return api.NewClient(api.SocketPath(h.dir)).Get(ctx, "/v1/trace"+path, pairs(args...), into)
}

// pairs builds a query from keys and values: key, value, key, value ...
func pairs(args ...string) url.Values {
	q := url.Values{}
	for pair := range slices.Chunk(args, 2) {
		q.Set(pair[0], pair[1])
	}
	return q
}

// traced returns the tracing of a cgroup.
func (h *tuned) traced(cgroup string) api.TracedCgroup {
	h.Helper()
	var s api.TraceStatus
	h.query("", &s)
	i := slices.IndexFunc(s.Cgroups, func(c api.TracedCgroup) bool { return c.Cgroup == cgroup })
	if i < 0 {
		h.Fatalf("%s is not traced: %+v", cgroup, s)
	}
	return s.Cgroups[i]
}

// results returns the merged results of the groups that match a selector.
func (h *tuned) results(selector string, args ...string) measure.Result {
	h.Helper()
	var r api.TraceResults
	h.query("/results", &r, append([]string{"select", selector}, args...)...)
	if len(r.Results) == 0 {
		return measure.Result{}
	}
	found, err := measure.Find([]measure.Period{r.Period}, "")
	h.must(err)
	return *found[0]
}

// ended waits until n messages that match a selector are complete and none is in transit, and returns their results.
func (h *tuned) ended(selector string, n uint64, args ...string) (r measure.Result) {
	h.Helper()
	h.eventually("messages to end", func() error {
		r = h.results(selector, args...)
		if ended(r.Outcomes) < n || r.InFlight > 0 {
			return fmt.Errorf("%d in flight, %v, want %d", r.InFlight, r.Outcomes, n)
		}
		return nil
	})
	if r.Chosen != ended(r.Outcomes) {
		h.Errorf("%s: chosen %d, ended %v", selector, r.Chosen, r.Outcomes)
	}
	return r
}

func ended(outcomes map[measure.Outcome]uint64) (sum uint64) {
	for _, n := range outcomes {
		sum += n
	}
	return sum
}

// took fails the test unless the times of a stage are as expected: most of them at least the minimum, and the faster
// ones at most a share above it plus the time on the wire. The slower ones may take any time on a busy host. If none is
// measured or fast enough, more messages are sent.
func (h *tuned) took(what string, r measure.Result, stage config.Stage, want time.Duration, again ...func() measure.Result) {
	h.Helper()
	h.tookAs(what, r, stage, func(measure.Result) time.Duration { return want }, want, again...)
}

// tookRounds is took for the time of several round trips in the stack. On a busy host, each of them takes as long as that of the last
// packet, which is the time in the network.
func (h *tuned) tookRounds(what string, r measure.Result, rounds int, rtt time.Duration, again ...func() measure.Result) {
	h.Helper()
	slowest := func(r measure.Result) time.Duration {
		if network := r.Stages[config.StageNetwork]; network != nil && network.Count > 0 {
			return time.Duration(rounds) * max(rtt, network.Quantile(0.5))
		}
		return time.Duration(rounds) * rtt
	}
	h.tookAs(what, r, config.StageStack, slowest, time.Duration(rounds)*rtt, again...)
}

// tookAs is took with a time on which the maximum depends, beside the minimum.
func (h *tuned) tookAs(what string, r measure.Result, stage config.Stage, slowest func(measure.Result) time.Duration, want time.Duration, again ...func() measure.Result) {
	h.Helper()
	const slack, most = 5 * time.Millisecond, 10
	for tries := 1; ; tries++ {
		// Histogram buckets have a relative width of 1/16. Long times are several round trips, each of which a busy host delays.
		low, high := want-want/20, slowest(r)+slowest(r)/20+slack+slowest(r)/10
		stats := r.Stages[stage]
		if stats == nil || stats.Count == 0 {
			// The kernel enables the timestamps of arrivals in a work queue (net_enable_timestamp).
			if len(again) == 0 || tries == most {
				h.Errorf("%s: nothing of %s: %+v", what, stage, r)
				return
			}
			r = again[0]()
			continue
		}
		half, quick := stats.Quantile(0.5), stats.Quantile(0.1)
		if half >= low && quick <= high {
			return
		}
		if half < low || len(again) == 0 || tries == most {
			h.Errorf("%s: %s: p10 %v, p50 %v, want %v (%v to %v)", what, stage, quick, half, want, low, high)
			return
		}
		r = again[0]()
	}
}

// slowest returns the slowest messages that match a selector.
func (h *tuned) slowest(selector string, n int) (list []api.TraceSlow) {
	h.Helper()
	h.query("/slow", &list, "select", selector, "n", fmt.Sprint(n))
	return list
}

// farListener listens on the remote side, in this process.
func (h *tuned) farListener(port uint16, options func(fd int) error) *net.TCPListener {
	h.Helper()
	return h.listener(h.devices, port, options)
}

func (h *tuned) listener(n *lab.Namespace, port uint16, options func(fd int) error) *net.TCPListener {
	h.Helper()
	var l net.Listener
	h.must(n.Do(func() (err error) {
		lc := net.ListenConfig{KeepAlive: -1, Control: func(_, _ string, raw syscall.RawConn) (err error) {
			if options == nil {
				return nil
			}
			failed := raw.Control(func(fd uintptr) { err = options(int(fd)) })
			return errors.Join(failed, err)
		}}
		lc.SetMultipathTCP(false)
		l, err = lc.Listen(h.Context(), "tcp", netip.AddrPortFrom(wildcard, port).String())
		return err
	}))
	h.Cleanup(func() { l.Close() })
	return l.(*net.TCPListener)
}

// accept accepts a connection, which ends with the test.
func (h *tuned) accept(l *net.TCPListener) *net.TCPConn {
	h.Helper()
	h.must(l.SetDeadline(time.Now().Add(patience)))
	c, err := l.AcceptTCP()
	h.must(err)
	h.Cleanup(func() { c.Close() })
	return c
}

// sink reads all data of a listener's connections.
func (h *tuned) sink(l *net.TCPListener) {
	go func() {
		for {
			c, err := l.AcceptTCP()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				defer context.AfterFunc(h.Context(), func() { c.Close() })()
				_, _ = io.Copy(io.Discard, c) // until the peer closes the connection or the test ends
			}()
		}
	}()
}

// tokenBucket adds a token bucket filter to the local end of the link and returns a function that removes it. rate is in
// bytes per second, burst in bytes.
func (h *tuned) tokenBucket(rate, burst uint64) (remove func()) {
	h.Helper()
	nl := h.collectors.Netlink()
	dev, err := nl.LinkByName("link0")
	h.must(err)
	// The kernel expects the burst as its transmission time in ticks.
	q := &netlink.Tbf{
		QdiscAttrs: netlink.QdiscAttrs{LinkIndex: dev.Attrs().Index, Handle: netlink.MakeHandle(1, 0), Parent: netlink.HANDLE_ROOT},
		Rate:       rate, Limit: 1 << 20, Buffer: uint32(float64(burst) / float64(rate) * netlink.TickInUsec() * 1e6),
	}
	h.must(nl.QdiscAdd(q))
	return func() {
		h.Helper()
		h.must(nl.QdiscDel(q))
	}
}
