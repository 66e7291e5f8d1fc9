// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"sockeye/internal/bigtcp/netif"
	"sockeye/internal/bigtcp/sizing"
)

// log gathers what a server tells.
type log struct {
	mu    sync.Mutex
	lines []string
}

func (l *log) printf(format string, args ...any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lines = append(l.lines, fmt.Sprintf(format, args...))
}

func (l *log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Join(l.lines, "\n")
}

// serve starts a server on its host, which ends with the test or by stop.
func (h *hosts) serve(t *testing.T) (s *Server, l *log, stop func()) {
	t.Helper()
	store, err := sizing.OpenStore(h.serverDir)
	if err != nil {
		t.Fatal(err)
	}
	l = &log{}
	if s, err = Listen(h.server.network, store, "[::]:0", l.printf); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- s.Serve(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-served; err != nil {
			t.Errorf("serve: %v", err)
		}
	})
	t.Cleanup(stop)
	return s, l, stop
}

func portOf(t *testing.T, s *Server) uint16 {
	t.Helper()
	at, err := netip.ParseAddrPort(s.Address().String())
	if err != nil {
		t.Fatal(err)
	}
	return at.Port()
}

// dial connects from the client's host.
func (h *hosts) dial(t *testing.T, s *Server) net.Conn {
	t.Helper()
	var conn net.Conn
	err := h.client.network.Do(func() (err error) {
		conn, err = net.DialTimeout("tcp", netip.AddrPortFrom(h.address(IPv4), portOf(t, s)).String(), 10*time.Second)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

func TestRemote(t *testing.T) {
	h := newHosts(t)
	s, _, stop := h.serve(t)
	for _, family := range Families {
		// While it runs, the sizes are those of off or of on, at both ends.
		seen := map[netif.Sizes]bool{}
		o := quick()
		o.For = 50 * time.Millisecond
		o.Progress = func(int, int) {
			if h.client.sizes(t) != h.server.sizes(t) {
				t.Errorf("client %+v, server %+v", h.client.sizes(t), h.server.sizes(t))
			}
			seen[h.server.sizes(t)] = true
		}
		r, err := Run(t.Context(), h.client.network, h.store, h.address(family).String(), portOf(t, s), s.Key(), o)
		if err != nil {
			t.Fatal(err)
		}
		h.asBefore(t)
		off, on := netif.Sizes{GSO: 65536, GRO: 65536, GSOIPv4: 65536, GROIPv4: 65536}, netif.Sizes{GSO: o.Size, GRO: o.Size, GSOIPv4: o.Size, GROIPv4: o.Size}
		if len(seen) != 2 || !seen[off] || !seen[on] {
			t.Errorf("sizes while it ran: %v", seen)
		}
		if len(r.Families) != 1 || r.Families[0].Family != family || len(r.Notes) > 0 {
			t.Fatalf("%+v", r)
		}
		f := r.Families[0]
		if !f.Server.Changed || f.Server.Interface != device || f.Client.Interface != device || f.Server.Kernel != kernelRelease() {
			t.Errorf("client %+v, server %+v", f.Client, f.Server)
		}
		if row, ok := r.Row(family, "stream_rate"); !ok || row.On <= 0 || row.Off <= 0 {
			t.Errorf("%+v", row)
		}
		text := strings.Join(r.Text(), "\n")
		for _, want := range []string{"eth0 of this host to eth0 of the server", "latency, P99", "transactions", familyName(family)} {
			if !strings.Contains(text, want) {
				t.Errorf("no %q in\n%s", want, text)
			}
		}
	}
	stop()
	h.asBefore(t)
}

func TestRefusals(t *testing.T) {
	h := newHosts(t)
	s, l, _ := h.serve(t)
	run := func(host, key string, o Options) error {
		_, err := Run(t.Context(), h.client.network, h.store, host, portOf(t, s), key, o)
		h.asBefore(t)
		return err
	}
	server := h.address(IPv4).String()
	for _, c := range []struct {
		name, host, key, want string
		kind                  netif.Kind
	}{
		{"wrong key", server, newKey().String(), "the key is wrong", netif.KindUsage},
		{"no key", server, "", "this is no key", netif.KindUsage},
		{"nonsense", server, "abc\x1b[2J", "this is no key", netif.KindUsage},
		{"itself", h.prefix(IPv4, 0).Addr().String(), s.Key(), "this host itself", netif.KindUsage},
		{"loopback", "127.0.0.1", s.Key(), "this host itself", netif.KindUsage},
		{"no host", "no.such.host.invalid", s.Key(), "no.such.host.invalid", netif.KindUsage},
	} {
		err := run(c.host, c.key, quick())
		if kind, ok := kindOf(err); !ok || kind != c.kind || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "\x1b") {
			t.Errorf("%s: %v", c.name, err)
		}
	}
	if got := l.String(); !strings.Contains(got, "refused: the key is wrong") {
		t.Errorf("the server says %q", got)
	}
	o := quick()
	o.Size = netif.Most + 1
	if kind, ok := kindOf(run(server, s.Key(), o)); !ok || kind != netif.KindUsage {
		t.Error("a size above the most was not refused")
	}
}

// What others have set stays, and is not measured over.
func TestHeldByOthers(t *testing.T) {
	for _, end := range []string{"client", "server"} {
		h := newHosts(t)
		s, _, _ := h.serve(t)
		at, dir := h.client, h.clientStore
		if end == "server" {
			at, dir = h.server, h.serverDir
		}
		store, err := sizing.OpenStore(dir)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := store.Apply(at.network, sizing.ByCommand, []sizing.Target{{Interface: device, Want: sizing.Want{IPv6: 100000}}}, false); err != nil {
			t.Fatal(err)
		}
		set := at.sizes(t)
		_, err = h.run(t, s, quick())
		if kind, ok := kindOf(err); !ok || kind != netif.KindConflict {
			t.Errorf("%s: %v", end, err)
		}
		if got := at.sizes(t); got != set {
			t.Errorf("%s: sizes %+v, were %+v", end, got, set)
		}
		if _, err := store.Revert(func(sizing.Record) bool { return true }, false); err != nil {
			t.Error(err)
		}
		h.serverAsBefore(t)
		h.asBefore(t)
	}
}

// Who talks nonsense is refused, and others are served all the same.
func TestGarbage(t *testing.T) {
	h := newHosts(t)
	s, _, _ := h.serve(t)
	for name, line := range map[string]string{
		"nonsense":         "GET / HTTP/1.0\r\n\r\n",
		"no JSON":          "{\n",
		"binary":           "\x16\x03\x01\x00\xff\n",
		"a long line":      strings.Repeat("a", 4*maxLine) + "\n",
		"a long value":     `{"op":"hello","nonce":"` + strings.Repeat("a", 2*maxLine) + "\"}\n",
		"run before hello": `{"op":"run","load":"rr","message":80000,"for_ns":1000000000}` + "\n",
		"bye before hello": `{"op":"bye"}` + "\n",
		"unknown field":    `{"op":"bye","path":"/etc/passwd"}` + "\n",
		"no MAC":           fmt.Sprintf(`{"op":"hello","nonce":%q,"size":185000}`, newNonce()) + "\n",
		"wrong MAC":        fmt.Sprintf(`{"op":"hello","nonce":%q,"mac":%q,"size":185000}`, newNonce(), strings.Repeat("0", 64)) + "\n",
		"size too large":   fmt.Sprintf(`{"op":"hello","nonce":%q,"mac":%q,"size":4294967295}`, newNonce(), strings.Repeat("0", 64)) + "\n",
		"data for nobody":  dataLine(newNonce()),
		"data, no token":   dataLine(""),
		"nothing":          "",
	} {
		conn := h.dial(t, s)
		if _, err := io.WriteString(conn, line); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if line == "" {
			conn.Close()
			continue
		}
		if err := conn.SetDeadline(time.Now().Add(20 * time.Second)); err != nil {
			t.Fatal(err)
		}
		// Then it is closed. What the server did not read makes that a reset.
		answer, err := io.ReadAll(conn)
		if err != nil && !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("%s: %v after %q", name, err, answer)
		}
	}
	// Connections that say nothing are in nobody's way.
	for range maxWaiting / 2 {
		h.dial(t, s)
	}
	h.asBefore(t)
	if _, err := h.run(t, s, quick()); err != nil {
		t.Error(err)
	}
	h.asBefore(t)
}

// begin says hello as a client that knows the key.
func (h *hosts) begin(t *testing.T, s *Server) *wire {
	t.Helper()
	c := &client{Options: quick(), network: h.client.network, key: s.key}
	w, _, err := c.hello(t.Context(), netip.AddrPortFrom(h.address(IPv4), portOf(t, s)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.Close() })
	if got := h.server.sizes(t); got.GSOIPv4 != c.Size {
		t.Fatalf("the server has sizes %+v", got)
	}
	return w
}

// A client that goes, or breaks the rules, at any point ends what it began.
func TestClientVanishes(t *testing.T) {
	h := newHosts(t)
	s, _, _ := h.serve(t)
	order := request{Op: opRun, On: true, Load: loadStream, Message: 80000, ForNS: int64(time.Second)}
	open := func(t *testing.T, w *wire) net.Conn {
		t.Helper()
		if err := w.write(order); err != nil {
			t.Fatal(err)
		}
		answer, err := w.reply(patience)
		if err != nil {
			t.Fatal(err)
		}
		conn := h.dial(t, s)
		if _, err := bufio.NewReader(conn).ReadSlice('\n'); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(conn, dataLine(answer.Token)); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(conn, make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
		return conn
	}
	for name, leave := range map[string]func(*testing.T, *wire){
		"after hello": func(_ *testing.T, w *wire) { w.Close() },
		"before data": func(t *testing.T, w *wire) {
			if err := w.write(order); err != nil {
				t.Fatal(err)
			}
			w.Close()
		},
		"while data flow": func(t *testing.T, w *wire) {
			conn := open(t, w)
			if _, err := conn.Write(make([]byte, 1<<16)); err != nil {
				t.Fatal(err)
			}
			w.Close()
		},
		"control alone, data stay open": func(t *testing.T, w *wire) {
			open(t, w)
			w.Close()
		},
		"a second hello": func(t *testing.T, w *wire) {
			if err := w.write(request{Op: opHello, Nonce: newNonce(), MAC: strings.Repeat("0", 64), Size: netif.Most}); err != nil {
				t.Fatal(err)
			}
		},
		"out of bounds": func(t *testing.T, w *wire) {
			if err := w.write(request{Op: opRun, Load: loadRR, Message: 1 << 30, ForNS: 1 << 60}); err != nil {
				t.Fatal(err)
			}
		},
		"false data": func(t *testing.T, w *wire) {
			if _, err := open(t, w).Write(bytes.Repeat([]byte("false"), 1000)); err != nil {
				t.Fatal(err)
			}
			if _, err := w.reply(patience); err == nil || !strings.Contains(err.Error(), errCorrupt.Error()) {
				t.Errorf("false data: %v", err)
			}
		},
	} {
		leave(t, h.begin(t, s))
		h.serverAsBefore(t)
		h.asBefore(t)
		if t.Failed() {
			t.Fatal(name)
		}
	}
	if _, err := h.run(t, s, quick()); err != nil {
		t.Error(err)
	}
	h.asBefore(t)
}

func TestOneClientAtATime(t *testing.T) {
	h := newHosts(t)
	s, _, _ := h.serve(t)
	w := h.begin(t, s)
	_, err := h.run(t, s, quick())
	if kind, ok := kindOf(err); !ok || kind != netif.KindConflict {
		t.Errorf("a second client: %v", err)
	}
	if h.client.sizes(t) != h.before[h.client] {
		t.Errorf("a client that was refused has changed its sizes: %+v", h.client.sizes(t))
	}
	if err := w.write(request{Op: opBye}); err != nil {
		t.Fatal(err)
	}
	if _, err := w.reply(patience); err != nil {
		t.Fatal(err)
	}
	h.asBefore(t)
}

// An interrupt of either end in the middle of a run leaves both as they were.
func TestRemoteInterrupted(t *testing.T) {
	for _, end := range []string{"client", "server"} {
		h := newHosts(t)
		s, _, stop := h.serve(t)
		ctx, cancel := context.WithCancelCause(t.Context())
		why := errors.New("interrupted")
		o := quick()
		o.For = 10 * time.Second
		o.Rounds = 1
		interrupted := make(chan struct{})
		go func() {
			defer close(interrupted)
			h.flowing(t)
			if end == "client" {
				cancel(why)
			} else {
				stop()
			}
		}()
		start := time.Now()
		_, err := Run(ctx, h.client.network, h.store, h.address(IPv4).String(), portOf(t, s), s.Key(), o)
		<-interrupted
		if took := time.Since(start); took > 8*time.Second {
			t.Errorf("the %s is interrupted after %v", end, took)
		}
		if err == nil || end == "client" && !errors.Is(err, why) {
			t.Errorf("the %s is interrupted: %v", end, err)
		}
		h.serverAsBefore(t)
		h.asBefore(t)
		cancel(nil)
	}
}

// When the link between the two fails, each gives back what it changed.
func TestLinkFails(t *testing.T) {
	h := newHosts(t)
	s, _, _ := h.serve(t)
	o := quick()
	o.For = 20 * time.Second
	failed := make(chan error, 1)
	go func() {
		h.flowing(t)
		link, err := h.client.nl.LinkByName(device)
		if err == nil {
			err = h.client.nl.LinkSetDown(link)
		}
		failed <- err
	}()
	_, err := Run(t.Context(), h.client.network, h.store, h.address(IPv4).String(), portOf(t, s), s.Key(), o)
	if err == nil || !strings.Contains(err.Error(), "no progress in 5s") || strings.Contains(err.Error(), "\n") {
		t.Errorf("without a link: %v", err)
	}
	if err := <-failed; err != nil {
		t.Fatal(err)
	}
	h.serverAsBefore(t)
	h.asBefore(t)
}

// flowing waits until a run sends data.
func (h *hosts) flowing(t *testing.T) {
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); time.Sleep(time.Millisecond) {
		if c, err := h.counted(); err != nil || c.sentBytes > 1<<20 {
			return
		}
	}
	t.Error("no data flow")
}

const (
	envServe = "SOCKEYE_TEST_BENCH_SERVE" // state directory
	envUser  = 65534
)

// TestServeProcess is a server in a process of its own.
func TestServeProcess(t *testing.T) {
	dir := os.Getenv(envServe)
	if dir == "" {
		return
	}
	n, err := netif.OpenNetwork("")
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close()
	store, err := sizing.OpenStore(dir)
	if err != nil {
		t.Fatal(err)
	}
	s, err := Listen(n, store, "[::]:0", t.Logf)
	if err != nil {
		t.Fatal(err)
	}
	fmt.Printf("%d %s\n", portOf(t, s), s.Key())
	if err := s.Serve(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// serveProcess starts a server in a process of its own on the server's host.
func (h *hosts) serveProcess(t *testing.T, attr *syscall.SysProcAttr) (cmd *exec.Cmd, port uint16, key string) {
	t.Helper()
	cmd = exec.Command("/proc/self/exe", "-test.run=^TestServeProcess$")
	cmd.Env = append(os.Environ(), envServe+"="+h.serverDir)
	cmd.Stderr, cmd.SysProcAttr = os.Stderr, attr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	// A child is in the namespace of the thread that starts it.
	if err := h.server.network.Do(cmd.Start); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
	})
	if _, err := fmt.Fscan(out, &port, &key); err != nil {
		t.Fatal(err)
	}
	return cmd, port, key
}

// What a server leaves that was killed is reverted from its records, and the client
// gives back what it changed.
func TestServerKilled(t *testing.T) {
	h := newHosts(t)
	cmd, port, key := h.serveProcess(t, &syscall.SysProcAttr{})
	o := quick()
	o.For = 10 * time.Second
	killed := make(chan error, 1)
	go func() {
		h.flowing(t)
		killed <- cmd.Process.Kill()
	}()
	if _, err := Run(t.Context(), h.client.network, h.store, h.address(IPv4).String(), port, key, o); err == nil {
		t.Error("a server that was killed has measured")
	}
	if err := <-killed; err != nil {
		t.Fatal(err)
	}
	cmd.Wait()
	if got := h.client.sizes(t); got != h.before[h.client] {
		t.Errorf("the client has sizes %+v, had %+v", got, h.before[h.client])
	}
	if h.server.sizes(t) == h.before[h.server] {
		t.Fatal("the server was killed too late")
	}
	// Its namespace was its own. From here it has another path, which is not recorded.
	err := h.server.network.Do(func() error {
		store, err := sizing.OpenStore(h.serverDir)
		if err != nil {
			return err
		}
		_, err = store.Revert(func(r sizing.Record) bool { return r.Owner == sizing.ByBench }, false)
		return err
	})
	if err != nil {
		t.Error(err)
	}
	h.asBefore(t)
}

// A server without rights changes nothing, and that is told.
func TestServerWithoutRights(t *testing.T) {
	h := newHosts(t)
	_, port, key := h.serveProcess(t, &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: envUser, Gid: envUser}})
	r, err := Run(t.Context(), h.client.network, h.store, h.address(IPv6).String(), port, key, quick())
	if err != nil {
		t.Fatal(err)
	}
	if r.Families[0].Server.Changed || !strings.Contains(strings.Join(r.Text(), "\n"), "IPv6: the server has no right to change its sizes") {
		t.Errorf("%+v\n%s", r.Families[0].Server, strings.Join(r.Text(), "\n"))
	}
	h.asBefore(t)
}
