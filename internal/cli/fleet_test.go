// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"sockeye/internal/api"
	"sockeye/internal/fault"
)

const (
	fleetPolicy = `services:
  telemetry:
    slots: 2
    user: root
    cgroup: CGROUP
    listeners: [{protocol: tcp, address: "[::]:1790"}, {protocol: udp, address: "[::]:4739"}]
fleet: {host: one, interfaces: [fleet0], addresses: [192.0.2.53, "2001:db8::53"], file: hosts.yaml}
metrics: {listen: "127.0.0.1:9732"}
`
	fleetHosts = `epoch: 1
nonce: 7
hosts: [{name: one, addresses: [198.51.100.1], macs: ["02:00:00:00:00:01"]}]
`
)

// ownServices adds the addresses of the services of fleets to lo.
func ownServices(t testing.TB) {
	t.Helper()
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	for _, service := range []string{"192.0.2.53/32", "2001:db8::53/128"} {
		address, err := netlink.ParseAddr(service)
		if err == nil {
			err = netlink.AddrReplace(lo, address)
		}
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := netlink.AddrDel(lo, address); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestFleetOfOne runs a host that is alone in its fleet, with a file: it behaves like a host without one.
func TestFleetOfOne(t *testing.T) {
	h := newHost(t, fleetPolicy)
	h.refused(fault.CodeUsage, "fleet: read file of hosts: open DIR/hosts.yaml: no such file or directory", "write the file first: it has the hosts of the fleet", nil, "check", h.policy)
	for _, c := range []struct{ text, problem, hint string }{
		{"", "fleet: DIR/hosts.yaml: the file is empty", "docs/fleet.md has an example"},
		{"epoch: 0", "fleet: DIR/hosts.yaml: no host is ready", "docs/fleet.md has an example"},
		{strings.ReplaceAll(fleetHosts, "{", "{state: foo, "), `fleet: DIR/hosts.yaml: host one: a host has no state "foo"`, "docs/fleet.md has an example"},
		{strings.ReplaceAll(fleetHosts, "one", "two"), `fleet: DIR/hosts.yaml has no host "one", which is the name of this host`, "add the host, or name this host with the key host"},
	} {
		h.write("hosts.yaml", c.text)
		h.refused(fault.CodeUsage, c.problem, c.hint, nil, "check", h.policy)
	}
	h.write("hosts.yaml", fleetHosts)
	if r := h.sockeye("check", h.policy); r.code != 0 || !strings.Contains(r.out, `sockeye apply refuses the policy on this host: fleet.interfaces: there is no interface "fleet0"`) {
		t.Errorf("check without the interface: %+v", r)
	}
	h.plug(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "fleet0"}, PeerName: "fleet1"})
	ownServices(h.t)
	if r := h.sockeye("check", h.policy); r.code != 0 {
		t.Errorf("check: %+v", r)
	}
	h.start()
	pid, _ := h.member(nil, "tcp [::]:1790", "udp [::]:4739")
	health := func() (code int, text string) {
		response, err := http.Get("http://127.0.0.1:9732/health")
		if err != nil {
			t.Fatal(err)
		}
		defer response.Body.Close()
		var b [100]byte
		n, _ := response.Body.Read(b[:])
		return response.StatusCode, string(b[:n])
	}
	if r := h.sockeye("health"); r.code != fault.CodeFailed || r.out != "not healthy: service telemetry has no ready slot\n" {
		t.Errorf("health: %+v", r)
	}
	if got := h.sockeye("fleet").out; !strings.Contains(got, "\nthis host is not healthy: service telemetry has no ready slot\n") {
		t.Errorf("fleet:\n%s", got)
	}
	if got := h.sockeye("status").out; !strings.Contains(got, "\nfleet main: this host is not healthy: service telemetry has no ready slot\n") {
		t.Errorf("status:\n%s", got)
	}
	if code, text := health(); code != http.StatusServiceUnavailable || text != "service telemetry has no ready slot\n" {
		t.Errorf("health by HTTP: %d %q", code, text)
	}
	must[api.Membership](h, "register", "--slot", "0", "--pid", strconv.Itoa(pid))
	h.eventually("health", func() bool { return h.sockeye("health").code == 0 })
	if code, _ := health(); code != http.StatusOK {
		t.Errorf("health by HTTP: %d", code)
	}
	s := must[api.FleetStatus](h, "fleet")
	if len(s.Hosts) != 1 || s.Hosts[0].Share != 1 || s.Hosts[0].Path != "self" || s.Epoch != 1 || !s.Connected || s.Store != "file" || len(s.Problems) > 0 {
		t.Errorf("%+v", s)
	}
	if got := h.sockeye("fleet").out; !strings.HasPrefix(got, "fleet main, this host one, epoch 1, file\n\nHOST") || !strings.Contains(got, "100.0 %") {
		t.Errorf("fleet:\n%s", got)
	}
	if w := must[[]api.WhereStatus](h, "where", "10.0.0.1"); len(w) != 1 || w[0].Host != "one" {
		t.Errorf("where: %+v", w)
	}
	if got := regexp.MustCompile(` +`).ReplaceAllString(h.sockeye("where", "10.0.0.1").out, " "); !strings.HasPrefix(got, "SERVICE ADDRESS DEVICE HOST FLEET BUCKET SERVICE BUCKET SLOT PINNED READY\ntelemetry 10.0.0.1 - one ") {
		t.Errorf("where:\n%s", got)
	}
	h.refused(fault.CodeUsage, `the fleet has no host "on"`, "did you mean one?", nil, "host", "set", "on", "drain")
	h.refused(fault.CodeUsage, `a host has no state "drian"`, "ready, drain, maint or removed", nil, "host", "set", "one", "drian")
	h.refused(fault.CodeUsage, "weight 1001 is out of range", "1 to 1000, or 0 for the weight in the policy of the host", nil, "host", "set", "one", "--weight", "1001")
	h.refused(fault.CodeUsage, "neither a state nor a weight is given", "usage: sockeye host set HOST [ready|drain|maint|removed] [--weight N] [flags]", nil, "host", "set", "one")
	h.refused(fault.CodeConflict, "host one is the last one that can serve devices", "make another host ready first", nil, "host", "set", "one", "drain")
	if r := h.sockeye("host", "set", "one", "--weight", "7", "--dry-run"); r.code != 0 || !strings.Contains(r.out, "host one: weight 1 (its own) -> 7 ") || !strings.HasSuffix(r.out, " 0.0 % of the devices would move\n") {
		t.Errorf("dry run: %+v", r)
	}
	if r := h.sockeye("host", "set", "one", "--weight", "7", "--dry-run", "-o", "json"); r.code != 0 || strings.Contains(r.out, `"policy"`) || !strings.Contains(r.out, `"effect": "0.0 % of the devices would move"`) {
		t.Errorf("dry run: %+v", r)
	}
	h.refused(fault.CodeConflict, "the table of this fleet is a file: edit the file on all hosts", "edit DIR/hosts.yaml", nil, "host", "set", "one", "--weight", "7")

	// A table that cannot follow is refused, and the last one stays in force.
	for text, problem := range map[string]string{
		strings.Replace(fleetHosts, "nonce: 7", "nonce: 8", 1): "the nonce differs", "rubbish": "hosts.yaml is refused",
		strings.Replace(fleetHosts, "weight", "", 1) + "\n# no change of the epoch\nx: 1\n": "hosts.yaml is refused",
	} {
		h.write("hosts.yaml", text)
		h.eventually(problem, func() bool {
			s := must[api.FleetStatus](h, "fleet")
			return s.Epoch == 1 && len(s.Problems) == 1 && strings.Contains(s.Problems[0], problem)
		})
		if r := h.sockeye("apply"); problem == "hosts.yaml is refused" && (r.code != fault.CodeUsage || !strings.Contains(r.err, "hosts.yaml: ")) {
			t.Errorf("apply with a file that is refused: %+v", r)
		}
	}
	h.write("hosts.yaml", strings.Replace(fleetHosts, "epoch: 1", "epoch: 2", 1))
	h.eventually("epoch 2", func() bool { s := must[api.FleetStatus](h, "fleet"); return s.Epoch == 2 && len(s.Problems) == 0 })

	// The agent's pins outlive it, and reset removes them.
	pins, err := filepath.Glob(h.pins + "/fleet@*/ingress_*")
	if err != nil || len(pins) != 1 {
		t.Errorf("pins %v, %v", pins, err)
	}
	h.write("policy.yaml", fleetPolicy[:strings.Index(fleetPolicy, "fleet:")])
	if r := h.sockeye("apply"); r.code != 0 || !strings.Contains(r.out, "fleet main") {
		t.Errorf("apply: %+v", r)
	}
	if left, _ := filepath.Glob(h.pins + "/fleet*"); len(left) > 0 {
		t.Errorf("left are %v", left)
	}
	if _, err := os.Stat(h.state + "/fleet.table"); err == nil {
		t.Error("the table is left")
	}
	h.refused(fault.CodeUsage, "the policy has no fleet", "docs/fleet.md describes the key fleet of the policy", nil, "fleet")
	if !must[api.Health](h, "health").Healthy {
		t.Error("a host without a fleet is not healthy")
	}
}

// elsewhere returns an address whose device the host two serves, and one of the host one, as the agent of host one says.
func (h *host) elsewhere() (there, here string) {
	h.t.Helper()
	for i := 1; there == "" || here == ""; i++ {
		address := fmt.Sprintf("127.0.0.%d", i)
		switch w := must[[]api.WhereStatus](h, "where", address, "--service", "telemetry")[0]; w.Host {
		case "one":
			here = address
		case "two":
			there = address
		default:
			h.t.Fatalf("%+v", w)
		}
	}
	return there, here
}

// TestFleetWhere is that where tells the host and the bucket of a device in the fleet, or why the host is not known, and shows the
// slots of this host only for its own devices.
func TestFleetWhere(t *testing.T) {
	h := newHost(t, strings.Replace(fleetPolicy, "fleet:", `  other:
    slots: 2
    user: root
    cgroup: CGROUP
    listeners: [{protocol: tcp, address: "127.0.0.1:1791"}]
fleet:`, 1))
	h.plug(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "fleet0"}, PeerName: "fleet1"})
	ownServices(h.t)
	h.start()
	text := func(args ...string) string {
		t.Helper()
		r := h.sockeye(append([]string{"where"}, args...)...)
		if r.code != 0 || r.err != "" {
			t.Errorf("%q: %+v", args, r)
		}
		return regexp.MustCompile(` +`).ReplaceAllString(r.out, " ")
	}
	const head = "SERVICE ADDRESS DEVICE HOST FLEET BUCKET SERVICE BUCKET SLOT PINNED READY\n"

	// The file of the fleet does not exist yet.
	w := must[[]api.WhereStatus](h, "where", "127.0.0.1")
	if len(w) != 2 || w[0].Service != "other" || w[0].HostUnknown != "" || w[0].Ready == nil || w[1].HostUnknown != "this host has no table of the fleet yet" ||
		w[1].Ready != nil || w[1].FleetBucket != nil || w[1].Host != "" {
		t.Errorf("without a table: %+v", w)
	}
	other := fmt.Sprintf("other 127.0.0.1 - - - %d %d no no\n", w[0].Bucket, w[0].Slot)
	if got, want := text("127.0.0.1"), head+other+"telemetry 127.0.0.1 - - - - - - -\n\nthis host has no table of the fleet yet\n"; got != want {
		t.Errorf("without a table:\n%s\nwant\n%s", got, want)
	}

	h.write("hosts.yaml", strings.Replace(fleetHosts, "hosts: [", `hosts: [{name: two, addresses: [198.51.100.2], macs: ["02:00:00:00:00:02"]}, `, 1))
	h.eventually("the table", func() bool { return must[api.FleetStatus](h, "fleet").Epoch == 1 })
	there, here := h.elsewhere()
	away, own := must[[]api.WhereStatus](h, "where", there, "--service", "telemetry")[0], must[[]api.WhereStatus](h, "where", here, "--service", "telemetry")[0]
	if away.FleetBucket == nil || own.FleetBucket == nil || away.Ready != nil || own.Ready == nil || away.HostUnknown+own.HostUnknown != "" {
		t.Fatalf("%+v %+v", away, own)
	}
	want := head + fmt.Sprintf("telemetry %s - two %d - - - -\ntelemetry %s - one %d %d %d no no\n", there, *away.FleetBucket, here, *own.FleetBucket, own.Bucket, own.Slot)
	if got := text(there, here, "--service", "telemetry"); got != want {
		t.Errorf("with a table:\n%s\nwant\n%s", got, want)
	}
	// More addresses than one request has: each has its line, and no request was refused.
	many := []string{"where", "--service", "telemetry"}
	for i := range 2500 {
		many = append(many, fmt.Sprintf("10.0.%d.%d", i>>8, i&0xff))
	}
	all := must[[]api.WhereStatus](h, many...)
	for i, w := range all {
		if w.Address.String() != many[i+3] || w.Host == "" || w.SlotUnknown != "" {
			t.Fatalf("%+v", w)
		}
	}
	if len(all) != 2500 {
		t.Errorf("%d lines", len(all))
	}
	// The two tables have different nonces, and so have the buckets.
	if *own.FleetBucket == own.Bucket && *away.FleetBucket == away.Bucket {
		t.Errorf("the buckets of the fleet are those of the service: %+v %+v", own, away)
	}

	const slots = ": the slots are those of devices of this host"
	for unknown, args := range map[string][]string{
		"the host of the fleet cannot be told offline" + slots:            {"--offline", "--pins", h.pins, "--service", "telemetry", here},
		"the host of the fleet cannot be told for another policy" + slots: {"--plan", h.policy, "--service", "telemetry", here},
	} {
		if got := must[[]api.WhereStatus](h, append([]string{"where"}, args...)...); len(got) != 1 || got[0].HostUnknown != unknown || got[0].Slot != own.Slot || got[0].Bucket != own.Bucket {
			t.Errorf("%q: %+v", args, got)
		}
		want := fmt.Sprintf("SERVICE ADDRESS DEVICE BUCKET SLOT PINNED READY\ntelemetry %s - %d %d no -\n\n%s\n", here, own.Bucket, own.Slot, unknown)
		if got := text(args...); got != want {
			t.Errorf("%q:\n%s\nwant\n%s", args, got, want)
		}
	}
	// Without a fleet, offline and plan have nothing to say.
	h.write("policy.yaml", fleetPolicy[:strings.Index(fleetPolicy, "fleet:")])
	must[api.Plan](h, "apply")
	for _, args := range [][]string{{"--offline", "--pins", h.pins, "--service", "telemetry", here}, {"--plan", h.policy, here}, {here}} {
		if got := must[[]api.WhereStatus](h, append([]string{"where"}, args...)...); len(got) != 1 || got[0].HostUnknown != "" || got[0].Host != "" || got[0].FleetBucket != nil {
			t.Errorf("without a fleet, %q: %+v", args, got)
		}
	}
}

// TestFleetWhy is that why sends the user to the host of a device, and explains the devices of this host only.
func TestFleetWhy(t *testing.T) {
	h := newHost(t, fleetPolicy)
	h.plug(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "fleet0"}, PeerName: "fleet1"})
	ownServices(h.t)
	h.start()
	text := func(address string) string {
		t.Helper()
		r := h.sockeye("why", address)
		if r.code != 0 || r.err != "" {
			t.Errorf("why %s: %+v", address, r)
		}
		return r.out
	}
	if w := h.why("127.0.0.1"); w.Effect != "dropped" || w.Reason != "this host has no table of the fleet yet" || w.Host != "" || w.FleetBucket != nil {
		t.Errorf("without a table: %+v", w)
	}
	if got := text("127.0.0.1"); got != "telemetry 127.0.0.1 is a device of its own\nhost      packets to the addresses of the fleet are dropped: this host has no table of the fleet yet\n" {
		t.Errorf("without a table:\n%s", got)
	}
	h.write("hosts.yaml", strings.Replace(fleetHosts, "hosts: [", `hosts: [{name: two, addresses: [198.51.100.2], macs: ["02:00:00:00:00:02"]}, `, 1))
	h.eventually("the table", func() bool { return must[api.FleetStatus](h, "fleet").Epoch == 1 })
	pid, _ := h.member(nil, "tcp [::]:1790", "udp [::]:4739")
	there, here := h.elsewhere()
	slot := must[[]api.WhereStatus](h, "where", there)[0].Slot // of a device of this host
	must[api.Membership](h, "register", "--slot", strconv.Itoa(slot), "--pid", strconv.Itoa(pid))
	w := h.why(there)
	if w.Effect != "elsewhere" || w.Reason != "host two of the fleet serves the device" || w.Host != "two" || w.FleetBucket == nil || w.Member != nil {
		t.Errorf("a device of another host: %+v", w)
	}
	for _, e := range w.Events {
		if e.Slot != nil {
			t.Errorf("a device of another host has the event %+v", e)
		}
	}
	if got, want := text(there), "telemetry "+there+" is a device of its own\nhost      two: packets to the addresses of the fleet go to that host\n          sockeye why "+there+" on that host gives the rest\n"; got != want {
		t.Errorf("a device of another host:\n%s\nwant\n%s", got, want)
	}
	if w := h.why(here); w.Host != "one" || w.FleetBucket == nil || w.Effect != "reach" && w.Effect != "refused" {
		t.Errorf("a device of this host: %+v", w)
	}
	if got := text(here); !strings.HasPrefix(got, "telemetry "+here+", which host one of the fleet serves, is a device of its own\nslot      ") || !strings.Contains(got, "\neffect    packets ") {
		t.Errorf("a device of this host:\n%s", got)
	}
}
