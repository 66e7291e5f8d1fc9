// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/api"
	"sockeye/internal/fault"
	"sockeye/internal/testenv"
)

const testToken = "0123456789abcdef0123456789abcdef"

// pageAgent returns an agent whose policy has a web page, and a function that applies another ui.
func pageAgent(t *testing.T, ui string) (a *Agent, apply func(ui string) error) {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "token"), []byte(testToken+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	a = testAgent(t, dir, testenv.BPFFS(t)+"/sockeye")
	text := func(ui string) string { return "services: {}\n" + ui + "\n" }
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		a.live.run(ctx)
	}()
	t.Cleanup(func() {
		cancel()
		<-ended
		a.stop()
	})
	a.begin(t, text(ui))
	return a, func(ui string) error {
		_, err := a.Apply(api.Candidate{Text: text(ui), Path: filepath.Join(dir, "policy.yaml")})
		return err
	}
}

// get requests a path of the page, and returns the status, or 0 if the server does not answer.
func get(t *testing.T, client *http.Client, url string) int {
	t.Helper()
	r, err := client.Get(url)
	if err != nil {
		return 0
	}
	defer r.Body.Close()
	if _, err := io.Copy(io.Discard, r.Body); err != nil {
		t.Error(err)
	}
	return r.StatusCode
}

func newClient(t *testing.T) *http.Client {
	transport := &http.Transport{}
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport, Timeout: time.Minute, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
}

// An apply changes the address and the token of the page, and what it cannot serve leaves the page as it was.
func TestPageApplied(t *testing.T) {
	a, apply := pageAgent(t, `ui: {listen: "127.0.0.1:9733"}`)
	client := newClient(t)
	const page = "http://127.0.0.1:9733/"
	if got := get(t, client, page); got != http.StatusOK {
		t.Fatalf("status %d", got)
	}
	taken, err := net.Listen("tcp", "127.0.0.1:9734")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	if err := apply(`ui: {listen: "127.0.0.1:9734"}`); err == nil || !errors.Is(err, unix.EADDRINUSE) || !strings.Contains(fault.Hint(err), "ui.listen") || strings.Contains(err.Error(), "\n") {
		t.Errorf("a port in use: %v", err)
	}
	if err := apply(`ui: {listen: "127.0.0.1:9733", token_file: nowhere}`); err == nil {
		t.Error("a missing token was applied")
	}
	if _, err := a.Plan(api.Candidate{Text: "services: {}\nui: {listen: '127.0.0.1:9733', token_file: nowhere}\n", Path: a.options.Policy}); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("plan with a missing token: %v", err)
	}
	if got := get(t, client, page); got != http.StatusOK {
		t.Errorf("after applies that failed: status %d", got)
	}
	// The connection is that of a user who has not entered a token.
	conn, err := net.Dial("tcp", "127.0.0.1:9733")
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := fmt.Fprint(conn, "GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	answer := bufio.NewReader(conn)
	if line, err := answer.ReadString('\n'); err != nil || !strings.Contains(line, "200") {
		t.Fatalf("%q, %v", line, err)
	}
	if err := apply(`ui: {listen: "127.0.0.1:9733", token_file: token}`); err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(io.Discard, answer); err != nil && !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("the stream of a user without the token goes on: %v", err)
	}
	client.CloseIdleConnections()
	if got := get(t, client, page+"live"); got != http.StatusUnauthorized {
		t.Errorf("without the token: status %d", got)
	}
	if err := apply(`ui: {listen: "127.0.0.1:9735"}`); err != nil {
		t.Fatal(err)
	}
	if got := get(t, client, page); got != 0 {
		t.Errorf("the previous address answers with %d", got)
	}
	if got := get(t, client, "http://127.0.0.1:9735/"); got != http.StatusOK {
		t.Errorf("the next address answers with %d", got)
	}
	if err := apply(""); err != nil {
		t.Fatal(err)
	}
	if got := get(t, client, "http://127.0.0.1:9735/"); got != 0 || a.page != nil {
		t.Errorf("without ui the page answers with %d", got)
	}
}

// A page that cannot be served when the agent starts is a problem of the policy, until an apply serves the page.
func TestPageInUseAtStart(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:9733")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	const ui = `ui: {listen: "127.0.0.1:9733"}`
	a, apply := pageAgent(t, ui)
	if err := os.WriteFile(a.options.Policy, []byte("services: {}\n"+ui+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if problem, hint := a.policyProblem(); !strings.Contains(problem, "serve the web page") || !strings.Contains(hint, "ui.listen") {
		t.Errorf("problem %q, hint %q", problem, hint)
	}
	taken.Close()
	plan, err := a.Plan(api.Candidate{})
	if err != nil {
		t.Fatal(err)
	}
	if len(plan.Changes) != 1 || plan.Changes[0].What != "web page: not served -> 127.0.0.1:9733" {
		t.Errorf("plan: %+v", plan.Changes)
	}
	if err := apply(ui); err != nil {
		t.Fatal(err)
	}
	if problem, _ := a.policyProblem(); problem != "" {
		t.Errorf("after apply: %s", problem)
	}
	if got := get(t, newClient(t), "http://127.0.0.1:9733/"); got != http.StatusOK {
		t.Errorf("status %d", got)
	}
}

// A plan names a token that was replaced, although the policy is the same, and the apply that reads the token is recorded.
func TestPageTokenReplaced(t *testing.T) {
	const ui = `ui: {listen: "127.0.0.1:9733", token_file: token}`
	a, apply := pageAgent(t, ui)
	dir := filepath.Dir(a.options.Policy)
	candidate := api.Candidate{Text: "services: {}\n" + ui + "\n", Path: filepath.Join(dir, "policy.yaml")}
	changes := func() []api.Change {
		plan, err := a.Plan(candidate)
		if err != nil {
			t.Fatal(err)
		}
		return plan.Changes
	}
	if list := changes(); len(list) != 0 {
		t.Errorf("plan of the same policy: %+v", list)
	}
	token := filepath.Join(dir, "token")
	if err := os.WriteFile(token+".new", []byte(strings.Repeat("f", 40)), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(token+".new", token); err != nil {
		t.Fatal(err)
	}
	if list := changes(); len(list) != 1 || list[0].What != "contents of "+token {
		t.Errorf("plan with another token: %+v", list)
	}
	if err := apply(ui); err != nil {
		t.Fatal(err)
	}
	if list := changes(); len(list) != 0 {
		t.Errorf("plan after the apply: %+v", list)
	}
}

// Only root may connect to the Unix socket without a group, and the socket that a killed agent left is replaced.
func TestPageSocket(t *testing.T) {
	path := filepath.Join(t.TempDir(), "ui.sock")
	left, err := net.ListenUnix("unix", &net.UnixAddr{Name: path})
	if err != nil {
		t.Fatal(err)
	}
	left.SetUnlinkOnClose(false)
	left.Close()
	_, apply := pageAgent(t, "ui: {listen: 'unix:"+path+"'}")
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info, err)
	}
	client := newClient(t)
	client.Transport.(*http.Transport).DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", path)
	}
	if got := get(t, client, "http://any.example/"); got != http.StatusOK {
		t.Errorf("status %d", got)
	}
	if err := apply(""); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket still exists: %v", err)
	}
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := apply("ui: {listen: 'unix:" + path + "'}"); err == nil || fault.Code(err) != fault.CodeConflict {
		t.Errorf("a file in the place of the socket: %v", err)
	}
}

// A thousand browsers get the page or a refusal, and the agent answers others.
func TestPageCrowd(t *testing.T) {
	a, _ := pageAgent(t, `ui: {listen: "127.0.0.1:9733"}`)
	const clients = 1000
	var streams, refused, closed int
	for range clients {
		c, err := net.Dial("tcp", "127.0.0.1:9733")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		if _, err := fmt.Fprint(c, "GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n"); err != nil {
			closed++
			continue
		}
		if err := c.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
			t.Fatal(err)
		}
		switch line, err := bufio.NewReader(c).ReadString('\n'); {
		case err != nil:
			closed++
		case strings.Contains(line, " 200 "):
			streams++
		case strings.Contains(line, " 503 "):
			refused++
		default:
			t.Fatalf("answer %q", line)
		}
	}
	if most := a.page.listener.Limit / 2; streams != most || streams+refused+closed != clients || refused < clients/2 {
		t.Errorf("%d streams, want %d; %d refused, %d closed", streams, most, refused, closed)
	}
	a.live.mu.Lock()
	watchers := a.live.watchers
	a.live.mu.Unlock()
	if watchers != 1 {
		t.Errorf("%d watchers for all browsers", watchers)
	}
	if _, err := a.Status(); err != nil {
		t.Error(err)
	}
}
