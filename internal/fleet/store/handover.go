// SPDX-License-Identifier: Apache-2.0

package store

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// The templates of a device are a value of the key sockeye/FLEET.templates/HOST/ADDRESS. No host watches these keys: the
// registration of the former owner says when it has written them. They end with its lease.
const (
	// mostTemplates is the size of the largest value in bytes; devices with more send their templates again by themselves.
	mostTemplates = 256 << 10
	// mostTaken is the size of the values that a host takes over at once; the others wait for the next table, or end.
	mostTaken = 64 << 20
	// mostBatch is the size of the values in one request, and batchKeys their number: etcd refuses requests of more than 1.5 MiB
	// or 128 operations.
	mostBatch, batchKeys = 1 << 20, 100
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

// TakeOver reads and removes the templates for this host.
func (e *Etcd) TakeOver(ctx context.Context) ([][]byte, error) {
	client, err := e.connect()
	if err != nil {
		return nil, err
	}
	var all [][]byte
	size := 0
	prefix := e.templatesOf(e.config.Host.Name)
	for {
		ctx, cancel := context.WithTimeout(ctx, requestTimeout)
		list, err := client.Get(ctx, prefix, clientv3.WithPrefix(), clientv3.WithLimit(batchKeys))
		if err == nil && len(list.Kvs) > 0 {
			operations := make([]clientv3.Op, len(list.Kvs))
			for i, kv := range list.Kvs {
				all, operations[i] = append(all, kv.Value), clientv3.OpDelete(string(kv.Key))
				size += len(kv.Value)
			}
			_, err = client.Txn(ctx).Then(operations...).Commit()
		}
		cancel()
		if err != nil {
			return nil, fmt.Errorf("take over templates: %w", err)
		}
		if len(list.Kvs) == 0 || size > mostTaken {
			return all, nil
		}
	}
}
