// SPDX-License-Identifier: Apache-2.0

package store

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"sockeye/internal/clock"
)

// A copy of the templates of a device is a value of the key sockeye/FLEET.templates/HOST+copy/ADDRESS. All copies of a host have a lease that
// outlives the host: for as long as an agent keeps templates by itself.
const (
	copyTime  = 6 * time.Hour // templates.DefaultLifetime
	copyRenew = 10 * time.Minute
	// copiesTime is the time that a call of Copies takes, and a request.
	copiesTime = 2 * time.Second
)

// copyLease is the lease of the copies of this host.
type copyLease struct {
	id      clientv3.LeaseID // 0: none
	renewed time.Duration    // clock.Monotonic
}

// RenewCopies keeps the copies of this host. The number changes when all of them must be written.
func (e *Etcd) RenewCopies(ctx context.Context) (number int64, err error) {
	client, err := e.connect()
	if err != nil {
		return 0, err
	}
	e.mu.Lock()
	lease := e.copies
	e.mu.Unlock()
	now := clock.Monotonic()
	if lease.id != 0 && now-lease.renewed < copyRenew {
		return int64(lease.id), nil
	}
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	if lease.id != 0 {
		_, err = client.KeepAliveOnce(ctx, lease.id)
	}
	if lease.id == 0 || errors.Is(err, rpctypes.ErrLeaseNotFound) {
		var granted *clientv3.LeaseGrantResponse
		if granted, err = client.Grant(ctx, int64(copyTime.Seconds())); err == nil {
			lease.id = granted.ID
		}
	}
	if err != nil {
		return 0, fmt.Errorf("keep copies of templates: %w", err)
	}
	lease.renewed = now
	e.mu.Lock()
	e.copies = lease
	e.mu.Unlock()
	return int64(lease.id), nil
}

// CopyTemplates writes copies of the templates of devices of this host, and removes those of devices without a value. number is that of
// RenewCopies.
func (e *Etcd) CopyTemplates(ctx context.Context, number int64, templates map[netip.Addr][]byte) error {
	client, err := e.connect()
	if err == nil {
		err = writeTemplates(ctx, client, e.copiesOf(e.config.Host.Name), clientv3.LeaseID(number), templates)
	}
	if errors.Is(err, rpctypes.ErrLeaseNotFound) { // etcd was restored, for example
		e.mu.Lock()
		e.copies = copyLease{}
		e.mu.Unlock()
	}
	if err != nil {
		return fmt.Errorf("copy templates: %w", err)
	}
	return nil
}

// Copies passes some of the copies of a host to take, beginning at the key from ("" for the first one). It returns the key to continue with, or ""
// after the last copy. Values are untrusted, because anybody with write access to etcd can write them: values that are too large are skipped.
// After an error, the caller can repeat the call with next.
func (e *Etcd) Copies(ctx context.Context, host, from string, take func(map[netip.Addr][]byte)) (next string, err error) {
	client, err := e.connect()
	if err != nil {
		return from, err
	}
	prefix := e.copiesOf(host)
	next = max(from, prefix)
	read := func() (more bool, err error) {
		ctx, cancel := context.WithTimeout(ctx, requestTimeout)
		defer cancel()
		some, err := client.Get(ctx, next, clientv3.WithRange(clientv3.GetPrefixRangeEnd(prefix)), clientv3.WithLimit(readKeys))
		if err != nil {
			return true, fmt.Errorf("read copies of templates: %w", err)
		}
		copies := make(map[netip.Addr][]byte)
		for _, kv := range some.Kvs {
			next = string(kv.Key) + "\x00"
			if address, bad := netip.ParseAddr(strings.TrimPrefix(string(kv.Key), prefix)); bad == nil && len(kv.Value) <= mostTemplates {
				copies[address] = kv.Value
			}
		}
		take(copies)
		return some.More, nil
	}
	for begun := clock.Monotonic(); clock.Monotonic()-begun < copiesTime; {
		if more, err := read(); err != nil || !more {
			if err == nil {
				next = ""
			}
			return next, err
		}
	}
	return next, nil
}

// copiesOf returns the beginning of the keys with the copies of a host.
func (e *Etcd) copiesOf(host string) string {
	return "sockeye/" + e.config.Fleet + ".templates/" + host + "+copy/"
}
