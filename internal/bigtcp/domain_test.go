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
	"strconv"
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

// runner runs the domain without an agent.
type runner struct{ *domaintest.Runner }

func newRunner(t *testing.T, stateDir, pins string, log slog.Handler) runner {
	t.Helper()
	h := domaintest.Host(t, stateDir, pins, log)
	a := runner{domaintest.New(h, New(h))}
	t.Cleanup(a.Stop)
	return a
}

func (a runner) sizing() *Domain { return a.Domains[0].(*Domain) }

// newSizing returns a runner without a policy. It skips the test on kernels without BIG
// TCP for both families.
func newSizing(t *testing.T) runner { return newSizingWithLog(t, slog.DiscardHandler) }

func newSizingWithLog(t *testing.T, log slog.Handler) runner {
	t.Helper()
	n, err := netif.OpenNamespace("")
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close()
	if s := n.Support(); !s.IPv6 || !s.IPv4 {
		t.Skip("kernel: BIG TCP for both families needs Linux 6.3")
	}
	return newRunner(t, t.TempDir(), testenv.BPFFS(t)+"/sockeye", log)
}

// again returns a runner of the next agent, after a was stopped.
func (a runner) again(t *testing.T) runner {
	t.Helper()
	return newRunner(t, a.Host.StateDir, a.Host.Root.Dir, slog.DiscardHandler)
}

// addLink adds an interface for the duration of the test.
func addLink(t *testing.T, l netlink.Link) {
	t.Helper()
	name := l.Attrs().Name
	if err := netlink.LinkAdd(l); err != nil {
		t.Fatalf("add %s: %v", name, err)
	}
	t.Cleanup(func() { removeLink(t, name) })
}

// removeLink removes an interface, if it exists.
func removeLink(t *testing.T, name string) {
	t.Helper()
	if l, err := netlink.LinkByName(name); err == nil {
		if err := netlink.LinkDel(l); err != nil {
			t.Errorf("remove %s: %v", name, err)
		}
	}
}

// addVeth adds a veth pair, NAME and peer-NAME.
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

// setAsOther sets sizes as another program does.
func setAsOther(t *testing.T, name string, s netif.Sizes) {
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

// waitFor waits up to a minute until condition holds.
func waitFor(t *testing.T, what string, condition func() bool) {
	t.Helper()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for late := time.After(time.Minute); !condition(); {
		select {
		case <-tick.C:
		case <-late:
			t.Fatalf("not in a minute: %s", what)
		}
	}
}

// interfaceStatus returns the status of the interface, or of the rule, with a name.
func (a runner) interfaceStatus(t *testing.T, name string) api.BigTCPInterface {
	t.Helper()
	status, err := a.sizing().Interfaces("", name)
	if err != nil || len(status.Interfaces) != 1 {
		return api.BigTCPInterface{State: fmt.Sprintf("%+v, %v", status, err)}
	}
	return status.Interfaces[0]
}

func wantState(t *testing.T, a runner, name, state, problem string) {
	t.Helper()
	got := a.interfaceStatus(t, name)
	if got.State != state || !strings.Contains(got.Problem, problem) || (problem == "") != (got.Problem == "") || got.Since.IsZero() {
		t.Errorf("%s is %+v, want %s %q", name, got, state, problem)
	}
}

// apply applies a policy and returns the changes as texts.
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
		"big* add rule big*: ipv6 192KB, ipv4 160KB (for 1 existing interface, and for those that appear)",
		"big0 change "+on+" (for new connections)")
	wantSizes(t, "big0", sizesOn)
	wantSizes(t, "other0", sizesOff)
	wantSizes(t, "peer-big0", sizesOff)
	wantState(t, a, "big0", api.SizesApplied, "")
	if got := a.interfaceStatus(t, "big0"); got.Rule != "big*: ipv6 192KB, ipv4 160KB" || got.Requested != (sizing.Want{IPv6: 192000, IPv4: 160000}) || got.Sizes != sizesOn {
		t.Errorf("%+v", got)
	}
	wantChanges(t, "nothing", a.apply(t, bigTCPPolicy))
	wantChanges(t, "larger", a.apply(t, strings.ReplaceAll(bigTCPPolicy, "192KB", "200KB")),
		"big* change rule big*: ipv6 192KB, ipv4 160KB -> big*: ipv6 200KB, ipv4 160KB (for 1 existing interface, and for those that appear)",
		"big0 change sizes ipv6 192000 -> 200000 (for new connections)")
	wantSizes(t, "big0", netif.Sizes{GSO: 200000, GRO: 200000, GSOIPv4: 160000, GROIPv4: 160000})
	wantChanges(t, "a name before a glob", a.apply(t, "bigtcp:\n  - {interface: big0, ipv6: off}\n  - {interface: \"big*\", ipv6: 192KB, ipv4: 160KB}\n"),
		"big0 add rule big0: ipv6 off (for new connections)",
		"big* change rule big*: ipv6 200KB, ipv4 160KB -> big*: ipv6 192KB, ipv4 160KB (when such an interface appears)",
		"big0 change sizes ipv6 200000 -> 65536, ipv4 160000 -> 65536 (for new connections)")
	wantSizes(t, "big0", sizesOff)
	wantState(t, a, "big*", api.SizesWaiting, "there is no such interface")
	if _, err := a.Apply(strings.ReplaceAll(bigTCPPolicy, "192KB", "200KB")); err != nil {
		t.Fatal(err)
	}
	wantSizes(t, "big0", netif.Sizes{GSO: 200000, GRO: 200000, GSOIPv4: 160000, GROIPv4: 160000})
	wantChanges(t, "off", a.apply(t, noSizes),
		"big* remove rule big*: ipv6 200KB, ipv4 160KB (its interfaces get their previous sizes)",
		"big0 change sizes ipv6 200000 -> 65536, ipv4 160000 -> 65536 (previous sizes)")
	wantSizes(t, "big0", sizesOff)
	if left, err := a.sizing().records.Records(); err != nil || len(left) > 0 {
		t.Errorf("records are left: %+v, %v", left, err)
	}
}

// Lower interfaces are set together with their upper interface, and reported.
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
		"big* add rule big*: ipv6 192KB, ipv4 160KB (for 1 existing interface, and for those that appear)",
		"bigbr change "+on+" (for new connections)",
		"port0 change "+on+" (for new connections; lower interface of bigbr)")
	wantSizes(t, "bigbr", sizesOn)
	wantSizes(t, "port0", sizesOn)
	if got := a.interfaceStatus(t, "port0"); got.UpperInterface != "bigbr" || got.State != api.SizesApplied {
		t.Errorf("%+v", got)
	}

	// A group with an interface that another program has changed is not set.
	other := netif.Sizes{GSO: 100000, GRO: 100000, GSOIPv4: 100000, GROIPv4: 100000}
	setAsOther(t, "port0", other)
	waitFor(t, "the port is seen to be changed", func() bool { return a.interfaceStatus(t, "port0").State == api.SizesChanged })
	wantState(t, a, "bigbr", api.SizesApplied, "")
	a.Stop()
	a = a.again(t)
	a.Start(t, strings.ReplaceAll(bigTCPPolicy, "192KB", "180KB"))
	wantSizes(t, "port0", other)
	wantSizes(t, "bigbr", sizesOn)
	wantState(t, a, "bigbr", api.SizesConflict, "not set, because of interface port0: its sizes were changed externally and are kept")
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
	waitFor(t, "big0 is set", func() bool { return a.interfaceStatus(t, "big0").State == api.SizesApplied })
	wantSizes(t, "big0", sizesOn)
	addVeth(t, "big1")
	waitFor(t, "big1 is set", func() bool { return a.interfaceStatus(t, "big1").State == api.SizesApplied })
	wantSizes(t, "big1", sizesOn)
	removeLink(t, "big0")
	waitFor(t, "big0 is forgotten", func() bool {
		records, err := a.sizing().records.Records()
		return err == nil && len(records) == 1 && records[0].Interface == "big1"
	})
	if _, err := a.sizing().Interfaces("", "big0"); fault.Code(err) != fault.CodeUsage || fault.Hint(err) != "did you mean big1?" {
		t.Errorf("an interface that has vanished: %v, hint %q", err, fault.Hint(err))
	}
	// A renamed interface does not match the rule any more.
	l, err := netlink.LinkByName("big1")
	if err != nil {
		t.Fatal(err)
	}
	if err := netlink.LinkSetName(l, "small1"); err != nil {
		t.Fatal(err)
	}
	defer removeLink(t, "small1")
	waitFor(t, "small1 has what it had before", func() bool { return sizesOf(t, "small1") == sizesOff })
	waitFor(t, "the rule waits", func() bool { return a.interfaceStatus(t, "big*").State == api.SizesWaiting })
}

// logBuffer is a log that can be read while it is written.
type logBuffer struct {
	mu   sync.Mutex
	text strings.Builder
}

func (r *logBuffer) Write(p []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.text.Write(p)
}

func (r *logBuffer) count(part string) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return strings.Count(r.text.String(), part)
}

// Sizes that another program sets are detected, logged once, and kept until the policy
// is applied again.
func TestBigTCPChangedByOthers(t *testing.T) {
	var log logBuffer
	a := newSizingWithLog(t, slog.NewTextHandler(&log, nil))
	addVeth(t, "big0")
	addVeth(t, "big1")
	a.Start(t, bigTCPPolicy)
	other := netif.Sizes{GSO: 100000, GRO: 192000, GSOIPv4: 160000, GROIPv4: 160000}
	setAsOther(t, "big0", other)
	setAsOther(t, "big1", sizesOff) // the previous sizes, but set by another program
	waitFor(t, "changes are seen", func() bool {
		return a.interfaceStatus(t, "big0").State == api.SizesChanged && a.interfaceStatus(t, "big1").State == api.SizesChanged
	})
	wantState(t, a, "big0", api.SizesChanged, "its sizes were changed externally and are kept")
	addVeth(t, "big2") // the next reconcile keeps them, too
	waitFor(t, "big2 is set", func() bool { return a.interfaceStatus(t, "big2").State == api.SizesApplied })
	wantSizes(t, "big0", other)
	wantSizes(t, "big1", sizesOff)
	for _, name := range []string{"big0", "big1"} {
		if n := log.count(`level=WARN msg="sizes changed externally and kept" netns="" interface=` + name); n != 1 {
			t.Errorf("%s: %d warnings", name, n)
		}
	}

	status := a.Status(t)
	if len(status.BigTCP) != 1 || status.BigTCP[0].Applied != 1 || status.BigTCP[0].Changed != 2 || len(status.BigTCP[0].Problems) != 2 {
		t.Errorf("%+v", status)
	}

	// Rolling back a change restores the sizes that another program had set.
	s := a.sizing().reconcilers[""]
	rollback, err := a.sizing().apply(namespaceRules{rules: s.rules})
	if err != nil {
		t.Fatal(err)
	}
	wantSizes(t, "big0", sizesOn)
	if err := rollback(); err != nil {
		t.Fatal(err)
	}
	wantSizes(t, "big0", other)
	wantState(t, a, "big0", api.SizesChanged, "its sizes were changed externally and are kept")
	wantState(t, a, "big1", api.SizesChanged, "its sizes were changed externally and are kept")

	// The next agent keeps them, too.
	a.Stop()
	a = a.again(t)
	a.Start(t, bigTCPPolicy)
	wantSizes(t, "big0", other)
	wantSizes(t, "big1", sizesOff)
	wantState(t, a, "big0", api.SizesChanged, "its sizes were changed externally and are kept")
	wantState(t, a, "big1", api.SizesChanged, "its sizes were changed externally and are kept")
	wantChanges(t, "set again", a.apply(t, bigTCPPolicy),
		"big0 change sizes ipv6 send 100000 -> 192000 (overwrites sizes that were set externally)",
		"big1 change sizes ipv6 65536 -> 192000, ipv4 65536 -> 160000 (overwrites sizes that were set externally)")
	for _, name := range []string{"big0", "big1", "big2"} {
		wantSizes(t, name, sizesOn)
		wantState(t, a, name, api.SizesApplied, "")
	}

	// An interface that a command reverts by force stays reverted.
	if _, err := a.sizing().records.Revert(func(r sizing.Record) bool { return r.Interface == "big1" }, true); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "the revert is seen", func() bool { return a.interfaceStatus(t, "big1").State == api.SizesChanged })
	wantSizes(t, "big1", sizesOff)

	// Sizes of another program stay when the rule is removed, and are reported while the
	// namespace has rules.
	setAsOther(t, "big0", other)
	waitFor(t, "the change is seen", func() bool { return a.interfaceStatus(t, "big0").State == api.SizesChanged })
	wantChanges(t, "another rule", a.apply(t, "bigtcp: [{interface: big1, ipv6: 192KB}]\n"),
		"big* remove rule big*: ipv6 192KB, ipv4 160KB (its interfaces get their previous sizes; except big0, big1, changed externally)",
		"big1 add rule big1: ipv6 192KB (for new connections)",
		"big1 change sizes ipv6 65536 -> 192000 (overwrites sizes that were set externally)",
		"big2 change sizes ipv6 192000 -> 65536, ipv4 160000 -> 65536 (previous sizes)")
	wantSizes(t, "big0", other)
	wantSizes(t, "big1", netif.Sizes{GSO: 192000, GRO: 192000, GSOIPv4: 65536, GROIPv4: 65536})
	wantSizes(t, "big2", sizesOff)
	wantState(t, a, "big0", api.SizesChanged, "no rule matches the interface any more; its sizes were changed externally and are kept")
	wantChanges(t, "nothing more", a.apply(t, "bigtcp: [{interface: big1, ipv6: 192KB}]\n"))
}

// The sizes stay when the agent exits, and the next agent takes them over.
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

	// Simulate an agent that was killed after it wrote the records.
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
	setAsOther(t, "big0", sizesOff)
	a = a.again(t)
	a.Start(t, bigTCPPolicy)
	wantSizes(t, "big0", sizesOn)
	wantSizes(t, "big2", sizesOn)
	setAsOther(t, "big2", sizesOff) // its record is complete by now
	waitFor(t, "the change is seen", func() bool { return a.interfaceStatus(t, "big2").State == api.SizesChanged })
	a.Stop()

	a = a.again(t)
	a.Start(t, noSizes)
	wantSizes(t, "big0", sizesOff)
	wantSizes(t, "big2", sizesOff)
	if left, err := a.sizing().records.Records(); err != nil || len(left) > 0 {
		t.Errorf("records are left: %+v, %v", left, err)
	}
}

// The agent does not change interfaces of a command until the command is reverted.
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
	wantState(t, a, "big0", api.SizesConflict, "its sizes were set by sockeye bigtcp apply")
	if got := a.interfaceStatus(t, "big0").Hint; got != "sockeye bigtcp revert big0 hands it over to the policy" {
		t.Errorf("hint %q", got)
	}
	addVeth(t, "big1")
	waitFor(t, "another is set", func() bool { return a.interfaceStatus(t, "big1").State == api.SizesApplied })
	wantChanges(t, "nothing to take", a.apply(t, bigTCPPolicy))
	wantSizes(t, "big0", held)
	wantChanges(t, "larger", a.apply(t, strings.ReplaceAll(bigTCPPolicy, "192KB", "180KB")),
		"big* change rule big*: ipv6 192KB, ipv4 160KB -> big*: ipv6 180KB, ipv4 160KB (for 2 existing interfaces, and for those that appear; not for big0 (its sizes were set by sockeye bigtcp apply))",
		"big1 change sizes ipv6 192000 -> 180000 (for new connections)")
	a.apply(t, bigTCPPolicy)
	if _, err := store.Revert(func(r sizing.Record) bool { return r.Owner == sizing.ByCommand }, false); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "the policy has it", func() bool { return a.interfaceStatus(t, "big0").State == api.SizesApplied })
	wantSizes(t, "big0", sizesOn)

	// A command may take the interface over by force.
	if _, err := store.Apply(n, sizing.ByCommand, []sizing.Target{{Interface: "big0", Want: sizing.Want{IPv6: 100000, IPv4: 100000}}}, true); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "that is seen", func() bool {
		return strings.HasPrefix(a.interfaceStatus(t, "big0").Problem, "its sizes were set by sockeye bigtcp apply")
	})
	if _, err := store.Revert(func(r sizing.Record) bool { return r.Owner == sizing.ByCommand }, false); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "the policy has it again", func() bool { return a.interfaceStatus(t, "big0").State == api.SizesApplied })
	wantSizes(t, "big0", sizesOn)
}

// TestBigTCPLocked checks that a rule whose sizes cannot be reverted stays in force.
func TestBigTCPLocked(t *testing.T) {
	a := newSizing(t)
	addVeth(t, "big0")
	a.Start(t, bigTCPPolicy)
	lock, err := os.Open(filepath.Join(a.Host.StateDir, "bigtcp"))
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Close()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	if _, err := a.Apply(noSizes); fault.Code(err) != fault.CodeConflict {
		t.Errorf("with locked records: %v", err)
	}
	wantSizes(t, "big0", sizesOn)
	lock.Close()
	if _, err := a.Apply(noSizes); err != nil {
		t.Error(err)
	}
	wantSizes(t, "big0", sizesOff)
}

// eventSockets returns the netlink sockets of this process that receive events.
func eventSockets(t *testing.T) (fds []int) {
	t.Helper()
	files, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		fd, err := strconv.Atoi(f.Name())
		if err != nil {
			t.Fatal(err)
		}
		if a, err := unix.Getsockname(fd); err == nil {
			if a, ok := a.(*unix.SockaddrNetlink); ok && a.Groups != 0 {
				fds = append(fds, fd)
			}
		}
	}
	return fds
}

// TestBigTCPWatchFails checks that the interfaces of the agent's network namespace are configured again after their watch has
// failed.
func TestBigTCPWatchFails(t *testing.T) {
	a := newSizing(t)
	addVeth(t, "big0")
	a.Start(t, bigTCPPolicy)
	wantSizes(t, "big0", sizesOn)
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	sockets := eventSockets(t)
	if len(sockets) == 0 {
		t.Fatal("no socket receives events")
	}
	for _, fd := range sockets { // a read returns EOF from here on
		if err := unix.Dup3(int(null.Fd()), fd, unix.O_CLOEXEC); err != nil {
			t.Fatal(err)
		}
	}
	waitFor(t, "another watch", func() bool { return len(eventSockets(t)) > 0 })
	setAsOther(t, "big0", sizesOff)
	waitFor(t, "the change is seen", func() bool { return a.interfaceStatus(t, "big0").State == api.SizesChanged })
	addVeth(t, "big1")
	waitFor(t, "a new interface is set", func() bool { return sizesOf(t, "big1") == sizesOn })
}

// addTun adds a TUN device, whose tso_max_size is 64 KiB, for the duration of the test.
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
	// The rule "off" is possible.
	a.apply(t, strings.Replace(text, "192KB", "off", 1))
	wantState(t, a, "bigtun", api.SizesApplied, "")
	a.Stop()

	// When the agent starts, the other interfaces are set.
	a = a.again(t)
	a.Start(t, text)
	wantState(t, a, "bigtun", api.SizesImpossible, "65536 bytes")
	wantSizes(t, "big0", netif.Sizes{GSO: 180000, GRO: 180000, GSOIPv4: 65536, GROIPv4: 65536})
}

// newNetns creates a network namespace and mounts it at a path, as ip netns does.
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

// removeNetns removes a network namespace as ip netns does, if it exists.
func removeNetns(t *testing.T, path string) {
	t.Helper()
	if err := unix.Unmount(path, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
		t.Error(err)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
}

// vethInto adds a veth pair with the end NAME in the namespace at a path.
func vethInto(t *testing.T, path, name, peer string) {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	addLink(t, &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: peer}, PeerName: name, PeerNamespace: netlink.NsFd(f.Fd())})
}

// sizesIn returns the sizes of an interface in another namespace.
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
		path+"inner add rule inner of "+path+": ipv6 192KB, ipv4 160KB (when the network namespace appears)")
	wantSizes(t, "big0", sizesOn)
	wantState(t, a, "inner", api.SizesWaiting, "there is no network namespace "+path)
	wantChanges(t, "nor any more", a.apply(t, bigTCPPolicy), path+"inner remove rule inner of "+path+": ipv6 192KB, ipv4 160KB ()")
	wantChanges(t, "and again", a.apply(t, text),
		path+"inner add rule inner of "+path+": ipv6 192KB, ipv4 160KB (when the network namespace appears)")

	// The namespace appears, with its directory.
	newNetns(t, path)
	waitFor(t, "the namespace is entered", func() bool {
		got := a.interfaceStatus(t, "inner")
		return got.State == api.SizesWaiting && got.Problem == "there is no such interface"
	})
	vethInto(t, path, "inner", "outer")
	waitFor(t, "inner is set", func() bool { return a.interfaceStatus(t, "inner").State == api.SizesApplied })
	if got := sizesIn(t, path, "inner"); got != sizesOn {
		t.Errorf("inner has %+v", got)
	}
	wantSizes(t, "outer", sizesOff)

	// A policy without the rule reverts the interface, and the previous policy sets it again.
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

	// The namespace vanishes: the agent does not keep it alive, so the veth pair vanishes, too.
	removeNetns(t, path)
	waitFor(t, "the namespace is gone", func() bool {
		_, err := netlink.LinkByName("outer")
		return errors.As(err, new(netlink.LinkNotFoundError))
	})
	waitFor(t, "that is shown", func() bool {
		return strings.HasPrefix(a.interfaceStatus(t, "inner").Problem, "there is no network namespace")
	})
	wantSizes(t, "big0", sizesOn)
	records, err := a.sizing().records.Records()
	if err != nil || len(records) != 1 || records[0].Interface != "big0" {
		t.Errorf("records %+v, %v", records, err)
	}

	// Another namespace appears at the path.
	newNetns(t, path)
	vethInto(t, path, "inner", "outer")
	waitFor(t, "inner is set again", func() bool { return a.interfaceStatus(t, "inner").State == api.SizesApplied })
	a.Stop()

	a = a.again(t)
	a.Start(t, noSizes)
	if got := sizesIn(t, path, "inner"); got != sizesOff {
		t.Errorf("inner has %+v after the policy has ended", got)
	}
	wantSizes(t, "big0", sizesOff)

	// A path with another file is an error in the policy.
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := a.Apply(strings.ReplaceAll(text, path, file)); fault.Code(err) != fault.CodeUsage {
		t.Errorf("a file: %v, code %d", err, fault.Code(err))
	}
	wantSizes(t, "big0", sizesOff)
}

// A rolled-back change restores the sizes.
func TestBigTCPRollback(t *testing.T) {
	a := newSizing(t)
	addVeth(t, "big0")
	a.Start(t, noSizes)
	rollback, err := a.sizing().apply(rulesByNamespace(parsed(t, bigTCPPolicy))[0])
	if err != nil {
		t.Fatal(err)
	}
	wantSizes(t, "big0", sizesOn)
	if err := rollback(); err != nil {
		t.Fatal(err)
	}
	wantSizes(t, "big0", sizesOff)
	a.apply(t, bigTCPPolicy)
	for name, text := range map[string]string{"changed": strings.ReplaceAll(bigTCPPolicy, "192KB", "180KB"), "removed": noSizes} {
		c := namespaceRules{}
		for _, c = range rulesByNamespace(parsed(t, text)) {
		}
		if rollback, err = a.sizing().apply(c); err != nil {
			t.Fatal(err)
		}
		if got := sizesOf(t, "big0"); got == sizesOn {
			t.Errorf("%s: nothing is done", name)
		}
		if err := rollback(); err != nil {
			t.Fatal(err)
		}
		wantSizes(t, "big0", sizesOn)
		wantState(t, a, "big0", api.SizesApplied, "")
	}
}

// Many interfaces with the same change are one row of a plan, and an interface that does
// not support the sizes does not keep the others from being set.
func TestBigTCPManyInterfaces(t *testing.T) {
	a := newSizing(t)
	const count = 30
	for i := range count {
		addVeth(t, fmt.Sprintf("big%d", i))
	}
	addTun(t, "bigtun")
	a.Start(t, noSizes)
	changes := a.apply(t, bigTCPPolicy)
	wantChanges(t, "on", []string{changes[len(changes)-1]}, "big0 and 29 more change sizes ipv6 65536 -> 192000, ipv4 65536 -> 160000 (for new connections)")
	if len(changes) != 2 || !strings.Contains(changes[0], "(for 31 existing interfaces, and for those that appear; not for bigtun (") {
		t.Errorf("%q", changes)
	}
	for i := range count {
		wantSizes(t, fmt.Sprintf("big%d", i), sizesOn)
	}
	status := a.Status(t)
	if status.BigTCP[0].Applied != count || status.BigTCP[0].Impossible != 1 || len(status.BigTCP[0].Problems) != 1 {
		t.Errorf("%+v", status)
	}
	wantChanges(t, "off", a.apply(t, noSizes),
		"big* remove rule big*: ipv6 192KB, ipv4 160KB (its interfaces get their previous sizes)",
		"big0 and 29 more change sizes ipv6 192000 -> 65536, ipv4 160000 -> 65536 (previous sizes)")
	for i := range count {
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
		t.Errorf("the metrics changed; run with UPDATE=1 if that is intended, and update docs/metrics.md.\ngot\n%s\nwant\n%s", text, want)
	}
	setAsOther(t, "big0", sizesOff)
	for _, line := range []string{
		`sockeye_bigtcp_changes_seen_total{netns=""} 1`,
		`sockeye_bigtcp_state{interface="big0",netns="",state="changed"} 1`,
		`sockeye_bigtcp_max_size_bytes{direction="send",family="ipv4",interface="big0",netns=""} 65536`,
	} {
		waitFor(t, line, func() bool { return strings.Contains(domaintest.Scrape(t, address), line+"\n") })
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
