// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sys/unix"

	"sockeye/internal/fault"
	"sockeye/internal/member"
	"sockeye/internal/peer"
	"sockeye/internal/testenv"
)

func TestHTTPStatus(t *testing.T) {
	for _, code := range []int{fault.CodeFailed, fault.CodeUsage, fault.CodeUnsupported, fault.CodeNotPermitted, fault.CodeConflict} {
		if httpStatus[code] == 0 {
			t.Errorf("code %d has no HTTP status", code)
		}
	}
}

// Commands while policies are applied: each command is answered, and with -race no state is read without its lock. Two
// services change together, so that the second one waits between the plan and its change. Each fourth policy removes a
// service.
func TestCommandsDuringApply(t *testing.T) {
	dir := t.TempDir()
	a := testAgent(t, dir, testenv.BPFFS(t)+"/sockeye")
	defer a.stop()
	const second = `  second:
    slots: 4
    listeners: [{protocol: tcp, address: "[::]:1791"}]
    user: root
    cgroup: CGROUP
`
	const others = `tune:
  - {name: small, cgroup: CGROUP, set: {mss: 1400}}
trace:
  - {name: bmp, cgroup: CGROUP, connections: 1/4, messages: 1/4}
`
	policy := policyText(onePolicy + second + others)
	a.begin(t, policy)
	defer retire(t, a)
	a.metrics = &metricsServer{}
	handler := a.handler()
	request := func(service, path, body string) {
		ctx := context.WithValue(t.Context(), peer.Key{}, &peer.Caller{Cred: unix.Ucred{Uid: 0, Pid: 1}, ID: member.ID{PID: 1}})
		method := http.MethodGet
		if body != "" {
			method = http.MethodPost
		}
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, httptest.NewRequestWithContext(ctx, method, "http://agent"+path, strings.NewReader(body)))
		removed := service == "second" && w.Code == http.StatusBadRequest && strings.Contains(w.Body.String(), `there is no service`)
		if w.Code != http.StatusOK && !removed {
			t.Errorf("%s %s: %d %s", path, body, w.Code, w.Body)
		}
	}
	done := make(chan struct{})
	var commands sync.WaitGroup
	for _, service := range []string{"telemetry", "second"} {
		commands.Go(func() {
			for i := 0; ; i++ {
				select {
				case <-done:
					return
				default:
				}
				state := []string{"drain", "ready"}[i%2]
				request(service, "/v1/slot", `{"service": "`+service+`", "slot": 1, "state": "`+state+`"}`)
				request(service, "/v1/move", `{"service": "`+service+`", "device": "192.0.2.1", "slot": `+strconv.Itoa(i%2*2)+`}`)
				for _, view := range []string{"slots", "devices", "moves", "templates"} {
					request(service, "/v1/"+view+"?service="+service, "")
					request("", "/v1/"+view, "")
				}
				request(service, "/v1/where?service="+service+"&address=192.0.2.1", "")
				for _, view := range []string{"status", "tune", "tune/learned", "trace", "trace/results", "trace/history", "bigtcp"} {
					request("", "/v1/"+view, "")
				}
				metrics := make(chan prometheus.Metric)
				go func() {
					defer close(metrics)
					a.Collect(metrics)
				}()
				for range metrics {
				}
			}
		})
	}
	for i := range 20 {
		next := strings.ReplaceAll(policy, "slots: 4", "slots: "+strconv.Itoa(3+i%2))
		if i%4 == 0 {
			next = policyText(onePolicy)
		}
		if i%4 == 2 {
			next = strings.NewReplacer("1400", "1300", "1/4", "1/8").Replace(next)
		}
		request("", "/v1/apply", `{"path": `+strconv.Quote(filepath.Join(dir, "policy.yaml"))+`, "text": `+strconv.Quote(next)+`}`)
	}
	close(done)
	commands.Wait()
}
