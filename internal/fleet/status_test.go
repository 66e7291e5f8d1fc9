// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"sockeye/internal/config"
	"sockeye/internal/fleet/follow"
	"sockeye/internal/fleet/lead"
	"sockeye/internal/fleet/store"
	"sockeye/internal/fleet/table"
)

// snapshot returns a fleet of hosts a, b and c of weight 100 with a table of an epoch, and what the store says about the hosts.
func snapshot(epoch uint64) *store.Snapshot {
	t := &table.Table{Epoch: epoch, Nonce: 7}
	s := &store.Snapshot{Table: t, Connected: true}
	var r table.Ranking
	for _, name := range []string{"a", "b", "c"} {
		h := table.Host{Name: name, Weight: 100}
		t.Hosts = append(t.Hosts, h)
		s.Hosts = append(s.Hosts, lead.Host{Host: h, State: lead.Ready, Alive: true, Healthy: true, Applied: epoch})
		r.Set(name, h.Weight)
	}
	t.Owner = *r.Column(t.Index)
	for b := range table.Buckets {
		t.Previous[b], t.Next[b] = table.None, table.None
	}
	return s
}

// TestBehind is that a host is behind while it is alive and has not applied the newest table, whether this host has it or only
// the store.
func TestBehind(t *testing.T) {
	s := snapshot(7)
	s.Hosts[1].Applied, s.Hosts[2].Applied, s.Hosts[2].Alive = 6, 5, false
	older := *s.Table
	older.Epoch = 6
	for name, c := range map[string]struct {
		store, applied *table.Table
	}{"this host has the newest table": {s.Table, s.Table}, "the store has it": {s.Table, &older}, "only this host has it": {nil, s.Table}} {
		s.Table = c.store
		p := &participation{settings: &settings{Fleet: config.Fleet{Name: "main"}, host: "a"}, table: c.applied, state: follow.State{Snapshot: s}}
		for i, behind := range []bool{false, true, false} {
			if got := p.hostsStatus()[i]; got.Behind != behind {
				t.Errorf("%s: %+v", name, got)
			}
		}
	}
}

// TestEffect is that the effect of a change of a host is the share of the devices that move, and that a dry run says that they
// would.
func TestEffect(t *testing.T) {
	s := snapshot(7)
	p := &participation{settings: &settings{}}
	for _, c := range []struct {
		to     store.Setting
		dryRun bool
		want   string
	}{
		{store.Setting{State: lead.Drain}, false, `^3[2-4]\.\d % of the devices move$`},
		{store.Setting{State: lead.Drain}, true, `^3[2-4]\.\d % of the devices would move$`},
		{store.Setting{Weight: 200}, true, `^1[6-7]\.\d % of the devices would move$`}, // from 1/3 to 1/2
		{store.Setting{State: lead.Maint}, true, `^0\.0 % of the devices would move$`},
	} {
		if got := p.effectOf(s, "b", c.to, c.dryRun); !regexp.MustCompile(c.want).MatchString(got) {
			t.Errorf("%+v: %s, want %s", c, got, c.want)
		}
	}
	s.Table = nil
	for dryRun, want := range map[bool]string{false: "no device moves: the fleet has no table yet", true: "no device would move: the fleet has no table yet"} {
		if got := p.effectOf(s, "b", store.Setting{State: lead.Drain}, dryRun); got != want {
			t.Errorf("without a table: %s, want %s", got, want)
		}
	}
}

// TestDescribeWeight is that the description of a weight says whether it is the host's own: a setting of the same weight is a change.
func TestDescribeWeight(t *testing.T) {
	h := &lead.Host{Host: table.Host{Name: "b", Weight: 100}}
	if got, want := describeChange(h, store.Setting{}, store.Setting{Weight: 100}), "weight 100 (its own) -> 100"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
	h.Weight, h.SetWeight, h.OwnWeight = 70, 70, 100
	if got, want := describeChange(h, store.Setting{Weight: 70}, store.Setting{}), "weight 70 -> 100 (its own)"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
}

// TestPlanWeight is that the plan of another weight in the policy tells the share of the devices that move, or why none does.
func TestPlanWeight(t *testing.T) {
	plug(t)
	const text = `services:
  telemetry: {slots: 2, user: root, listeners: [{protocol: tcp, address: "[::]:1790"}]}
fleet: {host: b, interfaces: [fleet0], addresses: [192.0.2.53], etcd: {endpoints: [http://127.0.0.1:2379]}}
`
	in := func(text string) (*config.Policy, *settings) {
		policy, err := config.Parse([]byte(text), "policy.yaml")
		check(t, err)
		s, err := newSettings(policy)
		check(t, err)
		return policy, s
	}
	_, before := in(text)
	p := &participation{settings: before}
	d := new(Domain)
	d.part.Store(p)
	plan := func(policy *config.Policy) (string, string) {
		t.Helper()
		steps, err := d.Plan(policy)
		check(t, err)
		if len(steps) != 1 || len(steps[0].Changes) != 1 {
			t.Fatalf("%+v", steps)
		}
		return steps[0].Changes[0].What, steps[0].Changes[0].Effect
	}
	heavier, _ := in(strings.Replace(text, "host: b", "host: b, weight: 200", 1))
	is := func(effect string) {
		t.Helper()
		if what, got := plan(heavier); what != "fleet main: weight 100 -> 200" || !regexp.MustCompile(effect).MatchString(got) {
			t.Errorf("%q with the effect %q, want %s", what, got, effect)
		}
	}
	is("^how many devices move is not known: this host is not registered")
	p.state.Snapshot = snapshot(7)
	is(`^1[6-7]\.\d % of the devices move$`) // from 1/3 to 1/2
	p.state.Hosts[1].SetWeight = 300
	is("^no device moves: sockeye host set has given this host the weight 300, which stays$")
	p.state.Hosts[1].SetWeight, p.state.Connected = 0, false
	is("^how many devices move is not known")

	// The settings that differ are named, and what the addresses mean for devices.
	changed, _ := in(strings.NewReplacer("fleet0]", "fleet0, fleet1]", "192.0.2.53", "192.0.2.54", "2379", "2380", "{host: b", "{host: b, min_hosts: 2, settle: 5s, on_host_death: wait", ":1790", ":1791").Replace(text))
	if what, effect := plan(changed); what != "fleet main: interfaces [fleet0] -> [fleet0 fleet1], addresses [192.0.2.53] -> [192.0.2.54], endpoints [http://127.0.0.1:2379] -> [http://127.0.0.1:2380], "+
		"min_hosts 1 -> 2, settle 10s -> 5s, on_host_death next -> wait, listeners at the addresses" ||
		effect != "this host does not have the address 192.0.2.54 of the services: ip addr add 192.0.2.54/32 dev lo; until then this host is not healthy, and its devices move to the others; "+
			"the devices at 192.0.2.54 move to their hosts; this host serves the devices that reach it at 192.0.2.53" {
		t.Errorf("%q with the effect %q", what, effect)
	}

	// The name that the host has anyway, and the order of listeners, which means nothing.
	name, err := os.Hostname()
	check(t, err)
	_, p.settings = in(strings.Replace(text, "host: b, ", "", 1))
	named, _ := in(strings.Replace(text, "host: b", "host: "+name, 1))
	if what, _ := plan(named); what != "fleet main: host (host name) -> "+name {
		t.Errorf("%q", what)
	}
	two := strings.Replace(text, "listeners: [", `listeners: [{protocol: udp, address: "[::]:4739"}, `, 1)
	_, p.settings = in(two)
	ordered, _ := in(strings.Replace(text, `"[::]:1790"}]`, `"[::]:1790"}, {protocol: udp, address: "[::]:4739"}]`, 1))
	if steps, err := d.Plan(ordered); err != nil || len(steps) > 0 {
		t.Errorf("another order of listeners: %+v, %v", steps, err)
	}
	p.settings = before

	// Another fleet has another table.
	other, _ := in(strings.Replace(text, "host: b", "host: d, weight: 200", 1))
	without := *other
	without.Fleet = nil
	if what, effect := plan(other); what != "fleet main, as host b -> fleet main, as host d: weight 100 -> 200" ||
		effect != "the devices of this host move to the others at once; run sockeye host set b drain first, and nothing is lost; this host serves what reaches it until it has the table as host d" {
		t.Errorf("%q with the effect %q", what, effect)
	}
	// The name of another host that lives, and more hosts than live.
	p.state.Connected = true
	c, _ := in(strings.Replace(text, "host: b", "host: c, min_hosts: 4", 1))
	if _, effect := plan(c); !strings.HasPrefix(effect, "host c is alive: with its name, this host is not healthy and has no devices; no device moves until 4 hosts are alive, now 3; ") {
		t.Errorf("%q", effect)
	}
	p.state.Connected = false // nothing is known then
	if _, effect := plan(c); strings.Contains(effect, "alive") {
		t.Errorf("%q", effect)
	}
	// A host that is drained, or whose name another host has, has no devices.
	p.table = snapshot(7).Table
	if _, effect := plan(other); !strings.HasPrefix(effect, "the devices of this host move") {
		t.Errorf("with devices: %q", effect)
	}
	p.state.Taken = true
	for _, to := range []*config.Policy{other, &without} {
		if _, effect := plan(to); !strings.HasPrefix(effect, "the others take over no device: this host has none; ") {
			t.Errorf("without a device: %q", effect)
		}
	}
	p.state.Taken = false

	// The file has its own weights.
	_, p.settings = in(strings.Replace(text, "etcd: {endpoints: [http://127.0.0.1:2379]}", "file: /hosts.yaml", 1))
	heavier, _ = in(strings.Replace(text, "etcd: {endpoints: [http://127.0.0.1:2379]}", "weight: 200, file: /hosts.yaml", 1))
	is("^no device moves: the weights are those of /hosts.yaml$")
}

// TestOwns is that a host has devices until the epoch in which no other host can take it for their owner: until then, routers send to it.
func TestOwns(t *testing.T) {
	drained := *snapshot(7).Table
	p := &participation{settings: &settings{host: "b"}, table: &drained}
	for i, owner := range drained.Owner {
		if owner == 1 {
			drained.Owner[i] = 0
		}
	}
	if n := p.owns(); n != 0 {
		t.Errorf("%d buckets of a drained host", n)
	}
	for column, name := range map[*table.Column]string{&drained.Next: "that comes to the host", &drained.Previous: "that has left it in this epoch"} {
		if column[5] = 1; p.owns() != 1 {
			t.Errorf("%d buckets with one %s", p.owns(), name)
		}
		column[5] = table.None
	}
}

// TestHostsOfTable is that the hosts of the table in force are shown before the store has told their states.
func TestHostsOfTable(t *testing.T) {
	p := &participation{settings: &settings{Fleet: config.Fleet{Name: "main", File: "hosts.yaml"}, host: "b"}, table: snapshot(7).Table, paths: map[string]path{"a": {kind: "link"}}}
	if list := p.hostsOfTable(); len(list) != 3 || !list[0].Alive || !list[0].Healthy || list[0].Epoch != p.table.Epoch || list[0].Behind {
		t.Errorf("with a file of hosts: %+v", list)
	}
	p.settings.Etcd = &config.FleetEtcd{}
	list := p.hostsOfTable()
	if len(list) != 3 || list[0].Name != "a" || list[0].State != "unknown" || list[0].Alive || list[0].Path != "link" || list[1].Path != "self" {
		t.Fatalf("%+v", list)
	}
	buckets := 0
	for _, h := range list {
		buckets += h.Buckets
	}
	if buckets != table.Buckets || list[0].Epoch != 0 {
		t.Errorf("%d buckets: %+v", buckets, list)
	}
	p.table = nil
	if list := p.hostsOfTable(); len(list) > 0 {
		t.Errorf("without a table: %+v", list)
	}
}
