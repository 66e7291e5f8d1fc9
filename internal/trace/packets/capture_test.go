// SPDX-License-Identifier: Apache-2.0

package packets

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"sockeye/internal/clock"
	"sockeye/internal/trace/capture"
)

// Source is the source of events: a *capture.Capture.
type Source interface {
	Read(deadline time.Time, e *capture.Event) error
	Stop() error
	Lost() (uint64, error)
	Missing() []string
}

// Options limits a capture.
type Options struct {
	Deadline time.Time // end of the capture
	Events   uint64    // maximum number of events; 0: no limit
	Window   int       // maximum number of packets in memory; 0: DefaultWindow
}

const tcpClose = 7 // TCP_CLOSE of linux/tcp_states.h

// Capture reads the packets of a connection until a limit is reached, the connection closes, or ctx is done, which is
// not an error. It emits a packet when this packet and all earlier packets are complete, and the remaining packets at
// the end. Capture stops the source; the caller closes it.
func Capture(ctx context.Context, s Source, o Options, emit func(*Packet) error) (_ *Summary, err error) {
	clock := Clock(clock.Offset())
	interrupted := make(chan error, 1)
	cancel := context.AfterFunc(ctx, func() { interrupted <- s.Stop() })
	defer func() {
		if !cancel() {
			err = errors.Join(err, <-interrupted)
		}
		err = errors.Join(err, s.Stop())
	}()

	a := NewAssembler(clock, o.Window, emit)
	stopped := Reason("")
	var e capture.Event
	for o.Events == 0 || a.summary.Events < o.Events {
		err := s.Read(o.Deadline, &e)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, fmt.Errorf("read packets: %w", err)
		}
		if err := a.Add(&e); err != nil {
			return nil, err
		}
		if e.Kind == capture.State && e.State == tcpClose {
			stopped = StoppedClosed
			if err := s.Stop(); err != nil {
				return nil, err
			}
		}
	}
	summary, err := a.Close()
	if err != nil {
		return nil, err
	}
	switch {
	case stopped != "":
	case o.Events != 0 && summary.Events >= o.Events:
		stopped = StoppedEvents
	case ctx.Err() == nil && !time.Now().Before(o.Deadline):
		stopped = StoppedDeadline
	default:
		stopped = StoppedInterrupted
	}
	summary.Stopped, summary.Missing = stopped, s.Missing()
	if summary.LostEvents, err = s.Lost(); err != nil {
		return nil, err
	}
	return summary, nil
}
