// SPDX-License-Identifier: Apache-2.0

package store

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"sockeye/internal/fleet/lead"
	"sockeye/internal/fleet/table"
)

// The keys below the prefix of a fleet.
const (
	tableKey    = "table"
	leaderKey   = "leader"
	hostKeys    = "hosts/"
	settingKeys = "settings/"
)

// mostValue is the size of the largest value of a key other than the table, in bytes.
const mostValue = 4096

// MostEpochs is the largest difference between two tables that a host sees, more than a century at one epoch a second. Without a
// limit, one wrong table would use up all epochs.
const MostEpochs = 1 << 32

// entry is a key of the store. All values but the table are decoded when they change: in a large fleet, registrations change
// all the time.
type entry struct {
	value    []byte // of the table
	modified int64  // revision
	host     *registered
	setting  *Setting
	leader   *leading
	damaged  bool
	since    time.Duration // monotonic time of the contact before the key changed
}

// registered is the value of hosts/NAME.
type registered struct {
	Registration
	// Instance names the process, so that two hosts with one name do not take the registration from each other.
	Instance string `json:"instance"`
}

// leading is the value of leader.
type leading struct {
	Name     string `json:"name"`
	Instance string `json:"instance"`
}

// absentTime is the time for which a host of the table is unknown that this host has not seen since it has reached the store:
// after an outage, all registrations have ended, and the hosts register one by one.
const absentTime = 10 * time.Second

// view makes snapshots of the keys.
type view struct {
	instance string
	entries  map[string]entry
	reached  time.Duration   // monotonic time since which this host reaches the store, but for interruptions that end no registration
	contact  time.Duration   // time of the last answer of the store
	seen     map[string]bool // hosts that were registered since then
	table    *table.Table    // the last good one
	refused  string          // why the present value of the table was refused; "": it was not
	decoded  int64           // revision of the value of the table that was decoded last
}

// startSession begins a session, without keys. A session that follows the one before within the time of a lease continues it: with a new
// beginning each time, an unstable connection would keep the hosts that have died unknown for ever.
func (v *view) startSession(now, lease time.Duration) {
	if v.entries == nil || now-v.contact >= lease {
		v.reached, v.seen = now, make(map[string]bool)
	}
	v.entries, v.contact = make(map[string]entry), now
}

// set sets a key, or deletes it with a nil value. leased is set if the key ends with a lease: a registration or a leader
// without one was not written by a host, and would never end.
func (v *view) set(key string, value []byte, modified int64, leased bool) {
	if value == nil {
		delete(v.entries, key)
		return
	}
	e := entry{modified: modified, since: v.contact}
	switch name, setting := strings.CutPrefix(key, settingKeys); {
	case key == tableKey:
		e.value = value
	case key == leaderKey:
		e.leader = new(leading)
		e.damaged = decode(value, e.leader) != nil || !leased
	case setting:
		e.setting = new(Setting)
		named := table.Host{Name: name, Weight: 1}
		e.damaged = decode(value, e.setting) != nil || e.setting.Check() != nil || named.Check() != nil
	case strings.HasPrefix(key, hostKeys):
		e.host = new(registered)
		e.damaged = decode(value, e.host) != nil || e.host.Name != strings.TrimPrefix(key, hostKeys) || e.host.Check() != nil || !leased
		if !e.damaged {
			v.seen[e.host.Name] = true
		}
	default:
		return
	}
	v.entries[key] = e
}

// snapshot returns the state at a monotonic time.
func (v *view) snapshot(now time.Duration) *Snapshot {
	v.decodeTable()
	s := &Snapshot{Table: v.table, Connected: true, Damaged: v.refused != "", revision: v.entries[tableKey].modified}
	if v.refused != "" {
		s.Problems = append(s.Problems, v.refused)
	}
	hosts := make(map[string]*lead.Host)
	keys := slices.Sorted(maps.Keys(v.entries)) // hosts before settings
	for _, key := range keys {
		switch e := v.entries[key]; {
		case e.host != nil && e.damaged:
			s.Problems = append(s.Problems, fmt.Sprintf("the registration of host %q is damaged", strings.TrimPrefix(key, hostKeys)))
		case e.host != nil:
			r := &e.host.Registration
			hosts[r.Name] = &lead.Host{Host: r.Host, State: lead.Ready, Alive: true, Healthy: r.Healthy && (!r.Refuses || r.Applied > 0), Refuses: r.Refuses, Nonce: r.Nonce, Applied: r.Applied, Handed: r.Handed, Prepared: r.Prepared, Late: r.Late, Digests: r.Digests}
		case e.leader != nil && e.damaged:
			s.Problems = append(s.Problems, "the key of the leader is damaged")
		case e.leader != nil:
			s.Leader, s.Leads = e.leader.Name, e.leader.Instance == v.instance
		case e.setting != nil && e.damaged:
			name := strings.TrimPrefix(key, settingKeys)
			named, mend := table.Host{Name: name, Weight: 1}, "set it again with sockeye host set"
			if named.Check() != nil {
				mend = "no host can have this name, so delete the key with etcdctl"
			}
			s.Problems = append(s.Problems, fmt.Sprintf("the setting of host %q is damaged: %s", name, mend))
		case e.setting != nil && *e.setting == Setting{}: // as if there were none
		case e.setting != nil:
			name := strings.TrimPrefix(key, settingKeys)
			h := hosts[name]
			if h == nil {
				h = &lead.Host{Host: table.Host{Name: name, Weight: 1}, State: lead.Ready}
				hosts[name] = h
			}
			h.OwnWeight = h.Weight
			h.State, h.Weight, h.SetWeight = cmp.Or(e.setting.State, h.State), cmp.Or(e.setting.Weight, h.Weight), e.setting.Weight
		}
	}
	v.addAbsent(hosts, now)
	for _, name := range slices.Sorted(maps.Keys(hosts)) {
		s.Hosts = append(s.Hosts, *hosts[name])
	}
	return s
}

// decodeTable reads the table if it has changed.
func (v *view) decodeTable() {
	e, ok := v.entries[tableKey]
	if !ok {
		v.decoded, v.refused = 0, ""
		if v.table != nil {
			v.refused = "the store has lost the table"
		}
		return
	}
	if e.modified == v.decoded {
		return
	}
	v.decoded, v.refused = e.modified, ""
	t, err := table.Decode(e.value)
	switch {
	case err != nil:
		v.refused = err.Error()
	case v.table != nil && t.Nonce != v.table.Nonce:
		v.refused = "the table has another nonce: it belongs to another fleet (see Troubleshooting in docs/fleet.md)"
	case v.table != nil && t.Epoch > v.table.Epoch+MostEpochs:
		v.refused = fmt.Sprintf("the epoch of the table jumps from %d to %d", v.table.Epoch, t.Epoch)
	case v.table != nil && t.Epoch < v.table.Epoch:
		v.refused = fmt.Sprintf("the epoch of the table goes back from %d to %d", v.table.Epoch, t.Epoch)
	default:
		v.table = t
	}
	if v.refused != "" {
		v.refused = "the table in the store is refused: " + v.refused
	}
}

// addAbsent adds the hosts of the table that are not registered, and completes those that only a setting names.
func (v *view) addAbsent(hosts map[string]*lead.Host, now time.Duration) {
	if v.table == nil {
		return
	}
	for i := range v.table.Hosts {
		t := &v.table.Hosts[i]
		h := hosts[t.Name]
		if h == nil {
			h = &lead.Host{State: lead.Ready}
			hosts[t.Name] = h
		}
		if !h.Alive {
			damaged := v.entries[hostKeys+t.Name] // somebody else has replaced the registration; a living host writes it again
			h.Host, h.Unknown = *t, !v.seen[t.Name] && now-v.reached < absentTime || damaged.damaged && now-damaged.since < absentTime
		}
	}
}

func decode(value []byte, into any) error {
	if len(value) > mostValue {
		return fmt.Errorf("%d bytes", len(value))
	}
	return json.Unmarshal(value, into)
}
