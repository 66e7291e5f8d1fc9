// SPDX-License-Identifier: Apache-2.0

// Package journal writes log lines in the format of systemd's journal: with a priority prefix (sd-daemon(3)) and
// without a time stamp, which the journal adds.
package journal

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"sync"

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

// Handler is a slog.Handler that writes one line for each record.
type Handler struct {
	out  *output
	next slog.Handler
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
		return &Handler{out, slog.NewJSONHandler(&out.line, options)}
	}
	return &Handler{out, slog.NewTextHandler(&out.line, options)}
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
	fmt.Fprintf(&h.out.line, "<%d>", priority(r.Level))
	if err := h.next.Handle(ctx, r); err != nil {
		return err
	}
	_, err := h.out.w.Write(h.out.line.Bytes())
	return err
}

// WithAttrs implements slog.Handler.
func (h *Handler) WithAttrs(attrs []slog.Attr) slog.Handler {
	return &Handler{h.out, h.next.WithAttrs(attrs)}
}

// WithGroup implements slog.Handler.
func (h *Handler) WithGroup(name string) slog.Handler {
	return &Handler{h.out, h.next.WithGroup(name)}
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

// Lines returns a text with a priority prefix before each line.
func Lines(priority int, text string) string {
	var b strings.Builder
	for line := range strings.Lines(text) {
		fmt.Fprintf(&b, "<%d>%s", priority, line)
	}
	return b.String()
}
