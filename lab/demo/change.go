// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"time"

	"sockeye/internal/api"
	"sockeye/lab"
)

// rejoinTime is the maximum time after a change until all flow records of a router
// are in the collector that has its BMP session.
const rejoinTime = 15 * time.Second

// addSlot adds a fifth slot. o is the outcome before. It returns the outcome
// afterwards.
func (d *demo) addSlot(ctx context.Context, o lab.Outcome) (lab.Outcome, error) {
	say("slots: 5 in the policy; nfacctd-%d does not run yet", collectors)
	if _, err := d.writePolicy(collectors + 1); err != nil {
		return o, err
	}
	before, err := d.devices(ctx)
	if err != nil {
		return o, err
	}
	if err := d.show(ctx, "apply"); err != nil {
		return o, err
	}
	if err := d.waitReady(ctx, collectors); err != nil {
		return o, err
	}
	early, err := d.compare(ctx, before)
	if err != nil {
		return o, err
	}
	if len(early) > 0 {
		return o, fmt.Errorf("routers %v moved, although slot %d has no member", early, collectors)
	}
	say("no router has moved to the slot without a member")

	say("\nnfacctd-%d starts", collectors)
	if _, err := d.startCollector(collectors, ""); err != nil {
		return o, err
	}
	if err := d.waitReady(ctx, collectors+1); err != nil {
		return o, err
	}
	devices, err := d.devices(ctx)
	if err != nil {
		return o, err
	}
	if !slices.ContainsFunc(devices, func(device api.DeviceStatus) bool { return device.Slot == collectors }) {
		say("the hash gives it none of the six routers (one run in four), so one is moved by hand")
		if err := d.show(ctx, "move", o.Routers[0].Address.String(), strconv.Itoa(collectors)); err != nil {
			return o, err
		}
	}
	return d.moved(ctx, o, before)
}

// drain drains the slot with the most routers. o is the outcome before. It returns the
// outcome afterwards.
func (d *demo) drain(ctx context.Context, o lab.Outcome) (lab.Outcome, error) {
	victim, load := busiest(o)
	say("\nnfacctd-%d, with %d routers, is to be stopped for maintenance: its slot is drained", victim, load)
	before, err := d.devices(ctx)
	if err != nil {
		return o, err
	}
	if err := d.show(ctx, "slot", "set", strconv.Itoa(victim), "drain", "--wait", "--timeout", "20s"); err != nil {
		return o, err
	}
	o, err = d.moved(ctx, o, before)
	if err != nil {
		return o, err
	}
	if i := slices.IndexFunc(o.Routers, func(r lab.RouterOutcome) bool { return r.TCPSlot == victim }); i >= 0 {
		return o, fmt.Errorf("router %s is still at nfacctd-%d, which drains", o.Routers[i].Address, victim)
	}
	say("\nnfacctd-%d has no router and can be stopped; sockeye slot set %d ready returns its routers to it", victim, victim)
	return o, nil
}

// moved waits until each router has both streams in one collector, measures and shows
// the outcome, and checks that the routers that have not moved have kept their
// connections. before are the devices before the change.
func (d *demo) moved(ctx context.Context, o lab.Outcome, before []api.DeviceStatus) (now lab.Outcome, err error) {
	if err := d.rejoin(ctx); err != nil {
		return now, err
	}
	d.before = make(map[netip.Addr]int)
	for _, r := range o.Routers {
		d.before[r.Address] = r.TCPSlot
	}
	if now, err = d.outcome(ctx, 1); err != nil {
		return now, err
	}
	for _, r := range now.Routers {
		if err := d.separated(&r); err != nil {
			return now, err
		}
	}
	moved, err := d.compare(ctx, before)
	if err != nil {
		return now, err
	}
	say("%d of %d routers moved, each with BMP and IPFIX; the others kept their connections", len(moved), len(now.Routers))
	return now, nil
}

// rejoin waits until all new flow records of each router are in the collector that
// has its BMP session, and carry its routes.
func (d *demo) rejoin(ctx context.Context) error {
	bounded, cancel := context.WithTimeout(ctx, rejoinTime)
	defer cancel()
	var last error
	err := d.WaitFor(bounded, "routers with both streams in one collector", func() (bool, error) {
		o, err := d.Measure(bounded, time.Second)
		if err != nil {
			return false, err
		}
		last = nil
		for _, r := range o.Routers {
			if err := d.separated(&r); err != nil && last == nil {
				last = err
			}
		}
		return last == nil, nil
	})
	if last != nil && ctx.Err() == nil && bounded.Err() != nil {
		return fmt.Errorf("%v after the change, %w", rejoinTime, last)
	}
	return err
}

// separated returns an error if BMP and IPFIX of a router are in different collectors,
// or if flow records lack its routes.
func (d *demo) separated(r *lab.RouterOutcome) error {
	if !r.Together() {
		return fmt.Errorf("router %s is separated: BMP in %s, IPFIX in %s", r.Address, d.name(r.TCPSlot), d.names(r.UDPSlots))
	}
	if r.Correlated < r.Records {
		return fmt.Errorf("router %s: %d of %d flow records have no communities", r.Address, r.Records-r.Correlated, r.Records)
	}
	return nil
}

// compare returns the devices that have another slot than before. It returns an error
// if another device connected again, or if a device is split.
func (d *demo) compare(ctx context.Context, before []api.DeviceStatus) (moved []netip.Addr, err error) {
	now, err := d.devices(ctx)
	if err != nil {
		return nil, err
	}
	was := make(map[netip.Addr]api.DeviceStatus)
	for _, device := range before {
		was[device.Address] = device
	}
	for _, device := range now {
		switch old, known := was[device.Address]; {
		case device.Split:
			return nil, fmt.Errorf("router %s is separated: its slot is %d, its sessions are at %v", device.Address, device.Slot, device.SessionSlots)
		case !known || old.Slot != device.Slot:
			moved = append(moved, device.Address)
		case old.Connections != device.Connections:
			return nil, fmt.Errorf("router %s has not moved, but connected again", device.Address)
		}
	}
	return moved, nil
}
