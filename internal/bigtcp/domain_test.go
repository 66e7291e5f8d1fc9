// SPDX-License-Identifier: Apache-2.0

package bigtcp

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"sockeye/internal/api"
	"sockeye/internal/bigtcp/netif"
	"sockeye/internal/bigtcp/sizing"
	"sockeye/internal/config"
	"sockeye/internal/domain/domaintest"
	"sockeye/internal/fault"
	"sockeye/internal/netns"
	"sockeye/internal/testenv"
)

const (
	bigTCPPolicy = "bigtcp:\n  - {interface: \"big*\", ipv6: 192KB, ipv4: 160KB}\n"
	noSizes      = "bigtcp: []\n"
)

var (
	sizesOff = netif.Sizes{GSO: 65536, GRO: 65536, GSOIPv4: 65536, GROIPv4: 65536}
	sizesOn  = netif.Sizes{GSO: 192000, GRO: 192000, GSOIPv4: 160000, GROIPv4: 160000}
)

// runner drives the domain.
type runner struct{ *domaintest.Runner }

func newRunner(t *testing.T, stateDir, pins string, log slog.Handler) runner {
	t.Helper()
	h := domaintest.Host(t, stateDir, pins, log)
	a := runner{domaintest.New(h, New(h))}
	t.Cleanup(a.Stop)
	return a
}

func (a runner) sizing() *Domain { return a.Domains[0].(*Domain) }

// newSizing drives the domain, without a policy yet, on a kernel that has BIG TCP.
func newSizing(t *testing.T) runner { return newSizingWithLog(t, slog.DiscardHandler) }

func newSizingWithLog(t *testing.T, log slog.Handler) runner {
	t.Helper()
	n, err := netif.OpenNamespace("")
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close()
	if s := n.Support(); !s.IPv6 || !s.IPv4 {
		t.Skip("kernel: BIG TCP for both families came with Linux 6.3")
	}
	return newRunner(t, t.TempDir(), testenv.BPFFS(t)+"/sockeye", log)
}

// again drives the domain of the next agent, after this one was stopped.
func (a runner) again(t *testing.T) runner {
	t.Helper()
	return newRunner(t, a.Host.StateDir, a.Host.Root.Dir, slog.DiscardHandler)
}

// addLink makes an interface that goes with the test.
func addLink(t *testing.T, l netlink.Link) {
	t.Helper()
	name := l.Attrs().Name
	if err := netlink.LinkAdd(l); err != nil {
		t.Fatalf("add %s: %v", name, err)
	}
	t.Cleanup(func() { removeLink(t, name) })
}

// removeLink removes an interface, if it is there.
func removeLink(t *testing.T, name string) {
	t.Helper()
	if l, err := netlink.LinkByName(name); err == nil {
		if err := netlink.LinkDel(l); err != nil {
			t.Errorf("remove %s: %v", name, err)
		}
	}
}

// addVeth makes a pair, NAME and peer-NAME.
func addVeth(t *testing.T, name string) {
	t.Helper()
	addLink(t, &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name}, PeerName: "peer-" + name})
}

func sizesOf(t *testing.T, name string) netif.Sizes {
	t.Helper()
	l, err := netlink.LinkByName(name)
	if err != nil {
		t.Fatalf("find %s: %v", name, err)
	}
	a := l.Attrs()
	return netif.Sizes{GSO: a.GSOMaxSize, GRO: a.GROMaxSize, GSOIPv4: a.GSOIPv4MaxSize, GROIPv4: a.GROIPv4MaxSize}
}

func wantSizes(t *testing.T, name string, want netif.Sizes) {
	t.Helper()
	if got := sizesOf(t, name); got != want {
		t.Errorf("%s has %+v, want %+v", name, got, want)
	}
}

// meddle sets sizes as somebody else would.
func meddle(t *testing.T, name string, s netif.Sizes) {
	t.Helper()
	n, err := netif.OpenNamespace("")
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close()
	i, err := n.Interface(name)
	if err == nil {
		err = n.Set(i.Index, s)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// until waits for what an agent does in its own time.
func until(t *testing.T, what string, so func() bool) {
	t.Helper()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for late := time.After(time.Minute); !so(); {
		select {
		case <-tick.C:
		case <-late:
			t.Fatalf("not in a minute: %s", what)
		}
	}
}

// sized is the status of the interface or the rule with a name.
func (a runner) sized(t *testing.T, name string) api.BigTCPInterface {
	t.Helper()
	status, err := a.sizing().Interfaces("", name)
	if err != nil || len(status.Interfaces) != 1 {
		return api.BigTCPInterface{State: fmt.Sprintf("%+v, %v", status, err)}
	}
	return status.Interfaces[0]
}

func wantState(t *testing.T, a runner, name, state, problem string) {
	t.Helper()
	got := a.sized(t, name)
	if got.State != state || !strings.Contains(got.Problem, problem) || (problem == "") != (got.Problem == "") || got.Since.IsZero() {
		t.Errorf("%s is %+v, want %s %q", name, got, state, problem)
	}
}

// apply makes a policy true, and returns the changes as texts.
func (a runner) apply(t *testing.T, text string) []string {
	t.Helper()
	planned, err := a.Plan(text)
	if err != nil {
		t.Fatal(err)
	}
	done, err := a.Apply(text)
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(planned, done) {
		t.Errorf("planned %+v, done %+v", planned, done)
	}
	var texts []string
	for _, c := range done {
		texts = append(texts, fmt.Sprintf("%s%s %s %s (%s)", c.Netns, c.Interface, c.Action, c.What, c.Effect))
	}
	return texts
}

func wantChanges(t *testing.T, name string, got []string, want ...string) {
	t.Helper()
	if !slices.Equal(got, want) {
		t.Errorf("%s:\ngot\n%s\nwant\n%s", name, strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

func TestBigTCPApply(t *testing.T) {
	a := newSizing(t)
	addVeth(t, "big0")
	addVeth(t, "other0")
	a.Start(t, noSizes)
	const on = "sizes ipv6 65536 -> 192000, ipv4 65536 -> 160000"
	wantChanges(t, "on", a.apply(t, bigTCPPolicy),
		"big* add rule big*: ipv6 192KB, ipv4 160KB (for 1 interface now, and those that appear)",
		"big0 change "+on+" (for new connections)")
	wantSizes(t, "big0", sizesOn)
	wantSizes(t, "other0", sizesOff)
	wantSizes(t, "peer-big0", sizesOff)
	wantState(t, a, "big0", api.SizesApplied, "")
	if got := a.sized(t, "big0"); got.Rule != "big*: ipv6 192KB, ipv4 160KB" || got.Want != (sizing.Want{IPv6: 192000, IPv4: 160000}) || got.Sizes != sizesOn {
		t.Errorf("%+v", got)
	}
	wantChanges(t, "nothing", a.apply(t, bigTCPPolicy))
	wantChanges(t, "larger", a.apply(t, strings.ReplaceAll(bigTCPPolicy, "192KB", "200KB")),
		"big* change rule big*: ipv6 192KB, ipv4 160KB -> big*: ipv6 200KB, ipv4 160KB (for 1 interface now, and those that appear)",
		"big0 change sizes ipv6 192000 -> 200000 (for new connections)")
	wantSizes(t, "big0", netif.Sizes{GSO: 200000, GRO: 200000, GSOIPv4: 160000, GROIPv4: 160000})
	wantChanges(t, "a name before a glob", a.apply(t, "bigtcp:\n  - {interface: big0, ipv6: off}\n  - {interface: \"big*\", ipv6: 192KB, ipv4: 160KB}\n"),
		"big0 add rule big0: ipv6 off (for new connections)",
		"big* change rule big*: ipv6 200KB, ipv4 160KB -> big*: ipv6 192KB, ipv4 160KB (there is none now: one that appears is set)",
		"big0 change sizes ipv6 200000 -> 65536, ipv4 160000 -> 65536 (for new connections)")
	wantSizes(t, "big0", sizesOff)
	wantState(t, a, "big*", api.SizesWaiting, "there is no such interface")
	if _, err := a.Apply(strings.ReplaceAll(bigTCPPolicy, "192KB", "200KB")); err != nil {
		t.Fatal(err)
	}
	wantSizes(t, "big0", netif.Sizes{GSO: 200000, GRO: 200000, GSOIPv4: 160000, GROIPv4: 160000})
	wantChanges(t, "off", a.apply(t, noSizes),
		"big* remove rule big*: ipv6 200KB, ipv4 160KB (its interfaces get the sizes that they had before)",
		"big0 change sizes ipv6 200000 -> 65536, ipv4 160000 -> 65536 (as they were before)")
	wantSizes(t, "big0", sizesOff)
	if left, err := a.sizing().records.Records(); err != nil || len(left) > 0 {
		t.Errorf("records are left: %+v, %v", left, err)
	}
}

// The devices below an interface are set with it, and shown.
func TestBigTCPPath(t *testing.T) {
	a := newSizing(t)
	addLink(t, &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "bigbr"}})
	addVeth(t, "port0")
	bridge, err := netlink.LinkByName("bigbr")
	if err != nil {
		t.Fatal(err)
	}
	port, err := netlink.LinkByName("port0")
	if err != nil {
		t.Fatal(err)
	}
	if err := netlink.LinkSetMaster(port, bridge); err != nil {
		t.Fatal(err)
	}
	a.Start(t, noSizes)
	const on = "sizes ipv6 65536 -> 192000, ipv4 65536 -> 160000"
	wantChanges(t, "on", a.apply(t, bigTCPPolicy),
		"big* add rule big*: ipv6 192KB, ipv4 160KB (for 1 interface now, and those that appear)",
		"bigbr change "+on+" (for new connections)",
		"port0 change "+on+" (for new connections; it is below bigbr)")
	wantSizes(t, "bigbr", sizesOn)
	wantSizes(t, "port0", sizesOn)
	if got := a.sized(t, "port0"); got.Because != "bigbr" || got.State != api.SizesApplied {
		t.Errorf("%+v", got)
	}

	// What is on a path that somebody else has changed is left as it is.
	other := netif.Sizes{GSO: 100000, GRO: 100000, GSOIPv4: 100000, GROIPv4: 100000}
	meddle(t, "port0", other)
	until(t, "the port is seen to be changed", func() bool { return a.sized(t, "port0").State == api.SizesChanged })
	wantState(t, a, "bigbr", api.SizesApplied, "")
	a.Stop()
	a = a.again(t)
	a.Start(t, strings.ReplaceAll(bigTCPPolicy, "192KB", "180KB"))
	wantSizes(t, "port0", other)
	wantSizes(t, "bigbr", sizesOn)
	wantState(t, a, "bigbr", api.SizesConflict, "port0 is on its path: somebody else has set its sizes since")
	a.apply(t, strings.ReplaceAll(bigTCPPolicy, "192KB", "180KB"))
	sizes := netif.Sizes{GSO: 180000, GRO: 180000, GSOIPv4: 160000, GROIPv4: 160000}
	wantSizes(t, "port0", sizes)
	wantSizes(t, "bigbr", sizes)
	a.apply(t, noSizes)
	wantSizes(t, "port0", sizesOff)
	wantSizes(t, "bigbr", sizesOff)
}

func TestBigTCPAppearsAndVanishes(t *testing.T) {
	a := newSizing(t)
	a.Start(t, bigTCPPolicy)
	wantState(t, a, "big*", api.SizesWaiting, "there is no such interface")
	addVeth(t, "big0")
	until(t, "big0 is set", func() bool { return a.sized(t, "big0").State == api.SizesApplied })
	wantSizes(t, "big0", sizesOn)
	addVeth(t, "big1")
	until(t, "big1 is set", func() bool { return a.sized(t, "big1").State == api.SizesApplied })
	wantSizes(t, "big1", sizesOn)
	removeLink(t, "big0")
	until(t, "big0 is forgotten", func() bool {
		records, err := a.sizing().records.Records()
		return err == nil && len(records) == 1 && records[0].Interface == "big1"
	})
	if _, err := a.sizing().Interfaces("", "big0"); fault.Code(err) != fault.CodeUsage || fault.Hint(err) != "did you mean big1?" {
		t.Errorf("an interface that has vanished: %v, hint %q", err, fault.Hint(err))
	}
	// An interface that is named otherwise now is no longer meant.
	l, err := netlink.LinkByName("big1")
	if err != nil {
		t.Fatal(err)
	}
	if err := netlink.LinkSetName(l, "small1"); err != nil {
		t.Fatal(err)
	}
	defer removeLink(t, "small1")
	until(t, "small1 has what it had before", func() bool { return sizesOf(t, "small1") == sizesOff })
	until(t, "the rule waits", func() bool { return a.sized(t, "big*").State == api.SizesWaiting })
}

// record is a log that is read while it is written.
type record struct {
	mu   sync.Mutex
	text strings.Builder
}

func (r *record) Write(p []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.text.Write(p)
}

func (r *record) count(part string) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return strings.Count(r.text.String(), part)
}

// What somebody else has set is seen, told once, and left until it is set again
// explicitly.
func TestBigTCPChangedByOthers(t *testing.T) {
	var log record
	a := newSizingWithLog(t, slog.NewTextHandler(&log, nil))
	addVeth(t, "big0")
	addVeth(t, "big1")
	a.Start(t, bigTCPPolicy)
	other := netif.Sizes{GSO: 100000, GRO: 192000, GSOIPv4: 160000, GROIPv4: 160000}
	meddle(t, "big0", other)
	meddle(t, "big1", sizesOff) // as it was before: somebody else's act all the same
	until(t, "changes are seen", func() bool {
		return a.sized(t, "big0").State == api.SizesChanged && a.sized(t, "big1").State == api.SizesChanged
	})
	wantState(t, a, "big0", api.SizesChanged, "somebody else has set its sizes since")
	addVeth(t, "big2") // another look leaves them alone, too
	until(t, "big2 is set", func() bool { return a.sized(t, "big2").State == api.SizesApplied })
	wantSizes(t, "big0", other)
	wantSizes(t, "big1", sizesOff)
	for _, name := range []string{"big0", "big1"} {
		if n := log.count(`level=WARN msg="sizes changed by somebody else, and left" netns="" interface=` + name); n != 1 {
			t.Errorf("%s: %d warnings", name, n)
		}
	}

	status := a.Status(t)
	if len(status.BigTCP) != 1 || status.BigTCP[0].Applied != 1 || status.BigTCP[0].Changed != 2 || len(status.BigTCP[0].Problems) != 2 {
		t.Errorf("%+v", status)
	}

	// A change that is taken back leaves what somebody else had set.
	s := a.sizing().sizers[""]
	back, err := a.sizing().apply(bigTCPChange{rules: s.rules})
	if err != nil {
		t.Fatal(err)
	}
	wantSizes(t, "big0", sizesOn)
	if err := back(); err != nil {
		t.Fatal(err)
	}
	wantSizes(t, "big0", other)
	wantState(t, a, "big0", api.SizesChanged, "somebody else has set its sizes since")
	wantState(t, a, "big1", api.SizesChanged, "somebody else has set its sizes since")

	// So does the next agent.
	a.Stop()
	a = a.again(t)
	a.Start(t, bigTCPPolicy)
	wantSizes(t, "big0", other)
	wantSizes(t, "big1", sizesOff)
	wantState(t, a, "big0", api.SizesChanged, "somebody else has set its sizes since")
	wantState(t, a, "big1", api.SizesChanged, "somebody else has set its sizes since")
	wantChanges(t, "set again", a.apply(t, bigTCPPolicy),
		"big0 change sizes ipv6 sent 100000 -> 192000 (somebody else has set them since, which is lost)",
		"big1 change sizes ipv6 65536 -> 192000, ipv4 65536 -> 160000 (somebody else has set them since, which is lost)")
	for _, name := range []string{"big0", "big1", "big2"} {
		wantSizes(t, name, sizesOn)
		wantState(t, a, name, api.SizesApplied, "")
	}

	// What a command takes back by force stays so.
	if _, err := a.sizing().records.Revert(func(r sizing.Record) bool { return r.Interface == "big1" }, true); err != nil {
		t.Fatal(err)
	}
	until(t, "the revert is seen", func() bool { return a.sized(t, "big1").State == api.SizesChanged })
	wantSizes(t, "big1", sizesOff)

	// What somebody else has set when the rule ends stays, and is shown for as long as there are rules.
	meddle(t, "big0", other)
	until(t, "the change is seen", func() bool { return a.sized(t, "big0").State == api.SizesChanged })
	wantChanges(t, "another rule", a.apply(t, "bigtcp: [{interface: big1, ipv6: 192KB}]\n"),
		"big* remove rule big*: ipv6 192KB, ipv4 160KB (its interfaces get the sizes that they had before; not big0, big1, which somebody else has set since)",
		"big1 add rule big1: ipv6 192KB (for new connections)",
		"big1 change sizes ipv6 65536 -> 192000 (somebody else has set them since, which is lost)",
		"big2 change sizes ipv6 192000 -> 65536, ipv4 160000 -> 65536 (as they were before)")
	wantSizes(t, "big0", other)
	wantSizes(t, "big1", netif.Sizes{GSO: 192000, GRO: 192000, GSOIPv4: 65536, GROIPv4: 65536})
	wantSizes(t, "big2", sizesOff)
	wantState(t, a, "big0", api.SizesChanged, "no rule is for it any more")
	wantChanges(t, "nothing more", a.apply(t, "bigtcp: [{interface: big1, ipv6: 192KB}]\n"))
}

// What an agent has set stays when it ends, and the next one goes on from there.
func TestBigTCPRestart(t *testing.T) {
	a := newSizing(t)
	addVeth(t, "big0")
	addVeth(t, "big1")
	a.Start(t, bigTCPPolicy)
	a.Stop()
	wantSizes(t, "big0", sizesOn)
	removeLink(t, "big1")
	addVeth(t, "big2")

	a = a.again(t)
	a.Start(t, bigTCPPolicy)
	wantSizes(t, "big0", sizesOn)
	wantSizes(t, "big2", sizesOn)
	wantState(t, a, "big0", api.SizesApplied, "")
	a.Stop()

	// As if it had been killed between the record and the change.
	files, err := filepath.Glob(filepath.Join(a.sizing().recordsDir(), "*.json"))
	if err != nil || len(files) != 2 {
		t.Fatalf("%v, %v", files, err)
	}
	for _, file := range files {
		var r sizing.Record
		data, err := os.ReadFile(file)
		if err == nil {
			err = json.Unmarshal(data, &r)
		}
		if err == nil {
			r.From = sizesOff
			data, err = json.Marshal(r)
		}
		if err == nil {
			err = os.WriteFile(file, data, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	meddle(t, "big0", sizesOff)
	a = a.again(t)
	a.Start(t, bigTCPPolicy)
	wantSizes(t, "big0", sizesOn)
	wantSizes(t, "big2", sizesOn)
	meddle(t, "big2", sizesOff) // its record is finished by now
	until(t, "the change is seen", func() bool { return a.sized(t, "big2").State == api.SizesChanged })
	a.Stop()

	a = a.again(t)
	a.Start(t, noSizes)
	wantSizes(t, "big0", sizesOff)
	wantSizes(t, "big2", sizesOff)
	if left, err := a.sizing().records.Records(); err != nil || len(left) > 0 {
		t.Errorf("records are left: %+v, %v", left, err)
	}
}

// What a command holds is left to it, until it takes that back.
func TestBigTCPConflict(t *testing.T) {
	a := newSizing(t)
	addVeth(t, "big0")
	store, err := sizing.OpenStore(a.Host.StateDir)
	if err != nil {
		t.Fatal(err)
	}
	n, err := netif.OpenNamespace("")
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close()
	if _, err := store.Apply(n, sizing.ByCommand, []sizing.Target{{Interface: "big0", Want: sizing.Want{IPv6: 100000}}}, false); err != nil {
		t.Fatal(err)
	}
	held := netif.Sizes{GSO: 100000, GRO: 100000, GSOIPv4: 65536, GROIPv4: 65536}
	a.Start(t, bigTCPPolicy)
	wantSizes(t, "big0", held)
	wantState(t, a, "big0", api.SizesConflict, "sockeye bigtcp apply has set its sizes")
	if got := a.sized(t, "big0").Hint; got != "sockeye bigtcp revert big0 leaves it to the policy" {
		t.Errorf("hint %q", got)
	}
	addVeth(t, "big1")
	until(t, "another is set", func() bool { return a.sized(t, "big1").State == api.SizesApplied })
	wantChanges(t, "nothing to take", a.apply(t, bigTCPPolicy))
	wantSizes(t, "big0", held)
	wantChanges(t, "larger", a.apply(t, strings.ReplaceAll(bigTCPPolicy, "192KB", "180KB")),
		"big* change rule big*: ipv6 192KB, ipv4 160KB -> big*: ipv6 180KB, ipv4 160KB (for 2 interfaces now, and those that appear; not for big0 (sockeye bigtcp apply has set its sizes))",
		"big1 change sizes ipv6 192000 -> 180000 (for new connections)")
	a.apply(t, bigTCPPolicy)
	if _, err := store.Revert(func(r sizing.Record) bool { return r.Owner == sizing.ByCommand }, false); err != nil {
		t.Fatal(err)
	}
	until(t, "the policy has it", func() bool { return a.sized(t, "big0").State == api.SizesApplied })
	wantSizes(t, "big0", sizesOn)

	// It may be borrowed by force.
	if _, err := store.Apply(n, sizing.ByCommand, []sizing.Target{{Interface: "big0", Want: sizing.Want{IPv6: 100000, IPv4: 100000}}}, true); err != nil {
		t.Fatal(err)
	}
	until(t, "that is seen", func() bool {
		return strings.HasPrefix(a.sized(t, "big0").Problem, "sockeye bigtcp apply has set its sizes")
	})
	if _, err := store.Revert(func(r sizing.Record) bool { return r.Owner == sizing.ByCommand }, false); err != nil {
		t.Fatal(err)
	}
	until(t, "the policy has it again", func() bool { return a.sized(t, "big0").State == api.SizesApplied })
	wantSizes(t, "big0", sizesOn)
}

// addTun makes a device that takes packets of 64 KiB, for as long as the test runs.
func addTun(t *testing.T, name string) {
	t.Helper()
	if err := os.MkdirAll("/dev/net", 0o755); err != nil {
		t.Fatal(err)
	}
	addLink(t, &netlink.Tuntap{LinkAttrs: netlink.LinkAttrs{Name: name}, Mode: netlink.TUNTAP_MODE_TUN})
}

func TestBigTCPImpossible(t *testing.T) {
	a := newSizing(t)
	addTun(t, "bigtun")
	addVeth(t, "big0")
	a.Start(t, bigTCPPolicy)
	wantSizes(t, "big0", sizesOn)
	wantSizes(t, "bigtun", sizesOff)
	wantState(t, a, "bigtun", api.SizesImpossible, "65536 bytes")
	wantChanges(t, "nothing", a.apply(t, bigTCPPolicy))
	text := "bigtcp:\n  - {interface: bigtun, ipv6: 192KB}\n  - {interface: \"big*\", ipv6: 180KB}\n"
	for name, try := range map[string]func(string) ([]api.Change, error){"plan": a.Plan, "apply": a.Apply} {
		if _, err := try(text); fault.Code(err) != fault.CodeUnsupported || !strings.Contains(err.Error(), "bigtun") {
			t.Errorf("%s: %v, code %d", name, err, fault.Code(err))
		}
	}
	wantSizes(t, "big0", sizesOn)
	// Off is possible.
	a.apply(t, strings.Replace(text, "192KB", "off", 1))
	wantState(t, a, "bigtun", api.SizesApplied, "")
	a.Stop()

	// At a start it is no reason not to do the rest.
	a = a.again(t)
	a.Start(t, text)
	wantState(t, a, "bigtun", api.SizesImpossible, "65536 bytes")
	wantSizes(t, "big0", netif.Sizes{GSO: 180000, GRO: 180000, GSOIPv4: 65536, GROIPv4: 65536})
}

// newNetns mounts a network namespace of its own at a path, as ip netns does.
func newNetns(t *testing.T, path string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	err := netns.Thread(func() error {
		f, err := os.OpenFile(path, os.O_RDONLY|os.O_CREATE|os.O_EXCL, 0)
		if err != nil {
			return err
		}
		f.Close()
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return err
		}
		return unix.Mount("/proc/thread-self/ns/net", path, "", unix.MS_BIND, "")
	})
	if err != nil {
		t.Fatalf("make network namespace: %v", err)
	}
	t.Cleanup(func() { removeNetns(t, path) })
}

// removeNetns removes a network namespace as ip netns does, if it is there.
func removeNetns(t *testing.T, path string) {
	t.Helper()
	if err := unix.Unmount(path, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
		t.Error(err)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
}

// vethInto makes a pair of which one end, NAME, is in the namespace at a path.
func vethInto(t *testing.T, path, name, peer string) {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	addLink(t, &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: peer}, PeerName: name, PeerNamespace: netlink.NsFd(f.Fd())})
}

// sizesIn reads the sizes of an interface of another namespace.
func sizesIn(t *testing.T, path, name string) netif.Sizes {
	t.Helper()
	n, err := netif.OpenNamespace(path)
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close()
	i, err := n.Interface(name)
	if err != nil {
		t.Fatal(err)
	}
	return i.Sizes
}

func TestBigTCPNetworkNamespaces(t *testing.T) {
	a := newSizing(t)
	path := filepath.Join(t.TempDir(), "netns", "blue")
	text := bigTCPPolicy + "  - {interface: inner, netns: " + path + ", ipv6: 192KB, ipv4: 160KB}\n"
	addVeth(t, "big0")
	a.Start(t, bigTCPPolicy)
	wantChanges(t, "a namespace that is not there", a.apply(t, text),
		path+"inner add rule inner of "+path+": ipv6 192KB, ipv4 160KB (there is no such network namespace now: when it appears)")
	wantSizes(t, "big0", sizesOn)
	wantState(t, a, "inner", api.SizesWaiting, "there is no network namespace "+path)
	wantChanges(t, "nor any more", a.apply(t, bigTCPPolicy), path+"inner remove rule inner of "+path+": ipv6 192KB, ipv4 160KB ()")
	wantChanges(t, "and again", a.apply(t, text),
		path+"inner add rule inner of "+path+": ipv6 192KB, ipv4 160KB (there is no such network namespace now: when it appears)")

	// It appears, with its folder.
	newNetns(t, path)
	until(t, "the namespace is entered", func() bool {
		got := a.sized(t, "inner")
		return got.State == api.SizesWaiting && got.Problem == "there is no such interface"
	})
	vethInto(t, path, "inner", "outer")
	until(t, "inner is set", func() bool { return a.sized(t, "inner").State == api.SizesApplied })
	if got := sizesIn(t, path, "inner"); got != sizesOn {
		t.Errorf("inner has %+v", got)
	}
	wantSizes(t, "outer", sizesOff)

	// A policy without it takes it back, the one before sets it again.
	a.apply(t, bigTCPPolicy)
	if got := sizesIn(t, path, "inner"); got != sizesOff {
		t.Errorf("inner has %+v", got)
	}
	wantChanges(t, "again", a.apply(t, text),
		path+"inner add rule inner of "+path+": ipv6 192KB, ipv4 160KB (for new connections)",
		path+"inner change sizes ipv6 65536 -> 192000, ipv4 65536 -> 160000 (for new connections)")
	if got := sizesIn(t, path, "inner"); got != sizesOn {
		t.Errorf("inner has %+v", got)
	}

	// It vanishes: the agent does not keep it alive, so the pair goes with it.
	removeNetns(t, path)
	until(t, "the namespace is gone", func() bool {
		_, err := netlink.LinkByName("outer")
		return errors.As(err, new(netlink.LinkNotFoundError))
	})
	until(t, "that is shown", func() bool {
		return strings.HasPrefix(a.sized(t, "inner").Problem, "there is no network namespace")
	})
	wantSizes(t, "big0", sizesOn)
	records, err := a.sizing().records.Records()
	if err != nil || len(records) != 1 || records[0].Interface != "big0" {
		t.Errorf("records %+v, %v", records, err)
	}

	// Another one at its place.
	newNetns(t, path)
	vethInto(t, path, "inner", "outer")
	until(t, "inner is set again", func() bool { return a.sized(t, "inner").State == api.SizesApplied })
	a.Stop()

	a = a.again(t)
	a.Start(t, noSizes)
	if got := sizesIn(t, path, "inner"); got != sizesOff {
		t.Errorf("inner has %+v after the policy has ended", got)
	}
	wantSizes(t, "big0", sizesOff)

	// What is there and is no namespace is the policy's mistake.
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := a.Apply(strings.ReplaceAll(text, path, file)); fault.Code(err) != fault.CodeUsage {
		t.Errorf("a file: %v, code %d", err, fault.Code(err))
	}
	wantSizes(t, "big0", sizesOff)
}

// All or nothing: where a later step fails, sizes are as they were.
func TestBigTCPUndone(t *testing.T) {
	a := newSizing(t)
	addVeth(t, "big0")
	a.Start(t, noSizes)
	back, err := a.sizing().apply(sizings(parsed(t, bigTCPPolicy))[0])
	if err != nil {
		t.Fatal(err)
	}
	wantSizes(t, "big0", sizesOn)
	if err := back(); err != nil {
		t.Fatal(err)
	}
	wantSizes(t, "big0", sizesOff)
	a.apply(t, bigTCPPolicy)
	for name, text := range map[string]string{"changed": strings.ReplaceAll(bigTCPPolicy, "192KB", "180KB"), "removed": noSizes} {
		c := bigTCPChange{}
		for _, c = range sizings(parsed(t, text)) {
		}
		if back, err = a.sizing().apply(c); err != nil {
			t.Fatal(err)
		}
		if got := sizesOf(t, "big0"); got == sizesOn {
			t.Errorf("%s: nothing is done", name)
		}
		if err := back(); err != nil {
			t.Fatal(err)
		}
		wantSizes(t, "big0", sizesOn)
		wantState(t, a, "big0", api.SizesApplied, "")
	}
}

// Many interfaces that change alike are one row of a plan, and one that cannot is no
// obstacle to them.
func TestBigTCPCrowd(t *testing.T) {
	a := newSizing(t)
	const crowd = 30
	for i := range crowd {
		addVeth(t, fmt.Sprintf("big%d", i))
	}
	addTun(t, "bigtun")
	a.Start(t, noSizes)
	changes := a.apply(t, bigTCPPolicy)
	wantChanges(t, "on", []string{changes[len(changes)-1]}, "big0 and 29 more change sizes ipv6 65536 -> 192000, ipv4 65536 -> 160000 (for new connections)")
	if len(changes) != 2 || !strings.Contains(changes[0], "(for 31 interfaces now, and those that appear; not for bigtun (") {
		t.Errorf("%q", changes)
	}
	for i := range crowd {
		wantSizes(t, fmt.Sprintf("big%d", i), sizesOn)
	}
	status := a.Status(t)
	if status.BigTCP[0].Applied != crowd || status.BigTCP[0].Impossible != 1 || len(status.BigTCP[0].Problems) != 1 {
		t.Errorf("%+v", status)
	}
	wantChanges(t, "off", a.apply(t, noSizes),
		"big* remove rule big*: ipv6 192KB, ipv4 160KB (its interfaces get the sizes that they had before)",
		"big0 and 29 more change sizes ipv6 192000 -> 65536, ipv4 160000 -> 65536 (as they were before)")
	for i := range crowd {
		wantSizes(t, fmt.Sprintf("big%d", i), sizesOff)
	}
}

func TestBigTCPMetrics(t *testing.T) {
	a := newSizing(t)
	addVeth(t, "big0")
	address := "127.0.0.1:9735"
	a.Start(t, bigTCPPolicy+"  - {interface: inner, netns: /run/netns/sockeye-none, ipv6: 192KB}\n")
	defer a.Serve(t, address)()
	mine := regexp.MustCompile(`(?m)^(# (HELP|TYPE) )?sockeye_bigtcp_.*\n`)
	text := strings.Join(mine.FindAllString(domaintest.Scrape(t, address), -1), "")
	problems, err := promlint.New(strings.NewReader(text)).Lint()
	if err != nil || len(problems) > 0 {
		t.Errorf("promlint: %v %v", problems, err)
	}
	const file = "testdata/metrics.golden"
	if os.Getenv("UPDATE") != "" {
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if text != string(want) {
		t.Errorf("the metrics changed; run with UPDATE=1 if they should, and mend docs/metrics.md.\ngot\n%s\nwant\n%s", text, want)
	}
	meddle(t, "big0", sizesOff)
	for _, line := range []string{
		`sockeye_bigtcp_changes_seen_total{netns=""} 1`,
		`sockeye_bigtcp_state{interface="big0",netns="",state="changed"} 1`,
		`sockeye_bigtcp_max_size_bytes{direction="send",family="ipv4",interface="big0",netns=""} 65536`,
	} {
		until(t, line, func() bool { return strings.Contains(domaintest.Scrape(t, address), line+"\n") })
	}
}

func parsed(t *testing.T, text string) *config.Policy {
	t.Helper()
	p, err := config.Parse([]byte(text), "policy.yaml")
	if err != nil {
		t.Fatal(err)
	}
	return p
}
