// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"golang.org/x/sys/unix"

	"sockeye/internal/api"
	"sockeye/internal/config"
	"sockeye/lab"
)

// peerEnv makes the test binary a peer: a process that carries out orders of the test.
const peerEnv = "E2E_PEER"

// The sides of the link. The agent is on the near side.
var (
	near4 = netip.MustParseAddr("10.90.0.1")
	near6 = netip.MustParseAddr("fd90::1")
	far4  = netip.MustParseAddr("10.90.0.2")
	far6  = netip.MustParseAddr("fd90::2")
)

// order is a line of input to a peer, which responds with one line.
type order struct {
	Do string // listen, connect, exchange, look or close
	// At are the listening addresses.
	At netip.AddrPort
	// To are the destinations, used in turn, and From the source address; default: any.
	To   []netip.AddrPort
	From []netip.Addr
	// N is the number of connections, Parallel the number of concurrent ones, at least 1.
	N, Parallel int
	// Up is the number of bytes that the connecting side sends, Down the number of bytes of the response.
	Up, Down int
	// Keep leaves the connections open.
	Keep bool
	// Device is the interface for SO_BINDTODEVICE, empty for none.
	Device string
	traceOrder
}

// report is the response of a peer.
type report struct {
	Error string
	Ends  []connectionEnd
}

// connectionEnd is the state of one end of a connection, read by its process.
type connectionEnd struct {
	FD            int
	Local, Remote netip.AddrPort
	Accepted      bool
	First         uint32 // congestion window before the first segment
	Info          unix.TCPInfo
	Congestion    string
	Options       map[string]int
}

// seen are the options that a peer reads from its sockets with getsockopt(2).
var seen = map[string][2]int{
	"sndbuf":           {unix.SOL_SOCKET, unix.SO_SNDBUF},
	"rcvbuf":           {unix.SOL_SOCKET, unix.SO_RCVBUF},
	"locks":            {unix.SOL_SOCKET, unix.SO_BUF_LOCK},
	"priority":         {unix.SOL_SOCKET, unix.SO_PRIORITY},
	"mark":             {unix.SOL_SOCKET, unix.SO_MARK},
	"notsent_lowat":    {unix.SOL_TCP, unix.TCP_NOTSENT_LOWAT},
	"user_timeout":     {unix.SOL_TCP, unix.TCP_USER_TIMEOUT},
	"keepalive_probes": {unix.SOL_TCP, unix.TCP_KEEPCNT},
}

// peerProcess is the state of a peer.
type peerProcess struct {
	mu   sync.Mutex
	open []*peerConnection
}

type peerConnection struct {
	net.Conn
	raw      syscall.RawConn
	accepted bool
	first    uint32
}

// bePeer returns only for an error.
func bePeer() error {
	p := &peerProcess{}
	orders, answers := json.NewDecoder(os.Stdin), json.NewEncoder(os.Stdout)
	for {
		var o order
		if err := orders.Decode(&o); err != nil {
			return err
		}
		var r report
		if err := p.carryOut(o, &r); err != nil {
			r.Error = err.Error()
		}
		if err := answers.Encode(r); err != nil {
			return err
		}
	}
}

func (p *peerProcess) carryOut(o order, r *report) (err error) {
	switch o.Do {
	case "listen":
		err = p.listen(o.At)
	case "connect":
		r.Ends, err = p.connect(o)
	case "exchange":
		err = p.each(o, func(c *peerConnection) error { return c.exchange(o) })
	case "look":
		p.mu.Lock()
		defer p.mu.Unlock()
		for _, c := range p.open {
			end, err := c.look()
			if err != nil {
				return err
			}
			r.Ends = append(r.Ends, end)
		}
	case "close":
		p.mu.Lock()
		defer p.mu.Unlock()
		for _, c := range p.open {
			c.Close()
		}
		p.open = nil
	default:
		err = p.carryOutTrace(o)
	}
	return err
}

func (p *peerProcess) listen(at netip.AddrPort) error {
	lc := net.ListenConfig{KeepAlive: -1}
	lc.SetMultipathTCP(false)
	l, err := lc.Listen(context.Background(), "tcp", at.String())
	if err != nil {
		return err
	}
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				fmt.Fprintln(os.Stderr, "accept:", err)
				continue
			}
			c, err := p.add(conn, true)
			if err != nil {
				fmt.Fprintln(os.Stderr, "look at what was accepted:", err)
				continue
			}
			go func() {
				defer p.remove(c)
				for c.serve() == nil {
				}
			}()
		}
	}()
	return nil
}

func (p *peerProcess) add(conn net.Conn, accepted bool) (*peerConnection, error) {
	raw, err := conn.(*net.TCPConn).SyscallConn()
	if err != nil {
		return nil, err
	}
	c := &peerConnection{Conn: conn, raw: raw, accepted: accepted}
	info, err := c.info()
	if err != nil {
		return nil, err
	}
	c.first = info.Snd_cwnd
	p.mu.Lock()
	defer p.mu.Unlock()
	p.open = append(p.open, c)
	return c, nil
}

func (p *peerProcess) remove(c *peerConnection) {
	c.Close()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.open = slices.DeleteFunc(p.open, func(other *peerConnection) bool { return other == c })
}

// connect opens connections and returns the state of each after its exchange.
func (p *peerProcess) connect(o order) (ends []connectionEnd, err error) {
	ends = make([]connectionEnd, o.N)
	return ends, atOnce(o.N, o.Parallel, func(i int) error {
		d := net.Dialer{KeepAlive: -1, Timeout: time.Minute, Control: func(_, _ string, raw syscall.RawConn) (err error) {
			failed := raw.Control(func(fd uintptr) { err = unix.BindToDevice(int(fd), o.Device) })
			return errors.Join(failed, err)
		}}
		d.SetMultipathTCP(false)
		if len(o.From) > 0 {
			d.LocalAddr = net.TCPAddrFromAddrPort(netip.AddrPortFrom(o.From[i%len(o.From)], 0))
		}
		conn, err := d.Dial("tcp", o.To[i%len(o.To)].String())
		if err != nil {
			return err
		}
		c, err := p.add(conn, false)
		if err != nil {
			return err
		}
		if !o.Keep {
			defer p.remove(c)
		}
		if err := c.exchange(o); err != nil {
			return err
		}
		ends[i], err = c.look()
		return err
	})
}

// each calls f for all connections that this process has opened.
func (p *peerProcess) each(o order, f func(*peerConnection) error) error {
	p.mu.Lock()
	made := slices.DeleteFunc(slices.Clone(p.open), func(c *peerConnection) bool { return c.accepted })
	p.mu.Unlock()
	return atOnce(len(made), o.Parallel, func(i int) error { return f(made[i]) })
}

// atOnce calls f for 0 to n-1, with a limit of concurrent calls.
func atOnce(n, parallel int, f func(int) error) error {
	var (
		wait sync.WaitGroup
		errs = make([]error, n)
		next = make(chan int)
	)
	for range max(1, parallel) {
		wait.Go(func() {
			for i := range next {
				errs[i] = f(i)
			}
		})
	}
	for i := range n {
		next <- i
	}
	close(next)
	wait.Wait()
	return errors.Join(errs...)
}

// exchange sends the order's bytes and reads the response.
func (c *peerConnection) exchange(o order) error {
	if o.Up+o.Down == 0 {
		return nil
	}
	message := make([]byte, 8+o.Up)
	binary.BigEndian.PutUint32(message, uint32(o.Up))
	binary.BigEndian.PutUint32(message[4:], uint32(o.Down))
	if err := c.SetDeadline(time.Now().Add(time.Minute)); err != nil {
		return err
	}
	_, err := c.Write(message)
	if err == nil {
		// The response acknowledges all sent bytes.
		_, err = io.CopyN(io.Discard, c, int64(1+o.Down))
	}
	return err
}

// serve answers one exchange.
func (c *peerConnection) serve() error {
	var header [8]byte
	if _, err := io.ReadFull(c, header[:]); err != nil {
		return err
	}
	up, down := binary.BigEndian.Uint32(header[:]), binary.BigEndian.Uint32(header[4:])
	if _, err := io.CopyN(io.Discard, c, int64(up)); err != nil {
		return err
	}
	_, err := c.Write(make([]byte, 1+down))
	return err
}

func (c *peerConnection) info() (info *unix.TCPInfo, err error) {
	failed := c.raw.Control(func(fd uintptr) { info, err = unix.GetsockoptTCPInfo(int(fd), unix.SOL_TCP, unix.TCP_INFO) })
	return info, errors.Join(failed, err)
}

func (c *peerConnection) look() (connectionEnd, error) {
	end := connectionEnd{Accepted: c.accepted, First: c.first, Options: map[string]int{}}
	for at, address := range map[*netip.AddrPort]net.Addr{&end.Local: c.LocalAddr(), &end.Remote: c.RemoteAddr()} {
		a := address.(*net.TCPAddr).AddrPort()
		*at = netip.AddrPortFrom(a.Addr().Unmap(), a.Port())
	}
	info, err := c.info()
	if err != nil {
		return end, err
	}
	end.Info = *info
	failed := c.raw.Control(func(fd uintptr) {
		end.FD = int(fd)
		end.Congestion, err = unix.GetsockoptString(int(fd), unix.SOL_TCP, unix.TCP_CONGESTION)
		for name, option := range seen {
			if err == nil {
				end.Options[name], err = unix.GetsockoptInt(int(fd), option[0], option[1])
			}
		}
	})
	return end, errors.Join(failed, err)
}

// tuned is a host with a policy with tune rules, and a link to remote hosts.
type tuned struct {
	*host
	link *lab.Link
}

// newTuned creates a host and a link. Connections use reno unless a rule sets another algorithm, and no cached metrics
// of earlier connections.
func newTuned(t *testing.T, o lab.LinkOptions) *tuned {
	t.Helper()
	h := newHost(t, config.Reuseport)
	for _, n := range []*lab.Namespace{h.collectors, h.devices} {
		for name, value := range map[string]string{"ipv4.tcp_congestion_control": "reno", "ipv4.tcp_no_metrics_save": "1"} {
			h.must(n.Sysctl(name, value))
		}
	}
	link, err := h.lab.Connect(h.collectors, h.devices, o,
		[]netip.Prefix{netip.PrefixFrom(near4, 24), netip.PrefixFrom(near6, 64)},
		[]netip.Prefix{netip.PrefixFrom(far4, 24), netip.PrefixFrom(far6, 64)})
	h.must(err)
	return &tuned{h, link}
}

// resendLate prevents retransmissions of segments that were not lost: a busy host may acknowledge them later than the smallest
// timeout, 0.2 s.
func (h *tuned) resendLate() {
	h.Helper()
	for _, n := range []*lab.Namespace{h.collectors, h.devices} {
		h.must(n.Sysctl("ipv4.tcp_early_retrans", "0"))                                         // no tail loss probes
		if err := n.Sysctl("ipv4.tcp_rto_min_us", "2000000"); !errors.Is(err, fs.ErrNotExist) { // Linux 6.11
			h.must(err)
		}
	}
}

// group returns the path of a cgroup of the lab for policies.
func (h *tuned) group(name string) string { return "/" + h.lab.CgroupPath() + "/" + name }

// groupDir returns the directory of a cgroup.
func (h *tuned) groupDir(name string) string { return filepath.Join(h.lab.Cgroup(), name) }

func (h *tuned) makeGroup(name string) string {
	h.Helper()
	h.must(os.MkdirAll(h.groupDir(name), 0o755))
	return h.group(name)
}

// exists reports whether a directory or a pin exists.
func (h *tuned) exists(path string) bool {
	h.Helper()
	_, err := os.Stat(path)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		h.Fatal(err)
	}
	return err == nil
}

// setRules writes a policy of tune rules, each in YAML's flow style.
func (h *tuned) setRules(rules ...string) {
	h.Helper()
	h.setPolicyText("tune:\n  - " + strings.Join(rules, "\n  - ") + "\n")
}

func (h *tuned) setPolicyText(text string) {
	h.Helper()
	h.must(os.WriteFile(h.policyPath(), []byte(text), 0o644))
}

// apply applies the rules.
func (h *tuned) apply(rules ...string) (plan api.Plan) {
	h.Helper()
	h.setRules(rules...)
	h.show(&plan, "apply")
	return plan
}

// stopAgent stops the agent with SIGTERM, as a service manager does.
func (h *tuned) stopAgent() {
	h.Helper()
	h.must(h.agent.Signal(unix.SIGTERM))
	if err := h.agent.Wait(); err != nil {
		h.Errorf("the agent exited with %v", err)
	}
}

// tunings returns the output of "sockeye tune".
func (h *tuned) tunings() (list []api.TuneStatus) {
	h.Helper()
	h.show(&list, "tune")
	return list
}

// tuning returns the tuning of one cgroup.
func (h *tuned) tuning(cgroup string) api.TuneStatus {
	h.Helper()
	list := h.tunings()
	i := slices.IndexFunc(list, func(s api.TuneStatus) bool { return s.Cgroup == cgroup })
	if i < 0 {
		h.Fatalf("sockeye tune has no %s: %+v", cgroup, list)
	}
	return list[i]
}

// rule returns a rule in the output of "sockeye tune".
func (h *tuned) rule(name string) api.TuneRuleStatus {
	h.Helper()
	for _, s := range h.tunings() {
		for _, r := range s.Rules {
			if r.Name == name {
				return r
			}
		}
	}
	h.Fatalf("sockeye tune has no rule %s", name)
	return api.TuneRuleStatus{}
}

// socket returns the output of "sockeye tune explain" for a connection of a peer.
func (h *tuned) socket(p *peer, end connectionEnd) (s api.TuneSocket) {
	h.Helper()
	h.show(&s, "tune", "explain", "--socket", fmt.Sprintf("%d:%d", p.Pid(), end.FD))
	return s
}

// peer is a running peer.
type peer struct {
	*lab.Process
	h       *tuned
	orders  *json.Encoder
	out     *os.File
	answers *json.Decoder
}

// startPeer starts a peer in a cgroup of the lab, which it creates if necessary.
func (h *tuned) startPeer(n *lab.Namespace, group, name string) *peer {
	h.Helper()
	return h.startPeerAs("root", n, group, name)
}

func (h *tuned) startPeerAs(user string, n *lab.Namespace, group, name string) *peer {
	h.Helper()
	h.makeGroup(group)
	h.must(os.MkdirAll(filepath.Join(h.dir, filepath.Clean("/"+group)), 0o755)) // directory of the log
	p := n.Command(h.Context(), "/proc/self/exe")
	p.Cmd.Args[0] = name
	p.Name, p.User = filepath.Join(group, name), user
	p.Cmd.Env = append(os.Environ(), peerEnv+"=1", "GOMAXPROCS=1")
	stdin, err := p.Cmd.StdinPipe()
	h.must(err)
	out, in, err := os.Pipe()
	h.must(err)
	h.Cleanup(func() { out.Close() })
	p.Cmd.Stdout = in
	h.must(p.Start())
	in.Close()
	return &peer{p, h, json.NewEncoder(stdin), out, json.NewDecoder(out)}
}

// startNear and startFar start a peer on the near and the far side of the link.
func (h *tuned) startNear(group string) *peer {
	h.Helper()
	return h.startPeer(h.collectors, group, "near")
}

func (h *tuned) startFar() *peer {
	h.Helper()
	return h.startPeer(h.devices, "others", "far")
}

// order sends an order and returns a function that waits for the response.
func (p *peer) order(o order) (answer func() []connectionEnd) {
	p.h.Helper()
	p.h.must(p.orders.Encode(o))
	return func() []connectionEnd {
		p.h.Helper()
		p.h.must(p.out.SetReadDeadline(time.Now().Add(2 * patience)))
		var r report
		if err := p.answers.Decode(&r); err != nil {
			p.h.Fatalf("%s does not answer %+v: %v; end of its log:\n%s", p.Name, o, err, p.LogTail(20))
		}
		if r.Error != "" {
			p.h.Fatalf("%s cannot %s: %s", p.Name, o.Do, r.Error)
		}
		return r.Ends
	}
}

func (p *peer) do(o order) []connectionEnd {
	p.h.Helper()
	return p.order(o)()
}

// listen makes a peer listen for both families.
func (p *peer) listen(port uint16) {
	p.h.Helper()
	p.do(order{Do: "listen", At: netip.AddrPortFrom(wildcard, port)})
}

// connect opens connections to the addresses in turn and leaves them open.
func (p *peer) connect(n int, to ...netip.AddrPort) []connectionEnd {
	p.h.Helper()
	return p.do(order{Do: "connect", N: n, Parallel: 8, To: to, Up: 1000, Keep: true})
}

// look returns the open connections.
func (p *peer) look() []connectionEnd {
	p.h.Helper()
	return p.do(order{Do: "look"})
}

// accepted waits until a peer has n accepted open connections and returns them.
func (p *peer) accepted(n int) (ends []connectionEnd) {
	p.h.Helper()
	p.h.eventually("connections", func() error {
		ends = slices.DeleteFunc(p.look(), func(e connectionEnd) bool { return !e.Accepted })
		if len(ends) != n {
			return fmt.Errorf("%d, want %d", len(ends), n)
		}
		return nil
	})
	return ends
}

// at combines the addresses with a port.
func at(port uint16, addresses ...netip.Addr) []netip.AddrPort {
	list := make([]netip.AddrPort, len(addresses))
	for i, a := range addresses {
		list[i] = netip.AddrPortFrom(a, port)
	}
	return list
}

// has fails the test for connections on which an option does not have the expected value.
func (h *tuned) has(what string, ends []connectionEnd, option string, want int) {
	h.Helper()
	if len(ends) == 0 {
		h.Errorf("%s: no connections", what)
	}
	for _, e := range ends {
		if got := e.Options[option]; got != want {
			h.Errorf("%s: %v -> %v has %s %d, want %d", what, e.Local, e.Remote, option, got, want)
		}
	}
}

// segment is a TCP segment on the link.
type segment struct {
	from, to netip.AddrPort
	syn      bool
	label    uint32 // flow label
	length   int    // bytes of data
}

// parseSegment parses a packet of the link without IP options.
func parseSegment(packet []byte) (s segment, ok bool) {
	var tcp []byte
	var from, to netip.Addr
	switch {
	case len(packet) >= 40 && packet[0]>>4 == 4 && packet[9] == unix.IPPROTO_TCP:
		from, to = netip.AddrFrom4([4]byte(packet[12:])), netip.AddrFrom4([4]byte(packet[16:]))
		tcp = packet[20:]
	case len(packet) >= 60 && packet[0]>>4 == 6 && packet[6] == unix.IPPROTO_TCP:
		from, to = netip.AddrFrom16([16]byte(packet[8:])), netip.AddrFrom16([16]byte(packet[24:]))
		s.label = binary.BigEndian.Uint32(packet) & 0xfffff
		tcp = packet[40:]
	default:
		return s, false
	}
	s.from = netip.AddrPortFrom(from, binary.BigEndian.Uint16(tcp))
	s.to = netip.AddrPortFrom(to, binary.BigEndian.Uint16(tcp[2:]))
	s.syn = tcp[13]&2 != 0
	s.length = len(tcp) - int(tcp[12]>>4)*4
	return s, true
}

// foreignProgram is a sock_ops program of another tool, which sets the priority of new connections.
func foreignProgram(t *testing.T, priority int32) *ebpf.Program {
	t.Helper()
	const connecting = 3 // BPF_SOCK_OPS_TCP_CONNECT_CB
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "foreign", Type: ebpf.SockOps, AttachType: ebpf.AttachCGroupSockOps, License: "Apache-2.0",
		Instructions: asm.Instructions{
			asm.LoadMem(asm.R2, asm.R1, 0, asm.Word), // op
			asm.JNE.Imm(asm.R2, connecting, "out"),
			asm.StoreImm(asm.R10, -4, int64(priority), asm.Word),
			asm.Mov.Imm(asm.R2, unix.SOL_SOCKET),
			asm.Mov.Imm(asm.R3, unix.SO_PRIORITY),
			asm.Mov.Reg(asm.R4, asm.R10),
			asm.Add.Imm(asm.R4, -4),
			asm.Mov.Imm(asm.R5, 4),
			asm.FnSetsockopt.Call(),
			asm.Mov.Imm(asm.R0, 1).WithSymbol("out"),
			asm.Return(),
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	return p
}

// line is the path from the near side to a remote address: a queue with a limit for each connection, which sends a
// packet every millisecond. Drop calls it.
type line struct {
	depth float64
	mu    sync.Mutex
	flows map[[2]netip.AddrPort]*queue
}

type queue struct {
	full float64
	at   time.Time
}

// drops reports whether the queue is full for a segment.
func (l *line) drops(s segment) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.flows == nil {
		l.flows = map[[2]netip.AddrPort]*queue{}
	}
	now := time.Now()
	q := l.flows[[2]netip.AddrPort{s.from, s.to}]
	if q == nil {
		q = &queue{at: now}
		l.flows[[2]netip.AddrPort{s.from, s.to}] = q
	}
	q.full = max(0, q.full-now.Sub(q.at).Seconds()*1000)
	q.at = now
	if q.full+1 > l.depth {
		return true
	}
	q.full++
	return false
}

// onlyData wraps a drop function, which is called for data segments of the near side only.
func onlyData(drop func(segment) bool) func(lab.Direction, []byte) bool {
	return func(d lab.Direction, packet []byte) bool {
		if d != lab.AToB {
			return false
		}
		s, ok := parseSegment(packet)
		return ok && s.length > 0 && drop(s)
	}
}
