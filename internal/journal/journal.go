// SPDX-License-Identifier: Apache-2.0

// Package journal writes log records for systemd's journal: with fields by the journal's socket (systemd.journal-fields(7)),
// or, if there is no such socket, as lines with a priority prefix (sd-daemon(3)). Both have no time stamp, which the
// journal adds.
package journal

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"os"
	"strings"
	"sync"

	"github.com/coreos/go-systemd/v22/journal"
	"golang.org/x/sys/unix"
)

// Priorities of syslog(3).
const (
	Error   = 3
	Warning = 4
	Info    = 6
	Debug   = 7
)

// Connected reports whether a file is connected to the journal. JOURNAL_STREAM has the device and the inode of the
// connected file (systemd.exec(5)).
func Connected(f *os.File) bool {
	var stat unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &stat); err != nil {
		return false
	}
	return os.Getenv("JOURNAL_STREAM") == fmt.Sprintf("%d:%d", stat.Dev, stat.Ino)
}

// Handler is a slog.Handler that sends one entry for each record. MESSAGE is the line of the record. Each attribute has a
// field with the prefix SOCKEYE_, as in SOCKEYE_SLOT.
type Handler struct {
	out    *output
	next   slog.Handler
	fields map[string]string // of WithAttrs
	group  string            // prefix of the fields
}

type output struct {
	mu   sync.Mutex
	w    io.Writer
	line bytes.Buffer
}

// NewHandler returns a handler that writes text or JSON to w.
func NewHandler(w io.Writer, level slog.Leveler, json bool) *Handler {
	out := &output{w: w}
	options := &slog.HandlerOptions{Level: level, ReplaceAttr: func(groups []string, a slog.Attr) slog.Attr {
		if len(groups) == 0 && (a.Key == slog.TimeKey || a.Key == slog.LevelKey && !json) {
			return slog.Attr{}
		}
		return a
	}}
	if json {
		return &Handler{out: out, next: slog.NewJSONHandler(&out.line, options)}
	}
	return &Handler{out: out, next: slog.NewTextHandler(&out.line, options)}
}

// Enabled implements slog.Handler.
func (h *Handler) Enabled(ctx context.Context, level slog.Level) bool {
	return h.next.Enabled(ctx, level)
}

// Handle implements slog.Handler.
func (h *Handler) Handle(ctx context.Context, r slog.Record) error {
	h.out.mu.Lock()
	defer h.out.mu.Unlock()
	h.out.line.Reset()
	if err := h.next.Handle(ctx, r); err != nil {
		return err
	}
	line := h.out.line.String()
	if h.send(r, strings.TrimSuffix(line, "\n")) == nil {
		return nil
	}
	_, err := io.WriteString(h.out.w, Lines(priority(r.Level), line))
	return err
}

// send sends a record to the journal's socket. It returns an error if there is none.
func (h *Handler) send(r slog.Record, line string) error {
	fields := maps.Clone(h.fields)
	if fields == nil {
		fields = make(map[string]string)
	}
	r.Attrs(func(a slog.Attr) bool {
		addField(fields, h.group, a)
		return true
	})
	fields["SYSLOG_IDENTIFIER"] = "sockeye"
	return journal.Send(line, journal.Priority(priority(r.Level)), fields)
}

// WithAttrs implements slog.Handler.
func (h *Handler) WithAttrs(attrs []slog.Attr) slog.Handler {
	with := *h
	with.next = h.next.WithAttrs(attrs)
	with.fields = make(map[string]string, len(h.fields)+len(attrs))
	maps.Copy(with.fields, h.fields)
	for _, a := range attrs {
		addField(with.fields, h.group, a)
	}
	return &with
}

// addField adds the field of an attribute. Attributes without a value have none.
func addField(fields map[string]string, group string, a slog.Attr) {
	value := a.Value.Resolve()
	if value.Kind() == slog.KindGroup {
		for _, inner := range value.Group() {
			addField(fields, group+a.Key+"_", inner)
		}
		return
	}
	if text := value.String(); text != "" {
		fields[fieldName(group+a.Key)] = text
	}
}

// fieldName returns the field of an attribute: at most 64 upper-case letters, digits and underscores.
func fieldName(key string) string {
	name := strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' {
			return r - 'a' + 'A'
		}
		if r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' {
			return r
		}
		return '_'
	}, key)
	return ("SOCKEYE_" + name)[:min(64, len("SOCKEYE_")+len(name))]
}

// WithGroup implements slog.Handler.
func (h *Handler) WithGroup(name string) slog.Handler {
	with := *h
	with.next, with.group = h.next.WithGroup(name), h.group+name+"_"
	return &with
}

// Lines returns a text with a priority prefix before each line.
func Lines(priority int, text string) string {
	var b strings.Builder
	for line := range strings.Lines(text) {
		fmt.Fprintf(&b, "<%d>%s", priority, line)
	}
	return b.String()
}

func priority(level slog.Level) int {
	switch {
	case level >= slog.LevelError:
		return Error
	case level >= slog.LevelWarn:
		return Warning
	case level >= slog.LevelInfo:
		return Info
	}
	return Debug
}
