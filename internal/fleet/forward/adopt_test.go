// SPDX-License-Identifier: Apache-2.0

package forward_test

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"sockeye/internal/fleet/forward"
	"sockeye/internal/fleet/table"
	"sockeye/internal/placement"
	"sockeye/internal/testenv"
)

// ofUnit are those capabilities of the systemd unit that concern the data path. CAP_SYS_ADMIN is not among them.
var ofUnit = []int{unix.CAP_BPF, unix.CAP_NET_ADMIN, unix.CAP_PERFMON}

// agent is one agent after the other, each with the capabilities of the unit.
type agent struct {
	t    *testing.T
	base string
}

func (a agent) open(before uint32, do func(p *forward.Path) error) {
	a.t.Helper()
	testenv.WithRights(a.t, ofUnit, func() {
		p, err := forward.Open(a.base)
		if err != nil {
			a.t.Error(err)
			return
		}
		if p.Named() != before {
			a.t.Errorf("the table in force names device map %d, want %d", p.Named(), before)
		}
		if err := errors.Join(do(p), p.Close()); err != nil {
			a.t.Error(err)
		}
	})
}

func alone(epoch uint64) *table.Table {
	t := &table.Table{Epoch: epoch, Nonce: 7, Hosts: []table.Host{{Name: "a", Weight: 1}}}
	for b := range table.Buckets {
		t.Previous[b], t.Next[b] = table.None, table.None
	}
	return t
}

func devicesOf(t *testing.T, epoch uint64) *placement.DeviceMap {
	t.Helper()
	m, err := placement.ParseDeviceMap(strings.NewReader(fmt.Sprintf("10.0.0.%d,edge\n", epoch)), "devices.csv")
	check(t, err)
	return m
}

func set(p *forward.Path, to *table.Table, devices *placement.DeviceMap, flipped func()) error {
	return p.Set(to, "a", func(*table.Host) forward.Next { return forward.Next{} }, devices, forward.Flip{After: flipped})
}

// TestAdoptTable is that agents with the capabilities of the unit open the data path of an earlier one, whenever that was
// killed, and know which of the two device maps is in force: the next change must write to the other one.
func TestAdoptTable(t *testing.T) {
	a := agent{t, filepath.Join(testenv.BPFFS(t), "fleet")}
	t.Cleanup(func() { check(t, forward.Remove(a.base)) })
	inForce := func(when string, epoch uint64, named uint32) {
		t.Helper()
		p, err := forward.Open(a.base)
		check(t, err)
		defer p.Close()
		if e, n, err := p.InForce(); err != nil || e != epoch || n != named || p.Named() != named {
			t.Errorf("%s: epoch %d names device map %d, found is %d, %v; want %d, %d", when, e, n, p.Named(), err, epoch, named)
		}
	}
	a.open(0, func(p *forward.Path) error { return set(p, alone(1), nil, func() {}) })
	inForce("without a device map", 1, 0)
	a.open(0, func(p *forward.Path) error { return set(p, alone(2), devicesOf(t, 2), func() {}) })
	inForce("with a device map", 2, 1)
	a.open(1, func(p *forward.Path) error { return set(p, alone(3), devicesOf(t, 3), func() {}) })
	inForce("with another device map", 3, 2)
	// Within one agent, an equal device map stays.
	same := devicesOf(t, 4)
	a.open(2, func(p *forward.Path) error {
		return errors.Join(set(p, alone(4), same, func() {}), set(p, alone(5), same, func() {}))
	})
	inForce("with the same device map", 5, 1)

	// The agent is killed when the table is in force, and not pinned as such.
	killed := func(epoch uint64, before uint32) {
		devices := devicesOf(t, epoch)
		a.open(before, func(p *forward.Path) error {
			done := make(chan struct{})
			go func() {
				defer close(done)
				_ = set(p, alone(epoch), devices, runtime.Goexit)
			}()
			<-done
			return nil
		})
	}
	killed(6, 1)
	pins := func() []string {
		all, err := filepath.Glob(a.base + "@*/table*")
		check(t, err)
		return all
	}
	if all := pins(); len(all) != 2 {
		t.Errorf("killed: pins %v", all)
	}
	killed(7, 2) // the first thing that an agent does may be its last one
	a.open(1, func(p *forward.Path) error { return set(p, alone(8), devicesOf(t, 8), func() {}) })
	inForce("after two kills", 8, 2)
	if all := pins(); len(all) != 1 {
		t.Errorf("after two kills: pins %v", all)
	}

	// The agent is killed before the table is in force: the pin is that of no table in force.
	dir := filepath.Dir(pins()[0])
	p, err := forward.Open(a.base)
	check(t, err)
	check(t, set(p, alone(9), devicesOf(t, 9), func() {
		check(t, os.Link(filepath.Join(dir, "table"), filepath.Join(dir, "kept")))
	}))
	check(t, p.Close())
	check(t, os.Rename(filepath.Join(dir, "kept"), filepath.Join(dir, "table_next")))
	inForce("a pin of a table that is not in force", 9, 1)
	a.open(1, func(p *forward.Path) error { return set(p, alone(10), devicesOf(t, 10), func() {}) })
	inForce("after a pin of a table that was not in force", 10, 2)

	// Versions before the pins have left none.
	check(t, os.Remove(filepath.Join(dir, "table")))
	inForce("without a pin, with all rights", 10, 2)
	a.open(2, func(p *forward.Path) error { return set(p, alone(11), devicesOf(t, 11), func() {}) })
	inForce("after an upgrade", 11, 1)
	killed(12, 1) // both device maps exist
	for _, path := range pins() {
		check(t, os.Remove(path))
	}
	a.open(1, func(p *forward.Path) error { return set(p, alone(13), devicesOf(t, 13), func() {}) })
	inForce("after an upgrade and a kill", 13, 2)
	a.open(2, func(p *forward.Path) error { return set(p, alone(14), nil, func() {}) })
	inForce("without a device map again", 14, 0)
	if err := os.Remove(filepath.Join(dir, "table")); err != nil {
		t.Fatal(err)
	}
	a.open(0, func(p *forward.Path) error { return set(p, alone(15), nil, func() {}) })
	inForce("after an upgrade without a device map", 15, 0)

	// The other steps of an agent need no other capabilities either.
	lo, err := net.InterfaceByName("lo")
	check(t, err)
	t.Cleanup(func() {
		_, err := forward.Retire()
		check(t, err)
	})
	for range 2 {
		a.open(0, func(p *forward.Path) error {
			tunnel, err := p.OpenTunnel([]netip.Addr{service4})
			if err != nil {
				return err
			}
			err = errors.Join(p.SetListeners(listeners(port)), p.Attach([]int{lo.Index}, tunnel))
			attached, failed := p.IsAttached()
			_, uncounted := p.Counts()
			if !attached {
				t.Error("not attached")
			}
			return errors.Join(err, failed, uncounted)
		})
	}
}
