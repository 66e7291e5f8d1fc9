// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"sockeye/internal/api"
	"sockeye/internal/bpf"
	"sockeye/internal/clock"
	"sockeye/internal/config"
	"sockeye/internal/fault"
	"sockeye/internal/format"
	"sockeye/internal/member"
	"sockeye/internal/placement"
	"sockeye/internal/sockdiag"
	"sockeye/internal/steer/core"
	"sockeye/internal/steer/stored"
)

const (
	// whyInterval is the time between the two readings that rates are computed from.
	whyInterval = time.Second
	// mostWhySessions is the number of connections in an answer.
	mostWhySessions = 100
	// mostNamedAddresses is the number of addresses that an error names.
	mostNamedAddresses = 5
)

// whyReading are the totals of an address at one time.
type whyReading struct {
	at                 time.Time
	datagrams, refused uint64
	bytes              map[uint64]uint64 // received by TCP, by socket cookie
}

// Why explains how the named service, or all services for "", treat a device, which is an address, or a name of a device
// map with one address. The answer takes whyInterval, because it has rates. Plan and Events of the entries are not set.
func (d *Domain) Why(ctx context.Context, name, device string) ([]api.Why, error) {
	services, err := d.selectServices(name)
	if err == nil && len(services) == 0 {
		_, err = d.findService("")
	}
	if err != nil {
		return nil, err
	}
	list, asked, readings := []api.Why{}, []*service{}, []*whyReading{}
	for _, s := range services {
		address, known, err := s.addressOf(device)
		if err != nil {
			return nil, core.OfService(s.Name, err)
		}
		if !known {
			continue
		}
		one, reading, err := s.explain(address)
		if err != nil && name == "" && s.isRemoved() {
			continue
		}
		if err != nil {
			return nil, core.OfService(s.Name, err)
		}
		list, asked, readings = append(list, *one), append(asked, s), append(readings, reading)
	}
	if len(list) == 0 {
		return nil, noDevice(services, device)
	}
	select {
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-time.After(whyInterval):
	}
	for i, s := range asked {
		// A service that was removed meanwhile has no rates.
		if later, reading, err := s.explain(list[i].Address); err == nil {
			later.Rates = reading.since(readings[i])
			list[i] = *later
		}
	}
	return list, nil
}

// noDevice returns the error for a device that is not an address, and that no device map has.
func noDevice(services []*service, device string) error {
	hint := "as in 192.0.2.1 or 2001:db8::1, or a name of a device map"
	for _, s := range services {
		s.Mu.Lock()
		names := s.Mapping.Devices.Devices()
		s.Mu.Unlock()
		if near := config.Nearest(device, names); near != "" {
			hint = "did you mean " + near + "?"
		}
	}
	return fault.Usage(fmt.Errorf("%q is neither an IP address nor a device of a device map", device), hint)
}

// addressOf returns the address of a device: the address itself, or the only address of a name in the device map that has
// sent packets. If none has, addressOf returns the first address of a prefix of the device, because all addresses of a
// device have one slot. known is false if the device map does not have the name.
func (s *service) addressOf(device string) (address netip.Addr, known bool, err error) {
	if address, err := netip.ParseAddr(device); err == nil {
		return address.Unmap().WithZone(""), true, nil
	}
	s.Mu.Lock()
	defer s.Mu.Unlock()
	devices := s.Mapping.Devices
	id := slices.Index(devices.Devices(), device)
	if id < 0 || s.CheckOpen() != nil {
		return address, false, nil
	}
	has := func(address netip.Addr) bool {
		of, ok := devices.Lookup(address)
		return ok && int(of) == id
	}
	for prefix, of := range devices.All() {
		if int(of) == id && has(prefix.Addr()) {
			address = prefix.Addr()
			break
		}
	}
	var seen []netip.Addr
	note := func(address netip.Addr) {
		if has(address) && !slices.Contains(seen, address) {
			seen = append(seen, address)
		}
	}
	for of := range s.Path.Devices() {
		note(placement.Addr(of))
	}
	sessions, err := s.ReadSessions()
	if err != nil {
		return address, false, err
	}
	for i := range sessions {
		note(sessions[i].Address)
	}
	slices.SortFunc(seen, netip.Addr.Compare)
	switch {
	case len(seen) == 1:
		return seen[0], true, nil
	case len(seen) > 1:
		return address, false, manyAddresses(device, seen)
	case !address.IsValid():
		return address, false, fault.Usage(fmt.Errorf("no prefix of %s begins with an address of the device, and none has sent packets", device), "name an address")
	}
	return address, true, nil
}

// manyAddresses returns the error for a device with several addresses.
func manyAddresses(device string, seen []netip.Addr) error {
	var names []string
	for _, address := range seen[:min(len(seen), mostNamedAddresses)] {
		names = append(names, address.String())
	}
	if more := len(seen) - len(names); more > 0 {
		names = append(names, fmt.Sprintf("%d more", more))
	}
	return fault.Usage(fmt.Errorf("%s has sent packets from several addresses: %s", device, strings.Join(names, ", ")), "name one of the addresses")
}

// explain returns how the service treats an address, and the totals of the address.
func (s *service) explain(address netip.Addr) (*api.Why, *whyReading, error) {
	s.past.Search()
	s.Mu.Lock()
	defer s.Mu.Unlock()
	if err := s.CheckOpen(); err != nil {
		return nil, nil, err
	}
	at := s.Mapping.Locate(address)
	w := &api.Why{
		Service: s.Name, Address: address, Device: at.Device, Bucket: at.Bucket, Slot: at.Slot, Because: "bucket",
		Sessions: []api.WhySession{}, Plan: api.WhyPlan{Changes: []api.Change{}}, Events: []api.Event{},
	}
	if prefix, ok := s.Mapping.Devices.Prefix(address); ok {
		w.Prefix = prefix.String()
	}
	if at.Pinned {
		w.Because, w.Until = s.whyPinned(address, &at)
	}
	if settled := s.moves.Settled().Locate(address); settled.Slot != at.Slot {
		w.Target = &settled.Slot
	}
	serving, by := s.Serving(), s.Host.ServedBy(&s.Config, address)
	if by.Explain(w); by.Here {
		if err := s.explainEffect(w, serving); err != nil {
			return nil, nil, err
		}
		w.Reason = strings.TrimPrefix(w.Reason+s.past.Reason(w.Address), ", ")
	}
	now := &whyReading{at: time.Now(), bytes: make(map[uint64]uint64)}
	if seen, ok := s.Path.Device(placement.Address(address)); ok {
		w.Seen = &api.WhySeen{
			Connections: seen.Connections, Datagrams: seen.Datagrams, Refused: seen.Refused, Dropped: s.traffic.Dropped(placement.Address(address)),
			LastSeen: clock.MonotonicZero().Add(time.Duration(seen.LastSeen)), LastSlot: slotOrNil(int(seen.Slot)),
		}
		now.datagrams, now.refused = seen.Datagrams, seen.Refused
	}
	return w, now, s.explainSessions(w, now, serving)
}

// whyPinned returns what assigns a pinned address to its slot, and the end of the pin.
func (s *service) whyPinned(address netip.Addr, at *placement.Location) (because string, until *time.Time) {
	var longest *stored.Pin
	for i := range s.State.Pins {
		p := &s.State.Pins[i]
		switch {
		case p.Slot != at.Slot:
		case p.Device != "" && p.Device == at.Device:
			return "pin", p.Until
		case at.Device == "" && p.Device == "" && p.Prefix.Contains(address) && (longest == nil || p.Prefix.Bits() > longest.Prefix.Bits()):
			longest = p
		}
	}
	if longest != nil {
		return "pin", longest.Until
	}
	return "adopted", nil
}

// explainEffect sets where the packets of an address go, and the member that receives them.
func (s *service) explainEffect(w *api.Why, serving *core.Serving) error {
	slot, served := serving.Slot(w.Slot)
	if seat := s.Seats[slot]; served && seat != nil {
		// The boot time is the difference of two clocks that are not read at the same time.
		since := clock.StartedAt(seat.Process.StartTime, clock.BootTime()).Round(time.Second)
		w.Member = &api.WhyMember{Slot: slot, PID: seat.Process.PID, Command: seat.Process.Command(), Source: seat.Source, Since: since}
	}
	if served && slot == w.Slot {
		w.Effect = "reach"
		if s.moves.GatedTable().Bucket[w.Bucket]&bpf.Gated != 0 && w.Because == "bucket" {
			w.Reason = "the member is new: new connections wait for their turn"
		}
		return nil
	}
	switch seat := s.Seats[w.Slot]; {
	case s.SlotState(w.Slot).State == stored.Maint:
		w.Reason = fmt.Sprintf("slot %d is in maint", w.Slot)
	case seat == nil:
		w.Reason = fmt.Sprintf("slot %d has no member", w.Slot)
	case s.rooms.IsFilling(w.Slot):
		w.Reason = fmt.Sprintf("the member of slot %d first receives the waiting packets", w.Slot)
	default:
		w.Reason = fmt.Sprintf("process %d, the member of slot %d, has closed a socket or has exited", seat.Process.PID, w.Slot)
	}
	if served {
		w.Effect = "diverted"
		return nil
	}
	w.Effect = "refused"
	room, err := s.rooms.Status(w.Slot)
	if err == nil && room != nil && (room.Until != nil || room.Filling) {
		w.Effect = "wait"
		w.Reason += "; " + format.Count(room.Waiting, "datagram waits", "datagrams wait") + " for the next one"
	}
	return err
}

// explainSessions sets the connections of an address.
func (s *service) explainSessions(w *api.Why, now *whyReading, serving *core.Serving) error {
	list, err := s.ReadSessions()
	if err != nil {
		return err
	}
	seated := make(map[member.ID]int)
	for slot, seat := range s.Seats {
		seated[seat.ID()] = slot
	}
	server, served := serving.Server(w.Address)
	for i := range list {
		x := &list[i]
		if x.State != sockdiag.Established || x.Address != w.Address {
			continue
		}
		w.SessionCount++
		one := api.WhySession{Local: x.Local, Remote: x.Remote, Unread: uint64(x.Unread)}
		if socket, _ := s.Ask(x); socket != nil {
			one.Received = socket.Info.Bytes_received
		}
		now.bytes[x.Cookie] = one.Received
		if x.Owned {
			one.PID = x.Owner.PID
			if slot, ok := seated[x.OwnerID()]; ok {
				one.Slot = &slot
			}
			w.Split = w.Split || served && x.OwnerID() != server
		}
		w.Sessions = append(w.Sessions, one)
	}
	slices.SortFunc(w.Sessions, func(a, b api.WhySession) int { return cmp.Or(a.Local.Compare(b.Local), a.Remote.Compare(b.Remote)) })
	w.Sessions = w.Sessions[:min(len(w.Sessions), mostWhySessions)]
	return nil
}

// since returns the rates from an earlier reading to this one. A counter that was created anew has no rate.
func (r *whyReading) since(before *whyReading) api.WhyRates {
	seconds := r.at.Sub(before.at).Seconds()
	rate := func(now, before uint64) float64 {
		if seconds <= 0 || now < before {
			return 0
		}
		return float64(now-before) / seconds
	}
	rates := api.WhyRates{Seconds: seconds, Datagrams: rate(r.datagrams, before.datagrams), Refused: rate(r.refused, before.refused)}
	for cookie, bytes := range r.bytes {
		rates.Bytes += rate(bytes, before.bytes[cookie]) // a new connection has received all in this time
	}
	return rates
}

// PlanFor returns what another policy would change for an address of a service. The caller serializes calls: a large device
// map takes seconds.
func (d *Domain) PlanFor(policy *config.Policy, name string, address netip.Addr) api.WhyPlan {
	plan := api.WhyPlan{Changes: []api.Change{}}
	i := slices.IndexFunc(policy.Services, func(c config.Service) bool { return c.Name == name })
	if i < 0 {
		plan.Problem = "the policy file does not have the service"
		return plan
	}
	c := policy.Services[i]
	s, err := d.findService(name)
	var devices *placement.DeviceMap
	if err == nil {
		devices, err = core.ReadDevices(c)
	}
	var t *target
	if err == nil {
		t, err = s.resolveTarget(c, devices)
	}
	if err != nil {
		plan.Problem = fault.Message(err)
		return plan
	}
	at := t.mapping.WithPins(t.settings.PinsFor(c.Slots, nil)).Locate(address)
	plan.Slot, plan.Device, plan.Changes = &at.Slot, at.Device, append(plan.Changes, s.plan(t)...)
	return plan
}
