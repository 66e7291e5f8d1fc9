// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"encoding/json"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/url"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"sockeye/internal/api"
	"sockeye/internal/config"
	"sockeye/internal/fault"
	"sockeye/internal/member"
	"sockeye/internal/peer"
	"sockeye/internal/scope"
)

// The agent answers every request with JSON and one of its exit codes, and changes nothing.
func FuzzAPI(f *testing.F) {
	for _, path := range []string{"/v1/status", "/v1/slots?service=a", "/v1/devices", "/v1/where?address=192.0.2.1&address=x",
		"/v1/tune", "/v1/tune?cgroup=x", "/v1/tune/explain?local=192.0.2.1:1&remote=192.0.2.2&role=accept&tag=0x5e", "/v1/tune/socket?pid=1&fd=0",
		"/v1/tune/socket?local=192.0.2.1:1&remote=x", "/v1/tune/trial?rule=a", "/v1/tune/learned", "/v1/tune/revert", "/v1/register", "/v1/unregister", "/v1/run", "/v1/plan", "/v1/apply", "/v2/x", "/"} {
		for _, body := range []string{"", "{}", "[", "null", `{"service": "a", "slot": 1, "pid": 1}`, `{"text": "services: {}", "path": "/p"}`,
			`{"previous": true}`, `{"text": "services: {a: {slots: 1, listeners: [{protocol: tcp, address: \"[::]:1\"}]"}`, `{"slot": 1e99}`, `{"rules": ["a"]}`, `{"text": "tune: [{name: a, cgroup: b, set: {mss: 1}}]", "live": true}`, `{} {}`, `{"PID": -1}`} {
			f.Add("GET", path, body)
			f.Add("POST", path, body)
		}
	}
	dir := f.TempDir()
	f.Fuzz(func(t *testing.T, method, path, body string) {
		target, err := url.ParseRequestURI(path)
		if err != nil || target.Host != "" || !strings.HasPrefix(path, "/") || strings.ContainsAny(method, " \r\n") || method == "CONNECT" {
			return
		}
		// The agent would apply a policy, which needs BPF.
		var c api.Candidate
		if json.Unmarshal([]byte(body), &c) == nil {
			if _, err := config.Parse([]byte(c.Text), "p"); err == nil {
				return
			}
		}
		a := newAgent(Options{StateDir: dir, Policy: filepath.Join(dir, "none.yaml"), Log: slog.New(slog.DiscardHandler)}, nil, scope.Tree{Mount: dir + "/none"})
		a.metrics = &metricsServer{}
		ctx := context.WithValue(context.Background(), peer.Key{}, &peer.Caller{Cred: unix.Ucred{Uid: 0, Pid: 1}, ID: member.ID{PID: 1}})
		r, err := http.NewRequestWithContext(ctx, method, "http://agent/", strings.NewReader(body))
		if err != nil {
			return
		}
		r.URL = target
		w := httptest.NewRecorder()
		a.handler().ServeHTTP(w, r)
		if w.Code >= 300 && w.Code < 400 {
			return // the path has .. or //
		}
		if w.Code != http.StatusOK {
			var failure api.Failure
			if err := json.Unmarshal(w.Body.Bytes(), &failure); err != nil || failure.Error == "" || httpStatus[failure.Code] != w.Code {
				t.Errorf("%s %s %q: %d %s", method, path, body, w.Code, w.Body)
			}
		} else if !json.Valid(w.Body.Bytes()) {
			t.Errorf("%s %s %q: %s", method, path, body, w.Body)
		}
		if len(servicesOf(t, a)) != 0 || len(a.policy.Services) != 0 {
			t.Errorf("%s %s %q: the agent has services now", method, path, body)
		}
	})
}

// A parsed address is valid, and its text parses to the same address.
func FuzzParseAddresses(f *testing.F) {
	for _, text := range []string{"192.0.2.1", "::", "::ffff:192.0.2.1", "fe80::1%eth0", "2001:db8::1", "", " 1.2.3.4", "1.2.3.4/8", "01.2.3.4", "1.2.3", "[::1]", "router"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		addresses, err := api.ParseAddresses([]string{text})
		if err != nil {
			if fault.Code(err) != fault.CodeUsage || fault.Hint(err) == "" || strings.Contains(err.Error(), "\n") {
				t.Errorf("%q: %d, %q, hint %q", text, fault.Code(err), err, fault.Hint(err))
			}
			return
		}
		if len(addresses) != 1 || !addresses[0].IsValid() {
			t.Fatalf("%q: %v", text, addresses)
		}
		again, err := api.ParseAddresses([]string{addresses[0].String()})
		if err != nil || again[0] != addresses[0] {
			t.Errorf("%q: %v, then %v %v", text, addresses, again, err)
		}
	})
}
