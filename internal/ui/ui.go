// SPDX-License-Identifier: Apache-2.0

// Package ui is the web page of the agent. The page is read-only: it shows the frames of the live view, the events and
// the trace report. All of its files are embedded, and it requests nothing from other servers.
//
// Each frame is encoded once for all browsers. A browser that is slow skips frames; one that reads nothing is
// disconnected. The number of streams is limited, and the agent limits the connections.
package ui

import (
	"bytes"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync/atomic"
	"time"

	"sockeye/internal/api"
	"sockeye/internal/fault"
	"sockeye/internal/trace/report"
)

// Source is what the page shows. The agent implements it.
type Source interface {
	// Watch makes the source renew its frame each second, until the caller calls stop.
	Watch() (stop func(), err error)
	// Frame returns the newest frame, which is nil until the first one exists, and a channel that is closed with the next
	// one. Nobody changes the frame.
	Frame() (*api.Frame, <-chan struct{})
	// Events answers a request for events as the API does: lines of api.Event. An error comes before the first line.
	Events(w http.ResponseWriter, r *http.Request) error
	// Report returns the input of the trace report: the measurements of the last time.
	Report(last time.Duration) (report.Report, error)
}

const (
	// writeTime is the time that a browser has for reading what was sent.
	writeTime = 10 * time.Second
	// reportWait is the longest time that a report waits for others.
	reportWait = 10 * time.Second
	// maxReport is the longest time that a report covers: the agent keeps one hour.
	maxReport = time.Hour
)

// pagePolicy is the content security policy of the page, and loginPolicy that of the login form.
const (
	pagePolicy  = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; frame-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
	loginPolicy = "default-src 'none'; style-src 'self'; img-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'"
)

//go:embed static
var static embed.FS

// Server answers the requests of browsers.
type Server struct {
	source   Source
	log      *slog.Logger
	settings atomic.Pointer[Settings]
	hub      hub
	streams  chan struct{} // a token for each stream
	reports  chan struct{} // a token for the report that is being made
	refused  atomic.Int64  // time of the last warning about a refused token, in nanoseconds
	mux      *http.ServeMux
}

// file is an embedded file.
type file struct {
	name, tag string
	data      []byte
}

// New returns a server with at most so many streams at a time.
func New(settings *Settings, source Source, log *slog.Logger, streams int) (*Server, error) {
	s := &Server{source: source, log: log, hub: hub{source: source}, streams: make(chan struct{}, streams), reports: make(chan struct{}, 1), mux: http.NewServeMux()}
	s.settings.Store(settings)
	files, err := fs.Sub(static, "static")
	if err != nil {
		return nil, err
	}
	for path, name := range map[string]string{"/{$}": "index.html", "/app.js": "app.js", "/app.css": "app.css", "/icon.svg": "icon.svg"} {
		file, err := newFile(files, name)
		if err != nil {
			return nil, err
		}
		s.mux.Handle("GET "+path, file)
	}
	s.mux.HandleFunc("GET /login", s.showLogin)
	s.mux.HandleFunc("POST /login", s.login)
	s.mux.HandleFunc("GET /live", s.live)
	s.mux.HandleFunc("GET /events", s.events)
	s.mux.HandleFunc("GET /report", s.report)
	return s, nil
}

// Set replaces the settings. The caller closes the connections that exist.
func (s *Server) Set(settings *Settings) { s.settings.Store(settings) }

// Settings returns the settings in force.
func (s *Server) Settings() *Settings { return s.settings.Load() }

// ServeHTTP checks where a request comes from and who sends it, and answers it.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	h := w.Header()
	h.Set("Content-Security-Policy", pagePolicy)
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Referrer-Policy", "no-referrer")
	h.Set("Cross-Origin-Opener-Policy", "same-origin")
	h.Set("Cross-Origin-Resource-Policy", "same-origin")
	h.Set("Cache-Control", "no-store")
	settings := s.settings.Load()
	if err := settings.checkOrigin(r); err != nil {
		http.Error(w, err.Error(), http.StatusForbidden)
		return
	}
	if r.Method != http.MethodGet && r.Method != http.MethodHead && (r.Method != http.MethodPost || r.URL.Path != "/login") {
		h.Set("Allow", "GET, HEAD")
		http.Error(w, "the page is read-only", http.StatusMethodNotAllowed)
		return
	}
	if !isPublic(r.URL.Path) && !settings.admits(r, time.Now()) {
		if r.URL.Path == "/" {
			// A relative address is right behind a proxy that serves the page below a path, too.
			h.Set("Location", "login")
			w.WriteHeader(http.StatusSeeOther)
			return
		}
		h.Set("WWW-Authenticate", `Bearer realm="sockeye"`)
		http.Error(w, "the token is missing or not valid; open the page to enter it", http.StatusUnauthorized)
		return
	}
	s.mux.ServeHTTP(w, r)
}

// isPublic reports whether a path needs no token.
func isPublic(path string) bool { return path == "/login" || path == "/app.css" || path == "/icon.svg" }

// checkOrigin refuses requests that pages of other sites make. On a loopback address, the name in the request must be
// one of this host: another site could have its own name resolve to 127.0.0.1 (DNS rebinding).
func (s *Settings) checkOrigin(r *http.Request) error {
	if at, err := netip.ParseAddrPort(s.Config.Listen); err == nil && at.Addr().IsLoopback() && !isLocalName(r.Host) {
		return fmt.Errorf("the page is only for names of this host, not for %.80q; open it as http://localhost", r.Host)
	}
	// Browsers tell which site a request comes from. A link on another site to the page is a navigation.
	site := r.Header.Get("Sec-Fetch-Site")
	if (site == "cross-site" || site == "same-site") && (r.Header.Get("Sec-Fetch-Mode") != "navigate" || r.Method == http.MethodPost) {
		return fmt.Errorf("the page does not answer requests of other sites")
	}
	return nil
}

// isLocalName reports whether the name in a request, with or without a port, is localhost or a loopback address.
func isLocalName(host string) bool {
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	}
	host = strings.TrimSuffix(strings.TrimPrefix(host, "["), "]")
	if strings.EqualFold(host, "localhost") {
		return true
	}
	addr, err := netip.ParseAddr(host)
	return err == nil && addr.Zone() == "" && addr.IsLoopback()
}

func newFile(files fs.FS, name string) (*file, error) {
	data, err := fs.ReadFile(files, name)
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256(data)
	return &file{name, `"` + hex.EncodeToString(sum[:16]) + `"`, data}, nil
}

// ServeHTTP sends the file. The browser asks each time whether the file is still the same.
func (f *file) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Cache-Control", "no-cache")
	w.Header().Set("ETag", f.tag)
	http.ServeContent(w, r, f.name, time.Time{}, bytes.NewReader(f.data))
}

// deadlineWriter gives each write writeTime, because a browser that does not read must not hold what the agent has few
// of.
type deadlineWriter struct {
	http.ResponseWriter
	control *http.ResponseController
}

// events streams events, as lines of JSON.
func (s *Server) events(w http.ResponseWriter, r *http.Request) {
	release, ok := s.admit(w, r)
	if !ok {
		return
	}
	defer release()
	if err := s.source.Events(&deadlineWriter{w, http.NewResponseController(w)}, r); err != nil {
		http.Error(w, fault.Message(err), http.StatusBadRequest)
	}
}

// admit takes a token for a stream. It answers the request if there is none, and if the request is not for the contents.
func (s *Server) admit(w http.ResponseWriter, r *http.Request) (release func(), ok bool) {
	if r.Method == http.MethodHead {
		w.WriteHeader(http.StatusOK)
		return nil, false
	}
	select {
	case s.streams <- struct{}{}:
		return func() { <-s.streams }, true
	default:
		w.Header().Set("Retry-After", "10")
		http.Error(w, fmt.Sprintf("%d streams of the web page are open; close other ones", cap(s.streams)), http.StatusServiceUnavailable)
		return nil, false
	}
}

// Write writes p within writeTime.
func (w *deadlineWriter) Write(p []byte) (int, error) {
	if err := w.control.SetWriteDeadline(time.Now().Add(writeTime)); err != nil {
		return 0, err
	}
	return w.ResponseWriter.Write(p)
}

// SetWriteDeadline does nothing: Write sets the deadline.
func (w *deadlineWriter) SetWriteDeadline(time.Time) error { return nil }

// FlushError flushes within writeTime.
func (w *deadlineWriter) FlushError() error {
	if err := w.control.SetWriteDeadline(time.Now().Add(writeTime)); err != nil {
		return err
	}
	return w.control.Flush()
}

// SetReadDeadline sets the deadline of the connection.
func (w *deadlineWriter) SetReadDeadline(t time.Time) error { return w.control.SetReadDeadline(t) }

// report sends the trace report of the last time, which is a page of its own in a frame of the page.
func (s *Server) report(w http.ResponseWriter, r *http.Request) {
	last, err := time.ParseDuration(r.URL.Query().Get("last"))
	if err != nil || last <= 0 || last > maxReport {
		http.Error(w, "last must be a duration of at most 1h, as in 15m", http.StatusBadRequest)
		return
	}
	timeout := time.NewTimer(reportWait)
	defer timeout.Stop()
	select {
	case s.reports <- struct{}{}:
	case <-r.Context().Done():
		return
	case <-timeout.C:
		http.Error(w, "too many reports; try again", http.StatusServiceUnavailable)
		return
	}
	page, err := s.makeReport(last)
	<-s.reports
	if err != nil {
		http.Error(w, fault.Message(err), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Security-Policy", report.ContentPolicy()+"; frame-ancestors 'self'")
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	// The browser may have disconnected.
	_, _ = w.Write(page)
}

func (s *Server) makeReport(last time.Duration) ([]byte, error) {
	input, err := s.source.Report(last)
	if err != nil {
		return nil, err
	}
	var page bytes.Buffer
	err = report.WriteReport(&page, input)
	return page.Bytes(), err
}
