// SPDX-License-Identifier: Apache-2.0

package rooms

import (
	"encoding/json"
	"iter"
	"maps"
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
	// Written is the time at which a copy was written, which lasts for hours; zero: now.
	Written time.Time `json:"written,omitzero"`
}

// HandOver returns the templates of the exporters that leave this host, and that have a new template since a time. each calls a function for the
// rooms of all services.
func HandOver(each func(func(*Rooms)), leaves func(netip.Addr) bool, since time.Time) (map[netip.Addr][]byte, error) {
	all := make(map[netip.Addr][]Handed)
	each(func(r *Rooms) {
		for addr := range r.withTemplates() {
			if r.kept.store.LearnedSince(addr, since) && leaves(addr) {
				all[addr] = nil
			}
		}
	})
	return encodeOf(each, all, time.Time{})
}

// CopyTemplates returns copies of the templates of exporters that have an established TCP connection to one of the services. Templates of other
// exporters may be forged. For each exporter, wanted returns whether a copy is wanted, and a time: the exporter must have sent a
// new template since this time or, with refreshed, any template. The result has the templates of at most most exporters.
func CopyTemplates(each func(func(*Rooms)), wanted func(netip.Addr) (since time.Time, refreshed, wanted bool), most int) (map[netip.Addr][]byte, error) {
	var proven []map[netip.Addr]bool
	each(func(r *Rooms) { proven = append(proven, r.kept.proven, maps.Clone(r.kept.vouched)) })
	all := make(map[netip.Addr][]Handed)
	each(func(r *Rooms) {
		for addr := range r.withTemplates() {
			if !slices.ContainsFunc(proven, func(p map[netip.Addr]bool) bool { return p[addr] }) {
				continue
			}
			since, refreshed, is := wanted(addr)
			if is && len(all) < most && (r.kept.store.LearnedSince(addr, since) || refreshed && r.kept.store.RefreshedSince(addr, since)) {
				all[addr] = nil
			}
		}
	})
	return encodeOf(each, all, time.Now())
}

// withTemplates yields the addresses of the exporters that have templates.
func (r *Rooms) withTemplates() iter.Seq[netip.Addr] {
	if !r.KeepsTemplates() {
		return func(func(netip.Addr) bool) {}
	}
	return r.kept.store.Addresses()
}

// encodeOf returns the templates that all services have of exporters: they replace those that another host has not taken over yet. written is the
// time for copies.
func encodeOf(each func(func(*Rooms)), all map[netip.Addr][]Handed, written time.Time) (map[netip.Addr][]byte, error) {
	each(func(r *Rooms) {
		now := time.Now()
		for addr := range all {
			if !r.KeepsTemplates() {
				return
			}
			for _, m := range r.kept.store.Replay(addr, now, 0, nil) {
				if l, ok := r.Listeners[m.Row]; ok {
					all[addr] = append(all[addr], Handed{l.String(), m.Source, m.Data, max(0, now.Sub(m.Refreshed)), written})
				}
			}
		}
	})
	return EncodeHanded(all)
}

// TakeOver keeps templates that another host has handed over, and sends them to the members of their exporters; with changed, only those that
// are new. Without it, the exporter comes to this host: a member that knew its templates may have forgotten them.
func (r *Rooms) TakeOver(list []Handed, changed bool) {
	if !r.KeepsTemplates() {
		return
	}
	r.insertTemplates(list, changed)
	r.scheduleTemplatesSave()
	r.ReplayMoved()
}

// insertTemplates keeps templates, and notes which of them to send; with changed, those that are new.
func (r *Rooms) insertTemplates(list []Handed, changed bool) {
	now := time.Now()
	for _, h := range list {
		age := h.Age
		if !h.Written.IsZero() {
			age += max(0, now.Sub(h.Written)) // the clock of the other host may be ahead
			r.kept.vouched[h.Source.Addr().Unmap()] = true
		}
		for _, row := range r.rowsOf(h) {
			before := r.kept.store.Revision()
			if r.kept.store.Insert(h.Source, row, h.Data, now.Add(-age), now) == nil && (!changed || r.kept.store.Revision() != before) {
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
