// SPDX-License-Identifier: Apache-2.0

package transfers

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"runtime"
	"runtime/debug"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Loads.
const (
	loadRR     = "rr"     // requests and responses of the same size, one at a time
	loadStream = "stream" // from the client to the server
)

const (
	// streamBuffer is the size of a write and of a read of a stream, in bytes: more
	// than a packet.
	streamBuffer = 256 << 10
	sequenceSize = 8    // number of a request, at its beginning
	startByte    = '\n' // of the server, once its thread runs
	checkedSize  = 64   // compared of each message or read, once warmed up
	// stall bounds the time without progress of the other end.
	stall = 5 * time.Second
	// fastest is the shortest transaction for which there is room in the list of
	// latencies.
	fastest = 5 * time.Microsecond
)

// A load is one run, as one end runs it.
type load struct {
	Kind    string
	Message int
	Warmup  time.Duration
	For     time.Duration
	Seed    string // of the data
	CPU     int    // to run on
	// SharesCPU is set for an end that shares its CPU with the other end, which counts
	// the softirq thread of the CPU.
	SharesCPU bool
}

// measured contains the counts of one end after the warm-up.
type measured struct {
	Count   int64 // transactions
	Bytes   int64 // sent and received
	Elapsed time.Duration
	CPU     time.Duration // of this end, and of its CPU's softirq thread
	took    []uint32      // ns of each transaction; of the client
	all     uint64        // transactions with those of the warm-up; of the client
	rates   []float64     // bytes a second, in each piece of a stream; of the client
}

// An end is one end of a connection. Its calls block.
type end struct {
	*load
	fd      int
	content []byte
	buf     []byte
	clock   cpuClock
	begun   time.Time
}

// on runs one end of a load on a thread of its own, bound to a CPU. When ctx ends, the
// connection is shut down, which ends the run.
func (l *load) on(ctx context.Context, fd int, run func(*end) (measured, error)) (m measured, err error) {
	if err := prepare(fd); err != nil {
		return m, err
	}
	defer context.AfterFunc(ctx, func() { _ = unix.Shutdown(fd, unix.SHUT_RDWR) })()
	defer pauseGC()()
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		var before, bound unix.CPUSet
		if err = unix.SchedGetaffinity(0, &before); err != nil {
			err = fmt.Errorf("read CPU affinity: %w", err)
			return
		}
		bound.Set(l.CPU)
		if err = unix.SchedSetaffinity(0, &bound); err != nil {
			err = fmt.Errorf("bind to CPU %d: %w", l.CPU, err)
			return
		}
		// The thread returns to the Go runtime.
		defer func() { _ = unix.SchedSetaffinity(0, &before) }()
		m, err = run(l.end(fd))
	}()
	<-done
	if ctx.Err() != nil {
		return m, context.Cause(ctx)
	}
	return m, err
}

// prepare makes the calls of a socket block, for at most stall.
func prepare(fd int) error {
	if err := unix.SetNonblock(fd, false); err != nil {
		return fmt.Errorf("set socket to blocking: %w", err)
	}
	limit := unix.NsecToTimeval(stall.Nanoseconds())
	for _, option := range []int{unix.SO_RCVTIMEO, unix.SO_SNDTIMEO} {
		if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, option, &limit); err != nil {
			return fmt.Errorf("set socket timeout: %w", err)
		}
	}
	if err := unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1); err != nil {
		return fmt.Errorf("set TCP_NODELAY: %w", err)
	}
	return nil
}

// collector counts the runs that have paused the garbage collector.
var collector struct {
	sync.Mutex
	runs    int
	percent int
}

// pauseGC collects garbage and pauses the collector until its result is called.
func pauseGC() (end func()) {
	c := &collector
	c.Lock()
	defer c.Unlock()
	if c.runs++; c.runs == 1 {
		runtime.GC()
		c.percent = debug.SetGCPercent(-1)
	}
	return func() {
		c.Lock()
		defer c.Unlock()
		if c.runs--; c.runs == 0 {
			debug.SetGCPercent(c.percent)
		}
	}
}

func (l *load) end(fd int) *end {
	size := streamBuffer
	if l.Kind == loadRR {
		size = l.Message
	}
	return &end{load: l, fd: fd, content: content(l.Seed, size), buf: make([]byte, size), clock: openCPUClock(l.CPU, !l.SharesCPU), begun: time.Now()}
}

// content returns the data of a run, which both ends know.
func content(seed string, size int) []byte {
	source := rand.NewChaCha8(sha256.Sum256([]byte(seed)))
	b := make([]byte, size)
	_, _ = source.Read(b) // always all
	return b
}

// drive runs the client's end. It starts with the first byte of the server.
func (e *end) drive() (measured, error) {
	if n, err := e.read(e.buf[:1]); err != nil || n != 1 || e.buf[0] != startByte {
		return measured{}, joined(errors.New("the server does not start"), err)
	}
	e.begun = time.Now()
	if e.Kind == loadRR {
		return e.sendRequests()
	}
	return e.sendStream()
}

// serve runs the server's end.
func (e *end) serve() (measured, error) {
	if err := e.send([]byte{startByte}); err != nil {
		return measured{}, err
	}
	if e.Kind == loadRR {
		return e.answerRequests()
	}
	return e.receiveStream()
}

var errCorrupt = errors.New("received data differ from those sent")

// sendRequests sends requests and checks the responses, which are equal to the
// requests.
func (e *end) sendRequests() (m measured, err error) {
	request := slices.Clone(e.content)
	var sequence uint64
	exchange := func() error {
		sequence++
		binary.LittleEndian.PutUint64(request, sequence)
		if err := e.send(request); err != nil {
			return err
		}
		if err := e.receive(); err != nil {
			return err
		}
		if binary.LittleEndian.Uint64(e.buf) != sequence {
			return errCorrupt
		}
		return nil
	}
	for time.Since(e.begun) < e.Warmup {
		if err := exchange(); err != nil {
			return m, err
		}
		if !bytes.Equal(e.buf, request) {
			return m, errCorrupt
		}
	}
	took := make([]uint32, e.For/fastest)
	for i := range took {
		took[i] = 1 // touches the memory
	}
	cpu, start := e.clock.now(), time.Since(e.begun)
	limit := start + e.For
	now := start
	n := 0
	for ; now < limit && n < len(took); n++ {
		if err := exchange(); err != nil {
			return m, err
		}
		then := now
		now = time.Since(e.begun)
		took[n] = uint32(min(now-then, 1<<32-1))
		if at := sequenceSize + n*checkedSize%(len(request)-sequenceSize-checkedSize+1); !bytes.Equal(e.buf[at:at+checkedSize], request[at:at+checkedSize]) {
			return m, errCorrupt
		}
	}
	m = measured{Count: int64(n), Bytes: 2 * int64(n) * int64(e.Message), Elapsed: now - start, CPU: e.clock.now() - cpu, took: took[:n], all: sequence}
	return m, e.finish()
}

// answerRequests sends each received message back.
func (e *end) answerRequests() (m measured, err error) {
	var cpu, start time.Duration
	for measuring := false; ; {
		err := e.receive()
		if errors.Is(err, io.EOF) {
			break
		}
		if err == nil {
			err = e.send(e.buf)
		}
		if err != nil {
			return m, err
		}
		switch {
		case measuring:
			m.Count++
		case time.Since(e.begun) >= e.Warmup:
			measuring = true
			cpu, start = e.clock.now(), time.Since(e.begun)
		}
	}
	m.Bytes = 2 * m.Count * int64(e.Message)
	m.Elapsed, m.CPU = time.Since(e.begun)-start, e.clock.now()-cpu
	return m, nil
}

// sendStream sends a stream.
func (e *end) sendStream() (m measured, err error) {
	for time.Since(e.begun) < e.Warmup {
		if err := e.send(e.content); err != nil {
			return m, err
		}
	}
	m.rates = make([]float64, 0, pieces)
	cpu, start := e.clock.now(), time.Since(e.begun)
	begun, sent := start, int64(0) // of the piece
	for len(m.rates) < pieces {
		if err := e.send(e.content); err != nil {
			return m, err
		}
		sent += int64(len(e.content))
		if now := time.Since(e.begun); now-begun >= e.For/pieces {
			m.rates = append(m.rates, float64(sent)/(now-begun).Seconds())
			m.Bytes += sent
			begun, sent = now, 0
		}
	}
	m.Elapsed, m.CPU = begun-start, e.clock.now()-cpu
	return m, e.finish()
}

// receiveStream receives and checks a stream.
func (e *end) receiveStream() (m measured, err error) {
	var cpu, start, last time.Duration
	at := 0 // in the content
	for measuring := false; ; {
		n, err := e.read(e.buf)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return m, err
		}
		check := n
		if measuring {
			check = min(n, checkedSize)
		}
		first := min(check, len(e.content)-at)
		if !bytes.Equal(e.buf[:first], e.content[at:at+first]) || !bytes.Equal(e.buf[first:check], e.content[:check-first]) {
			return m, errCorrupt
		}
		at = (at + n) % len(e.content)
		last = time.Since(e.begun)
		switch {
		case measuring:
			m.Bytes += int64(n)
		case last >= e.Warmup:
			measuring = true
			cpu, start = e.clock.now(), last
		}
	}
	m.Elapsed, m.CPU = last-start, e.clock.now()-cpu
	return m, nil
}

// finish closes the sending direction and waits until the other end has closed.
func (e *end) finish() error {
	if err := unix.Shutdown(e.fd, unix.SHUT_WR); err != nil {
		return fmt.Errorf("shut down the connection: %w", err)
	}
	switch _, err := e.read(e.buf); {
	case errors.Is(err, io.EOF):
		return nil
	case err != nil:
		return err
	}
	return errCorrupt
}

func (e *end) send(b []byte) error {
	for len(b) > 0 {
		n, err := unix.Write(e.fd, b)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.EAGAIN):
			return fmt.Errorf("send: no progress in %v", stall)
		case err != nil:
			return fmt.Errorf("send: %w", err)
		}
		b = b[n:]
	}
	return nil
}

// receive receives one message. Returns io.EOF if the other end has closed.
func (e *end) receive() error {
	for done := 0; done < len(e.buf); {
		n, err := e.read(e.buf[done:])
		if errors.Is(err, io.EOF) && done > 0 {
			return errors.New("receive: the connection was closed within a message")
		}
		if err != nil {
			return err
		}
		done += n
	}
	return nil
}

func (e *end) read(b []byte) (int, error) {
	for {
		n, err := unix.Read(e.fd, b)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.EAGAIN):
			return 0, fmt.Errorf("receive: no progress in %v", stall)
		case err != nil:
			return 0, fmt.Errorf("receive: %w", err)
		case n == 0:
			return 0, io.EOF
		}
		return n, nil
	}
}
