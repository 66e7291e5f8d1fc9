// SPDX-License-Identifier: Apache-2.0

package domain

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"time"
)

// Stream writes lines of JSON until it ends or the client disconnects.
type Stream struct {
	control *http.ResponseController
	mu      sync.Mutex
	encoder *json.Encoder
}

// NewStream removes the deadlines of a request. Lines are flushed within 0.1 s. The caller must call stop before the
// end of the response.
func NewStream(w http.ResponseWriter) (s *Stream, stop func(), err error) {
	s = &Stream{control: http.NewResponseController(w), encoder: json.NewEncoder(w)}
	if err := errors.Join(s.control.SetReadDeadline(time.Time{}), s.control.SetWriteDeadline(time.Time{})); err != nil {
		return nil, nil, fmt.Errorf("begin answer: %w", err)
	}
	w.Header().Set("Content-Type", "application/x-ndjson")
	if err := s.Flush(); err != nil {
		return nil, nil, err
	}
	ended := make(chan struct{})
	var flushing sync.WaitGroup
	flushing.Go(func() {
		tick := time.NewTicker(100 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-ended:
				return
			case <-tick.C:
			}
			if s.Flush() != nil {
				return // the client has disconnected; writing the next line fails
			}
		}
	})
	return s, func() { close(ended); flushing.Wait() }, nil
}

// Line writes a line.
func (s *Stream) Line(v any) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.encoder.Encode(v)
}

// Flush sends the lines written so far.
func (s *Stream) Flush() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.control.Flush()
}
