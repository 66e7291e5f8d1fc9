// SPDX-License-Identifier: Apache-2.0

package moves

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"sockeye/internal/api"
	"sockeye/internal/fault"
	"sockeye/internal/format"
	"sockeye/internal/placement"
	"sockeye/internal/sockdiag"
	"sockeye/internal/steer/session"
	"sockeye/internal/steer/stored"
)

// counted are the counters of a device at one instant.
type counted struct {
	device    string
	slot      int
	pinned    bool
	datagrams uint64
	bytes     map[uint64]uint64 // received bytes of each session, by cookie
}

// maxProposed is the maximum number of proposed moves.
const maxProposed = 256

// Rebalance measures the load of the devices, and proposes moves that make the load of the slots more even. With apply,
// the devices are pinned to their new slots.
func (m *Moves) Rebalance(ctx context.Context, period time.Duration, apply bool) (*api.Rebalance, error) {
	before, err := m.countDevices()
	if err != nil {
		return nil, err
	}
	began := time.Now()
	select {
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-time.After(period):
	}
	after, err := m.countDevices()
	if err != nil {
		return nil, err
	}
	seconds := time.Since(began).Seconds()
	result := &api.Rebalance{Service: m.Name, Slots: []api.SlotLoad{}, Moves: []api.ProposedMove{}}
	var loads []placement.Load
	var datagrams, bytes uint64
	for key, d := range after {
		load := placement.Load{Key: key, Slot: d.slot, Datagrams: d.datagrams, Pinned: d.pinned}
		was := before[key]
		if was != nil {
			load.Datagrams -= min(was.datagrams, d.datagrams)
		}
		for cookie, n := range d.bytes {
			if was == nil || was.bytes[cookie] == 0 {
				continue // a new session, whose dump does not last
			}
			load.Bytes += n - min(was.bytes[cookie], n)
		}
		datagrams, bytes = datagrams+load.Datagrams, bytes+load.Bytes
		if load.Datagrams+load.Bytes > 0 {
			result.Devices++
		}
		loads = append(loads, load)
	}
	result.Datagrams, result.Bytes = float64(datagrams)/seconds, float64(bytes)/seconds

	weights := m.loadWeights(loads)
	if slices.Max(weights) == 0 {
		return nil, fault.Conflict(errors.New("no slot that is ready takes devices"), "sockeye slots shows the members, states and weights")
	}
	balance, err := placement.Rebalance(loads, weights, placement.RebalanceOptions{MaxMoves: maxProposed})
	if err != nil {
		return nil, fault.Conflict(err, "sockeye slots shows the members, states and weights")
	}
	for slot := range weights {
		result.Slots = append(result.Slots, api.SlotLoad{Slot: slot, Fair: balance.Fair[slot], Before: balance.Before[slot], After: balance.After[slot]})
	}
	shares := make(map[string]float64)
	for _, l := range loads {
		shares[l.Key] = loadShare(&l, datagrams, bytes)
	}
	for _, one := range balance.Moves {
		result.Moves = append(result.Moves, api.ProposedMove{Device: after[one.Key].device, From: one.From, To: one.To, Load: shares[one.Key]})
	}
	if !apply || len(result.Moves) == 0 {
		return result, nil
	}
	result.Applied = true
	return result, m.pinAll(result.Moves)
}

// countDevices reads the counters of all devices by session.Key.
func (m *Moves) countDevices() (map[string]*counted, error) {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	if err := m.CheckOpen(); err != nil {
		return nil, err
	}
	if m.Config.SharesSlots {
		return nil, fault.Conflict(errors.New("the slots are shared with another service"), "move devices by sockeye move, which moves them in both services")
	}
	if m.Config.TrackDevices == 0 {
		return nil, fault.Conflict(fmt.Errorf("service %s does not track devices, so their load is not known", m.Name), "set track_devices in the policy")
	}
	all := make(map[string]*counted)
	of := func(at placement.Location, address string, key string) *counted {
		d := all[key]
		if d == nil {
			d = &counted{device: address, slot: at.Slot, pinned: at.Pinned, bytes: make(map[uint64]uint64)}
			if at.Device != "" {
				d.device = at.Device
			}
			all[key] = d
		}
		return d
	}
	for address, seen := range m.Path.Devices() {
		addr := placement.Addr(address)
		at := m.Mapping.Locate(addr)
		of(at, addr.String(), session.Key(at.Device, addr)).datagrams += seen.Datagrams
	}
	list, err := m.ReadSessions()
	if err != nil {
		return nil, err
	}
	for i := range list {
		one := &list[i]
		if one.State != sockdiag.Established {
			continue
		}
		at := m.Mapping.Locate(one.Address)
		d := of(at, one.Address.String(), session.Key(at.Device, one.Address))
		if socket, _ := m.Ask(one); socket != nil {
			d.bytes[one.Cookie] = socket.Info.Bytes_received
		}
	}
	return all, nil
}

// loadWeights returns the weights of the slots that may receive devices, for the slots of the policy and of the loads.
func (m *Moves) loadWeights(loads []placement.Load) placement.Weights {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	weights := placement.Weights(m.State.Weights(m.Config.Slots))
	for _, l := range loads {
		for len(weights) <= l.Slot { // a slot that the policy no longer has, until its devices have moved
			weights = append(weights, 0)
		}
	}
	for slot := range weights {
		if !m.IsReady(slot) {
			weights[slot] = 0
		}
	}
	return weights
}

// loadShare returns the share of a device in the load of all devices.
func loadShare(l *placement.Load, datagrams, bytes uint64) (share float64) {
	kinds := 0.0
	for _, part := range [][2]uint64{{l.Datagrams, datagrams}, {l.Bytes, bytes}} {
		if part[1] > 0 {
			share += float64(part[0]) / float64(part[1])
			kinds++
		}
	}
	if kinds == 0 {
		return 0
	}
	return share / kinds
}

// pinAll pins devices to the slots of proposed moves.
func (m *Moves) pinAll(proposed []api.ProposedMove) error {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	if err := m.CheckOpen(); err != nil {
		return err
	}
	if err := m.checkNoMoves("rebalance"); err != nil {
		return err
	}
	next := m.State
	next.Pins = append([]stored.Pin(nil), m.State.Pins...)
	for _, p := range proposed {
		one, err := stored.ParsePin(p.Device, m.Mapping.Devices)
		if err != nil {
			return err
		}
		one.Slot = p.To
		if one.Slot >= m.Config.Slots || m.SlotState(one.Slot).State != stored.Ready {
			return fault.Conflict(fmt.Errorf("slot %d has changed during the measurement", one.Slot), "try again")
		}
		next.Pins = slices.DeleteFunc(next.Pins, func(o stored.Pin) bool { return o.SameDevice(&one) })
		next.Pins = append(next.Pins, one)
	}
	if len(next.Pins) > stored.MaxPins {
		return stored.TooManyPins()
	}
	return m.replaceState(next, m.Target, fmt.Sprintf("rebalance: %s pinned", format.Count(len(proposed), "device", "devices")), "rebalance")
}
