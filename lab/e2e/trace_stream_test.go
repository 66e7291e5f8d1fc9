// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"sockeye/internal/api"
	"sockeye/internal/cgroup"
	"sockeye/internal/config"
	"sockeye/internal/fault"
	"sockeye/internal/procsock"
	"sockeye/internal/trace/capture"
	"sockeye/internal/trace/measure"
	"sockeye/internal/trace/packets"
	"sockeye/lab"
)

// stream starts a streaming response.
func (h *tuned) stream(path string, args ...string) (*api.Stream, error) {
	s, err := api.NewClient(api.SocketPath(h.dir)).Stream(h.Context(), "/v1/trace"+path, pairs(args...))
	if err == nil {
		h.Cleanup(func() { s.Close() })
	}
	return s, err
}

// samples starts to read samples.
func (h *tuned) samples(args ...string) *api.Stream {
	h.Helper()
	s, err := h.stream("/samples", args...)
	h.must(err)
	return s
}

// refused fails the test unless an error has the code, a hint and the words.
func (h *tuned) refused(what string, err error, code int, words ...string) {
	h.Helper()
	if fault.Code(err) != code {
		h.Errorf("%s: code %d, want %d: %v", what, fault.Code(err), code, err)
		return
	}
	for _, word := range words {
		if !strings.Contains(err.Error()+"\nhint: "+fault.Hint(err), word) {
			h.Errorf("%s lacks %q: %v, hint: %s", what, word, err, fault.Hint(err))
		}
	}
}

// TestTraceSamples checks that there is one sample for each counted message when it is complete, for one reader at a
// time, also after changes of rules and agents.
func TestTraceSamples(t *testing.T) {
	t.Parallel()
	h := newTuned(t, lab.LinkOptions{Delay: time.Millisecond})
	h.resendLate()
	near, unit := h.makeGroup("near"), h.unit(".service")
	all := "{name: all, cgroup: " + near + ", messages: 1/1, group_by: [remote/24, port]}"
	late := "{name: late, cgroup: " + unit + ", messages: 1/1}"
	h.setPolicyText("tune: []\n")
	h.startAgent()
	_, err := h.stream("/samples")
	h.refused("without rules", err, fault.CodeUsage, "nothing is traced", "hint: add a trace rule")
	h.applyTrace(all, late)
	p, far := h.startNear("near"), h.startFar()
	far.listen(tracePort)
	far.listen(tracePort + 1)
	both := at(tracePort, far4, far6)
	p.connect(4, both...)

	s := h.samples()
	next := func(s *api.Stream) (line api.TraceSampleLine) {
		t.Helper()
		h.must(s.Next(&line))
		return line
	}
	p.exchanges(5)
	var of4, of6 int
	var last *measure.Sample
	for range 20 {
		line := next(s)
		if line.Sample == nil {
			t.Fatalf("lost %d", line.Lost)
		}
		m := line.Sample
		if m.Group.Rule != "all" || m.Group.Port != tracePort || m.Length != 1008 || m.Outcome != measure.Acked || m.Role != config.RoleConnect ||
			m.Local.Addr() != near4 && m.Local.Addr() != near6 || m.Remote.Port() != tracePort || m.Cookie == 0 ||
			m.Stages[config.StageNetwork] < 2*time.Millisecond || m.Stages[measure.Total] < m.Stages[config.StageNetwork]+m.Stages[config.StageQdisc] ||
			time.Since(m.Ended) > patience || time.Since(m.Ended) < -time.Second {
			t.Errorf("%+v", m)
		}
		switch m.Group.Remote {
		case netip.MustParsePrefix("10.90.0.0/24"):
			of4++
		case netip.MustParsePrefix("fd90::/48"):
			of6++
		default:
			t.Errorf("%+v", m.Group)
		}
		last = m
	}
	if of4 != 10 || of6 != 10 {
		t.Errorf("%d samples of IPv4, %d of IPv6, want 10 each", of4, of6)
	}

	// One reader at a time, including the command, until the reader disconnects.
	_, err = h.stream("/samples")
	h.refused("a second reader", err, fault.CodeConflict, near, "being read already", "hint:")
	h.refuse(5, []string{"being read already", "hint:"}, "trace", "samples", "--count", "1")
	s.Close()
	h.eventually("the reader to be disconnected", func() error {
		s, err = h.stream("/samples", "select", fmt.Sprintf("port=%d,remote=10.90.0.0/16", tracePort+1))
		return err
	})

	// A new group is selected from its first message on.
	p.connect(3, at(tracePort+1, far6, far4, far6)...)
	p.exchanges(1)
	if m := next(s).Sample; m == nil || m.Group.Port != tracePort+1 || !m.Local.Addr().Is4() {
		t.Errorf("%+v", m)
	}
	s.Close()

	// Samples continue when rules change and a cgroup is added.
	h.eventually("the reader to be disconnected", func() error {
		s, err = h.stream("/samples")
		return err
	})
	h.applyTrace(strings.Replace(all, "1/1", "1000/s", 1), late)
	p.do(order{Do: "close"})
	p.connect(1, both...)
	if m := next(s).Sample; m == nil || m.Group.Rule != "all" || !m.Ended.After(last.Ended) {
		t.Errorf("other rules: %+v", m)
	}
	h.makeGroup(unit)
	h.eventually("the unit to be traced", func() error {
		if !h.traced(unit).Attached {
			return errors.New("it is not")
		}
		return nil
	})
	q := h.startNear(unit)
	q.connect(1, both...)
	if m := next(s).Sample; m == nil || m.Group.Rule != "late" {
		t.Errorf("a unit that started later: %+v", m)
	}

	// The response ends when the agent stops. Samples without a reader are not stored.
	h.stopAgent()
	var line api.TraceSampleLine
	if err := s.Next(&line); err == nil {
		t.Errorf("the stopped agent sent a line: %+v", line)
	}
	if h.sampling() {
		t.Error("samples are stored after the agent has stopped")
	}
	h.startAgent()
	h.samples()
	if !h.sampling() {
		t.Error("samples are not stored while there is a reader")
	}
	h.killAgent()
	p.exchanges(1)
	h.startAgent()
	if h.sampling() {
		t.Error("a new agent stores samples for the reader of the previous agent")
	}
	s = h.samples()
	p.exchanges(1)
	if m := next(s).Sample; m == nil || m.Group.Rule != "all" {
		t.Errorf("a new agent: %+v", m)
	}
	s.Close()

	// With the command, as lines of JSON.
	var out bytes.Buffer
	h.eventually("the reader to be disconnected", func() error {
		out.Reset()
		cmd := exec.CommandContext(h.Context(), os.Getenv(binaryEnv), "--run-dir", h.dir, "trace", "samples", "-o", "jsonl", "--count", "3")
		cmd.Stdout = &out
		h.must(cmd.Start())
		done := make(chan error, 1)
		go func() { done <- cmd.Wait() }()
		for {
			select {
			case err := <-done:
				return err
			default:
				p.exchanges(1)
			}
		}
	})
	lines := strings.Split(strings.TrimSuffix(out.String(), "\n"), "\n")
	for _, text := range lines {
		var m measure.Sample
		if err := json.Unmarshal([]byte(text), &m); err != nil || m.Group.Rule != "all" {
			t.Errorf("sockeye trace samples: %v: %s", err, text)
		}
	}
	if len(lines) != 3 {
		t.Errorf("sockeye trace samples --count 3:\n%s", out.String())
	}
}

// sampling reports whether a tracing has a ring for samples.
func (h *tuned) sampling() bool {
	h.Helper()
	rings, err := filepath.Glob(filepath.Join(h.pins, "trace_*", "rings"))
	h.must(err)
	if len(rings) == 0 {
		h.Fatal("no pins")
	}
	for _, path := range rings {
		m, err := ebpf.LoadPinnedMap(path, nil)
		h.must(err)
		defer m.Close()
		var id uint32
		err = m.Lookup(uint32(0), &id)
		if err == nil {
			return true
		}
		if !errors.Is(err, ebpf.ErrKeyNotExist) {
			h.Fatal(err)
		}
	}
	return false
}

// TestTraceSamplesLost checks that a reader that is too slow for its buffer receives the number of lost samples, and
// all other samples.
func TestTraceSamplesLost(t *testing.T) {
	t.Parallel()
	h := newTraced(t, 0)
	h.setTrace("{name: all, cgroup: " + h.group("near") + ", messages: 1/1}")
	h.startAgent()
	p, far := h.startNear("near"), h.startFar()
	far.listen(tracePort)
	p.connect(4, at(tracePort, far4)...)
	h.ended("", 4)
	// The client does not read, so that its socket and then the ring become full.
	s := h.samples("buffer", "4096")
	const messages = 4 * 400
	p.exchanges(messages / 4)
	h.ended("", 4+messages)
	var got, lost uint64
	h.must(agentLines(s, func(line api.TraceSampleLine) bool {
		if line.Sample != nil {
			got++
		}
		if line.Lost > 0 {
			if line.Lost < lost {
				t.Errorf("%d lost, after %d", line.Lost, lost)
			}
			lost = line.Lost
		}
		return got+lost < messages
	}))
	if lost == 0 || got == 0 || got+lost != messages {
		t.Errorf("%d samples, %d lost, of %d", got, lost, messages)
	}
}

// agentLines calls f for each line until f returns false.
func agentLines(s *api.Stream, f func(api.TraceSampleLine) bool) error {
	for {
		var line api.TraceSampleLine
		if err := s.Next(&line); err != nil {
			return err
		}
		if !f(line) {
			return nil
		}
	}
}

// TestTracePacketsUDP follows the UDP socket of one of two members: the datagrams of its devices, and its responses.
func TestTracePacketsUDP(t *testing.T) {
	inBothModes(t, func(t *testing.T, mode config.Steering) {
		h := newHost(t, mode)
		h.up(2)
		home := h.homes(2)
		pid, fd := h.members[0].Pid(), -1
		// The socket was created in the cgroup above.
		group, err := cgroup.Of(pid)
		h.must(err)
		moved := filepath.Join(filepath.Dir(h.lab.Cgroup()), group, "moved")
		h.must(os.Mkdir(moved, 0o755))
		h.must(cgroup.Move(moved, pid))
		for n := range 100 {
			if s, err := procsock.Open(pid, n); err == nil {
				if s.Protocol == unix.IPPROTO_UDP {
					fd = n
				}
				s.Close()
			}
		}
		all := addresses(20)
		want := map[netip.Addr]int{}
		for _, a := range all {
			if home(a) == 0 {
				want[a] = 3
			}
		}
		begun, done := make(chan struct{}), make(chan struct{})
		var events []capture.Event
		var about api.TraceConnection
		go func() {
			defer close(done)
			s, err := api.NewClient(api.SocketPath(h.dir)).Stream(h.Context(), "/v1/trace/packets", url.Values{"pid": {fmt.Sprint(pid)}, "fd": {fmt.Sprint(fd)}, "for": {"1m"}})
			if err != nil {
				t.Error(err)
				close(begun)
				return
			}
			defer s.Close()
			counts := map[uint8]int{}
			for n := 3 * len(want); counts[capture.Receive] < n || counts[capture.Read] < n || counts[capture.Driver] < n; {
				var line api.TracePacketLine
				if err := s.Next(&line); err != nil || line.End != nil {
					return
				}
				if line.Connection != nil {
					about = *line.Connection
					close(begun)
				} else {
					events = append(events, *line.Event)
					counts[line.Event.Kind]++
				}
			}
		}()
		<-begun
		h.flood(all, 3*len(all))
		<-done
		got, sent := map[netip.Addr]int{}, map[netip.Addr]int{}
		a := packets.NewDatagramAssembler(packets.Clock(about.Clock), 0, about.DropReasons, func(p *packets.Packet) error {
			if p.Sent != nil {
				sent[p.Peer.Addr()]++
			} else if got[p.Peer.Addr()]++; p.Received.Read.IsZero() {
				t.Errorf("not read: %+v", p)
			}
			return nil
		})
		for i := range events {
			h.must(a.Add(&events[i]))
		}
		summary, err := a.Close()
		h.must(err)
		if !maps.Equal(got, want) || !maps.Equal(sent, want) || about.Protocol != "udp" || about.Remote != "" || about.PID != pid || about.FD != fd {
			about.DropReasons = nil
			t.Errorf("received %v, sent %v, want %v each; %+v; %+v", got, sent, want, about, summary)
		}

		raw, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_UDP)
		h.must(err)
		defer unix.Close(raw)
		h.refuse(2, []string{"is a raw socket", "ss -uanp"}, "trace", "packets", "--pid", fmt.Sprint(os.Getpid()), "--fd", fmt.Sprint(raw))

		// The command; the member stops reading.
		h.must(h.members[0].Signal(unix.SIGSTOP))
		defer func() { h.must(h.members[0].Signal(unix.SIGCONT)) }()
		file := filepath.Join(h.dir, "datagrams.pcapng")
		var out, errs string
		var code int
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			out, errs, code = h.cli("trace", "packets", "--pid", fmt.Sprint(pid), "--fd", fmt.Sprint(fd), "--for", "3s", "-w", file)
		}()
		for running := true; running; {
			h.flood(all, len(all))
			select {
			case <-ended:
				running = false
			case <-time.After(200 * time.Millisecond):
			}
		}
		if info, err := os.Stat(file); code != 0 || !strings.Contains(out, "received datagrams: 0 read, ") || strings.Contains(out, " 0 not read, ") || err != nil || info.Size() < int64(100*len(want)) {
			t.Errorf("exit code %d: %s%s; %v", code, out, errs, err)
		}
	})
}

// TestTracePackets checks that trace packets shows the packets of one connection only, independent of the policy.
func TestTracePackets(t *testing.T) {
	t.Parallel()
	const delay = 5 * time.Millisecond
	h := newTuned(t, lab.LinkOptions{Delay: delay})
	h.makeGroup("near")
	h.setPolicyText("tune: []\n")
	h.startAgent()
	p, far := h.startNear("near"), h.startFar()
	far.listen(tracePort)
	ends := p.connect(3, at(tracePort, far4, far6, far4)...)
	for name, c := range map[string]struct {
		end  connectionEnd
		args []string
	}{
		"by its descriptor": {ends[0], []string{"pid", fmt.Sprint(p.Pid()), "fd", fmt.Sprint(ends[0].FD)}},
		"by its addresses":  {ends[1], []string{"local", ends[1].Local.String(), "remote", ends[1].Remote.String()}},
	} {
		s, err := h.stream("/packets", append(c.args, "for", "1m", "limit", "60")...)
		h.must(err)
		var line api.TracePacketLine
		h.must(s.Next(&line))
		if l := line.Connection; l == nil || l.Local != c.end.Local.String() || l.Remote != c.end.Remote.String() || l.PID != p.Pid() || l.FD != c.end.FD ||
			l.Cookie == 0 || l.Clock == 0 || l.Missing == nil {
			t.Fatalf("%s: %+v", name, l)
		}
		p.exchanges(1)
		// The packets are streamed.
		line = api.TracePacketLine{}
		h.must(s.Next(&line))
		if line.Event == nil {
			t.Fatalf("%s: %+v", name, line)
		}
		done := make(chan error, 1)
		events, end := 1, (*api.TracePacketsEnd)(nil)
		go func() {
			for {
				var line api.TracePacketLine
				if err := s.Next(&line); err != nil {
					done <- err
					return
				}
				if line.Event != nil {
					events++
				}
				if line.End != nil {
					end = line.End
				}
			}
		}()
		for running := true; running; {
			select {
			case err := <-done:
				if !errors.Is(err, io.EOF) {
					t.Errorf("%s: %v", name, err)
				}
				running = false
			default:
				p.exchanges(1)
			}
		}
		if events != 60 || end == nil || end.Reason != "limit" || end.Lost != 0 {
			t.Errorf("%s: %d events, %+v", name, events, end)
		}
	}

	// With the command, with a file for Wireshark.
	file := filepath.Join(h.dir, "packets.pcapng")
	var packets struct {
		Packets []struct {
			Length int `json:"length"`
		} `json:"packets"`
	}
	shown := make(chan struct{})
	go func() {
		defer close(shown)
		h.show(&packets, "trace", "packets", "--pid", fmt.Sprint(p.Pid()), "--fd", fmt.Sprint(ends[2].FD), "--for", "300ms", "-w", file)
	}()
	for running := true; running; {
		select {
		case <-shown:
			running = false
		default:
			p.do(order{Do: "exchanges", Parallel: 3, Up: 30_000, traceOrder: traceOrder{Count: 1}})
		}
	}
	if len(packets.Packets) == 0 {
		t.Error("sockeye trace packets shows no packets")
	}
	if info, err := os.Stat(file); err != nil || info.Size() < 1000 {
		t.Errorf("%v, %v", info, err)
	}

	// Nothing is left after the end of the duration, a disconnect of the client, and a stop of the agent.
	s, err := h.stream("/packets", "pid", fmt.Sprint(p.Pid()), "fd", fmt.Sprint(ends[0].FD), "for", "10ms")
	h.must(err)
	var end api.TracePacketLine
	for end.End == nil {
		end = api.TracePacketLine{}
		h.must(s.Next(&end))
	}
	if end.End.Reason != "time" {
		t.Errorf("%+v", end.End)
	}
	for _, leave := range []func(){func() { s.Close() }, h.stopAgent} {
		s, err = h.stream("/packets", "pid", fmt.Sprint(p.Pid()), "fd", fmt.Sprint(ends[0].FD), "for", "1m")
		h.must(err)
		if n := h.packetPrograms(); n == 0 {
			t.Error("no program is attached")
		}
		leave()
		h.eventually("the programs to be detached", func() error {
			if n := h.packetPrograms(); n > 0 {
				return fmt.Errorf("%d are there", n)
			}
			return nil
		})
	}
}

// packetPrograms counts the agent's packet programs.
func (h *tuned) packetPrograms() (n int) {
	h.Helper()
	infos, err := filepath.Glob(fmt.Sprintf("/proc/%d/fdinfo/*", h.agent.Pid()))
	h.must(err)
	for _, path := range infos {
		b, err := os.ReadFile(path)
		if err == nil && bytes.Contains(b, []byte("link_type:\traw_tracepoint")) && bytes.Contains(b, []byte("net_dev_queue")) {
			n++
		}
	}
	return n
}

// TestTraceRefused checks that invalid requests are refused with a hint about valid requests, and leave nothing
// attached.
func TestTraceRefused(t *testing.T) {
	t.Parallel()
	h := newTuned(t, lab.LinkOptions{})
	near := h.makeGroup("near")
	h.setPolicyText("trace:\n  - cgroup: " + near + "\n    messages: 1/1\n")
	h.startAgent()
	p, far := h.startNear("near"), h.startFar()
	far.listen(tracePort)
	end := p.connect(1, at(tracePort, far4)...)[0]

	// Policies: each with its line and column.
	for _, c := range []struct {
		keys  string
		words []string
	}{
		{"group_by: remote", []string{":3:15: ", "groups need a bound", "remote/24"}},
		{"group_by: remote/0", []string{":3:15: ", "groups need a bound"}},
		{"groups: 0", []string{":3:13: "}},
		{"groups: 5000", []string{":3:13: ", "1024"}},
		{"messages: 0", []string{":3:15: ", "leave the rule out to trace nothing"}},
		{"messages: 1/0", []string{":3:15: ", "leave the rule out to trace nothing"}},
		{"messages: 0/s", []string{":3:15: "}},
		{"connections: 1/0", []string{":3:18: "}},
		{"stages: [stack, qdisk]", []string{":3:21: ", "did you mean qdisc?"}},
		{"stages: []", []string{":3:13: ", "must not be empty"}},
		{"stages: [nic], protocols: udp", []string{":3:13: ", "udp"}},
		{"match: {tag: x}", []string{":3:", "match.tag"}},
		{"message: 1/10", []string{":3:5: ", "did you mean messages?"}},
	} {
		text := "trace:\n  - cgroup: " + h.group("refused") + "\n    " + strings.ReplaceAll(c.keys, ", protocols", "\n    protocols") + "\n"
		h.setPolicyText(text)
		h.refuse(2, append(c.words, "policy.yaml"), "plan")
		h.refuse(2, append(c.words, "policy.yaml"), "apply")
	}
	if h.exists(h.groupDir("refused")) || len(h.tracePins()) != 1 || !h.traced(near).Attached {
		t.Errorf("refused policies left pins %v", h.tracePins())
	}

	// Queries.
	socket := []string{"pid", fmt.Sprint(p.Pid()), "fd", fmt.Sprint(end.FD)}
	for _, c := range []struct {
		path  string
		args  []string
		words []string
	}{
		{"/results", []string{"select", "rules=x"}, []string{"rules", "did you mean rule?"}},
		{"/results", []string{"select", "port=x"}, []string{"port", "hint:"}},
		{"/results", []string{"select", "rule"}, []string{"key=value", "hint: keys:"}},
		{"/results", []string{"select", "rule=a,rule=b"}, []string{"twice"}},
		{"/results", []string{"since", "5"}, []string{`"5" is not a time span`, "hint: as in"}},
		{"/results", []string{"since", "-5m"}, []string{"is not a time span"}},
		{"/results", []string{"since", "0s"}, []string{"is not a time span"}},
		{"/results", []string{"since", "99999999h"}, []string{"is not a time span"}},
		{"/results", []string{"since", "5m", "from", "2026-01-31T14:05:00Z"}, []string{"since excludes from and to"}},
		{"/results", []string{"from", "yesterday"}, []string{"is not a time", "hint: as in"}},
		{"/results", []string{"to", "2026-01-31T14:05:00Z"}, []string{"to goes with from"}},
		{"/results", []string{"from", "2026-01-31T14:05:00Z", "to", "2026-01-31T14:05:00Z"}, []string{"ends before it begins"}},
		{"/results", []string{"cgroup", "/nowhere"}, []string{`no cgroup "/nowhere"`, near}},
		{"/results", []string{"cgroup", "/nowhere", "since", "1m"}, []string{`no cgroup "/nowhere"`, near}},
		{"/history", []string{"select", "rules=x"}, []string{"did you mean rule?"}},
		{"/history", []string{"cgroup", "/nowhere"}, []string{`no cgroup "/nowhere"`}},
		{"/slow", []string{"n", "0"}, []string{`"0" is not a number`, "1 to 1000"}},
		{"/slow", []string{"n", "1001"}, []string{"1 to 1000"}},
		{"/slow", []string{"n", "many"}, []string{"is not a number"}},
		{"/slow", []string{"cgroup", "/nowhere"}, []string{`no cgroup "/nowhere"`}},
		{"", []string{"cgroup", "/nowhere"}, []string{`no cgroup "/nowhere"`}},
		{"/samples", []string{"buffer", "0"}, []string{"buffer", "1 to"}},
		{"/samples", []string{"buffer", "-1"}, []string{"buffer"}},
		{"/samples", []string{"buffer", "1000"}, []string{"1000", "power of two", "4096"}},
		{"/samples", []string{"buffer", "5000"}, []string{"power of two", "take 8192"}},
		{"/samples", []string{"buffer", "1099511627776"}, []string{"buffer"}},
		{"/samples", []string{"buffer", "1MB"}, []string{"is not a number"}},
		{"/samples", []string{"select", "rules=x"}, []string{"did you mean rule?"}},
		{"/samples", []string{"cgroup", "/nowhere"}, []string{`no cgroup "/nowhere"`}},
		{"/packets", nil, []string{"local", "hint:"}},
		{"/packets", []string{"pid", "x", "fd", "1"}, []string{"is not a socket", "hint:"}},
		{"/packets", []string{"pid", fmt.Sprint(p.Pid())}, []string{"is not a socket", "hint:"}},
		{"/packets", []string{"pid", fmt.Sprint(p.Pid()), "fd", "0"}, []string{"hint:"}},
		{"/packets", []string{"pid", "4000000", "fd", "3"}, []string{"hint:"}},
		{"/packets", []string{"local", "10.90.0.1:1", "remote", "10.90.0.2:2"}, []string{"10.90.0.1:1", "hint:"}},
		{"/packets", []string{"local", "here", "remote", "10.90.0.2:2"}, []string{"here"}},
		{"/packets", append(socket, "for", "0s"), []string{"is not a time span"}},
		{"/packets", append(socket, "for", "11m"), []string{"up to 10m"}},
		{"/packets", append(socket, "for", "ever"), []string{"is not a time span"}},
		{"/packets", append(socket, "limit", "0"), []string{"limit"}},
		{"/packets", append(socket, "limit", "99999999"), []string{"limit"}},
		{"/packets", append(socket, "buffer", "3000"), []string{"power of two"}},
	} {
		what := fmt.Sprintf("%s %v", c.path, c.args)
		if c.path == "/samples" || c.path == "/packets" {
			_, err := h.stream(c.path, c.args...)
			h.refused(what, err, fault.CodeUsage, c.words...)
			continue
		}
		var answer json.RawMessage
		h.refused(what, h.tryQuery(c.path, &answer, c.args...), fault.CodeUsage, c.words...)
	}
	if h.sampling() || h.packetPrograms() > 0 {
		t.Error("refused requests left programs attached")
	}
	h.refuse(2, []string{"did you mean qdisc?"}, "trace", "--stage", "qdisk")
	h.refuse(2, []string{"rules", "did you mean rule?"}, "trace", "slow", "--select", "rules=x")
	h.refuse(2, []string{"--buffer", "4KB to 256MB"}, "trace", "samples", "--buffer", "1KB")

	// Listening sockets and unknown sockets have no packets.
	far.listen(tracePort + 1)
	h.refuse(2, []string{"hint:"}, "trace", "packets", "--pid", fmt.Sprint(os.Getpid()), "--fd", "0")
}

// TestTraceRights checks that users other than root see figures without addresses, and that an agent without privileges
// lists the missing privileges.
func TestTraceRights(t *testing.T) {
	t.Parallel()
	h := newTuned(t, lab.LinkOptions{})
	near := h.makeGroup("near")
	h.setTrace("{name: all, cgroup: " + near + ", messages: 1/1}")
	h.agent = h.collectors.Command(context.Background(), os.Getenv(binaryEnv), "agent", "--group", "nogroup",
		"--policy", h.policyPath(), "--state-dir", filepath.Join(h.dir, "state"), "--run-dir", h.dir, "--pins", h.pins)
	h.agent.Name = "agent"
	h.must(h.agent.Start())
	h.eventually("the agent", func() error {
		_, err := h.askStatus()
		return err
	})
	asNobody := func(path string) (code int) {
		t.Helper()
		p := h.collectors.Command(h.Context(), append([]string{os.Getenv(binaryEnv), "--run-dir", h.dir}, strings.Fields(path)...)...)
		p.User = "nobody"
		h.must(p.Start())
		<-p.Done()
		return p.Cmd.ProcessState.ExitCode()
	}
	for command, want := range map[string]int{
		"trace": 0, "trace --since 1m": 0, "trace compare rule=a rule=b": 2,
		"trace slow": 4, "trace samples --count 1": 4, "trace packets --pid 1 --fd 1": 4,
	} {
		if code := asNobody(command); code != want {
			t.Errorf("sockeye %s as user nobody: exit code %d, want %d", command, code, want)
		}
	}
	h.stopAgent()

	p := h.collectors.Command(h.Context(), os.Getenv(binaryEnv), "agent", "--policy", h.policyPath(),
		"--state-dir", filepath.Join(h.dir, "state"), "--run-dir", h.dir, "--pins", h.pins)
	p.User = "nobody"
	h.must(p.Start())
	<-p.Done()
	if code := p.Cmd.ProcessState.ExitCode(); code != 4 || !strings.Contains(p.LogTail(10), "CAP_BPF") {
		t.Errorf("an agent without rights: exit code %d:\n%s", code, p.LogTail(10))
	}
}
