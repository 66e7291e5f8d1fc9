// SPDX-License-Identifier: Apache-2.0

// Package traffic simulates devices: BMP sessions (RFC 7854) with valid BGP UPDATEs
// over TCP, and IPFIX (RFC 7011) over UDP, each from a source address that the caller
// selects.
//
// Source addresses must be local to the network namespace: addresses of 127.0.0.0/8,
// or addresses that were added to an interface.
package traffic

import (
	"context"
	"errors"
	"time"
)

// Limit limits Drive. The zero value means no limit: Drive sends at the maximum rate until
// the context is done.
type Limit struct {
	Rate     float64       // messages per second over all sources; 0: no limit
	Count    uint64        // messages over all sources; 0: no limit
	Duration time.Duration // 0: no limit
	Batch    int           // maximum number of consecutive messages of one source; 0: 16
}

// Result has the counts of Drive.
type Result struct {
	Messages uint64
	Elapsed  time.Duration
}

// pause is the time that Drive sleeps when it is ahead of its rate. After each pause,
// Drive sends a burst of rate*pause messages over all sources.
const pause = 500 * time.Microsecond

// Drive calls send(source, n) for the sources 0 to sources-1 in turn, within the
// limit. send returns the number of sent messages, like Exporter.Send and
// Session.Announce. Drive returns at the limit, when the context is done (without an
// error), or at the first error of send.
func Drive(ctx context.Context, l Limit, sources int, send func(source, n int) (int, error)) (Result, error) {
	if sources < 1 {
		return Result{}, errors.New("drive traffic: no sources")
	}
	if l.Batch <= 0 {
		l.Batch = 16
	}
	var sent uint64
	start := time.Now()
	for source := 0; ; source = (source + 1) % sources {
		elapsed := time.Since(start)
		if ctx.Err() != nil || l.Duration > 0 && elapsed >= l.Duration {
			return Result{sent, elapsed}, nil
		}
		n := l.Batch
		if l.Rate > 0 {
			due := uint64(l.Rate * elapsed.Seconds())
			for due <= sent {
				time.Sleep(pause)
				elapsed = time.Since(start)
				if ctx.Err() != nil || l.Duration > 0 && elapsed >= l.Duration {
					return Result{sent, elapsed}, nil
				}
				due = uint64(l.Rate * elapsed.Seconds())
			}
			n = min(n, int(due-sent))
		}
		if l.Count > 0 {
			n = min(n, int(l.Count-sent))
		}
		done, err := send(source, n)
		sent += uint64(done)
		if err != nil || l.Count > 0 && sent >= l.Count {
			return Result{sent, time.Since(start)}, err
		}
	}
}
