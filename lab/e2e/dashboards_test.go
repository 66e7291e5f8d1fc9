// SPDX-License-Identifier: Apache-2.0

//go:build !vm

package e2e_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"sockeye/lab"
)

// dashboard is what a test reads of a dashboard for Grafana.
type dashboard struct {
	Title      string
	Templating struct {
		List []struct {
			Name, Type, Definition, AllValue string
			Current                          struct{ Value any }
		}
	}
	Panels []struct {
		Title   string
		Targets []struct{ Expr string }
	}
}

// prometheus is a running Prometheus in the collectors' namespace.
type prometheus struct {
	*tuned
	client *http.Client
}

// startPrometheus starts Prometheus, which reads the agent twice a second and has the alerts of the package.
func (h *tuned) startPrometheus() *prometheus {
	h.Helper()
	rules, err := filepath.Abs("../../dist/prometheus/sockeye.rules.yml")
	h.must(err)
	config := filepath.Join(h.dir, "prometheus.yml")
	h.replaceFile(config, fmt.Sprintf(`global: {scrape_interval: 500ms, evaluation_interval: 500ms}
rule_files: [%s]
scrape_configs:
  - {job_name: sockeye, static_configs: [{targets: ["127.0.0.1:9732"]}]}
`, rules))
	p := h.collectors.Command(h.Context(), "prometheus", "--config.file", config, "--storage.tsdb.path", filepath.Join(h.dir, "tsdb"),
		"--web.listen-address", "127.0.0.1:9090", "--log.level", "warn")
	p.Name = "prometheus"
	h.must(p.Start())
	h.Cleanup(func() {
		if h.Failed() {
			h.Logf("end of Prometheus's log:\n%s", p.LogTail(20))
		}
	})
	transport := &http.Transport{DialContext: func(_ context.Context, network, address string) (c net.Conn, err error) {
		return c, h.collectors.Do(func() (err error) {
			c, err = net.DialTimeout(network, address, time.Second)
			return err
		})
	}, DisableKeepAlives: true}
	return &prometheus{h, &http.Client{Transport: transport}}
}

// sample is a result of a query.
type sample struct {
	Metric map[string]string
	Value  [2]any
}

// ask asks the API, and returns the data of the answer.
func (p *prometheus) ask(path string, arguments url.Values, into any) error {
	response, err := p.client.Get("http://127.0.0.1:9090/api/v1/" + path + "?" + arguments.Encode())
	if err != nil {
		return err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		return err
	}
	answer := struct {
		Error string
		Data  any
	}{Data: into}
	if err := json.Unmarshal(text, &answer); err != nil {
		return err
	}
	if answer.Error != "" {
		return fmt.Errorf("%s", answer.Error)
	}
	return nil
}

// query returns the results of an expression that are numbers.
func (p *prometheus) query(expr string) (found []sample, err error) {
	var data struct{ Result []sample }
	if err := p.ask("query", url.Values{"query": {expr}}, &data); err != nil {
		return nil, err
	}
	return slices.DeleteFunc(data.Result, func(s sample) bool {
		var value float64
		_, err := fmt.Sscan(fmt.Sprint(s.Value[1]), &value)
		return err != nil || math.IsNaN(value) || math.IsInf(value, 0)
	}), nil
}

// alerts returns the states of the alerts. Each was evaluated without an error, or not yet.
func (p *prometheus) alerts() map[string]string {
	p.Helper()
	var rules struct {
		Groups []struct {
			Rules []struct{ Name, State, Health, LastError string }
		}
	}
	p.must(p.ask("rules", nil, &rules))
	states := map[string]string{}
	for _, g := range rules.Groups {
		for _, r := range g.Rules {
			states[r.Name] = r.State
			if r.Health == "err" {
				p.Errorf("alert %s: %s", r.Name, r.LastError)
			}
		}
	}
	return states
}

// fill replaces the variables of a dashboard with "All" or the chosen value.
func (d *dashboard) fill(expr string) string {
	for _, v := range d.Templating.List {
		value := v.AllValue
		if v.Type == "custom" {
			value = fmt.Sprint(v.Current.Value)
		}
		expr = regexp.MustCompile(`\$`+v.Name+`\b`).ReplaceAllLiteralString(expr, value)
	}
	// Scrapes of the whole test.
	return strings.NewReplacer("$__rate_interval", "60s", "$__range", "60s").Replace(expr)
}

// readDashboards returns the dashboards of the package.
func (h *host) readDashboards() (all []*dashboard) {
	h.Helper()
	files, err := filepath.Glob("../../dist/grafana/*.json")
	h.must(err)
	for _, file := range files {
		text, err := os.ReadFile(file)
		h.must(err)
		d := &dashboard{}
		h.must(json.Unmarshal(text, d))
		all = append(all, d)
	}
	if len(all) != 5 {
		h.Fatalf("dashboards: %q", files)
	}
	return all
}

// TestDashboards checks that no query of the dashboards is empty: Prometheus reads an agent whose policy has all parts,
// while devices, tuned and traced connections send.
func TestDashboards(t *testing.T) {
	h := newTuned(t, lab.LinkOptions{Delay: 2 * time.Millisecond, Loss: 0.02, Seed: 1})
	near := h.makeGroup("near")
	h.setPolicy(2, "when_empty: {wait: 10m}")
	text, err := os.ReadFile(h.policyPath())
	h.must(err)
	h.setPolicyText(string(text) + fmt.Sprintf(`tune:
  - {name: one, cgroup: %[1]s, match: {port: %[2]d}, set: {sndbuf: 50KB, bind_ifindex: 1}, trial: {control: 50%%}}
  - {name: two, cgroup: %[1]s, set: {initial_cwnd: 20}, react: {retransmits: "> 0.1%%", set: {sndbuf: 300KB}}}
trace:
  - {name: all, cgroup: %[1]s, messages: 1/1, group_by: [remote/24, port, rule], stages: [stack, qdisc, network, rx_stack, reader]}
bigtcp:
  - {interface: lo, ipv6: 128KB}
fleet: {host: one, interfaces: [eth0], addresses: [192.0.2.53], file: hosts.yaml}
metrics: {listen: "127.0.0.1:9732"}
`, near, tunePort))
	h.replaceFile(filepath.Join(h.dir, "hosts.yaml"), "epoch: 1\nnonce: 7\nhosts: [{name: one, addresses: [10.77.0.254]}]\n")
	h.must(h.collectors.Own(netip.MustParsePrefix("192.0.2.53/32")))
	h.startAgent()
	h.start(0)
	h.ready(0)
	prometheus := h.startPrometheus()
	dashboards := h.readDashboards()

	// The user nobody cannot change the bound interface of a socket, and a rule cannot either.
	p, far := h.startPeerAs("65534", h.collectors, "near", "near"), h.startFar()
	far.listen(tunePort)
	far.listen(tracePort)
	p.do(order{Do: "connect", N: 2, Parallel: 2, To: at(tracePort, far4, far6), Up: 1000, Keep: true})
	ctx, stop := context.WithCancel(t.Context())
	var traffic sync.WaitGroup
	defer traffic.Wait()
	defer stop()
	traffic.Go(func() {
		for ctx.Err() == nil {
			p.do(order{Do: "connect", N: 4, Parallel: 4, To: at(tunePort, far4, far6), Up: 20_000, Device: "link0"})
			p.do(order{Do: "exchanges", Parallel: 2, Up: 14_000, Down: 14_000, traceOrder: traceOrder{Count: 2}})
		}
	})
	all := addresses(20)
	traffic.Go(func() {
		for ctx.Err() == nil {
			h.flood(all, 40)
			time.Sleep(100 * time.Millisecond)
		}
	})
	type question struct{ dashboard, panel, expr string }
	var open []question
	for _, d := range dashboards {
		for _, panel := range d.Panels {
			for _, target := range panel.Targets {
				expr := d.fill(target.Expr)
				if strings.Contains(expr, "$") {
					t.Errorf("%s, %s: a variable is not defined: %s", d.Title, panel.Title, expr)
				}
				open = append(open, question{d.Title, panel.Title, expr})
			}
		}
	}
	if len(open) < 100 {
		t.Fatalf("%d queries", len(open))
	}
	queries := len(open)
	start := time.Now()
	h.eventually("values of all queries", func() error {
		var reason error
		open = slices.DeleteFunc(open, func(q question) bool {
			found, err := prometheus.query(q.expr)
			if err == nil && len(found) == 0 {
				err = fmt.Errorf("no value")
			}
			if err != nil {
				reason = fmt.Errorf("%s, %s: %w: %s", q.dashboard, q.panel, err, q.expr)
			}
			return err == nil
		})
		if reason != nil {
			return fmt.Errorf("%d of %d: %w", len(open), queries, reason)
		}
		return nil
	})
	// The values of variables.
	values := regexp.MustCompile(`^label_values\((.*), (\w+)\)$`)
	for _, d := range dashboards {
		for _, v := range d.Templating.List {
			if v.Type != "query" {
				continue
			}
			var found []string
			m := values.FindStringSubmatch(v.Definition)
			if m == nil || m[2] != v.Name {
				t.Errorf("%s: variable %s: %s", d.Title, v.Name, v.Definition)
				continue
			}
			h.must(prometheus.ask("label/"+m[2]+"/values", url.Values{"match[]": {d.fill(m[1])}}, &found))
			if len(found) == 0 {
				t.Errorf("%s: variable %s has no values: %s", d.Title, v.Name, v.Definition)
			}
		}
	}
	// Slot 1 has no member, the kernel refuses an option, and the devices have no connections.
	h.eventually("alerts", func() error {
		states := prometheus.alerts()
		for _, name := range []string{"SockeyeSlotNotReady", "SockeyeTuneOptionsFailed", "SockeyeDevicesOneStream"} {
			if states[name] != "pending" && states[name] != "firing" {
				return fmt.Errorf("%s is %q", name, states[name])
			}
		}
		for _, name := range []string{"SockeyeServiceDown", "SockeyeMemberDrops", "SockeyeBigTCPNotApplied", "SockeyeAgentDown"} {
			// A scrape that takes longer than 500 ms, or a dropped datagram, makes an alert pending.
			if states[name] == "firing" {
				t.Fatalf("%s is %q", name, states[name])
			}
			if states[name] != "inactive" && name != "SockeyeMemberDrops" {
				return fmt.Errorf("%s is %q", name, states[name])
			}
		}
		return nil
	})
	t.Logf("%d queries of %d dashboards after %v", queries, len(dashboards), time.Since(start).Round(time.Second))
}
