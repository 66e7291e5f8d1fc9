// SPDX-License-Identifier: Apache-2.0

package ui

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"sockeye/internal/api"
	"sockeye/internal/config"
	"sockeye/internal/trace/report"
)

// fake is a source for tests.
type fake struct {
	mu       sync.Mutex
	frame    *api.Frame
	changed  chan struct{}
	watchers int
	idle     chan struct{} // a value when the last watcher leaves
	refusal  error         // of Watch
	events   []api.Event
	asked    []string // queries for events
}

func newFake(frame *api.Frame) *fake {
	return &fake{frame: frame, changed: make(chan struct{}), idle: make(chan struct{}, 100)}
}

func (f *fake) Watch() (func(), error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.refusal != nil {
		return nil, f.refusal
	}
	f.watchers++
	return func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		if f.watchers--; f.watchers == 0 {
			f.idle <- struct{}{}
		}
	}, nil
}

func (f *fake) Frame() (*api.Frame, <-chan struct{}) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.frame, f.changed
}

// set makes a frame the newest one.
func (f *fake) set(frame *api.Frame) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.frame = frame
	close(f.changed)
	f.changed = make(chan struct{})
}

func (f *fake) Events(w http.ResponseWriter, r *http.Request) error {
	f.mu.Lock()
	f.asked = append(f.asked, r.URL.RawQuery)
	list := slices.Clone(f.events)
	f.mu.Unlock()
	control := http.NewResponseController(w)
	for i := range list {
		if err := json.NewEncoder(w).Encode(&list[i]); err != nil {
			return nil
		}
	}
	if err := control.Flush(); err != nil {
		return nil
	}
	if r.URL.Query().Get("follow") != "" {
		<-r.Context().Done()
	}
	return nil
}

func (f *fake) Report(time.Duration) (report.Report, error) {
	return report.Report{Host: "test", Notes: []string{"a note"}}, nil
}

// serve serves the page until the end of the test, and returns its address.
func serve(t *testing.T, source Source, streams int) string {
	t.Helper()
	_, address := serveWith(t, &Settings{Config: config.UI{Listen: "127.0.0.1:1"}}, source, streams)
	return address
}

func serveWith(t *testing.T, settings *Settings, source Source, streams int) (s *Server, address string) {
	t.Helper()
	s, err := New(settings, source, slog.New(slog.DiscardHandler), streams)
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: s, ReadHeaderTimeout: time.Minute, ReadTimeout: time.Minute, WriteTimeout: time.Minute, ErrorLog: slog.NewLogLogger(slog.DiscardHandler, 0)}
	var serving sync.WaitGroup
	serving.Go(func() {
		if err := server.Serve(s.Listener(l)); !errors.Is(err, http.ErrServerClosed) {
			t.Error(err)
		}
	})
	t.Cleanup(func() {
		server.Close()
		serving.Wait()
	})
	return s, l.Addr().String()
}

// devicesFrame returns a frame with devices in slots; n changes their rates.
func devicesFrame(slots, devices, n int) *api.Frame {
	f := &api.Frame{Time: time.Date(2026, 1, 2, 3, 4, n, 0, time.UTC), Seconds: 1, Groups: []api.LiveGroup{}, Stuck: []api.LiveSocket{}}
	s := api.LiveService{Name: "telemetry", Devices: []api.LiveDevice{}}
	for i := range slots {
		s.Slots = append(s.Slots, api.LiveSlot{Slot: i, State: "ready", Ready: true, PID: 1000 + i, Command: "nfacctd", QueueLimit: 1 << 20, Queued: uint64(i) << 16})
	}
	for i := range devices {
		d := api.LiveDevice{Address: netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}), Device: fmt.Sprintf("router-%d", i), Slot: i * 7919 % slots,
			Datagrams: float64((i*i+n*17)%2000) / 2, Bytes: float64(i * (n % 5) * 10), Sessions: 1, LastSeen: f.Time}
		slot := &s.Slots[d.Slot]
		slot.Devices++
		slot.Sessions++
		slot.Datagrams += d.Datagrams
		slot.Bytes += d.Bytes
		s.Devices = append(s.Devices, d)
	}
	f.Services = append(f.Services, s)
	return f
}
