// SPDX-License-Identifier: Apache-2.0

package store

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// The templates of a device are a value of the key sockeye/FLEET.templates/HOST/ADDRESS. No host watches these keys: the
// registration of the former owner says when it has written them. They end with its lease.
const (
	// mostTemplates is the size of the largest value in bytes; devices with more send their templates again by themselves.
	mostTemplates = 256 << 10
	// A host takes over mostTaken bytes and mostTakenKeys devices at once at most, in takeTime.
	mostTaken, mostTakenKeys, takeTime = 64 << 20, 20_000, 5 * time.Second
	// mostBatch is the size of the values in one request, and batchKeys their number: etcd refuses requests of more than 1.5 MiB
	// or 128 operations.
	mostBatch, batchKeys = 1 << 20, 100
	// readKeys is the number of values that one request reads. Whoever can write to etcd chooses their size, up to that of a request.
	readKeys = 16
)

func (e *Etcd) templatesOf(host string) string {
	return "sockeye/" + e.config.Fleet + ".templates/" + host + "/"
}

// HandOver writes the templates of devices for another host.
func (e *Etcd) HandOver(ctx context.Context, to string, templates map[netip.Addr][]byte) error {
	client, err := e.connect()
	if err != nil {
		return err
	}
	e.mu.Lock()
	lease := e.lease
	e.mu.Unlock()
	if lease == 0 {
		return fmt.Errorf("hand over templates: this host has no lease")
	}
	var operations []clientv3.Op
	size := 0
	commit := func() error {
		if len(operations) == 0 {
			return nil
		}
		ctx, cancel := context.WithTimeout(ctx, requestTimeout)
		defer cancel()
		if _, err := client.Txn(ctx).Then(operations...).Commit(); err != nil {
			return fmt.Errorf("hand over templates: %w", err)
		}
		operations, size = nil, 0
		return nil
	}
	for _, a := range slices.SortedFunc(maps.Keys(templates), netip.Addr.Compare) {
		value := templates[a]
		if len(value) > mostTemplates {
			continue
		}
		if size+len(value) > mostBatch || len(operations) == batchKeys {
			if err := commit(); err != nil {
				return err
			}
		}
		operations = append(operations, clientv3.OpPut(e.templatesOf(to)+a.String(), string(value), clientv3.WithLease(lease)))
		size += len(value)
	}
	return commit()
}

// TakeOver reads and removes the templates for this host. The values are those of whoever can write to etcd: a value that is too
// large is left out, and what cannot be read is removed. Values that another host writes meanwhile stay, for the next call.
func (e *Etcd) TakeOver(ctx context.Context) (map[netip.Addr][]byte, error) {
	client, err := e.connect()
	if err != nil {
		return nil, err
	}
	short, cancel := context.WithTimeout(ctx, takeTime)
	defer cancel()
	prefix := e.templatesOf(e.config.Host.Name)
	keys, err := client.Get(short, prefix, clientv3.WithPrefix(), clientv3.WithKeysOnly(), clientv3.WithLimit(mostTakenKeys))
	if err != nil && short.Err() == nil {
		// Keys that are too long for a response would keep all devices from moving to this host.
		if _, bad := client.Delete(short, prefix, clientv3.WithPrefix()); bad == nil {
			return nil, nil
		}
	}
	if err != nil {
		return nil, fmt.Errorf("take over templates: %w", err)
	}
	if len(keys.Kvs) == 0 {
		return nil, nil
	}
	all, size := make(map[netip.Addr][]byte), 0
	for some := range slices.Chunk(keys.Kvs, readKeys) {
		if size > mostTaken {
			break
		}
		reads := make([]clientv3.Op, len(some))
		for i, kv := range some {
			reads[i] = clientv3.OpGet(string(kv.Key))
		}
		read, err := client.Txn(short).Then(reads...).Commit()
		if err != nil {
			break // templates are sent again by their exporters
		}
		for _, one := range read.Responses {
			for _, kv := range one.GetResponseRange().GetKvs() {
				address, bad := netip.ParseAddr(strings.TrimPrefix(string(kv.Key), prefix))
				if bad == nil && len(kv.Value) <= mostTemplates {
					all[address] = kv.Value
					size += len(kv.Value)
				}
			}
		}
	}
	if err := e.removeTemplates(ctx, client, prefix, keys.Header.Revision); err != nil {
		return nil, err
	}
	return all, nil
}

// removeTemplates removes the keys that begin with a prefix and have not changed since a revision. Templates that stay would be taken over
// again at the next move.
func (e *Etcd) removeTemplates(ctx context.Context, client *clientv3.Client, prefix string, revision int64) error {
	ctx, cancel := context.WithTimeout(ctx, takeTime) // the reads may have used up the time
	defer cancel()
	all, err := client.Txn(ctx).If(clientv3.Compare(clientv3.ModRevision(prefix).WithPrefix(), "<", revision+1)).
		Then(clientv3.OpDelete(prefix, clientv3.WithPrefix())).Commit()
	if err == nil && !all.Succeeded {
		err = e.removeUnchanged(ctx, client, prefix, revision)
	}
	if err != nil && ctx.Err() == nil {
		return fmt.Errorf("remove templates: %w", err)
	}
	return nil
}

// removeUnchanged does the same, key by key, while other hosts write keys.
func (e *Etcd) removeUnchanged(ctx context.Context, client *clientv3.Client, prefix string, revision int64) error {
	old, err := client.Get(ctx, prefix, clientv3.WithPrefix(), clientv3.WithKeysOnly(), clientv3.WithMaxModRev(revision))
	if err != nil {
		return err
	}
	for some := range slices.Chunk(old.Kvs, batchKeys) {
		var removes []clientv3.Op
		for _, kv := range some {
			key := string(kv.Key)
			removes = append(removes, clientv3.OpTxn([]clientv3.Cmp{clientv3.Compare(clientv3.ModRevision(key), "<", revision+1)}, []clientv3.Op{clientv3.OpDelete(key)}, nil))
		}
		if _, err := client.Txn(ctx).Then(removes...).Commit(); err != nil {
			return err
		}
	}
	return nil
}
