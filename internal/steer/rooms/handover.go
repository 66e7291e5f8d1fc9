// SPDX-License-Identifier: Apache-2.0

package rooms

import (
	"encoding/json"
	"iter"
	"net/netip"
	"slices"
	"strings"
	"time"
)

// Handed is a datagram with templates of an exporter, for another host.
type Handed struct {
	Listener string         `json:"listener"` // as text: rows differ between hosts
	Source   netip.AddrPort `json:"source"`
	Data     []byte         `json:"data"`
	// Age is the time since the exporter has sent a template of the datagram; clocks differ between hosts.
	Age time.Duration `json:"age"`
}

// WithTemplates yields the addresses of the exporters that have templates.
func (r *Rooms) WithTemplates() iter.Seq[netip.Addr] {
	if !r.KeepsTemplates() {
		return func(func(netip.Addr) bool) {}
	}
	return r.kept.store.Addresses()
}

// HasTemplatesSince reports whether an exporter of WithTemplates has a new template since a time.
func (r *Rooms) HasTemplatesSince(addr netip.Addr, since time.Time) bool {
	return r.kept.store.LearnedSince(addr, since)
}

// IsProven reports whether an address has an established TCP connection, as of the last check of the connections.
func (r *Rooms) IsProven(addr netip.Addr) bool { return r.kept.proven[addr] }

// AddHanded adds the templates of exporters: together, those of all services replace those that another host has not taken over yet.
func (r *Rooms) AddHanded(all map[netip.Addr][]Handed) {
	if !r.KeepsTemplates() {
		return
	}
	now := time.Now()
	for addr := range all {
		for _, m := range r.kept.store.Replay(addr, now, 0, nil) {
			if l, ok := r.Listeners[m.Row]; ok {
				all[addr] = append(all[addr], Handed{l.String(), m.Source, m.Data, max(0, now.Sub(m.Refreshed))})
			}
		}
	}
}

// TakeOver keeps templates that another host has handed over, and sends them to the members of their exporters; with changed, only those that
// are new. Without it, the exporter comes to this host: a member that knew its templates may have forgotten them.
func (r *Rooms) TakeOver(list []Handed, changed bool) {
	if !r.KeepsTemplates() {
		return
	}
	r.adopt(list, changed)
	r.scheduleTemplatesSave()
	r.ReplayMoved()
}

// adopt keeps templates, and notes which of them to send; with changed, those that are new.
func (r *Rooms) adopt(list []Handed, changed bool) {
	now := time.Now()
	for _, h := range list {
		for _, row := range r.rowsOf(h) {
			before := r.kept.store.Revision()
			if r.kept.store.Adopt(h.Source, row, h.Data, now.Add(-h.Age), now) == nil && (!changed || r.kept.store.Revision() != before) {
				r.replayAgain(h.Source.Addr().Unmap().WithZone(""))
			}
		}
	}
}

// replayAgain notes that no member knows the templates of an exporter: those that are being sent are earlier ones.
func (r *Rooms) replayAgain(addr netip.Addr) {
	delete(r.kept.replayedTo, addr)
	for _, fills := range []map[int]*fill{r.kept.running, r.filling} {
		for _, f := range fills {
			if i := slices.Index(f.addresses, addr); i >= 0 {
				f.addresses, f.again = slices.Delete(slices.Clone(f.addresses), i, i+1), true
			}
		}
	}
}

// rowsOf returns the rows of the listeners for the datagrams of an exporter of another host. That host may write the listener in
// another way, and name the service differently: protocol, port and address decide.
func (r *Rooms) rowsOf(h Handed) (rows []int) {
	protocol, text, _ := strings.Cut(h.Listener, " ")
	theirs, err := netip.ParseAddrPort(text)
	if err != nil {
		return nil
	}
	from4 := h.Source.Addr().Unmap().Is4()
	for row, l := range r.Listeners {
		own := l.Address.Addr()
		serves := own.Is4() == from4 || own.Is6() && own.IsUnspecified() && !l.V6Only
		if string(l.Protocol) == protocol && l.Address.Port() == theirs.Port() && serves &&
			(own.IsUnspecified() || theirs.Addr().IsUnspecified() || own == theirs.Addr()) {
			rows = append(rows, row)
		}
	}
	return rows
}

// IsReplaying reports whether members still receive templates.
func (r *Rooms) IsReplaying() bool { return len(r.kept.running) > 0 }

// EncodeHanded returns the encoding of templates by address.
func EncodeHanded(all map[netip.Addr][]Handed) (map[netip.Addr][]byte, error) {
	encoded := make(map[netip.Addr][]byte, len(all))
	for addr, list := range all {
		data, err := json.Marshal(list)
		if err != nil {
			return nil, err
		}
		encoded[addr] = data
	}
	return encoded, nil
}

// DecodeHanded returns the templates that other hosts have encoded, by address, and the number of devices whose templates are
// damaged, or are those of another address.
func DecodeHanded(encoded map[netip.Addr][]byte) (all []Handed, damaged int) {
	for address, data := range encoded {
		var list []Handed
		if json.Unmarshal(data, &list) != nil || slices.ContainsFunc(list, func(h Handed) bool { return h.Source.Addr() != address }) {
			damaged++
			continue
		}
		all = append(all, list...)
	}
	return all, damaged
}
