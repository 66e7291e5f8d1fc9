// SPDX-License-Identifier: Apache-2.0

package sizing

import (
	"fmt"
	"maps"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"sockeye/internal/bigtcp/netif"
	"sockeye/internal/bigtcp/netif/netiftest"
	"sockeye/internal/fault"
)

// steps are the sizes that the tests set, in bytes.
var ladder = []uint32{netif.Legacy, 100000, large, netif.MaxSize}

// TestTransitions changes each of the four sizes to each other one, for both families.
func TestTransitions(t *testing.T) {
	h := newChangeHost(t)
	h.veth("big0")
	for _, from6 := range ladder {
		for _, from4 := range ladder {
			before := netiftest.Sizes(from6, from6, from4, from4)
			for _, to6 := range append([]uint32{0}, ladder...) {
				for _, to4 := range append([]uint32{0}, ladder...) {
					w := Want{IPv6: to6, IPv4: to4}
					if w == (Want{}) {
						continue
					}
					after := before
					if to6 != 0 {
						after.GSO, after.GRO = to6, to6
					}
					if to4 != 0 {
						after.GSOIPv4, after.GROIPv4 = to4, to4
					}
					h.set("big0", before)
					h.is(before, "big0")
					changes := h.apply(Target{"big0", w})
					h.is(after, "big0")
					if len(changes) != 1 || changes[0].From != before || changes[0].To != after || changes[0].UpperInterface != "" {
						t.Errorf("from %v by %v: changes are %+v", before, w, changes)
					}
					want := "map[]"
					if before != after {
						want = "map[big0:reverted]"
					}
					if got := fmt.Sprint(h.revert()); got != want {
						t.Errorf("from %v by %v: %s", before, w, got)
					}
					h.is(before, "big0")
				}
			}
		}
	}
}

// names returns the interfaces of changes, in order.
func names(changes []Change) string {
	var list []string
	for _, c := range changes {
		list = append(list, c.Interface)
	}
	return strings.Join(list, " ")
}

// TestPath applies sizes to a macvlan over a bridge over two veth interfaces, and reverts them.
func TestPath(t *testing.T) {
	h := newChangeHost(t)
	h.veth("big0")
	h.veth("big1")
	bridge := h.bridge("bigbr", "big0", "big1")
	h.macvlan("bigmac", bridge)
	path := []string{"big0", "big1", "bigbr", "bigmac"}

	changes := h.apply(Target{"bigmac", wantOn})
	h.is(sizesOn, path...)
	h.is(sizesOff, "big0p", "big1p")
	if got := names(changes); got != "big0 big1 bigbr bigmac" {
		t.Errorf("they are changed in the order %s", got)
	}
	for _, c := range changes {
		if want := map[bool]string{false: "bigmac"}[c.Interface == "bigmac"]; c.UpperInterface != want {
			t.Errorf("%s is changed because of %q", c.Interface, c.UpperInterface)
		}
	}
	done, err := h.Revert(nil, false)
	if err != nil {
		t.Fatal(err)
	}
	var order []string
	for _, r := range done {
		order = append(order, r.Interface+" "+r.Result)
	}
	if got := strings.Join(order, ", "); got != "bigmac reverted, bigbr reverted, big0 reverted, big1 reverted" {
		t.Errorf("they are taken back in the order %s", got)
	}
	h.is(sizesOff, path...)
	if got := h.recorded(); len(got) > 0 {
		t.Errorf("records are left: %v", got)
	}
}

// TestEveryOrder requests the interfaces of a path in every order, in one call and in several, each with another
// size.
func TestEveryOrder(t *testing.T) {
	h := newChangeHost(t)
	h.veth("big0")
	h.veth("big1")
	bridge := h.bridge("bigbr", "big0", "big1")
	h.macvlan("bigmac", bridge)
	targets := []Target{
		{"big0", Want{IPv6: large}}, {"big1", Want{IPv4: 100000}},
		{"bigbr", Want{IPv6: 100000, IPv4: large}}, {"bigmac", Want{IPv6: netif.MaxSize, IPv4: netif.MaxSize}},
	}
	after := func(names ...string) map[string]netif.Sizes {
		now := map[string]netif.Sizes{}
		for _, name := range names {
			now[name] = h.sizes(name)
		}
		return now
	}
	want := map[string]netif.Sizes{
		"big0":   netiftest.Sizes(large, large, netif.MaxSize, netif.MaxSize),
		"big1":   netiftest.Sizes(netif.MaxSize, netif.MaxSize, 100000, 100000),
		"bigbr":  netiftest.Sizes(100000, 100000, large, large),
		"bigmac": netiftest.Sizes(netif.MaxSize, netif.MaxSize, netif.MaxSize, netif.MaxSize),
	}
	for _, order := range permutations(targets) {
		h.apply(order...)
		if got := after("big0", "big1", "bigbr", "bigmac"); !maps.Equal(got, want) {
			t.Errorf("asked for as %v: %v", order, got)
		}
		h.revert()
		h.is(sizesOff, "big0", "big1", "bigbr", "bigmac")

		for _, target := range order {
			h.apply(target)
		}
		if got := after("big0", "big1", "bigbr", "bigmac"); !maps.Equal(got, want) {
			t.Errorf("asked for one by one as %v: %v", order, got)
		}
		for _, target := range order {
			h.revert(target.Interface)
		}
		h.is(sizesOff, "big0", "big1", "bigbr", "bigmac")
		if got := h.recorded(); len(got) > 0 {
			t.Fatalf("records are left: %v", got)
		}
	}
}

// TestApplyAgain repeats an apply, as the agent does at each check: nothing may change, including the files.
func TestApplyAgain(t *testing.T) {
	h := newChangeHost(t)
	lower := h.veth("big0")
	h.macvlan("bigmac", lower)
	apply := func() {
		for _, name := range []string{"bigmac", "big0"} {
			if _, err := h.Apply(h.network, ByPolicy, []Target{{name, wantOn}}, false); err != nil {
				t.Fatal(err)
			}
		}
	}
	apply()
	h.before = func() { t.Error("something is changed that is as wanted") }
	apply()
}

// TestNotOurs checks that interfaces that already have the requested sizes are not recorded.
func TestNotOurs(t *testing.T) {
	h := newChangeHost(t)
	lower := h.veth("big0")
	h.macvlan("bigmac", lower)
	h.set("bigmac", sizesOn)
	h.set("big0", sizesOn)
	changes := h.apply(Target{"bigmac", wantOn})
	if len(changes) != 2 || changes[0].From != changes[0].To || changes[1].From != changes[1].To {
		t.Errorf("changes are %+v", changes)
	}
	if got := h.recorded(); len(got) > 0 {
		t.Errorf("recorded are %v", got)
	}
	if got := h.revert(); len(got) > 0 {
		t.Errorf("reverted are %v", got)
	}
	h.is(sizesOn, "big0", "bigmac")

	// The lower interface was changed for it and is reverted with it.
	h.set("big0", sizesOff)
	h.apply(Target{"bigmac", wantOn})
	h.is(sizesOn, "big0", "bigmac")
	if got := fmt.Sprint(h.revert("bigmac")); got != "map[big0:reverted]" {
		t.Errorf("reverted are %s", got)
	}
	h.is(sizesOff, "big0")
	h.is(sizesOn, "bigmac")

	// The lower interface can be reverted alone, because no record says that the other one needs it.
	h.apply(Target{"bigmac", wantOn})
	if got := fmt.Sprint(h.revert("big0")); got != "map[big0:reverted]" {
		t.Errorf("reverted are %s", got)
	}
	h.is(sizesOff, "big0")
	h.is(sizesOn, "bigmac")
}

// TestKeepsBefore applies several changes and reverts to the sizes before the first one.
func TestKeepsBefore(t *testing.T) {
	h := newChangeHost(t)
	h.veth("big0")
	before := netiftest.Sizes(70000, 80000, 90000, 100000)
	h.set("big0", before)
	for _, w := range []Want{{IPv6: large}, {IPv4: large}, wantOn, {IPv6: netif.MaxSize}, {IPv6: netif.Legacy, IPv4: netif.Legacy}, {IPv4: 70000}} {
		h.apply(Target{"big0", w})
	}
	h.is(netiftest.Sizes(netif.Legacy, netif.Legacy, 70000, 70000), "big0")
	records, err := h.Records()
	if err != nil || len(records) != 1 {
		t.Fatal(records, err)
	}
	r := records[0]
	if r.Want != (Want{netif.Legacy, 70000}) || r.Before != before || r.Applied != h.sizes("big0") || r.From != (netif.Sizes{}) || r.Owner != ByCommand ||
		r.Netns != "" || r.NetnsID != h.network.ID() || r.Since.IsZero() {
		t.Errorf("the record is %+v", r)
	}
	h.revert()
	h.is(before, "big0")
}

// TestPolicyGivesUp reverts a family that the policy no longer names.
func TestPolicyGivesUp(t *testing.T) {
	h := newChangeHost(t)
	lower := h.veth("big0")
	h.macvlan("bigmac0", lower)
	h.macvlan("bigmac1", lower)
	before := netiftest.Sizes(netif.Legacy, netif.Legacy, 70000, 80000)
	h.set("big0", before)
	h.set("bigmac0", before)
	apply := func(name string, w Want) {
		t.Helper()
		if _, err := h.Apply(h.network, ByPolicy, []Target{{name, w}}, false); err != nil {
			t.Fatal(err)
		}
	}
	apply("bigmac0", wantOn)
	h.is(sizesOn, "big0", "bigmac0")
	apply("bigmac0", Want{IPv6: large})
	h.is(netiftest.Sizes(large, large, 70000, 80000), "big0", "bigmac0")
	apply("bigmac0", Want{IPv4: large})
	h.is(netiftest.Sizes(netif.Legacy, netif.Legacy, large, large), "big0", "bigmac0")
	// The other interface needs it.
	apply("bigmac1", wantOn)
	apply("bigmac0", Want{IPv6: large})
	h.is(sizesOn, "big0", "bigmac1")
	h.is(netiftest.Sizes(large, large, 70000, 80000), "bigmac0")
	h.revert()
	h.is(before, "big0", "bigmac0")
	h.is(sizesOff, "bigmac1")
}

func TestLowerOfTwo(t *testing.T) {
	h := newChangeHost(t)
	lower := h.veth("big0")
	h.macvlan("bigmac0", lower)
	h.macvlan("bigmac1", lower)
	h.apply(Target{"bigmac0", wantOn})
	h.apply(Target{"bigmac1", Want{IPv6: large, IPv4: large}})
	h.revert("bigmac0")
	h.is(sizesOff, "bigmac0")
	h.is(sizesOn, "big0", "bigmac1")
	// It was changed for the other interface.
	h.revert("big0")
	h.is(sizesOn, "big0", "bigmac1")
	h.revert("bigmac1")
	h.is(sizesOff, "big0", "bigmac0", "bigmac1")

	// An interface that was deleted needs nothing.
	h.apply(Target{"bigmac0", wantOn}, Target{"bigmac1", wantOn})
	found, err := netlink.LinkByName("bigmac0")
	if err == nil {
		err = netlink.LinkDel(found)
	}
	if err != nil {
		t.Fatal(err)
	}
	if got := fmt.Sprint(h.revert("bigmac1")); got != "map[big0:reverted bigmac1:reverted]" {
		t.Errorf("reverted are %s", got)
	}
	if got := fmt.Sprint(h.revert()); got != "map[bigmac0:gone]" {
		t.Errorf("reverted are %s", got)
	}

	// With force it is reverted alone.
	h.apply(Target{"bigmac1", wantOn})
	if done, err := h.Revert(named("big0"), true); err != nil || fmt.Sprint(results(done)) != "map[big0:reverted]" {
		t.Errorf("reverted are %v, %v", done, err)
	}
	h.is(sizesOff, "big0")
	h.is(sizesOn, "bigmac1")
}

// TestRefusesWhole checks that no size is set if one of them cannot be set.
func TestRefusesWhole(t *testing.T) {
	h := newChangeHost(t)
	h.veth("big0")
	h.add(&netlink.Tuntap{LinkAttrs: netlink.LinkAttrs{Name: "bigtun"}, Mode: netlink.TUNTAP_MODE_TUN})
	_, err := h.Apply(h.network, ByCommand, []Target{{"big0", wantOn}, {"bigtun", wantOn}}, false)
	failsAs(t, err, fault.CodeUnsupported)
	if want := "bigtun (tun) supports packets of at most 65536 bytes"; err.Error() != want {
		t.Errorf("error is %q, not %q", err, want)
	}
	_, err = h.Apply(h.network, ByCommand, []Target{{"big0", wantOn}, {"bigtum", wantOn}}, false)
	if hint := failsAs(t, err, fault.CodeUsage); hint != "did you mean bigtun?" {
		t.Errorf("hint is %q", hint)
	}
	h.is(sizesOff, "big0", "bigtun")
	if got := h.recorded(); len(got) > 0 {
		t.Errorf("recorded are %v", got)
	}
}

// TestBridgeBounds uses a bridge over a port with small sizes, then over a port without BIG TCP.
func TestBridgeBounds(t *testing.T) {
	h := newChangeHost(t)
	h.veth("big0")
	h.veth("big1")
	small := netiftest.Sizes(20000, 30000, 20000, 30000)
	h.set("big1", small)
	h.bridge("bigbr", "big0", "big1")
	h.apply(Target{"bigbr", Want{IPv6: large}})
	h.is(netiftest.Sizes(large, large, netif.Legacy, netif.Legacy), "bigbr", "big0")
	h.is(netiftest.Sizes(large, large, 20000, 30000), "big1")
	h.revert()
	h.is(sizesOff, "bigbr", "big0")
	h.is(small, "big1")

	h.set("bigbr", netiftest.Sizes(100000, 100000, netif.Legacy, netif.Legacy))
	h.apply(Target{"bigbr", wantOn})
	tap := h.add(&netlink.Tuntap{LinkAttrs: netlink.LinkAttrs{Name: "bigtap"}, Mode: netlink.TUNTAP_MODE_TAP})
	bridge, err := netlink.LinkByName("bigbr")
	if err == nil {
		err = netlink.LinkSetMaster(tap, bridge)
	}
	if err != nil {
		t.Fatal(err)
	}
	now := h.sizes("bigbr")
	if now.GSO != netif.Legacy || now.GRO != large {
		t.Fatalf("the kernel leaves a bridge over a tap %v", now)
	}
	_, err = h.Apply(h.network, ByCommand, []Target{{"bigbr", wantOn}}, false)
	failsAs(t, err, fault.CodeUnsupported)
	// The kernel has reduced the size. The size before the change exceeds the present limit.
	_, err = h.Revert(named("bigbr"), false)
	failsAs(t, err, fault.CodeConflict)
	h.is(now, "bigbr")
	done, err := h.Revert(named("bigbr"), true)
	if err != nil || results(done)["bigbr"] != ResultReverted {
		t.Fatal(done, err)
	}
	h.is(netiftest.Sizes(netif.Legacy, 100000, netif.Legacy, netif.Legacy), "bigbr")
	h.is(small, "big1")
}

// TestMeanwhile lets another program change one of the four sizes.
func TestMeanwhile(t *testing.T) {
	h := newChangeHost(t)
	h.veth("big0")
	h.veth("big1")
	for n, name := range []string{"gso_max_size", "gro_max_size", "gso_ipv4_max_size", "gro_ipv4_max_size"} {
		h.apply(Target{"big0", wantOn}, Target{"big1", wantOn})
		theirs := sizesOn
		*[]*uint32{&theirs.GSO, &theirs.GRO, &theirs.GSOIPv4, &theirs.GROIPv4}[n] = 70000
		h.set("big0", theirs)
		what := fmt.Sprintf("the sizes of big0 were changed externally: %s 70000 instead of 196608", name)

		status, err := h.Check(h.network)
		if err != nil || len(status) != 2 || status[0].Interface+status[1].Interface != "big0big1" && status[0].Interface+status[1].Interface != "big1big0" {
			t.Fatal(status, err)
		}
		for _, s := range status {
			if want := map[string]string{"big0": StatusChanged, "big1": StatusOK}[s.Interface]; s.State != want || s.Now != h.sizes(s.Interface) {
				t.Errorf("status of %s is %s, %v", s.Interface, s.State, s.Now)
			}
		}

		_, err = h.Apply(h.network, ByCommand, []Target{{"big0", Want{IPv6: netif.MaxSize}}, {"big1", Want{IPv6: netif.MaxSize}}}, false)
		failsAs(t, err, fault.CodeConflict)
		if err.Error() != what {
			t.Errorf("error is %q, not %q", err, what)
		}
		if _, err := h.Plan(h.network, ByCommand, []Target{{"big0", wantOn}}, false); err == nil || err.Error() != what {
			t.Errorf("plan's error is %v, not %q", err, what)
		}
		h.is(theirs, "big0")
		h.is(sizesOn, "big1")

		done, err := h.Revert(nil, false)
		failsAs(t, err, fault.CodeConflict)
		if want := fmt.Sprintf("sizes changed externally: big0 (%s 70000 instead of 196608)", name); err.Error() != want {
			t.Errorf("error is %q, not %q", err, want)
		}
		if got := fmt.Sprint(results(done)); got != "map[big0:changed big1:reverted]" {
			t.Errorf("reverted are %s", got)
		}
		h.is(theirs, "big0")
		h.is(sizesOff, "big1")
		if got := fmt.Sprint(h.recorded()); got != "[big0]" {
			t.Errorf("recorded are %s", got)
		}

		// If another program sets the requested size, nothing differs.
		h.set("big0", netiftest.Sizes(netif.MaxSize, netif.MaxSize, large, large))
		h.apply(Target{"big0", Want{IPv6: netif.MaxSize}})
		h.set("big0", theirs)
		if _, err := h.Apply(h.network, ByCommand, []Target{{"big0", wantOn}}, true); err != nil {
			t.Fatal(err)
		}
		h.is(sizesOn, "big0")
		h.set("big0", theirs)
		done, err = h.Revert(nil, true)
		if err != nil || fmt.Sprint(results(done)) != "map[big0:reverted]" {
			t.Errorf("reverted are %v, %v", done, err)
		}
		h.is(sizesOff, "big0")
	}
}

// TestSetBack lets another program restore the previous size.
func TestSetBack(t *testing.T) {
	h := newChangeHost(t)
	h.veth("big0")
	h.apply(Target{"big0", wantOn})
	h.set("big0", sizesOff)
	if status, err := h.Check(h.network); err != nil || len(status) != 1 || status[0].State != StatusChanged {
		t.Errorf("status is %v, %v", status, err)
	}
	if got := fmt.Sprint(h.revert()); got != "map[big0:already]" {
		t.Errorf("reverted are %s", got)
	}
	if got := h.revert(); len(got) > 0 {
		t.Errorf("reverted again are %v", got)
	}
}

func TestOwners(t *testing.T) {
	h := newChangeHost(t)
	lower := h.veth("big0")
	h.macvlan("bigmac", lower)
	owners := []Owner{ByCommand, ByPolicy}
	for _, first := range owners {
		for _, second := range owners {
			if first == second {
				continue
			}
			if _, err := h.Apply(h.network, first, []Target{{"big0", wantOn}}, false); err != nil {
				t.Fatal(err)
			}
			// A repeated request of the same size does not set it either.
			_, err := h.Apply(h.network, second, []Target{{"big0", wantOn}}, false)
			failsAs(t, err, fault.CodeConflict)
			if want := "sizes of big0 were set by " + first.words(); err.Error() != want {
				t.Errorf("error is %q, not %q", err, want)
			}
			_, err = h.Apply(h.network, second, []Target{{"bigmac", Want{IPv6: netif.MaxSize}}}, false)
			// An interface that was requested explicitly keeps its sizes.
			if err != nil {
				t.Errorf("%s above what %s has: %v", second, first, err)
			}
			h.is(sizesOn, "big0")
			if _, err := h.Apply(h.network, second, []Target{{"big0", Want{IPv6: netif.MaxSize}}}, true); err != nil {
				t.Fatal(err)
			}
			h.is(netiftest.Sizes(netif.MaxSize, netif.MaxSize, large, large), "big0")
			mine := func(o Owner) func(Record) bool { return func(r Record) bool { return r.Owner == o } }
			if done, err := h.Revert(mine(first), false); err != nil || len(done) != 0 {
				t.Errorf("%s still has %v, %v", first, done, err)
			}
			if _, err := h.Revert(mine(second), false); err != nil {
				t.Error(err)
			}
			h.is(sizesOff, "big0", "bigmac")
		}
	}
}

// TestForcedIsSettled forces the requested sizes over a change of another program, and checks that the next change of
// another program is detected too.
func TestForcedIsSettled(t *testing.T) {
	h := newChangeHost(t)
	h.veth("big0")
	h.apply(Target{"big0", wantOn})
	theirs := sizesOn
	theirs.GSO = 70000
	h.set("big0", theirs)
	if _, err := h.Apply(h.network, ByCommand, []Target{{"big0", wantOn}}, true); err != nil {
		t.Fatal(err)
	}
	h.set("big0", theirs)
	if status, err := h.Check(h.network); err != nil || len(status) != 1 || status[0].State != StatusChanged {
		t.Errorf("status is %v, %v", status, err)
	}
}
