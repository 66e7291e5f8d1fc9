// SPDX-License-Identifier: Apache-2.0

//go:build !vm

package ui

import (
	"fmt"
	"math"
	"net/netip"
	"net/url"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/chromedp/kb"

	"sockeye/internal/api"
	"sockeye/internal/config"
	"sockeye/internal/testenv"
	"sockeye/lab/browser"
)

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
	s = &f.Services[0]
	s.Waiting = append(s.Waiting, api.WaitingStatus{Slot: &s.Slots[1].Slot, PID: 4711, Command: "nfacctd -f /etc/pmacct/1.conf", Problem: "it does not listen on udp [::]:4739",
		Hint: "if this persists, compare the ports of its configuration with the listeners of the policy"})
	f.Fleet = troubledFleet()
	f.Services[1].NotAdmitted = append(f.Services[1].NotAdmitted, api.RefusedStatus{PID: 4712, Command: "nfacctd", Problem: "it runs as user 65534", Hint: "set user of the service"})
	return f
}

// troubledFleet returns a fleet in which a bucket moves, with a host of each kind.
func troubledFleet() *api.FleetStatus {
	f := &api.FleetStatus{Fleet: "main", Host: "collector1", Store: "etcd", Connected: true, Leader: "collector2", Epoch: 12, StoreEpoch: 13, Moving: 256, Healthy: true,
		Problems: []string{"there is no route to host collector4"}, Packets: map[string]uint64{"local": 48210, "forwarded": 47733, "disagreed": 0, "no_owner": 57}}
	for i, h := range []api.FleetHost{
		{State: "ready", Alive: true, Healthy: true, Share: 0.42, Epoch: 12, Behind: true, Path: "self"},
		{State: "ready", Alive: true, Healthy: true, Share: 0.4, Epoch: 13, Path: "link"},
		{State: "drain", Alive: true, Healthy: true, Share: 0.08, Epoch: 13, Path: "tunnel"},
		{State: "ready", Share: 0.1, Epoch: 9, Path: "none"},
		{State: "maint", Alive: true, Epoch: 13, Path: "link"},
		{State: "removed", Path: "none"},
	} {
		h.Name, h.Weight, h.Addresses = fmt.Sprintf("collector%d", i+1), 100, []string{fmt.Sprintf("10.0.0.%d", i+11), fmt.Sprintf("fd00::%d", i+11)}
		f.Hosts = append(f.Hosts, h)
	}
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
	for _, view := range []string{"overview", "slot/telemetry/3", "devices", "device/telemetry/10.0.0.0", "fleet", "events", "trace"} {
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
				var rules []string // all
				if scheme == "dark" {
					rules = browser.Colors
				}
				for _, v := range b.Axe(rules...) {
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

// A slot whose waiting room is open waits, also before the first packet; one without a member and a wait is empty.
func TestWaits(t *testing.T) {
	frame := devicesFrame(5, 10, 1)
	until := time.Date(2026, 1, 2, 3, 5, 0, 0, time.UTC)
	s := &frame.Services[0]
	for i := range 2 {
		s.Slots[i].PID, s.Slots[i].Ready = 0, false
	}
	s.Slots[0].WaitUntil = &until
	for i, state := range []string{3: "drain", 4: "maint"} {
		if state != "" {
			s.Slots[i].State, s.Slots[i].Ready = state, false
		}
	}
	b := browser.Start(t)
	page := "http://" + serve(t, newFake(frame), 8) + "/"
	b.Open(page)
	b.Eventually("document.querySelector('#problems li')")
	for script, want := range map[string]string{
		"[...document.querySelectorAll('#flow h3 span')].map((e) => e.textContent + '/' + e.className).join()": "waits/warn,empty/bad,ready/good,drain/warn,maint/warn",
		"[...document.querySelectorAll('#problems li')].map((e) => e.className + ':' + e.textContent).join()":  "severe:telemetry slot 1 is empty,:telemetry slot 0 waits for its next member,:telemetry slot 3 drains,:telemetry slot 4 is in maint",
	} {
		if got := browser.Eval[string](b, script); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
	b.Open(page + "#slot/telemetry/0")
	b.Eventually("document.getElementById('facts')?.textContent.includes('0 datagrams, open until 2026-01-02 03:05:00')")
	b.Open(page + "#device/telemetry/10.0.0.0")
	b.Eventually("document.getElementById('facts')?.textContent.includes('; the slot waits for its next member')")
}

// The page of a device has its drops, where the kernel counts them.
func TestDeviceDrops(t *testing.T) {
	frame := devicesFrame(2, 10, 1)
	dropped := uint64(12_345)
	frame.Services[0].Devices[3].Drops, frame.Services[0].Devices[3].Dropped = 17, &dropped
	b := browser.Start(t)
	page := "http://" + serve(t, newFake(frame), 8) + "/#device/telemetry/10.0.0."
	b.Open(page + "3")
	b.Eventually("document.getElementById('facts')?.textContent.includes('17 datagrams/s, 12,345 since the start of the agent')")
	b.Eventually("document.getElementById('facts').textContent.includes('17 of its datagrams per second are dropped')")
	b.Open(page + "4")
	b.Eventually("document.getElementById('facts')?.textContent.includes('not counted by this kernel')")
}

// Processes that are not members are on the overview, and those of a slot on its page. There is no empty table.
func TestOutside(t *testing.T) {
	source := newFake(troubledFrame())
	b := browser.Start(t)
	page := "http://" + serve(t, source, 8) + "/"
	b.Open(page)
	rows := "[...document.querySelectorAll('#outside tbody tr')].map((r) => [...r.cells].map((c) => c.textContent).join('|')).join(' / ')"
	waits := "4711|telemetry|not ready|1|it does not listen on udp [::]:4739; hint: if this persists, compare the ports of its configuration with the listeners of the policy|nfacctd -f /etc/pmacct/1.conf"
	b.Eventually("document.getElementById('outside')?.checkVisibility()")
	if got, want := browser.Eval[string](b, rows), waits+" / 4712|flows|refused|-|it runs as user 65534; hint: set user of the service|nfacctd"; got != want {
		t.Errorf("the overview has %q, want %q", got, want)
	}
	for slot, want := range []string{"", waits} {
		b.Open(fmt.Sprintf("%s#slot/telemetry/%d", page, slot))
		b.Eventually(fmt.Sprintf("document.getElementById('title')?.textContent === 'Slot %d of telemetry'", slot))
		if got := browser.Eval[string](b, rows); got != want {
			t.Errorf("the page of slot %d has %q, want %q", slot, got, want)
		}
		if got := browser.Eval[bool](b, "document.getElementById('outside').checkVisibility()"); got != (want != "") {
			t.Errorf("the page of slot %d: the table is visible: %t", slot, got)
		}
	}
	source.set(devicesFrame(2, 10, 9))
	b.Eventually("!document.getElementById('outside').checkVisibility() && !document.getElementById('outside-title').checkVisibility()")
}

// The view of the fleet has what sockeye fleet shows, and is renewed with each frame. Without a fleet there is no link to it, and
// its address leads to the overview.
func TestFleetView(t *testing.T) {
	source := newFake(troubledFrame())
	b := browser.Start(t)
	page := "http://" + serve(t, source, 8) + "/"
	b.Open(page)
	b.Eventually("document.getElementById('fleet-link').checkVisibility()")
	problems := "[...document.querySelectorAll('#problems li')].map((e) => e.className + ':' + e.textContent).filter((s) => s.includes('fleet') || s.includes('collector')).join()"
	wrong := "severe:fleet: host collector4 is dead,:fleet: there is no route to host collector4,:fleet: host collector3 drains,:fleet: host collector5 cannot serve devices"
	b.Eventually("document.querySelector('#problems li')")
	b.Eventually("problems(state.frame).filter((p) => p[2] === '#fleet').length === 4")
	if got := browser.Eval[string](b, "problems(state.frame).filter((p) => p[2] === '#fleet').map((p) => (p[0] ? 'severe:' : ':') + p[1]).join()"); got != wrong {
		t.Errorf("the problems are %q, want %q", got, wrong)
	}
	browser.Eval[bool](b, "document.getElementById('fleet-link').click(), true")
	b.Eventually("document.querySelector('#hosts tbody tr') && document.getElementById('title').textContent === 'Fleet main'")
	rows := func(id string) string {
		return browser.Eval[string](b, "[...document.querySelectorAll('#"+id+" tbody tr')].map((r) => [...r.cells].map((c) => c.textContent + (c.className.replace('number', '').replace('wide', '').trim() && '/' + c.className.replace('number ', ''))).join('|')).join('\\n')")
	}
	for id, want := range map[string]string{
		"hosts": "collector1 (this host)|ready|yes|yes|100|42.0 %|12 (behind)/warn|self|10.0.0.11 fd00::11\n" +
			"collector2|ready|yes|yes|100|40.0 %|13|link|10.0.0.12 fd00::12\n" +
			"collector3|drain/warn|yes|yes|100|8.0 %|13|tunnel|10.0.0.13 fd00::13\n" +
			"collector4|ready|no/bad|no/warn|100|10.0 %|-|none/warn|10.0.0.14 fd00::14\n" +
			"collector5|maint/warn|yes|no/warn|100|0.0 %|13|link|10.0.0.15 fd00::15\n" +
			"collector6|removed|no|no|100|0.0 %|-|none|10.0.0.16 fd00::16",
		"packets": "local|48,210|50 %|this host serves the device\n" +
			"forwarded|47,733|50 %|sent to the host that serves the device\n" +
			"no_owner|57|0 %|dropped: no host serves the device",
	} {
		if got := rows(id); got != want {
			t.Errorf("%s has\n%s\nwant\n%s", id, got, want)
		}
	}
	facts := "Object.fromEntries([...document.querySelectorAll('#facts dt')].map((t) => [t.textContent, t.nextElementSibling.textContent]))"
	is := func(want map[string]string) {
		t.Helper()
		got := browser.Eval[map[string]string](b, facts)
		for name, value := range want {
			if got[name] != value {
				t.Errorf("%s is %q, want %q", name, got[name], value)
			}
		}
	}
	is(map[string]string{"This host": "collector1, healthy", "Table": "epoch 12; the newest one has epoch 13", "Moving": "256 buckets of 16,384", "Leader": "collector2", "Store": "etcd"})
	if got := browser.Eval[string](b, problems); got != strings.ReplaceAll(wrong, "fleet: ", "") {
		t.Errorf("the problems are %q", got)
	}
	if got := browser.Eval[string](b, "document.querySelector('nav [aria-current]').textContent"); got != "Fleet" {
		t.Errorf("the view in the navigation is %q", got)
	}

	next := devicesFrame(2, 10, 9)
	next.Fleet = &api.FleetStatus{Fleet: "main", Host: "collector1", Store: "file", Reason: "this host has no table of the fleet yet", Hosts: []api.FleetHost{}, Packets: map[string]uint64{"no_table": 3}, Problems: []string{}}
	source.set(next)
	b.Eventually("document.querySelector('#hosts caption').textContent === 'this host knows no hosts yet'")
	is(map[string]string{"This host": "collector1, not healthy: this host has no table of the fleet yet", "Table": "none yet", "Moving": "nothing", "Leader": "none: each host computes the table",
		"Store": "file does not answer; the rest is of the time before"})
	if got, want := browser.Eval[string](b, "document.querySelector('#problems li').textContent"), "this host is not healthy: this host has no table of the fleet yet"; got != want {
		t.Errorf("the problem is %q, want %q", got, want)
	}
	source.set(devicesFrame(2, 10, 10))
	b.Eventually("document.getElementById('title').textContent === 'Overview' && !document.getElementById('fleet-link').checkVisibility() && !document.getElementById('hosts')")
	if p := b.Problems(); len(p) > 0 {
		t.Errorf("errors of the page: %q", p)
	}
}

// On a phone, no name makes the page wider than the screen: tables scroll in their regions, which the keyboard reaches.
func TestNarrow(t *testing.T) {
	const width = 375
	long := strings.Repeat("verylongname", 16)
	frame := troubledFrame()
	frame.Problem = long
	s := &frame.Services[0]
	s.Slots[3].Command, s.Slots[3].Cgroup, s.Devices[0].Device = long, long, long
	s.Devices[1].Address = netip.MustParseAddr("2001:db8:1111:2222:3333:4444:5555:6666")
	s.Waiting[0].Command, s.Waiting[0].Problem = long, long
	frame.Groups[0].Cgroup, frame.Groups[1].Name, frame.Groups[2].Problem = long, long, long
	frame.Services[1].Name = long[:60]
	h := &frame.Fleet.Hosts[3]
	h.Name, h.Addresses, frame.Fleet.Fleet, frame.Fleet.Healthy, frame.Fleet.Reason, frame.Fleet.Leader, frame.Fleet.Problems = long, []string{long, long}, long, false, long, long, []string{long}
	frame.Stuck[0].Remote, frame.Stuck[0].Local = netip.AddrPortFrom(s.Devices[1].Address, 40_000), netip.AddrPortFrom(s.Devices[1].Address, 1790)
	source := newFake(frame)
	source.events = []api.Event{{Kind: "member_registered", Level: "error", Text: long, Service: "telemetry", Cgroup: long, Details: map[string]string{"rule": long}}}
	page := "http://" + serve(t, source, 8) + "/"
	b := browser.Start(t)
	b.Size(width, 800, "light")
	for _, view := range []string{"overview", "slot/telemetry/3", "devices", "device/telemetry/10.0.0.0", "device/telemetry/" + s.Devices[1].Address.String(), "fleet", "events", "trace"} {
		b.Open(page + "#" + view)
		b.Eventually("document.querySelector('#main table tbody tr')")
		if strings.HasPrefix(view, "event") || strings.Contains(view, "/") {
			b.Eventually("document.querySelector('#log tbody tr')")
		}
		b.Frame()
		wide := browser.Eval[string](b, `[...document.querySelectorAll("body *")].filter((e) => (e.matches(".scroll") || !e.closest(".scroll")) && e.getBoundingClientRect().right > innerWidth)
			.map((e) => e.tagName + " " + e.id + " " + e.className).join()`)
		if got := browser.Eval[int](b, "document.documentElement.scrollWidth"); got > width || wide != "" {
			t.Errorf("%s: the page has a width of %d of %d pixels: %s", view, got, width, wide)
		}
		if bad := browser.Eval[int](b, `[...document.querySelectorAll("#main table")].filter((e) => { const box = e.closest(".scroll"); return !box || box.tabIndex !== 0 || !document.getElementById(box.getAttribute("aria-labelledby"))?.textContent }).length`); bad > 0 {
			t.Errorf("%s: %d tables are in no named region that the keyboard reaches", view, bad)
		}
	}
	b.Open(page + "#devices")
	b.Eventually("document.querySelector('#devices tbody tr')")
	browser.Eval[bool](b, "document.getElementById('devices').focus(), true")
	b.Press(kb.ArrowRight)
	b.Eventually("document.getElementById('devices').scrollLeft > 0 && scrollX === 0")
}

// Names of devices and commands are text, whatever they are.
func TestNamesAreText(t *testing.T) {
	const name = `<img src=x onerror="document.title='owned'"><script>document.title='owned'</script>`
	frame := troubledFrame()
	frame.Problem = name
	s := &frame.Services[0]
	s.Slots[0].Command, s.Devices[0].Device, s.Devices[0].Datagrams = name, name, 1e6
	s.Waiting[0].Command, s.Waiting[0].Problem, s.Waiting[0].Hint = name, name, name
	frame.Groups[1].Name, frame.Groups[2].Problem = name, name
	frame.Fleet.Fleet, frame.Fleet.Host, frame.Fleet.Leader, frame.Fleet.Hosts[0].Name, frame.Fleet.Hosts[1].State, frame.Fleet.Hosts[1].Addresses[0], frame.Fleet.Problems[0] = name, name, name, name, name, name, name
	source := newFake(frame)
	source.events = []api.Event{{Kind: name, Text: name, Device: name, Details: map[string]string{name: name}}}
	page := "http://" + serve(t, source, 8) + "/"
	b := browser.Start(t)
	for _, view := range []string{"overview", "slot/telemetry/0", "devices", "device/telemetry/10.0.0.0", "fleet", "events", "trace"} {
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
	_, address := serveWith(t, &Settings{Config: config.UI{Listen: "127.0.0.1:1", TokenFile: "/token"}, token: []byte(token)}, newFake(devicesFrame(2, 10, 1)), 8)
	page := "http://" + address + "/"
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
	for _, view := range []string{"overview", "devices"} {
		b.Open(page + "#" + view) // the second view is in the same document
		b.Eventually("document.querySelectorAll('main table tbody tr').length > 0")
		for n := 1; n <= frames; n++ {
			before := browser.Eval[int](b, "performance.getEntriesByName('frame').length")
			source.set(devicesFrame(8, devices, n))
			b.Eventually(fmt.Sprintf("performance.getEntriesByName('frame').length > %d", before))
		}
		// The page shows the last frame.
		last := devicesFrame(8, devices, frames)
		if got := browser.Eval[string](b, "state.frame.time"); got != last.Time.Format(time.RFC3339) {
			t.Errorf("%s shows the frame of %s", view, got)
		}
		b.Screenshot(pictures, "many-"+view)
	}
	all := browser.Eval[[]float64](b, "performance.getEntriesByName('frame').map((m) => m.duration)")
	slices.Sort(all)
	// From the message to the picture. A busy host delays some.
	median, p99 := all[len(all)/2], all[len(all)*99/100]
	t.Logf("%d frames, median %.1f ms, p99 %.1f ms, max %.1f ms", len(all), median, p99, all[len(all)-1])
	if median > 1000 {
		t.Errorf("the page falls behind: %.0f ms for a frame", median)
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
