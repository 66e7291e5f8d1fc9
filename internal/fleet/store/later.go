// SPDX-License-Identifier: Apache-2.0

package store

import (
	"context"
	"encoding/json"
	"errors"
	"net/netip"
	"sync"
	"time"

	"sockeye/internal/fleet/table"
)

// laterPause is the pause before another attempt to open a store.
const laterPause = 2 * time.Second

// errNotOpen is the error of changes before the store could be opened.
var errNotOpen = errors.New("the store of the fleet is not open")

// Later is a store that is opened while it runs, again and again until that succeeds: a certificate that has expired must not keep
// an agent from starting.
type Later struct {
	open func(Registration) (Store, error)

	mu           sync.Mutex
	registration Registration
	store        Store // nil: not open
}

// OpenLater returns a store that open opens, with the registration of this host.
func OpenLater(r Registration, open func(Registration) (Store, error)) *Later {
	return &Later{open: open, registration: r}
}

// Run opens the store and runs it.
func (l *Later) Run(ctx context.Context, snapshots chan *Snapshot) {
	problem := ""
	for {
		l.mu.Lock()
		s, err := l.open(l.registration)
		if err == nil {
			l.store = s
		}
		l.mu.Unlock()
		if err == nil {
			s.Run(ctx, snapshots)
			return
		}
		if err.Error() != problem {
			problem = err.Error()
			offer(snapshots, &Snapshot{Problems: []string{problem}})
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(laterPause):
		}
	}
}

// Update changes the registration of this host.
func (l *Later) Update(r Registration) {
	l.mu.Lock()
	l.registration = r
	s := l.store
	l.mu.Unlock()
	if s != nil {
		s.Update(r)
	}
}

// Write makes a table the present one.
func (l *Later) Write(ctx context.Context, from *Snapshot, t *table.Table) error {
	if s := l.opened(); s != nil {
		return s.Write(ctx, from, t)
	}
	return errNotOpen
}

// ChangeSetting changes what the operator wants of a host.
func (l *Later) ChangeSetting(ctx context.Context, host string, change func(Setting) (Setting, error)) error {
	if s := l.opened(); s != nil {
		return s.ChangeSetting(ctx, host, change)
	}
	return errNotOpen
}

// Ask asks another host.
func (l *Later) Ask(ctx context.Context, host string, question json.RawMessage) (json.RawMessage, error) {
	if s := l.opened(); s != nil {
		return s.Ask(ctx, host, question)
	}
	return nil, errNotOpen
}

// HandOver keeps the templates of devices for another host.
func (l *Later) HandOver(ctx context.Context, to string, late bool, templates map[netip.Addr][]byte) error {
	if s := l.opened(); s != nil {
		return s.HandOver(ctx, to, late, templates)
	}
	return errNotOpen
}

// TakeOver returns the templates for this host.
func (l *Later) TakeOver(ctx context.Context, late bool) (handed []map[netip.Addr][]byte, more bool, err error) {
	if s := l.opened(); s != nil {
		return s.TakeOver(ctx, late)
	}
	return nil, false, errNotOpen
}

// RenewCopies keeps the copies of the templates of this host's devices.
func (l *Later) RenewCopies(ctx context.Context) (number int64, err error) {
	if s := l.opened(); s != nil {
		return s.RenewCopies(ctx)
	}
	return 0, errNotOpen
}

// CopyTemplates writes copies.
func (l *Later) CopyTemplates(ctx context.Context, number int64, templates map[netip.Addr][]byte) error {
	if s := l.opened(); s != nil {
		return s.CopyTemplates(ctx, number, templates)
	}
	return errNotOpen
}

// Copies calls take with the copies of another host.
func (l *Later) Copies(ctx context.Context, host, from string, take func(map[netip.Addr][]byte)) (next string, err error) {
	if s := l.opened(); s != nil {
		return s.Copies(ctx, host, from, take)
	}
	return from, errNotOpen
}

// Close closes the store if it is open.
func (l *Later) Close(leave bool) error {
	if s := l.opened(); s != nil {
		return s.Close(leave)
	}
	return nil
}

// opened returns the store, or nil.
func (l *Later) opened() Store {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.store
}
