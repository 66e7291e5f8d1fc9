// SPDX-License-Identifier: Apache-2.0

// Package browser runs headless Chromium in tests, and checks pages by axe-core.
package browser

import (
	"context"
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/network"
	cdpruntime "github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
)

// executable is the program of the Debian package chromium-headless-shell, without its shell script, which would be the
// parent. The whole browser takes three times as much CPU time to start.
const executable = "/usr/lib/chromium/chromium-headless-shell"

// wait is the longest time for an action on a busy machine.
const wait = 90 * time.Second

// Browser is a browser with one page.
type Browser struct {
	t   testing.TB
	ctx context.Context

	mu       sync.Mutex
	requests []string // addresses
	problems []string // errors of scripts, and violations of the content security policy
}

// Start starts a browser until the end of the test.
func Start(t testing.TB) *Browser {
	t.Helper()
	if _, err := os.Stat(executable); err != nil {
		t.Fatalf("%v\nhint: tools/setup chromium-headless-shell", err)
	}
	allocator, stop := chromedp.NewExecAllocator(context.Background(), append(chromedp.DefaultExecAllocatorOptions[:],
		chromedp.ExecPath(executable), chromedp.NoSandbox, chromedp.DisableGPU, chromedp.UserDataDir(t.TempDir()),
		chromedp.Flag("disable-dev-shm-usage", true), chromedp.Flag("force-color-profile", "srgb"),
		chromedp.WSURLReadTimeout(time.Minute), // Chromium starts slowly on a busy host
		chromedp.Env("TZ=UTC", "HOME="+t.TempDir()))...)
	t.Cleanup(stop)
	ctx, cancel := chromedp.NewContext(allocator)
	t.Cleanup(cancel)
	b := &Browser{t: t, ctx: ctx}
	if err := chromedp.Listen(ctx, b.note); err != nil {
		t.Fatalf("start Chromium: %v", err)
	}
	call(b, network.Enable, network.EnableParams{})
	call(b, log.Enable, cdp.Empty{})
	call(b, cdpruntime.Enable, cdp.Empty{})
	return b
}

// note keeps what the page requests, and what goes wrong.
func (b *Browser) note(event any) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch e := event.(type) {
	case *network.EventRequestWillBeSent:
		b.requests = append(b.requests, e.Request.URL)
	case *cdpruntime.EventExceptionThrown:
		b.problems = append(b.problems, e.ExceptionDetails.Text+" "+exceptionText(e.ExceptionDetails))
	case *log.EventEntryAdded:
		if e.Entry.Level == log.EntryLevelError {
			b.problems = append(b.problems, e.Entry.Text+" "+e.Entry.URL)
		}
	}
}

func exceptionText(d *cdpruntime.ExceptionDetails) string {
	if d.Exception == nil {
		return d.URL
	}
	return d.Exception.Description
}

// Requests returns the addresses of all requests.
func (b *Browser) Requests() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return append([]string(nil), b.requests...)
}

// Problems returns errors of scripts, and violations of the content security policy, since the last call.
func (b *Browser) Problems() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	problems := b.problems
	b.problems = nil
	return problems
}

// Open loads a page. Of the page that is open, it shows another fragment, and returns when the page has handled the change.
// The command Page.navigate returns before that, so that the page might handle a change after the next action.
func (b *Browser) Open(url string) {
	b.t.Helper()
	const change = `new Promise((done) => {
		const to = new URL(%s), is = new URL(location)
		const other = to.hash !== "" && to.hash !== is.hash
		to.hash = is.hash
		if (!other || to.href !== is.href) return done(false)
		addEventListener("hashchange", () => done(true), { once: true })
		location.hash = new URL(%[1]s).hash
	})`
	if !Eval[bool](b, fmt.Sprintf(change, strconv.Quote(url))) {
		do(b, chromedp.Navigate(url))
	}
}

// Eventually waits until an expression is true. An error of the expression is false, as is a page that another one is
// replacing.
func (b *Browser) Eventually(expression string) {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.ctx, wait)
	defer cancel()
	// The promise ends when the page is drawn again, or by the timer where nothing is drawn.
	const next = "await new Promise((done) => { requestAnimationFrame(() => setTimeout(done, 20)); setTimeout(done, 100) })"
	for {
		done, err := chromedp.Run(ctx, chromedp.Evaluate[bool]("(async () => { try { if ("+expression+") return true } catch {} "+next+"; return false })()", chromedp.EvalAwaitPromise))
		if done {
			return
		}
		if ctx.Err() != nil {
			b.t.Fatalf("browser: %s is not true: %v; the page:\n%s", expression, err, b.Text())
		}
	}
}

// Text returns the visible text of the page.
func (b *Browser) Text() string {
	b.t.Helper()
	return Eval[string](b, "document.body.innerText")
}

// Frame waits until the page is drawn again.
func (b *Browser) Frame() {
	b.t.Helper()
	Eval[bool](b, "new Promise((done) => requestAnimationFrame(() => setTimeout(() => done(true), 20)))")
}

// Size sets the size of the window, in pixels, and the color scheme, dark or light.
func (b *Browser) Size(width, height int64, scheme string) {
	b.t.Helper()
	do(b, chromedp.EmulateViewport(width, height))
	call(b, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{Features: []*emulation.MediaFeature{
		{Name: "prefers-color-scheme", Value: scheme}, {Name: "prefers-reduced-motion", Value: "reduce"}}})
}

// call runs a command of the protocol.
func call[P, R any](b *Browser, command cdp.Command[P, R], params P) R {
	b.t.Helper()
	return do(b, func(ctx context.Context, t *chromedp.Target) (R, error) { return cdp.Call(ctx, t, command, params) })
}

// Press presses keys, as a user does; see the package kb of chromedp.
func (b *Browser) Press(keys string) {
	b.t.Helper()
	do(b, chromedp.KeyEvent(keys))
}

// Screenshot writes a picture of the window to a PNG file, if dir is not "".
func (b *Browser) Screenshot(dir, name string) {
	b.t.Helper()
	if dir == "" {
		return
	}
	err := os.MkdirAll(dir, 0o755)
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, name+".png"), do(b, chromedp.CaptureScreenshot()), 0o644)
	}
	if err != nil {
		b.t.Fatal(err)
	}
}

// Axe returns the violations that axe-core finds on the page, one a line. Without rules, it checks all that are enabled
// by default.
func (b *Browser) Axe(rules ...string) (violations []string) {
	b.t.Helper()
	b.loadAxe()
	options := map[string]any{"iframes": false, "resultTypes": []string{"violations"}}
	if len(rules) > 0 {
		options["runOnly"] = map[string]any{"type": "rule", "values": rules}
	}
	text, err := json.Marshal(options)
	if err != nil {
		b.t.Fatal(err)
	}
	type violation struct {
		ID, Help string
		Nodes    []struct {
			HTML           string
			FailureSummary string
		}
	}
	for _, v := range Eval[[]violation](b, "axe.run(document, "+string(text)+").then((r) => r.violations.map((v) => ({ID: v.id, Help: v.help, Nodes: v.nodes.map((n) => ({HTML: n.html, FailureSummary: n.failureSummary}))})))") {
		for _, n := range v.Nodes {
			violations = append(violations, fmt.Sprintf("%s: %s: %.200s: %s", v.ID, v.Help, n.HTML, strings.ReplaceAll(n.FailureSummary, "\n", " ")))
		}
	}
	return violations
}

// axeFiles are places of what tools/axe downloads, from the directories of tests. axe-core has the licence MPL-2.0, and is
// no part of what is distributed.
var axeFiles = []string{"axe.min.js", "../browser/axe.min.js", "../../lab/browser/axe.min.js"}

// Colors are the rules of axe-core at the levels A and AA that depend on the color scheme (tag cat.color).
var Colors = []string{"color-contrast", "link-in-text-block"}

// loadAxe loads axe-core into the page, once.
func (b *Browser) loadAxe() {
	b.t.Helper()
	if Eval[bool](b, "typeof axe !== 'undefined'") {
		return
	}
	var script []byte
	err := fs.ErrNotExist
	for _, path := range axeFiles {
		if script, err = os.ReadFile(path); err == nil {
			break
		}
	}
	if err != nil {
		b.t.Fatalf("read axe-core: %v\nhint: tools/axe", err)
	}
	// The content security policy is for scripts of the page; those of a debugger may run.
	Eval[bool](b, string(script)+"; true")
}

// Eval returns the value of an expression, which may be a promise.
func Eval[T any](b *Browser, expression string) T {
	b.t.Helper()
	return do(b, chromedp.Evaluate[T](expression, chromedp.EvalAwaitPromise))
}

// do carries out an action within wait.
func do[T any](b *Browser, action chromedp.Action[T]) T {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.ctx, wait)
	defer cancel()
	v, err := chromedp.Run(ctx, action)
	if err != nil {
		b.t.Fatalf("browser: %v", err)
	}
	return v
}
