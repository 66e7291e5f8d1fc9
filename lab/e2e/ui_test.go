// SPDX-License-Identifier: Apache-2.0

//go:build !vm

package e2e_test

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"sockeye/internal/api"
	"sockeye/internal/config"
	"sockeye/lab/browser"
	labfleet "sockeye/lab/fleet"
)

// serveUI adds a web page at a Unix socket to the policy file.
func (h *host) serveUI() {
	h.Helper()
	text, err := os.ReadFile(h.policyPath())
	h.must(err)
	h.replaceFile(h.policyPath(), string(text)+uiPolicy(h.dir))
}

// uiPolicy is the part of a policy with a web page at a Unix socket in a directory.
func uiPolicy(dir string) string {
	return "ui: {listen: \"unix:" + filepath.Join(dir, "ui.sock") + "\"}\n"
}

func (h *host) proxyUI() string {
	h.Helper()
	return proxyUI(h.T, h.dir)
}

// proxyUI starts a proxy in front of the socket in a directory until the end of the test, and returns the address of the page.
// The browser runs in the network namespace of the test.
func proxyUI(t *testing.T, dir string) string {
	t.Helper()
	transport := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", filepath.Join(dir, "ui.sock"))
	}}
	proxy := httptest.NewServer(&httputil.ReverseProxy{Transport: transport, FlushInterval: -1, ErrorLog: slog.NewLogLogger(slog.DiscardHandler, 0),
		Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(&url.URL{Scheme: "http", Host: "sockeye"}) }})
	t.Cleanup(func() {
		proxy.CloseClientConnections()
		proxy.Close()
		transport.CloseIdleConnections()
	})
	return proxy.URL + "/"
}

// cells is the text of the cells of a table of the page, in rows.
func cells(b *browser.Browser, id string) [][]string {
	return browser.Eval[[][]string](b, fmt.Sprintf("[...document.querySelectorAll('#%s tbody tr')].map((r) => [...r.cells].map((c) => c.textContent))", id))
}

// facts is the list of names and values of a page of a slot or a device.
func facts(b *browser.Browser) map[string]string {
	return browser.Eval[map[string]string](b, "Object.fromEntries([...document.querySelectorAll('#facts dt')].map((t) => [t.textContent, t.nextElementSibling.textContent]))")
}

// TestUI compares the page with the output of the commands, while a member is there and after it was killed.
func TestUI(t *testing.T) {
	t.Parallel()
	h := newHost(t, config.Reuseport)
	h.setPolicy(4)
	h.serveUI()
	h.startAgent()
	h.start(upTo(4)...)
	h.ready(upTo(4)...)
	all := addresses(60)
	h.connectAll(all)

	b := browser.Start(t)
	page := h.proxyUI()
	b.Size(1440, 900, "light")
	b.Open(page)
	b.Eventually("document.querySelector('#services tbody tr').cells[2].textContent === '60' && document.querySelector('#services tbody tr').cells[3].textContent === '60'")

	var status api.Status
	h.show(&status, "status")
	var slots []api.SlotStatus
	h.show(&slots, "slots")
	var devices []api.DeviceStatus
	h.show(&devices, "devices")
	home := h.homes(4)
	at := make(map[int]int)
	for _, a := range all {
		at[home(a)]++
	}
	if got, want := browser.Eval[string](b, "document.getElementById('state').textContent"), fmt.Sprintf("%d of %d slots ready, no problems", status.Services[0].Ready, status.Services[0].Slots); got != want {
		t.Errorf("the state is %q, want %q", got, want)
	}
	cards := browser.Eval[[][]string](b, "[...document.querySelectorAll('#flow > li')].map((li) => [li.querySelector('a').textContent, li.querySelector('h3 span').textContent, li.querySelector('.member').textContent, ...[...li.querySelectorAll('dd')].map((d) => d.textContent)])")
	if len(cards) != len(slots) {
		t.Fatalf("%d slots on the page, %d in the output", len(cards), len(slots))
	}
	for i, s := range slots {
		want := []string{fmt.Sprintf("Slot %d", s.Slot), "ready", fmt.Sprintf("%s, pid %d", s.Command, s.PID), fmt.Sprint(at[s.Slot]), fmt.Sprint(s.Sessions)}
		if got := cards[i][:len(want)]; !slices.Equal(got, want) {
			t.Errorf("slot %d is %q, want %q", s.Slot, got, want)
		}
	}
	tiles := browser.Eval[[]int](b, `[...document.querySelectorAll('.tiles')].map((svg) => [...svg.children].reduce((n, p) => n + [...p.getAttribute('d').matchAll(/h(\d+)/g)].reduce((m, x) => m + Number(x[1]), 0), 0))`)
	for slot, n := range tiles {
		if n != at[slot] {
			t.Errorf("slot %d has %d squares, want %d", slot, n, at[slot])
		}
	}

	b.Open(page + "#devices")
	b.Eventually("document.querySelectorAll('#devices tbody tr').length === 60")
	shown := make(map[string][]string)
	for _, row := range cells(b, "devices") {
		shown[row[0]] = row
	}
	for _, d := range devices {
		row := shown[d.Address.String()]
		if len(row) != 7 || row[2] != fmt.Sprint(home(d.Address)) || row[6] != "1" {
			t.Errorf("device %v is %q on the page", d.Address, row)
		}
	}

	h.kill(1)
	b.Open(page + "#slot/telemetry/1")
	b.Eventually("document.querySelector('#facts dd').textContent === 'empty'")
	b.Eventually("[...document.querySelectorAll('#log tbody tr')].some((r) => r.textContent.includes('slot_closed'))")
	if got := facts(b); got["Member"] != "none" || got["Sessions"] != "0" {
		t.Errorf("after the member was killed: %v", got)
	}
	b.Open(page + "#overview")
	b.Eventually("document.querySelector('#problems li')?.textContent.includes('telemetry slot 1 is empty')")
	if got := browser.Eval[string](b, "document.getElementById('state').textContent"); !strings.HasPrefix(got, "3 of 4 slots ready, ") {
		t.Errorf("the state is %q", got)
	}

	// The page says when the agent is away, and goes on when the agent is back.
	h.killAgent()
	b.Eventually("document.getElementById('state').textContent.includes('does not answer')")
	h.startAgent()
	b.Eventually("document.getElementById('state').textContent.includes('3 of 4 slots ready')")
}

// TestUITrace compares the trace report of the page with the measurements, in the theme of the page.
func TestUITrace(t *testing.T) {
	t.Parallel()
	h := newTraced(t, 5*time.Millisecond)
	h.setTrace("{name: all, cgroup: " + h.group("near") + ", messages: 1/1, group_by: port}")
	h.serveUI()
	h.startAgent()
	p, far := h.startNear("near"), h.startFar()
	far.listen(tracePort)
	p.connect(4, at(tracePort, far4, far6)...)
	p.do(order{Do: "exchanges", Parallel: 4, Up: 1000, traceOrder: traceOrder{Count: 10}})
	sent := h.ended(fmt.Sprintf("port=%d", tracePort), 44).Chosen

	b := browser.Start(t)
	page := h.proxyUI()
	b.Open(page + "#trace")
	const report = "document.getElementById('report').contentDocument"
	b.Eventually(report + ".querySelector('#overview tbody tr')")
	if got, want := browser.Eval[string](b, report+".querySelector('.figures b').textContent"), fmt.Sprint(sent); got != want {
		t.Errorf("the report has %s messages, want %s", got, want)
	}
	row := cells(b, "groups")
	if len(row) != 1 || row[0][1] != "trace" || row[0][2] == "" {
		t.Errorf("groups %q", row)
	}
	for _, theme := range []string{"light", "dark"} {
		for browser.Eval[string](b, "document.documentElement.dataset.theme") != theme {
			browser.Eval[bool](b, "document.getElementById('theme').click(), true")
		}
		// The frame has the scheme of the page around it, whatever the system prefers.
		b.Eventually(fmt.Sprintf("document.getElementById('report').contentWindow.matchMedia('(prefers-color-scheme: %s)').matches", theme))
		b.Screenshot(os.Getenv("SOCKEYE_SCREENSHOTS"), "e2e-trace-"+theme)
	}
	// The script of the report runs, and the plots are drawn by the same generator as the report of the command.
	if n := browser.Eval[int](b, report+".querySelectorAll('table.sortable button').length"); n == 0 {
		t.Error("the script of the report does not run")
	}
	browser.Eval[bool](b, "document.querySelector('.tools button').click(), true")
	b.Eventually(report + ".querySelector('#overview tbody tr')")
	if problems := b.Problems(); len(problems) > 0 {
		t.Errorf("errors of the page: %q", problems)
	}
	b.Open(page + "report?last=5m")
	for _, scheme := range []string{"light", "dark"} {
		b.Size(1440, 900, scheme)
		for _, v := range b.Axe() {
			t.Errorf("report, %s: %s", scheme, v)
		}
		b.Screenshot(os.Getenv("SOCKEYE_SCREENSHOTS"), "e2e-report-"+scheme)
	}
}

// TestUIFleet compares the view of the fleet with the output of sockeye fleet, before and after a host drains.
func TestUIFleet(t *testing.T) {
	f := newFleet(t, labfleet.Options{})
	a, b := f.addHost(), f.addHost()
	f.await("the first table", f.Hosts, labfleet.Shared("a", "b"))
	f.route(a, b)
	f.load(24, 10)
	text, err := os.ReadFile(a.PolicyPath())
	f.must(err)
	f.must(os.WriteFile(a.PolicyPath(), append(text, uiPolicy(a.Dir)...), 0o600))
	if out, errs, err := a.Command(t.Context(), "apply"); err != nil {
		t.Fatalf("apply: %v: %s%s", err, out, errs)
	}
	page := browser.Start(t)
	page.Open(proxyUI(t, a.Dir) + "#fleet")
	page.Eventually("document.querySelectorAll('#hosts tbody tr').length === 2")
	// compare compares the page, once it has a frame of the state in which nothing moves any more.
	compare := func() {
		t.Helper()
		s, err := a.Status(t.Context())
		f.must(err)
		page.Eventually(fmt.Sprintf("state.frame.fleet.epoch === %d && state.frame.fleet.moving === 0 && state.frame.fleet.hosts.every((h) => h.epoch === %[1]d && h.path !== 'none')", s.Epoch))
		s, err = a.Status(t.Context())
		f.must(err)
		var want [][]string
		for _, h := range s.Hosts {
			name := h.Name
			if name == "a" {
				name = "a (this host)"
			}
			want = append(want, []string{name, h.State, "yes", "yes", fmt.Sprint(h.Weight), fmt.Sprintf("%.1f %%", 100*h.Share), fmt.Sprint(h.Epoch), h.Path, strings.Join(h.Addresses, " ")})
		}
		if got := cells(page, "hosts"); !reflect.DeepEqual(got, want) {
			t.Errorf("the hosts are %q, want %q", got, want)
		}
		got := facts(page)
		if want := map[string]string{"This host": "a, healthy", "Table": fmt.Sprintf("epoch %d", s.Epoch), "Moving": "nothing", "Leader": s.Leader, "Store": "etcd"}; !reflect.DeepEqual(got, want) {
			t.Errorf("the state is %q, want %q", got, want)
		}
	}
	compare()
	page.Eventually("['local', 'forwarded'].every((name) => state.frame.fleet.packets[name] > 0)")
	if rows := cells(page, "packets"); len(rows) < 2 || rows[0][0] != "local" || rows[0][1] == "0" || rows[1][0] != "forwarded" || rows[1][1] == "0" {
		t.Errorf("the packets are %q", rows)
	}
	f.set(a, b, "drain")
	f.await("host b to drain", f.Hosts, labfleet.Shared("a"))
	page.Eventually("document.querySelector('#problems li')?.textContent === 'host b drains'")
	compare()
	if p := page.Problems(); len(p) > 0 {
		t.Errorf("errors of the page: %q", p)
	}
}

// TestUIManyDevices has 5,000 devices that send, and the page shows each frame before the next one.
func TestUIManyDevices(t *testing.T) {
	h := newHost(t, config.Reuseport)
	h.setPolicy(4)
	h.serveUI()
	h.startAgent()
	h.start(upTo(4)...)
	h.ready(upTo(4)...)
	const devices, frames = 5000, 20
	all := addresses(devices)
	ctx, cancel := context.WithCancel(t.Context())
	var sending sync.WaitGroup
	sending.Go(func() {
		// A datagram a second of each device.
		for next := time.Now(); ctx.Err() == nil; time.Sleep(time.Until(next)) {
			next = next.Add(time.Second)
			h.flood(all, devices)
		}
	})
	defer sending.Wait()
	defer cancel()

	b := browser.Start(t)
	b.Size(1440, 900, "light")
	b.Open(h.proxyUI())
	b.Eventually("document.querySelector('#services tbody tr').cells[2].textContent === '5,000'")
	// lags has the time from the frame's time to its picture, in milliseconds.
	browser.Eval[bool](b, `(() => {
		window.lags = [];
		new PerformanceObserver((list) => { for (const e of list.getEntries()) lags.push([Date.now() - Date.parse(state.frame.time), e.duration]); }).observe({ type: "measure" });
		return true;
	})()`)
	b.Eventually(fmt.Sprintf("lags.length >= %d", frames))
	b.Eventually(fmt.Sprintf("state.frame.services[0].devices.filter((d) => d.datagrams > 0).length >= %d", devices/10)) // a busy host sends less
	b.Screenshot(os.Getenv("SOCKEYE_SCREENSHOTS"), "e2e-many")
	var lags, updates []float64
	for _, pair := range browser.Eval[[][2]float64](b, "lags") {
		lags, updates = append(lags, pair[0]), append(updates, pair[1])
	}
	slices.Sort(lags)
	slices.Sort(updates)
	t.Logf("lag: median %.0f ms, max %.0f ms; update: median %.0f ms, max %.0f ms", lags[len(lags)/2], lags[len(lags)-1], updates[len(updates)/2], updates[len(updates)-1])
	// A page that falls behind would be later with each frame.
	if late := lags[len(lags)/2]; late > 5000 {
		t.Errorf("the page is %.0f ms behind", late)
	}
}
