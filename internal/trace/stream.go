// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"sockeye/internal/api"
	"sockeye/internal/bpf"
	"sockeye/internal/bpf/load"
	"sockeye/internal/cgroup"
	"sockeye/internal/clock"
	"sockeye/internal/domain"
	"sockeye/internal/fault"
	"sockeye/internal/procsock"
	"sockeye/internal/trace/capture"
	"sockeye/internal/trace/measure"
)

const (
	defaultTraceBuffer = 1 << 20
	maxTraceBuffer     = 256 << 20
	maxPacketsFor      = 10 * time.Minute
	maxPacketEvents    = 10_000_000
)

// streamSamples writes each message that has ended.
func (d *Domain) streamSamples(ctx context.Context, w http.ResponseWriter, q url.Values) error {
	query, tracers, err := d.traceQuery(q)
	if err != nil {
		return err
	}
	buffer, err := queryNumber(q, "buffer", defaultTraceBuffer, maxTraceBuffer)
	if err != nil {
		return err
	}
	if len(tracers) == 0 {
		return fault.Usage(errors.New("nothing is traced"), "add a trace rule to the policy")
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	lines := make(chan api.TraceSampleLine, 256)
	for _, t := range tracers {
		r, err := t.startSampler(buffer)
		if err != nil {
			return ofBuffer(err)
		}
		defer r.close()
		go func() {
			defer cancel()
			r.run(ctx, lines)
		}()
	}
	s, ended, err := domain.NewStream(w)
	if err != nil {
		return err
	}
	defer ended()
	var lost uint64
	for {
		select {
		case <-ctx.Done():
			return nil
		case line := <-lines:
			if line.Sample != nil && !query.selected(line.Sample.Group) {
				continue
			}
			if line.Lost > 0 {
				lost += line.Lost
				line.Lost = lost
			}
			if s.Line(line) != nil {
				return nil // the client has disconnected
			}
		}
	}
}

// sampler reads the samples of a tracer. Rules and cgroup of the tracer may change meanwhile.
type sampler struct {
	tracer  *tracer
	buffer  int
	changed chan struct{} // signals that reader has changed

	// The lock of the tracer protects the fields below.
	trace  *bpf.Trace
	reader *bpf.TraceReader // nil while the cgroup does not exist
	lost   uint64           // lost by earlier readers
}

// startSampler starts to read samples.
func (t *tracer) startSampler(buffer int) (*sampler, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.sampler != nil {
		return nil, fault.Conflict(fmt.Errorf("samples of cgroup %s are being read already", t.name), "end the other sockeye trace samples")
	}
	s := &sampler{tracer: t, buffer: buffer, changed: make(chan struct{}, 1)}
	if t.trace != nil {
		if err := s.open(t.trace); err != nil {
			return nil, err
		}
	}
	t.sampler = s
	return s, nil
}

// resumeSampler switches the sampler to the attached programs.
func (t *tracer) resumeSampler() {
	if t.sampler == nil || t.trace == nil {
		return
	}
	t.pauseSampler()
	if err := t.sampler.open(t.trace); err != nil {
		t.log.Warn("samples not read", "error", err)
	}
}

func (s *sampler) open(t *bpf.Trace) (err error) {
	s.reader, err = t.Samples(s.buffer)
	if err == nil {
		s.trace = t
		s.notify()
	}
	return err
}

func (s *sampler) close() {
	s.tracer.mu.Lock()
	defer s.tracer.mu.Unlock()
	s.tracer.pauseSampler()
	s.tracer.sampler = nil
}

// pauseSampler pauses the sampler until resumeSampler.
func (t *tracer) pauseSampler() {
	if t.sampler == nil || t.sampler.reader == nil {
		return
	}
	if err := t.sampler.end(); err != nil {
		t.log.Warn("samples not ended", "error", err)
	}
}

func (s *sampler) end() error {
	lost, err := s.reader.Lost()
	s.lost += lost
	err = fault.Join(err, s.reader.Close())
	s.trace, s.reader = nil, nil
	s.notify()
	return err
}

func (s *sampler) notify() {
	select {
	case s.changed <- struct{}{}:
	default:
	}
}

// run sends samples, and the number of samples lost in between.
func (s *sampler) run(ctx context.Context, lines chan<- api.TraceSampleLine) {
	var told uint64
	for ctx.Err() == nil {
		t, reader, _ := s.current()
		if reader == nil {
			select {
			case <-ctx.Done():
			case <-s.changed:
			}
			continue
		}
		if err := s.read(ctx, t, reader, lines, &told); err != nil && !errors.Is(err, os.ErrClosed) {
			s.tracer.log.Warn("samples not read", "error", err)
			return
		}
	}
}

// read sends the samples of one reader until the reader is closed.
func (s *sampler) read(ctx context.Context, of *bpf.Trace, reader *bpf.TraceReader, lines chan<- api.TraceSampleLine, told *uint64) error {
	var (
		groups    map[uint32]measure.Group
		translate func(*bpf.TraceSample) measure.Sample
		renewed   time.Time
	)
	send := func(line api.TraceSampleLine) {
		select {
		case lines <- line:
		case <-ctx.Done():
		}
	}
	for ctx.Err() == nil {
		raw, err := reader.Read(time.Now().Add(time.Second))
		if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			return err
		}
		known := raw == nil
		if !known {
			_, known = groups[raw.Group]
		}
		if due := time.Since(renewed) > time.Second; due || !known {
			if groups, translate, err = s.tracer.translator(of); err != nil {
				return err
			}
			renewed = time.Now()
			if _, _, lost := s.current(); due && lost > *told {
				send(api.TraceSampleLine{Lost: lost - *told})
				*told = lost
			}
		}
		if raw != nil {
			sample := translate(raw)
			send(api.TraceSampleLine{Sample: &sample})
		}
	}
	return nil
}

// current returns the current reader, and the number of lost samples.
func (s *sampler) current() (*bpf.Trace, *bpf.TraceReader, uint64) {
	s.tracer.mu.Lock()
	defer s.tracer.mu.Unlock()
	lost := s.lost
	if s.reader != nil {
		// A count that cannot be read now is reported later.
		n, _ := s.reader.Lost()
		lost += n
	}
	return s.trace, s.reader, lost
}

// translator returns the groups, and a function that converts samples.
func (t *tracer) translator(of *bpf.Trace) (map[uint32]measure.Group, func(*bpf.TraceSample) measure.Sample, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.trace != of {
		return nil, nil, os.ErrClosed
	}
	groups, err := t.names().Indexes(of, t.compiled.Rules)
	if err != nil {
		return nil, nil, err
	}
	translate, err := t.names().Translator(of, t.compiled.Rules)
	return groups, translate, err
}

const tcpClose = 7 // TCP_CLOSE of linux/tcp_states.h

// streamPackets writes the events of the packets of one connection or UDP socket.
func (d *Domain) streamPackets(ctx context.Context, w http.ResponseWriter, q url.Values) error {
	during := 10 * time.Second
	if text := q.Get("for"); text != "" {
		var err error
		if during, err = time.ParseDuration(text); err != nil || during <= 0 || during > maxPacketsFor {
			return fault.Usage(fmt.Errorf("%q is not a time span up to %v", text, maxPacketsFor), "as in 10s")
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
	socket, err := d.openSocket(q)
	if err != nil {
		return err
	}
	c := &api.TraceConnection{Protocol: "tcp", Local: socket.Local.String(), PID: socket.PID, FD: socket.Number, Command: socket.Command, Cookie: socket.Cookie}
	if socket.Remote.IsValid() {
		c.Remote = socket.Remote.String()
	}
	// The duplicate descriptor would keep the connection open.
	if err := socket.Close(); err != nil {
		return fmt.Errorf("close duplicate of descriptor: %w", err)
	}
	c.Clock = int64(clock.Offset())
	var p *capture.Capture
	if socket.Protocol == unix.IPPROTO_UDP {
		c.Protocol = "udp"
		p, err = d.openDatagrams(c, buffer)
	} else {
		p, err = capture.Open(c.Cookie, buffer)
	}
	if err != nil {
		return ofBuffer(err)
	}
	defer p.Close()
	stop := context.AfterFunc(ctx, func() { p.Close() })
	defer stop()
	c.Missing = append([]string{}, p.Missing()...)
	s, ended, err := domain.NewStream(w)
	if err != nil {
		return err
	}
	defer ended()
	if err := s.Line(api.TracePacketLine{Connection: c}); err != nil {
		return nil // the client has disconnected
	}
	_ = s.Flush()
	end := api.TracePacketsEnd{Reason: "time"}
	deadline := time.Now().Add(during)
	var event capture.Event
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
			err = s.Line(api.TracePacketLine{Event: &event})
		}
		if err == nil && event.Kind == capture.State && event.State == tcpClose {
			end.Reason = "closed"
			err = p.Stop()
		}
		if err != nil {
			return nil // the client has disconnected, or the agent stops
		}
	}
	if end.Lost, err = p.Lost(); err != nil {
		return nil
	}
	_ = s.Line(api.TracePacketLine{End: &end})
	return nil
}

// queryNumber reads a number of a query, or returns the default.
func queryNumber(q url.Values, key string, otherwise, most int) (int, error) {
	text := q.Get(key)
	if text == "" {
		return otherwise, nil
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 || n > most {
		return 0, fault.Usage(fmt.Errorf("%s %q is not a number from 1 to %d", key, text, most), "")
	}
	return n, nil
}

// ofBuffer converts an error about a ring buffer to an error of the request.
func ofBuffer(err error) error {
	var buffer *load.BufferError
	if errors.As(err, &buffer) {
		return fault.Usage(err, "")
	}
	if errors.Is(err, ebpf.ErrNotSupported) {
		return &fault.Error{Err: err, Code: fault.CodeUnsupported}
	}
	return err
}

// openDatagrams follows a UDP socket. A program sees the datagrams that the socket receives in the cgroup in which the
// socket was created, or above; the process may have moved since. The cgroup at the top is most likely above both.
func (d *Domain) openDatagrams(c *api.TraceConnection, buffer int) (*capture.Capture, error) {
	path, err := cgroup.Of(c.PID)
	if err != nil {
		return nil, err
	}
	top, _, _ := strings.Cut(strings.TrimPrefix(path, "/"), "/")
	if c.DropReasons, err = capture.DropReasons(); err != nil {
		return nil, err
	}
	return capture.OpenUDP(c.Cookie, filepath.Join(d.host.Cgroups.Mount, top), buffer)
}

const packetsHint = "name an open TCP connection as ss -tnp shows it, by --pid and --fd or by --local and --remote; or a UDP socket as ss -uanp shows it, by --pid and --fd"

// openSocket opens the connection, or the UDP socket, of any process that a request identifies.
func (d *Domain) openSocket(q url.Values) (*procsock.Socket, error) {
	var (
		socket *procsock.Socket
		err    error
	)
	if q.Get("pid") != "" || q.Get("fd") != "" {
		pid, errPID := strconv.Atoi(q.Get("pid"))
		fd, errFD := strconv.Atoi(q.Get("fd"))
		if errPID != nil || errFD != nil || pid <= 0 || fd < 0 {
			return nil, fault.Usage(fmt.Errorf("%q is not a socket", q.Get("pid")+":"+q.Get("fd")), packetsHint)
		}
		socket, err = procsock.Open(pid, fd)
	} else {
		local, failed := api.ParseEndpoint("local", q.Get("local"))
		if failed != nil {
			return nil, failed
		}
		remote, failed := api.ParseEndpoint("remote", q.Get("remote"))
		if failed != nil {
			return nil, failed
		}
		socket, err = procsock.Find(d.host.Cgroups.Mount, local, remote)
	}
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fault.Usage(err, packetsHint)
	}
	if err == nil && socket.Protocol == unix.IPPROTO_UDP {
		if kind, failed := unix.GetsockoptInt(socket.FD, unix.SOL_SOCKET, unix.SO_TYPE); failed != nil || kind != unix.SOCK_DGRAM {
			err = fault.Usage(fmt.Errorf("%s is a raw socket", socket), packetsHint)
			socket.Close()
		}
	} else if err == nil && (socket.Listening || socket.MPTCP) {
		err = fault.Usage(fmt.Errorf("%s is not a TCP connection", socket), packetsHint)
		socket.Close()
	}
	return socket, err
}
