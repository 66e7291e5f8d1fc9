// SPDX-License-Identifier: Apache-2.0

//go:build !vm

package ui

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/chromedp/kb"

	"sockeye/internal/api"
	"sockeye/internal/config"
	"sockeye/internal/testenv"
	"sockeye/internal/trace/report"
	"sockeye/lab/browser"
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
	settings, err := ReadSettings(config.UI{Listen: "127.0.0.1:1"})
	if err != nil {
		t.Fatal(err)
	}
	return serveWith(t, settings, source, streams)
}

func serveWith(t *testing.T, settings *Settings, source Source, streams int) string {
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
	return l.Addr().String()
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

// troubledFrame returns a frame with problems of each kind.
func troubledFrame() *api.Frame {
	f := devicesFrame(6, 300, 1)
	f.Problem = "the policy file differs from the policy in force"
	lag := int64(2_300_000_000)
	s := &f.Services[0]
	s.Split, s.Refused = 1, 40
	s.Slots[1].PID, s.Slots[1].Ready, s.Slots[1].Refused = 0, false, 40
	s.Slots[2].Drops, s.Slots[2].Queued = 130, 1<<20-1
	s.Slots[3].ZeroWindows, s.Slots[3].ReaderLag, s.Slots[3].Backlog = 2, &lag, 3
	s.Slots[4].Waiting = 800
	s.Slots[5].State = "drain"
	s.Devices[0].Split, s.Devices[7].Refused, s.Devices[9].Pinned = true, 40, true
	f.Stuck = append(f.Stuck, api.LiveSocket{Service: "telemetry", Local: netip.MustParseAddrPort("192.0.2.1:1790"), Remote: netip.AddrPortFrom(s.Devices[0].Address, 40000),
		Slot: &s.Devices[0].Slot, PID: 1000, Reason: "zero_window", Bytes: 65000, Since: 12})
	f.Groups = append(f.Groups, api.LiveGroup{Kind: "tune", Cgroup: "web.slice", Path: "/web.slice", Name: "replies", Connections: 120, Rate: 33},
		api.LiveGroup{Kind: "trace", Cgroup: "web.slice", Path: "/web.slice", Name: "port=443", Rate: 512, Stage: "network", Median: 1_200_000, P99: 38_000_000},
		api.LiveGroup{Kind: "tune", Cgroup: "old.slice", Name: "old", Problem: "the cgroup does not exist"})
	f.Services = append(f.Services, devicesFrame(2, 10, 1).Services...)
	f.Services[1].Name = "flows"
	return f
}

// pictures is the directory for screenshots, or "".
var pictures = os.Getenv("SOCKEYE_SCREENSHOTS")

// watchFile has what tests measure of the live views, in the directory OUT.
const watchFile = "watch.json"

// The page has no violation that axe-core finds, in all views, in light and dark, for three widths.
func TestAccessible(t *testing.T) {
	source := newFake(troubledFrame())
	slot := 3
	for i := range 30 {
		source.events = append(source.events, api.Event{ID: uint64(i), Time: time.Date(2026, 1, 2, 3, 4, i, 0, time.UTC), Kind: "member_registered", Level: []string{"info", "warning", "error"}[i%3],
			Text: "member registered", Service: "telemetry", Slot: &slot, PID: 1003, Details: map[string]string{"rule": "command line", "after": "12 ms"}})
	}
	page := "http://" + serve(t, source, 8) + "/"
	b := browser.Start(t)
	b.Open(page)
	b.Eventually("document.querySelector('#problems li')")
	violations := 0
	for _, view := range []string{"overview", "slot/telemetry/3", "devices", "device/telemetry/10.0.0.0", "events", "trace"} {
		b.Open(page + "#" + view)
		if strings.HasPrefix(view, "event") || strings.Contains(view, "/") {
			b.Eventually("document.querySelectorAll('#log tbody tr').length === 30")
		}
		if view == "trace" {
			b.Eventually("document.querySelector('iframe').contentDocument.querySelector('h1')")
		}
		for _, width := range []int64{360, 768, 1440} {
			for _, scheme := range []string{"light", "dark"} {
				b.Size(width, 900, scheme)
				b.Frame()
				for _, v := range b.Axe() {
					t.Errorf("%s, %d pixels, %s: %s", view, width, scheme, v)
					violations++
				}
				if wide := browser.Eval[int64](b, "document.documentElement.scrollWidth"); wide > width {
					t.Errorf("%s: the page has a width of %d of %d pixels", view, wide, width)
				}
				b.Screenshot(pictures, fmt.Sprintf("%s-%d-%s", strings.ReplaceAll(view, "/", "-"), width, scheme))
			}
		}
	}
	if p := b.Problems(); len(p) > 0 {
		t.Errorf("errors of the page: %q", p)
	}
	// The report is a page of its own in a frame.
	b.Open(page + "report?last=5m")
	for _, v := range b.Axe() {
		t.Errorf("report: %s", v)
		violations++
	}
	testenv.Record(t, watchFile, map[string]any{"axe_violations": violations})
	for _, r := range b.Requests() {
		if u, err := url.Parse(r); err != nil || u.Scheme != "http" || "http://"+u.Host+"/" != page {
			t.Errorf("the page requests %s", r)
		}
	}
}

// Names of devices and commands are text, whatever they are.
func TestNamesAreText(t *testing.T) {
	const name = `<img src=x onerror="document.title='owned'"><script>document.title='owned'</script>`
	frame := troubledFrame()
	frame.Problem = name
	s := &frame.Services[0]
	s.Slots[0].Command, s.Devices[0].Device, s.Devices[0].Datagrams = name, name, 1e6
	frame.Groups[1].Name, frame.Groups[2].Problem = name, name
	source := newFake(frame)
	source.events = []api.Event{{Kind: name, Text: name, Device: name, Details: map[string]string{name: name}}}
	page := "http://" + serve(t, source, 8) + "/"
	b := browser.Start(t)
	for _, view := range []string{"overview", "slot/telemetry/0", "devices", "device/telemetry/10.0.0.0", "events", "trace"} {
		b.Open(page + "#" + view)
		b.Eventually("document.getElementById('main').textContent.includes('onerror=')")
		if n := browser.Eval[int](b, "document.querySelectorAll('img, main script').length"); n > 0 || strings.HasPrefix(browser.Eval[string](b, "document.title"), "owned") {
			t.Errorf("%s: a name is HTML", view)
		}
	}
	if p := b.Problems(); len(p) > 0 {
		t.Errorf("errors of the page: %q", p)
	}
}

// A user enters the token, and a browser without a session comes to the form.
func TestLogin(t *testing.T) {
	page := "http://" + serveWith(t, &Settings{Config: config.UI{Listen: "127.0.0.1:1", TokenFile: "/token"}, token: []byte(token)}, newFake(devicesFrame(2, 10, 1)), 8) + "/"
	b := browser.Start(t)
	b.Open(page)
	b.Eventually("document.activeElement.id === 'token'")
	for _, scheme := range []string{"light", "dark"} {
		b.Size(768, 600, scheme)
		for _, v := range b.Axe() {
			t.Errorf("login: %s", v)
		}
		b.Screenshot(pictures, "login-"+scheme)
	}
	b.Press("wrong" + kb.Enter)
	b.Eventually("document.querySelector('[role=alert]').textContent === 'This is not the token.' && document.activeElement.id === 'token'")
	b.Press(token + kb.Enter)
	b.Eventually("document.querySelector('#flow li')")
	if got := browser.Eval[string](b, "document.cookie"); got != "" {
		t.Errorf("scripts see the cookie %q", got)
	}
}

// The page draws 5,000 devices within the second that a frame has.
func TestManyDevices(t *testing.T) {
	const devices, frames = 5000, 60
	source := newFake(devicesFrame(8, devices, 0))
	page := "http://" + serve(t, source, 8) + "/"
	b := browser.Start(t)
	b.Size(1440, 900, "light")
	var all []float64
	for _, view := range []string{"overview", "devices"} {
		b.Open(page + "#" + view)
		b.Eventually("document.querySelectorAll('main table tbody tr').length > 0")
		for n := 1; n <= frames; n++ {
			before := browser.Eval[int](b, "performance.getEntriesByName('frame').length")
			source.set(devicesFrame(8, devices, n))
			b.Eventually(fmt.Sprintf("performance.getEntriesByName('frame').length > %d", before))
		}
		all = append(all, browser.Eval[[]float64](b, "performance.getEntriesByName('frame').map((m) => m.duration)")...)
		// The page shows the last frame.
		last := devicesFrame(8, devices, frames)
		if got := browser.Eval[string](b, "state.frame.time"); got != last.Time.Format(time.RFC3339) {
			t.Errorf("%s shows the frame of %s", view, got)
		}
		b.Screenshot(pictures, "many-"+view)
	}
	slices.Sort(all)
	p99 := all[len(all)*99/100] // from the message to the picture
	t.Logf("%d frames, median %.1f ms, p99 %.1f ms, max %.1f ms", len(all), all[len(all)/2], p99, all[len(all)-1])
	if p99 > 1000 {
		t.Errorf("the page falls behind: %.0f ms for a frame", p99)
	}
	if rows := browser.Eval[int](b, "document.querySelectorAll('#devices tbody tr').length"); rows != 100 {
		t.Errorf("%d rows in a page of the table", rows)
	}
	testenv.Record(t, watchFile, map[string]any{"ui_devices": devices, "ui_update_ms_p99": math.Round(p99*10) / 10})
}

// A user without a pointer gets everywhere: the first link skips the header, heads of columns sort, and the focus stays
// while frames arrive.
func TestKeyboard(t *testing.T) {
	source := newFake(devicesFrame(4, 300, 1))
	page := "http://" + serve(t, source, 8) + "/"
	b := browser.Start(t)
	b.Open(page)
	b.Eventually("document.querySelector('#flow li')")
	focused := func(want string) {
		t.Helper()
		if got := browser.Eval[string](b, "document.activeElement.id || document.activeElement.textContent"); got != want {
			t.Errorf("the focus is at %q, want %q", got, want)
		}
	}
	b.Press(kb.Tab)
	focused("Skip to the content")
	b.Press(kb.Enter)
	focused("main")
	for _, want := range []string{"services", "Slot 0", "Slot 1"} {
		b.Press(kb.Tab)
		if want == "services" {
			continue // the region of the table, which can be scrolled
		}
		focused(want)
	}
	b.Press(kb.Enter)
	b.Eventually("document.getElementById('title').textContent === 'Slot 1 of telemetry'")
	b.Open(page + "#devices")
	b.Eventually("document.querySelectorAll('#devices tbody tr').length === 100")
	browser.Eval[bool](b, "document.querySelector('.next').focus(), true")
	b.Press(kb.Enter)
	b.Eventually("document.querySelector('#devices caption').textContent === '101 to 200 of 300 devices'")
	browser.Eval[bool](b, "document.querySelector('#devices thead button').focus(), true")
	b.Press(kb.Enter)
	b.Eventually("document.querySelector('#devices thead th').getAttribute('aria-sort') === 'ascending'")
	focused("Address")
	browser.Eval[bool](b, "document.querySelectorAll('#devices thead button')[3].focus(), true")
	b.Press(kb.Enter)
	b.Eventually("document.querySelectorAll('#devices thead th')[3].getAttribute('aria-sort') === 'descending'")

	// A focused link remains a link to its device, while others get more traffic.
	address := browser.Eval[string](b, "(() => { const a = document.querySelectorAll('#devices tbody a')[20]; a.focus(); return a.textContent })()")
	source.set(devicesFrame(4, 300, 40))
	b.Eventually("state.frame.time.includes('04:40')")
	b.Frame()
	focused(address)
	if got := browser.Eval[string](b, "document.querySelector('#devices tbody').textContent"); !strings.Contains(got, address) {
		t.Errorf("the row of %s is away", address)
	}
}
