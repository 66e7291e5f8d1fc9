// SPDX-License-Identifier: Apache-2.0

package events

import (
	"context"
	"log/slog"
	"slices"
	"strconv"
	"time"

	"sockeye/internal/api"
)

// Key is the attribute that makes a log record an event. Its value is the kind of the event.
const Key = "event"

// Attributes of log records that have a field in [api.Event].
const (
	keyService   = "service"
	keySlot      = "slot"
	keyDevice    = "device"
	keyAddress   = "address"
	keyPID       = "pid"
	keyCgroup    = "cgroup"
	keyNetns     = "netns"
	keyInterface = "interface"
)

// Handler is a slog.Handler that adds the events among the log records to a log: records with the attribute [Key],
// warnings and errors. It passes all records on, except events that are too frequent.
type Handler struct {
	log   *Log
	next  slog.Handler
	attrs []slog.Attr // of WithAttrs
	group bool        // inside a group: records are not events
}

// NewHandler returns a handler. Events are recorded whatever the level of next is.
func NewHandler(log *Log, next slog.Handler) *Handler {
	log.mu.Lock()
	defer log.mu.Unlock()
	log.next = next
	return &Handler{log: log, next: next}
}

// Enabled implements slog.Handler.
func (h *Handler) Enabled(ctx context.Context, level slog.Level) bool {
	return level >= slog.LevelInfo || h.next.Enabled(ctx, level)
}

// Handle implements slog.Handler.
func (h *Handler) Handle(ctx context.Context, r slog.Record) error {
	if e, ok := h.event(r); ok && !h.log.add(e) {
		return nil
	}
	if !h.next.Enabled(ctx, r.Level) {
		return nil
	}
	return h.next.Handle(ctx, r)
}

// WithAttrs implements slog.Handler.
func (h *Handler) WithAttrs(attrs []slog.Attr) slog.Handler {
	with := *h
	with.next = h.next.WithAttrs(attrs)
	if !h.group {
		with.attrs = append(slices.Clip(h.attrs), attrs...)
	}
	return &with
}

// WithGroup implements slog.Handler.
func (h *Handler) WithGroup(name string) slog.Handler {
	with := *h
	with.next, with.group = h.next.WithGroup(name), true
	return &with
}

// event converts a record with the attribute Key.
func (h *Handler) event(r slog.Record) (api.Event, bool) {
	if h.group || r.Level < slog.LevelInfo {
		return api.Event{}, false
	}
	e := api.Event{Time: r.Time, Level: levelOf(r.Level), Text: r.Message}
	if e.Time.IsZero() {
		e.Time = time.Now()
	}
	for _, a := range h.attrs {
		set(&e, a)
	}
	r.Attrs(func(a slog.Attr) bool {
		set(&e, a)
		return true
	})
	if e.Kind == "" && r.Level >= slog.LevelWarn {
		e.Kind = Problem
	}
	return e, e.Kind != ""
}

func levelOf(l slog.Level) string {
	switch {
	case l >= slog.LevelError:
		return "error"
	case l >= slog.LevelWarn:
		return "warning"
	}
	return "info"
}

func set(e *api.Event, a slog.Attr) {
	value := a.Value.Resolve()
	text := value.String()
	switch a.Key {
	case Key:
		e.Kind = text
	case keyService:
		e.Service = text
	case keyDevice:
		e.Device = text
	case keyAddress:
		e.Address = text
	case keyCgroup:
		e.Cgroup = text
	case keyNetns:
		e.Netns = text
	case keyInterface:
		e.Interface = text
	case keySlot:
		if n, err := strconv.Atoi(text); err == nil && n >= 0 { // a member that takes any slot has none yet
			e.Slot = &n
		}
	case keyPID:
		if n, err := strconv.Atoi(text); err == nil {
			e.PID = n
		}
	default:
		if text == "" {
			return
		}
		if e.Details == nil {
			e.Details = make(map[string]string)
		}
		e.Details[a.Key] = text
	}
}
