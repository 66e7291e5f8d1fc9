// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
	"github.com/cilium/ebpf/link"
	"github.com/cilium/ebpf/ringbuf"
	"golang.org/x/sys/unix"
)

// TraceConfig says what the tracing of one cgroup consists of.
type TraceConfig struct {
	// Dir is the cgroup's folder in the bpffs.
	Dir string
	// Cgroup is the folder of the cgroup whose sockets are traced.
	Cgroup string
	// Rules say what is traced, and never change.
	Rules *TraceRules
	// Adopt: what is pinned in Dir has these rules, and goes on. Else it is
	// removed. Pins of another layout cannot go on: an *IncompatibleError.
	Adopt bool
	// Tuning is the folder with the pins of the cgroup's tuning, "" for none.
	Tuning string
	// Send: the start of sendmsg is noted, by a program on every connection of
	// the host.
	Send bool
}

// TraceRules is a list of rules, compiled.
type TraceRules struct {
	MatchRules
	Rules []TraceRule
	// Services are the listeners of services, by a number from 1.
	Services map[TraceListener]uint32
	// Groups is the number of indexes that the rules use, the "other" of each
	// included; at most TraceGroups.
	Groups int
}

// Trace is the tracing of one cgroup: pinned maps and links. It goes on without
// this process.
type Trace struct {
	dir    string
	cgroup string
	banks
	links map[string]link.Link
	// attached are the programs that are attached to the cgroup.
	attached []attachedHook
}

// attachedHook is a program at a hook of a cgroup.
type attachedHook struct {
	pin     string
	at      ebpf.AttachType
	program *ebpf.Program
}

const (
	pinTraceLink = "link_sockops"
	pinSendLink  = "link_send"
)

// OpenTrace makes the tracing of a cgroup, or adopts what is pinned in c.Dir in
// this version's layout. Without BPF timestamping in the kernel (see
// HaveTimestamps) nothing sent is measured. Pins of other layouts are removed once
// the new ones are attached.
//
// A pin that cannot be this layout's gives an *IncompatibleError.
func OpenTrace(c TraceConfig) (_ *Trace, err error) {
	base := c.Dir
	if c.Dir, err = inLayout(base, traceLayout); err != nil {
		return nil, err
	}
	t := &Trace{dir: c.Dir, cgroup: c.Cgroup, links: make(map[string]link.Link),
		banks: banks{maps: make(map[string]*ebpf.Map), inner: make(map[string]*ebpf.MapSpec)}}
	defer func() {
		if err != nil {
			t.Close()
		}
	}()
	cgroup, err := os.Open(c.Cgroup)
	if err != nil {
		return nil, fmt.Errorf("open cgroup: %w", err)
	}
	defer cgroup.Close()
	if !c.Adopt {
		err = removeTrace(c.Dir)
	} else if _, err = os.Stat(c.Dir); errors.Is(err, os.ErrNotExist) {
		err = &IncompatibleError{Path: base, Err: errors.New("another layout")}
	}
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(c.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("create pin directory: %w", err)
	}
	spec, err := loadTraceSockops()
	if err != nil {
		return nil, err
	}
	if err := t.openMaps(c, spec); err != nil {
		return nil, err
	}
	if c.Adopt {
		// The one who had them given is gone.
		err = t.endSamples()
	} else {
		err = t.install(c.Rules)
	}
	if err != nil {
		return nil, err
	}
	program := "trace_sockops"
	switch err := HaveTimestamps(); {
	case errors.Is(err, ebpf.ErrNotSupported):
		program = "trace_choose"
		if spec, err = loadTraceChoose(); err != nil {
			return nil, err
		}
	case err != nil:
		return nil, err
	}
	p, err := t.load(spec, program)
	if err != nil {
		return nil, err
	}
	defer p.Close()
	if err := t.attach(pinTraceLink, ebpf.AttachCGroupSockOps, p, cgroup); err != nil {
		return nil, err
	}
	if err := t.openRX(c); err != nil {
		return nil, err
	}
	if c.Send {
		if err := t.openSend(); err != nil {
			return nil, err
		}
	}
	others, err := otherLayouts(base, c.Dir)
	if err != nil {
		return nil, err
	}
	for _, other := range others {
		if err := removeTrace(other); err != nil {
			return nil, err
		}
	}
	return t, nil
}

// SetScope keeps a record with the pins.
func (t *Trace) SetScope(s Scope) error { return setScope(t.dir, s) }

// MoveTrace renames the pins in a directory, of all layouts, if there are any.
func MoveTrace(from, to string) error {
	return eachLayout(from, func(dir string) error {
		if err := os.Rename(dir, to+strings.TrimPrefix(dir, from)); err != nil {
			return fmt.Errorf("move pins: %w", err)
		}
		return nil
	})
}

// load loads a program that uses the maps of this tracing.
func (t *Trace) load(spec *ebpf.CollectionSpec, program string) (*ebpf.Program, error) {
	for name, m := range spec.Maps {
		if of := t.maps[name]; of != nil {
			m.MaxEntries = of.MaxEntries()
		}
	}
	if timestamps := spec.Variables["timestamps"]; timestamps != nil {
		err := HaveTimestamps()
		if err != nil && !errors.Is(err, ebpf.ErrNotSupported) {
			return nil, err
		}
		if err := timestamps.Set(err == nil); err != nil {
			return nil, err
		}
	}
	return loadProgram(spec, program, t.maps)
}

// HaveTimestamps fails, with an error that wraps ebpf.ErrNotSupported, if the
// kernel has no BPF timestamping (Linux 6.15).
func HaveTimestamps() error {
	kernel, err := kernelTypes.Kernel()
	if err != nil {
		return fmt.Errorf("read types of the kernel: %w", err)
	}
	var f *btf.Func
	err = kernel.TypeByName("bpf_sock_ops_enable_tx_tstamp", &f)
	if errors.Is(err, btf.ErrNotFound) {
		return fmt.Errorf("BPF timestamping: %w before Linux 6.15", ebpf.ErrNotSupported)
	}
	return err
}

func (t *Trace) openMaps(c TraceConfig, spec *ebpf.CollectionSpec) (err error) {
	indexes := uint32(max(c.Rules.Groups, 1))
	for _, name := range []string{"groups", "stats", "slowest"} {
		spec.Maps[name].MaxEntries = indexes
	}
	if c.Tuning != "" {
		if t.maps["tuned"], err = tunedConnections(c.Tuning); err != nil {
			return err
		}
	}
	for name, m := range spec.Maps {
		if m.Type == ebpf.ArrayOfMaps {
			t.inner[name] = m.InnerMap
		}
		if isVariables(name) || t.maps[name] != nil {
			continue
		}
		if name == "tuned" {
			// Nobody's: with the cgroup's tuning it is another.
			t.maps[name], err = ebpf.NewMap(m)
		} else {
			t.maps[name], err = openMap(c.Dir, m)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// install writes the rules into maps that are new.
func (t *Trace) install(r *TraceRules) error {
	ids := make([]uint32, len(r.Rules))
	for i := range r.Rules {
		ids[i] = uint32(i + 1)
		if err := t.maps["rules"].Put(uint32(i), &r.Rules[i]); err != nil {
			return fmt.Errorf("write rule: %w", err)
		}
	}
	for listener, id := range r.Services {
		if err := t.maps["services"].Put(listener, id); err != nil {
			return fmt.Errorf("write listener of a service: %w", err)
		}
	}
	if err := t.setState(func(s *TraceState) { s.Seed = randomSeed() }); err != nil {
		return err
	}
	return t.banks.install(&r.MatchRules, ids)
}

// attach attaches a program to the cgroup and keeps its link pinned.
func (t *Trace) attach(pin string, at ebpf.AttachType, p *ebpf.Program, cgroup *os.File) error {
	kept, err := p.Clone()
	if err != nil {
		return fmt.Errorf("keep program: %w", err)
	}
	h := attachedHook{pin, at, kept}
	t.attached = append(t.attached, h)
	t.links[pin], err = t.linkOf(h, cgroup)
	if err != nil {
		delete(t.links, pin)
	}
	return err
}

func (t *Trace) linkOf(h attachedHook, cgroup *os.File) (link.Link, error) {
	return ensureLink(t.dir, h.pin, h.program, cgroup, func() (link.Link, error) {
		return link.AttachCgroup(link.CgroupOptions{Path: cgroup.Name(), Attach: h.at, Program: h.program})
	})
}

// Move attaches the programs, as they are loaded, to another cgroup, given by its
// folder: one that was made in the place of the one before. One that fails leaves
// some of them moved.
func (t *Trace) Move(path string) error {
	cgroup, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("open cgroup: %w", err)
	}
	defer cgroup.Close()
	var errs []error
	for _, h := range t.attached {
		l, err := t.linkOf(h, cgroup)
		if err != nil {
			return err
		}
		errs = append(errs, t.links[h.pin].Close())
		t.links[h.pin] = l
	}
	t.cgroup = path
	return errors.Join(errs...)
}

// openSend attaches to tcp_sendmsg, for all connections of the host.
func (t *Trace) openSend() error {
	spec, err := loadTraceSend()
	if err != nil {
		return err
	}
	p, err := t.load(spec, "trace_send")
	if err != nil {
		return err
	}
	defer p.Close()
	l, err := link.AttachTracing(link.TracingOptions{Program: p})
	if err != nil {
		return fmt.Errorf("attach trace_send: %w", err)
	}
	if err := replacePin(l.Pin, filepath.Join(t.dir, pinSendLink)); err != nil {
		l.Close()
		return fmt.Errorf("pin %s: %w", pinSendLink, err)
	}
	t.links[pinSendLink] = l
	return nil
}

// Close releases this process' hold. Pinned maps and links stay.
func (t *Trace) Close() error {
	var errs []error
	for _, l := range t.links {
		errs = append(errs, l.Close())
	}
	for _, h := range t.attached {
		errs = append(errs, h.program.Close())
	}
	for _, m := range t.maps {
		if m != nil {
			errs = append(errs, m.Close())
		}
	}
	return errors.Join(errs...)
}

// RemoveTrace ends the tracing whose pins are in dir, in any layout.
func RemoveTrace(dir string) error { return eachLayout(dir, removeTrace) }

func removeTrace(dir string) error {
	pins, err := filepath.Glob(filepath.Join(dir, "link_*"))
	if err != nil {
		return err
	}
	for _, path := range pins {
		// What cannot be loaded goes with its pin.
		if l, err := link.LoadPinnedLink(path, nil); err == nil {
			err := errors.Join(detach(l), l.Unpin())
			l.Close()
			if err != nil {
				return fmt.Errorf("remove %s: %w", filepath.Base(path), err)
			}
		}
	}
	return os.RemoveAll(dir)
}

// detach ends a link at once, if it is of a type that can: others end with
// their last reference.
func detach(l link.Link) error {
	if err := l.Detach(); err != nil && !errors.Is(err, ebpf.ErrNotSupported) {
		return err
	}
	return nil
}

// Attached tells whether the cgroup that stands where it did is the one that is
// traced: it may have been removed, and made anew.
func (t *Trace) Attached() bool {
	cgroup, err := os.Open(t.cgroup)
	if err != nil {
		return false
	}
	defer cgroup.Close()
	same, err := attachedTo(t.links[pinTraceLink], cgroup)
	return err == nil && same
}

// Groups are the groups that were met, by index. "Other" of each rule, at
// TraceRule.First, is not among them.
func (t *Trace) Groups() (map[uint32]TraceGroup, error) {
	groups := make(map[uint32]TraceGroup)
	var (
		key   TraceGroup
		index uint32
	)
	entries := t.maps["groups"].Iterate()
	for entries.Next(&key, &index) {
		groups[index] = key
	}
	if err := entries.Err(); err != nil {
		return nil, fmt.Errorf("read groups: %w", err)
	}
	return groups, nil
}

// Stats are the counts of a group, of all CPUs.
func (t *Trace) Stats(group uint32) (*TraceStats, error) {
	var each []TraceStats
	if err := t.maps["stats"].Lookup(group, &each); err != nil {
		return nil, fmt.Errorf("read counts of group %d: %w", group, err)
	}
	sum := &each[0]
	for i := range each[1:] {
		s := &each[i+1]
		sum.Chosen += s.Chosen
		sum.Bytes += s.Bytes
		sum.Undriven += s.Undriven
		sum.Unqueued += s.Unqueued
		for k := range s.Outcome {
			sum.Outcome[k] += s.Outcome[k]
		}
		for k := range s.Stage {
			addHistogram(&sum.Stage[k], &s.Stage[k])
		}
	}
	return sum, nil
}

func addHistogram(to, from *TraceHistogram) {
	to.Sum += from.Sum
	to.Max = max(to.Max, from.Max)
	for i, n := range from.Bucket {
		to.Bucket[i] += n
	}
}

// Slowest are the slowest messages of a group in each of the last TraceMinutes
// minutes, in no order.
func (t *Trace) Slowest(group uint32) ([]TraceSample, error) {
	var kept TraceSlowest
	if err := t.maps["slowest"].LookupWithFlags(group, &kept, ebpf.LookupLock); err != nil {
		return nil, fmt.Errorf("read slowest messages of group %d: %w", group, err)
	}
	now := monotonic()
	var samples []TraceSample
	for i := range kept.Minute {
		m := &kept.Minute[i]
		// A minute is overwritten only when something ends in its place.
		if m.Minute+uint64(TraceMinutes) <= uint64(now)>>TraceMinuteShift {
			continue
		}
		samples = append(samples, m.Sample[:min(int(m.Count), len(m.Sample))]...)
	}
	return samples, nil
}

// TraceReader reads samples as they come.
type TraceReader struct {
	trace *Trace
	ring  *ringbuf.Reader
	lost  uint64 // when it began
}

// Samples has the program give a sample for each message that ends, through a
// ring buffer of so many bytes: a power of two, at least a page. A *BufferError
// says what is wrong with it. There is one reader at a time: an earlier one gets
// nothing more.
func (t *Trace) Samples(bytes int) (_ *TraceReader, err error) {
	m, err := newRing(t.inner["rings"], bytes)
	if err != nil {
		return nil, err
	}
	defer m.Close()
	ring, err := ringbuf.NewReader(m)
	if err != nil {
		return nil, fmt.Errorf("open ring buffer: %w", err)
	}
	r := &TraceReader{trace: t, ring: ring}
	counts, err := t.counts()
	if err == nil {
		r.lost = counts.Lost
		err = t.maps["rings"].Put(uint32(0), uint32(m.FD()))
	}
	if err == nil {
		err = t.setState(func(s *TraceState) { s.Samples = 1 })
	}
	if err != nil {
		ring.Close()
		return nil, fmt.Errorf("install ring buffer: %w", err)
	}
	return r, nil
}

// samplesEvery is when samples are looked for: the program wakes their reader
// only when the buffer fills up.
const samplesEvery = 50 * time.Millisecond

// Read waits for a sample until the deadline. It fails with
// os.ErrDeadlineExceeded then, and with os.ErrClosed after Close.
func (r *TraceReader) Read(deadline time.Time) (*TraceSample, error) {
	var (
		record ringbuf.Record
		err    error
	)
	for {
		look := time.Now().Add(samplesEvery)
		last := !deadline.IsZero() && deadline.Before(look)
		if last {
			look = deadline
		}
		r.ring.SetDeadline(look)
		record, err = r.ring.Read()
		if last || !errors.Is(err, os.ErrDeadlineExceeded) {
			break
		}
	}
	if err != nil {
		return nil, err
	}
	var s TraceSample
	const size = int(unsafe.Sizeof(s))
	if len(record.RawSample) < size {
		return nil, fmt.Errorf("read sample: %d bytes, want %d", len(record.RawSample), size)
	}
	copy(unsafe.Slice((*byte)(unsafe.Pointer(&s)), size), record.RawSample)
	return &s, nil
}

// Lost is the number of samples that found no room.
func (r *TraceReader) Lost() (uint64, error) {
	counts, err := r.trace.counts()
	if err != nil {
		return 0, err
	}
	return counts.Lost - r.lost, nil
}

// Close ends the samples.
func (r *TraceReader) Close() error {
	return errors.Join(r.trace.endSamples(), r.ring.Close())
}

// endSamples has the program give no samples.
func (t *Trace) endSamples() error {
	err := t.maps["rings"].Delete(uint32(0))
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		err = nil
	}
	return errors.Join(err, t.setState(func(s *TraceState) { s.Samples = 0 }))
}

func (t *Trace) counts() (TraceCounts, error) {
	var c TraceCounts
	if err := t.maps["counts"].Lookup(uint32(0), &c); err != nil {
		return c, fmt.Errorf("read counts: %w", err)
	}
	return c, nil
}

func (t *Trace) setState(change func(*TraceState)) error {
	var s TraceState
	if err := t.maps["state"].Lookup(uint32(0), &s); err != nil {
		return fmt.Errorf("read state: %w", err)
	}
	change(&s)
	if err := t.maps["state"].Put(uint32(0), s); err != nil {
		return fmt.Errorf("write state: %w", err)
	}
	return nil
}

// TraceLive chooses connections that are open already.
type TraceLive struct {
	nonce uint64
	link  link.Link
}

// Live attaches the hook by which the agent reaches open connections. Its error
// wraps ebpf.ErrNotSupported before Linux 5.15.
func (t *Trace) Live() (*TraceLive, error) {
	l := &TraceLive{nonce: newNonce()}
	spec, err := loadTraceLive()
	if err != nil {
		return nil, err
	}
	if err := spec.Variables["nonce"].Set(l.nonce); err != nil {
		return nil, err
	}
	hook, err := t.load(spec, "trace_live")
	if lacksHelper(err) {
		return nil, fmt.Errorf("trace open connections: %w before Linux 5.15: %w", ebpf.ErrNotSupported, err)
	}
	if err != nil {
		return nil, err
	}
	defer hook.Close()
	l.link, err = link.AttachCgroup(link.CgroupOptions{Path: t.cgroup, Attach: ebpf.AttachCGroupSetsockopt, Program: hook})
	if err != nil {
		return nil, fmt.Errorf("attach trace_live to cgroup %s: %w", t.cgroup, err)
	}
	return l, nil
}

// Close detaches the hook.
func (l *TraceLive) Close() error { return l.link.Close() }

// Adopt has the rules decide on a connection that they have not chosen.
func (l *TraceLive) Adopt(fd int, role uint32) error {
	return l.call(fd, traceLiveAdopt, traceLiveTraceLiveRequest{Role: role})
}

// Forget lets go of a connection.
func (l *TraceLive) Forget(fd int) error {
	return l.call(fd, traceLiveForget, traceLiveTraceLiveRequest{})
}

func (l *TraceLive) call(fd int, name uint32, r traceLiveTraceLiveRequest) error {
	r.Nonce = l.nonce
	value := unsafe.String((*byte)(unsafe.Pointer(&r)), unsafe.Sizeof(r))
	// A socket outside of the hook's cgroup gives ENOPROTOOPT.
	return os.NewSyscallError("setsockopt", unix.SetsockoptString(fd, traceLiveLevel, int(name), value))
}

// Connection is what is known of a chosen connection, nil of another.
func (t *Trace) Connection(fd int) (*TraceConnection, error) {
	var c TraceConnection
	err := t.maps["connections"].Lookup(uint32(fd), &c)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read connection: %w", err)
	}
	return &c, nil
}

func newNonce() uint64 {
	var b [8]byte
	rand.Read(b[:])
	return binary.LittleEndian.Uint64(b[:])
}

// ProgramID is the number of the sock_ops program that is attached.
func (t *Trace) ProgramID() (uint32, error) {
	info, err := t.links[pinTraceLink].Info()
	if err != nil {
		return 0, fmt.Errorf("read link: %w", err)
	}
	return uint32(info.Program), nil
}

// Programs names what is attached, in alphabetical order.
func (t *Trace) Programs() []string {
	var names []string
	for pin := range t.links {
		names = append(names, "trace_"+strings.TrimPrefix(pin, "link_"))
	}
	slices.Sort(names)
	return names
}

// Memory is about how many bytes the kernel keeps for the maps that have a fixed
// size. A connection that is chosen takes 7 KiB more.
func (t *Trace) Memory() int64 {
	var sum int64
	for _, m := range t.maps {
		info, err := m.Info()
		if err != nil {
			continue
		}
		// Without the right to know it is not counted.
		if bytes, ok := info.Memlock(); ok {
			sum += int64(bytes)
		}
	}
	return sum
}

// HaveSend fails, with an error that wraps ebpf.ErrNotSupported, if the kernel
// does not let the start of sendmsg be noted: it has no fentry programs, or
// allows them to nobody.
func HaveSend() error {
	spec, err := loadTraceSend()
	if err != nil {
		return err
	}
	// Who may load those may load all that read the kernel.
	if err := probeProgram(ebpf.RawTracepoint, ebpf.AttachNone); err != nil {
		return fmt.Errorf("load program that reads the kernel: %w", err)
	}
	collection, err := loadCollection(spec, nil)
	switch {
	case errors.Is(err, unix.EPERM):
		return fmt.Errorf("fentry: %w: this kernel lets nobody load such programs: %w", ebpf.ErrNotSupported, err)
	case lacksHelper(err):
		return fmt.Errorf("storage of sockets for fentry: %w before Linux 5.11: %w", ebpf.ErrNotSupported, err)
	case err != nil:
		return fmt.Errorf("load program trace_send: %w", err)
	}
	defer collection.Close()
	l, err := link.AttachTracing(link.TracingOptions{Program: collection.Programs["trace_send"]})
	if err != nil {
		return fmt.Errorf("attach trace_send: %w", err)
	}
	return l.Close()
}
