// SPDX-License-Identifier: Apache-2.0

// Package store reads and writes the registrations, the settings and the table of a fleet, in etcd or in a file.
//
// The store decides which host leads; a host that cannot reach the store keeps its last table and changes nothing. Whoever
// can write to the store decides where devices go, so what is read from the store is checked, and a table that no leader
// writes is refused: the last good one stays in force.
package store

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"

	"sockeye/internal/fleet/lead"
	"sockeye/internal/fleet/table"
)

// Store is a store of a fleet. All methods may be called at the same time.
type Store interface {
	// Run registers this host, and sends a snapshot after each change, until ctx is done. A snapshot that was not received
	// is replaced by the next one. Run tries again after all errors; a snapshot reports them.
	Run(ctx context.Context, snapshots chan *Snapshot)
	// Update changes the registration of this host.
	Update(r Registration)
	// Write makes a table the present one. The error is ErrNotLeader if this host does not lead any more, or if the table
	// has changed since the snapshot that the table was made from.
	Write(ctx context.Context, from *Snapshot, t *table.Table) error
	// ChangeSetting changes what the operator wants of a host. change gets the present setting, and returns the next one. ChangeSetting
	// calls change again if the setting changes meanwhile, and returns its error.
	ChangeSetting(ctx context.Context, host string, change func(present Setting) (Setting, error)) error
	// Ask asks another host, and returns the answer. The error is ErrNoAnswers if the hosts of the store cannot be asked.
	Ask(ctx context.Context, host string, question json.RawMessage) (answer json.RawMessage, err error)
	// HandOver keeps the templates of devices for another host, by address, for a minute at most. late is set for templates that are not part
	// of the preparation of a table: TakeOver returns either those, or the others.
	HandOver(ctx context.Context, to string, late bool, templates map[netip.Addr][]byte) error
	// TakeOver returns the templates that other hosts have handed over to this one, by address, and removes them. The templates of one device
	// may be in several elements. With more, further ones are left for another call. With an error, handed are those that may not have been
	// removed.
	TakeOver(ctx context.Context, late bool) (handed []map[netip.Addr][]byte, more bool, err error)
	// RenewCopies keeps the copies of the templates of this host's devices, which outlive the host by hours, and returns a number: another one says
	// that there are no copies. 0: the store keeps none.
	RenewCopies(ctx context.Context) (number int64, err error)
	// CopyTemplates writes copies, by address, and removes those without a value. number is that of RenewCopies.
	CopyTemplates(ctx context.Context, number int64, templates map[netip.Addr][]byte) error
	// Copies calls take with some of the copies of another host, by address, from a place on, which is "" at first. It returns the next place, or ""
	// at the end. With an error, the call can be repeated with that place.
	Copies(ctx context.Context, host, from string, take func(map[netip.Addr][]byte)) (next string, err error)
	// Close gives back what the store holds of the process. With leave, the registration ends at once; otherwise with its
	// lease.
	Close(leave bool) error
}

// ErrNotLeader is the error of Write on a host that may not write.
var ErrNotLeader = errors.New("this host does not lead the fleet, or the table has changed")

// ErrReadOnly is the error of changes to a store that people edit.
var ErrReadOnly = errors.New("the table of this fleet is a file: edit the file on all hosts")

// Registration is what a host says about itself.
type Registration struct {
	table.Host
	// Healthy is set while the host can serve devices.
	Healthy bool `json:"healthy"`
	// Refuses is set while the host refuses the table of the store: it does not lead, and with a table of another fleet
	// (Applied is 0) it gets no devices.
	Refuses bool `json:"refuses,omitempty"`
	// Nonce is that of the table in force, or 0, Applied its epoch, Handed the last one whose templates the host has handed over, and
	// Prepared the last one whose preparations are finished.
	Nonce    uint64 `json:"nonce,omitempty"`
	Applied  uint64 `json:"applied"`
	Handed   uint64 `json:"handed"`
	Prepared uint64 `json:"prepared"`
	// Late changes whenever the host has handed over late templates.
	Late uint64 `json:"late,omitempty"`
	// Digests are those of the policy.
	Digests lead.Digests `json:"digests,omitzero"`
}

// Setting is what the operator wants of a host.
type Setting struct {
	State  lead.State `json:"state,omitempty"`  // "": ready
	Weight uint32     `json:"weight,omitempty"` // 0: that of the registration
}

// Check returns an error if no host can have such a setting.
func (s *Setting) Check() error {
	switch s.State {
	case "", lead.Ready, lead.Drain, lead.Maint, lead.Removed:
	default:
		return fmt.Errorf("a host has no state %q", s.State)
	}
	if s.Weight > table.MostWeight {
		return fmt.Errorf("weight %d, at most %d", s.Weight, table.MostWeight)
	}
	return nil
}

// Snapshot is what the store shows at one moment. The receiver does not change it.
type Snapshot struct {
	// Table is the last good table, or nil before the first one.
	Table *table.Table
	// Hosts are those that are registered, or that have a setting, sorted by name.
	Hosts []lead.Host
	// Leader is the name of the host that leads, or "".
	Leader string
	// Leads is set if this host leads.
	Leads bool
	// Connected is set if the snapshot is of now; otherwise it is of the time at which the connection was lost.
	Connected bool
	// Problems are what is wrong with the connection, with the registration of this host, and with the contents of the store,
	// one line each.
	Problems []string
	// Taken is set if another process has registered a host with the name of this one.
	Taken bool
	// Damaged is set if the store has no table, or one that was refused, while Table is a good one.
	Damaged bool

	revision int64 // of the table in the store; 0: there is none
}

// offer sends a snapshot, in place of one that was not received yet. The channel has a buffer of one.
func offer(snapshots chan *Snapshot, s *Snapshot) {
	for {
		select {
		case snapshots <- s:
			return
		default:
		}
		select {
		case <-snapshots:
		default:
		}
	}
}
