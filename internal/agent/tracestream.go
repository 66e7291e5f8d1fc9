// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"time"

	"github.com/cilium/ebpf"

	"sockeye/internal/bpf"
	"sockeye/internal/sockets"
	"sockeye/internal/trace"
	"sockeye/internal/trace/packets"
)

const (
	defaultTraceBuffer = 1 << 20
	maxTraceBuffer     = 256 << 20
	maxPacketsFor      = 10 * time.Minute
	maxPacketEvents    = 10_000_000
)

// stream answers with lines of JSON until it ends or the caller leaves.
type stream struct {
	w       http.ResponseWriter
	control *http.ResponseController
	encoder *json.Encoder
}

// newStream lifts the deadlines of a request, which would end the answer.
func newStream(w http.ResponseWriter) (*stream, error) {
	s := &stream{w, http.NewResponseController(w), json.NewEncoder(w)}
	if err := s.control.SetReadDeadline(time.Time{}); err != nil {
		return nil, fmt.Errorf("begin answer: %w", err)
	}
	w.Header().Set("Content-Type", "application/x-ndjson")
	return s, nil
}

func (s *stream) line(v any) error { return s.encoder.Encode(v) }

// traceStreams has the answers that go on. An error before the first line is
// answered as any other.
func (a *Agent) traceStreams(mux *http.ServeMux) {
	for path, answer := range map[string]func(context.Context, http.ResponseWriter, url.Values) error{
		"/v1/trace/samples": a.streamSamples,
		"/v1/trace/packets": a.streamPackets,
	} {
		mux.HandleFunc("GET "+path, func(w http.ResponseWriter, r *http.Request) {
			err := mustBeRoot(r)
			if err == nil {
				err = answer(r.Context(), w, r.URL.Query())
			}
			if err != nil && r.Context().Err() == nil {
				reply(w, r, func(*http.Request) (any, error) { return nil, err })
			}
		})
	}
}

// number reads a number of a query, or takes the default.
func queryNumber(q url.Values, key string, otherwise, most int) (int, error) {
	text := q.Get(key)
	if text == "" {
		return otherwise, nil
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 || n > most {
		return 0, Usage(fmt.Errorf("%s %q is no number from 1 to %d", key, text, most), "")
	}
	return n, nil
}

// ofBuffer makes an error of a ring buffer the caller's.
func ofBuffer(err error) error {
	var buffer *bpf.BufferError
	if errors.As(err, &buffer) {
		return Usage(err, "")
	}
	if errors.Is(err, ebpf.ErrNotSupported) {
		return &Error{Err: err, Code: CodeUnsupported}
	}
	return err
}

// streamSamples gives each message that ends.
func (a *Agent) streamSamples(ctx context.Context, w http.ResponseWriter, q url.Values) error {
	query, err := parseTraceQuery(q)
	if err != nil {
		return err
	}
	buffer, err := queryNumber(q, "buffer", defaultTraceBuffer, maxTraceBuffer)
	if err != nil {
		return err
	}
	tracers, err := a.tracersOf(q.Get("cgroup"))
	if err != nil {
		return err
	}
	if len(tracers) == 0 {
		return Usage(errors.New("nothing is traced"), "add a trace rule to the policy")
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	lines := make(chan TraceSampleLine, 256)
	for _, t := range tracers {
		r, err := t.sample(buffer)
		if err != nil {
			return ofBuffer(err)
		}
		if r == nil {
			continue // there is no such cgroup now
		}
		defer r.close()
		go r.read(ctx, lines)
	}
	s, err := newStream(w)
	if err != nil {
		return err
	}
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case line := <-lines:
			if line.Sample != nil && !query.selected(line.Sample.Group) {
				continue
			}
			err = s.line(line)
		case <-tick.C:
			err = s.control.Flush()
		}
		if err != nil {
			return nil // the caller has left
		}
	}
}

// sampler reads the samples of a tracer.
type sampler struct {
	tracer *tracer
	trace  *bpf.Trace
	reader *bpf.TraceReader
}

// sample begins to read samples; nil if there is no cgroup.
func (t *tracer) sample(buffer int) (*sampler, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.trace == nil {
		return nil, nil
	}
	if t.sampling {
		return nil, conflict(fmt.Errorf("samples of cgroup %s are being read already", t.name), "end the other sockeye trace samples")
	}
	r, err := t.trace.Samples(buffer)
	if err != nil {
		return nil, err
	}
	t.sampling = true
	return &sampler{t, t.trace, r}, nil
}

func (s *sampler) close() {
	s.tracer.mu.Lock()
	defer s.tracer.mu.Unlock()
	s.tracer.sampling = false
	if err := s.reader.Close(); err != nil && s.tracer.trace == s.trace {
		s.tracer.log.Warn("samples not ended", "error", err)
	}
}

// read gives samples until the reader is closed, and at least once a second how
// many were lost.
func (s *sampler) read(ctx context.Context, lines chan<- TraceSampleLine) {
	var (
		translate func(*bpf.TraceSample) trace.Sample
		renewed   time.Time
		told      uint64
	)
	send := func(line TraceSampleLine) {
		select {
		case lines <- line:
		case <-ctx.Done():
		}
	}
	for ctx.Err() == nil {
		raw, err := s.reader.Read(time.Now().Add(time.Second))
		if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			return
		}
		if time.Since(renewed) > time.Second {
			if fresh, err := s.tracer.translator(s.trace); err == nil {
				translate, renewed = fresh, time.Now()
			}
			if lost, err := s.reader.Lost(); err == nil && lost > told {
				told = lost
				send(TraceSampleLine{Lost: lost})
			}
		}
		if raw != nil && translate != nil {
			sample := translate(raw)
			send(TraceSampleLine{Sample: &sample})
		}
	}
}

func (t *tracer) translator(of *bpf.Trace) (func(*bpf.TraceSample) trace.Sample, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.trace != of {
		return nil, errors.New("the rules have changed")
	}
	return t.names().Translator(of, t.compiled.Rules)
}

const packetsHint = "name an open TCP connection as ss -tnp shows it, by --pid and --fd or by --local and --remote"

// streamPackets gives what happens to the packets of one connection.
func (a *Agent) streamPackets(ctx context.Context, w http.ResponseWriter, q url.Values) error {
	during := 10 * time.Second
	if text := q.Get("for"); text != "" {
		var err error
		if during, err = time.ParseDuration(text); err != nil || during <= 0 || during > maxPacketsFor {
			return Usage(fmt.Errorf("%q is no time span up to %v", text, maxPacketsFor), "as in 10s")
		}
	}
	limit, err := queryNumber(q, "limit", maxPacketEvents, maxPacketEvents)
	if err != nil {
		return err
	}
	buffer, err := queryNumber(q, "buffer", 4*defaultTraceBuffer, maxTraceBuffer)
	if err != nil {
		return err
	}
	socket, err := a.connectionOf(q)
	if err != nil {
		return err
	}
	c := &TraceConnection{Local: socket.Local.String(), Remote: socket.Remote.String(), PID: socket.PID, FD: socket.Number,
		Command: socket.Command, Cookie: socket.Cookie}
	// The copy would keep the connection open.
	if err := socket.Close(); err != nil {
		return fmt.Errorf("close copy of descriptor: %w", err)
	}
	clock, err := packets.ReadClock()
	if err != nil {
		return err
	}
	c.Clock = int64(clock)
	p, err := bpf.OpenPackets(c.Cookie, buffer)
	if err != nil {
		return ofBuffer(err)
	}
	defer p.Close()
	stop := context.AfterFunc(ctx, func() { p.Close() })
	defer stop()
	c.Missing = append([]string{}, p.Missing()...)
	s, err := newStream(w)
	if err != nil {
		return err
	}
	if err := s.line(TracePacketLine{Connection: c}); err != nil {
		return nil // the caller has left
	}
	_ = s.control.Flush()
	end := TracePacketsEnd{Reason: "time"}
	deadline := time.Now().Add(during)
	var event bpf.PacketEvent
	for n := 0; ; n++ {
		if n == limit {
			end.Reason = "limit"
			break
		}
		err := p.Read(deadline, &event)
		if errors.Is(err, io.EOF) {
			break
		}
		if err == nil {
			err = s.line(TracePacketLine{Event: &event})
		}
		if err != nil {
			return nil // the caller has left, or the agent ends
		}
	}
	if end.Lost, err = p.Lost(); err != nil {
		return nil
	}
	_ = s.line(TracePacketLine{End: &end})
	return nil
}

// connectionOf takes the connection that a request names, of any process.
func (a *Agent) connectionOf(q url.Values) (*sockets.Socket, error) {
	var (
		socket *sockets.Socket
		err    error
	)
	if q.Get("pid") != "" || q.Get("fd") != "" {
		pid, errPID := strconv.Atoi(q.Get("pid"))
		fd, errFD := strconv.Atoi(q.Get("fd"))
		if errPID != nil || errFD != nil || pid <= 0 || fd < 0 {
			return nil, Usage(fmt.Errorf("%q is no socket", q.Get("pid")+":"+q.Get("fd")), packetsHint)
		}
		socket, err = sockets.Take(pid, fd)
	} else {
		local, failed := parseEnd("local", q.Get("local"))
		if failed != nil {
			return nil, failed
		}
		remote, failed := parseEnd("remote", q.Get("remote"))
		if failed != nil {
			return nil, failed
		}
		socket, err = sockets.Find(a.host.cgroups, local, remote)
	}
	if errors.Is(err, fs.ErrNotExist) {
		return nil, Usage(err, packetsHint)
	}
	if err == nil && (socket.Listening || socket.MPTCP) {
		err = Usage(fmt.Errorf("%s is no TCP connection", socket), packetsHint)
		socket.Close()
	}
	return socket, err
}
