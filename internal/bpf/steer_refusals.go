// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/cilium/ebpf/ringbuf"
)

// Refusals that the programs of a service report: one in reportEvery, and reportBurst at once.
const (
	reportEvery = 20 * time.Millisecond
	reportBurst = 1000
)

// RefusalReader reads the reported refusals of a service. The ring keeps what is reported while there is no reader.
type RefusalReader struct {
	reader *ringbuf.Reader
	record ringbuf.Record
}

// Refusals opens the ring. There is one reader at a time.
func (s *Steer) Refusals() (*RefusalReader, error) {
	reader, err := ringbuf.NewReader(s.refusals)
	if err != nil {
		return nil, fmt.Errorf("open ring of refusals: %w", err)
	}
	return &RefusalReader{reader: reader}, nil
}

// Read returns the refusals that were reported since the last call, without waiting. The error is os.ErrClosed after
// Close.
func (r *RefusalReader) Read() (list []Refusal, err error) {
	r.reader.SetDeadline(time.Now().Add(-time.Second))
	for {
		err := r.reader.ReadInto(&r.record)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return list, nil
		}
		if err != nil {
			return list, err
		}
		var refusal Refusal
		if err := binary.Read(bytes.NewReader(r.record.RawSample), binary.LittleEndian, &refusal); err != nil {
			return list, fmt.Errorf("read refusal: %w", err)
		}
		list = append(list, refusal)
	}
}

// Close ends Read.
func (r *RefusalReader) Close() error { return r.reader.Close() }
