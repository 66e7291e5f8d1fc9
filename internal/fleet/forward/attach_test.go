// SPDX-License-Identifier: Apache-2.0

package forward_test

import (
	"errors"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"sockeye/internal/fleet/forward"
)

// filters returns the names and program IDs of the filters at the hooks of eth0.
func (n *node) filters(t testing.TB) (names []string, ids []int) {
	t.Helper()
	eth, err := n.nl.LinkByIndex(n.index)
	check(t, err)
	for _, parent := range []uint32{netlink.HANDLE_MIN_INGRESS, netlink.HANDLE_MIN_EGRESS} {
		list, err := n.nl.FilterList(eth, parent)
		if err != nil && !errors.Is(err, unix.EINVAL) {
			t.Fatal(err)
		}
		for _, f := range list {
			if b, ok := f.(*netlink.BpfFilter); ok {
				names, ids = append(names, b.Name), append(ids, b.Id)
			}
		}
	}
	return names, ids
}

func (n *node) hasClsact(t testing.TB) bool {
	t.Helper()
	eth, err := n.nl.LinkByIndex(n.index)
	check(t, err)
	qdiscs, err := n.nl.QdiscList(eth)
	check(t, err)
	return slices.ContainsFunc(qdiscs, func(q netlink.Qdisc) bool { return q.Type() == "clsact" })
}

// TestFilters attaches by filters of clsact, as on kernels without TCX: the next process replaces a program in one step,
// filters of others stay, a removed queueing discipline is noticed, and Retire leaves nothing.
func TestFilters(t *testing.T) {
	f := newFleetBy(t, 2, true)
	f.setAll(t, f.table())
	a, b := f.hosts[0], f.hosts[1]
	from := device(4, 0)
	for i := 0; f.owner(from) != b; i++ {
		from = device(4, i)
	}
	f.route(t, a)
	arrives := func(when string) {
		t.Helper()
		f.send(t, from, []byte(when))
		if at := f.receive(t, from, []byte(when)); at != b {
			t.Fatalf("%s: at %v, want b; a counts %v, b %v", when, at, counts(t, a), counts(t, b))
		}
	}
	arrives("attached")
	names, before := a.filters(t)
	if !slices.Equal(names, []string{"sockeye-fleet/ingress/q"}) {
		t.Fatalf("filters %q", names)
	}

	others, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SchedCLS, License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, -1), asm.Return()}})
	check(t, err)
	defer others.Close()
	check(t, a.nl.FilterAdd(&netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{LinkIndex: a.index, Parent: netlink.HANDLE_MIN_EGRESS, Priority: 1, Protocol: unix.ETH_P_ALL},
		Fd:          others.FD(), Name: "theirs", DirectAction: true,
	}))

	// The next process adopts the pins, and replaces the program.
	check(t, a.path.Close())
	a.do(t, func() (err error) {
		if a.path, err = forward.Open(filepath.Join(f.pins, "fleet_a")); err != nil {
			return err
		}
		if err := a.path.UseFilters(); err != nil {
			return err
		}
		return a.path.Attach([]int{a.index}, 0)
	})
	names, after := a.filters(t)
	if !slices.Equal(names, []string{"sockeye-fleet/ingress/q", "theirs"}) || after[0] == before[0] {
		t.Fatalf("filters %q with programs %v, before %v", names, after, before)
	}
	arrives("replaced")

	// With a tunnel there are further programs, as long as the tunnel exists.
	a.openTunnel(t)
	for range 2 {
		if names, _ := a.filters(t); !slices.Equal(names, []string{"sockeye-fleet/ingress/q", "sockeye-fleet/egress/q", "theirs"}) {
			t.Errorf("with a tunnel: filters %q", names)
		}
		a.do(t, func() error { return a.path.Attach([]int{a.index}, 0) })
	}

	isAttached := func() bool {
		attached, err := a.path.IsAttached()
		check(t, err)
		return attached
	}
	if !isAttached() {
		t.Error("not attached")
	}
	check(t, a.nl.QdiscDel(&netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{LinkIndex: a.index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT}}))
	if isAttached() {
		t.Error("attached without a queueing discipline")
	}
	a.do(t, func() error { return a.path.Attach([]int{a.index}, 0) })
	arrives("attached again")

	a.do(t, func() error {
		removed, err := forward.Retire()
		slices.Sort(removed)
		if !slices.Equal(removed, []string{"filters of interface eth0", "interface " + forward.TunnelName}) {
			t.Errorf("removed %q", removed)
		}
		return err
	})
	if names, _ := a.filters(t); len(names) > 0 || a.hasClsact(t) {
		t.Errorf("left are filters %q, clsact %v", names, a.hasClsact(t))
	}

	// An ingress qdisc excludes clsact.
	check(t, a.nl.QdiscAdd(&netlink.Ingress{QdiscAttrs: netlink.QdiscAttrs{LinkIndex: a.index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_INGRESS}}))
	a.do(t, func() error {
		if err := a.path.Attach([]int{a.index}, 0); err == nil || !strings.Contains(err.Error(), "ingress qdisc") {
			t.Errorf("beside an ingress qdisc: %v", err)
		}
		return nil
	})
}
