// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"time"

	"sockeye/internal/api"
	"sockeye/internal/config"
	"sockeye/internal/connlimit"
	"sockeye/internal/domain"
	"sockeye/internal/fault"
	"sockeye/internal/format"
	"sockeye/internal/trace/report"
	"sockeye/internal/ui"
)

// webPage is the server of the web page.
type webPage struct {
	server   *ui.Server
	http     *http.Server
	listener *connlimit.Listener
}

// pageChange is a change of the web page that has not been made. nil is not a change.
type pageChange struct {
	page     *webPage     // a page that is served already; nil if the change ends the page, or changes settings
	settings *ui.Settings // new settings of the page in force, with the same address
}

// discard undoes what openPage has done.
func (c *pageChange) discard() {
	if c != nil {
		c.page.close()
	}
}

// openPage prepares the web page of a policy: it reads the files and opens the address. The caller calls setPage or
// discard.
func (a *Agent) openPage(policy *config.Policy) (*pageChange, error) {
	if policy.UI.Listen == "" {
		return &pageChange{}, nil
	}
	settings, err := ui.ReadSettings(policy.UI)
	if err != nil {
		return nil, err
	}
	if a.page != nil {
		switch now := a.page.server.Settings(); {
		case now.Equal(settings):
			return nil, nil
		case now.Config.Listen == policy.UI.Listen:
			return &pageChange{settings: settings}, nil
		}
	}
	gid, err := a.group()
	if err != nil {
		return nil, err
	}
	listener, err := ui.Listen(policy.UI, gid)
	if err != nil {
		return nil, err
	}
	page, err := a.servePage(settings, listener)
	if err != nil {
		listener.Close()
		return nil, err
	}
	return &pageChange{page: page}, nil
}

// pageSource is what the web page shows.
type pageSource struct{ a *Agent }

func (a *Agent) servePage(settings *ui.Settings, listener net.Listener) (*webPage, error) {
	limit := domain.ShareOfDescriptors(pageShare, leastPage, mostPage)
	// Half of the connections remain for requests that end.
	server, err := ui.New(settings, pageSource{a}, a.log, limit/2)
	if err != nil {
		return nil, err
	}
	p := &webPage{server: server, http: &http.Server{Handler: server, ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 30 * time.Second,
		WriteTimeout: 30 * time.Second, MaxHeaderBytes: 16 << 10, ErrorLog: slog.NewLogLogger(a.log.Handler(), slog.LevelDebug)}}
	p.listener = &connlimit.Listener{Listener: server.Listener(listener), Name: "web page", Log: a.log, Limit: limit}
	if settings.Config.TLS.Cert == "" {
		const text = "the web page has too many connections; try again\n"
		p.listener.Refusal = fmt.Appendf(nil, "HTTP/1.1 503 Service Unavailable\r\nContent-Type: text/plain; charset=utf-8\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s", len(text), text)
	}
	p.listener.Wrap(p.http)
	go func() {
		if err := p.http.Serve(p.listener); !errors.Is(err, http.ErrServerClosed) {
			a.log.Error("web page failed", "error", err)
		}
	}()
	a.log.Info("web page served", "address", settings.Config.Listen)
	return p, nil
}

// setPage makes a change that openPage has prepared, or notes why there is none. The caller holds a.mu.
func (a *Agent) setPage(c *pageChange, problem error) {
	a.pageProblem = problem
	switch {
	case problem != nil || c == nil:
	case c.settings != nil:
		a.page.server.Set(c.settings)
		// The clients of these connections have authenticated under the former settings.
		a.page.listener.CloseAll()
	default:
		a.page.close()
		a.page = c.page
	}
}

// close closes the listener and all connections.
func (p *webPage) close() {
	if p != nil {
		p.http.Close()
	}
}

// describeUI describes the web page of a policy, as in "127.0.0.1:9733, TLS, token".
func describeUI(u config.UI) string {
	parts := []string{format.OrNone(u.Listen)}
	if u.TLS.Cert != "" {
		parts = append(parts, "TLS")
	}
	if u.TokenFile != "" {
		parts = append(parts, "token")
	}
	if u.TLS.ClientCA != "" {
		parts = append(parts, "client certificates")
	}
	return strings.Join(parts, ", ")
}

// Watch counts a live view.
func (s pageSource) Watch() (stop func(), err error) {
	if !s.a.live.admit() {
		return nil, fault.Conflict(fmt.Errorf("%d live views are open", mostWatchers), "close other ones")
	}
	return s.a.live.removeWatcher, nil
}

// Frame returns the newest frame of the live view.
func (s pageSource) Frame() (*api.Frame, <-chan struct{}) {
	v := s.a.live
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.frame, v.changed
}

// Events answers a request for events.
func (s pageSource) Events(w http.ResponseWriter, r *http.Request) error {
	return s.a.streamEvents(w, r)
}

// reportSlow is the number of slowest messages of a report, of which the report shows some.
const reportSlow = 200

// Report returns the measurements of the last time.
func (s pageSource) Report(last time.Duration) (report.Report, error) {
	host, err := os.Hostname()
	if err != nil {
		return report.Report{}, err
	}
	r := report.Report{Host: host, Version: s.a.options.Version}
	for _, d := range domain.With[domain.Measurer](s.a.domains) {
		status, err := d.Cgroups("")
		if err != nil {
			return report.Report{}, err
		}
		q := url.Values{"since": {last.String()}}
		history, err := d.History(q)
		if err != nil {
			return report.Report{}, err
		}
		q.Set("n", fmt.Sprint(reportSlow))
		slow, err := d.Slow(q)
		if err != nil {
			return report.Report{}, err
		}
		r.Notes, r.Periods = append(r.Notes, report.Notes(status)...), append(r.Periods, history.Slices...)
		for _, m := range slow {
			r.Slow = append(r.Slow, m.Sample)
		}
	}
	return r, nil
}
