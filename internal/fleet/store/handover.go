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
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// The templates of a device are a value of the key sockeye/FLEET.templates/HOST/ADDRESS, or, if they are late, of
// sockeye/FLEET.templates/HOST+late/FORMER/ADDRESS, where FORMER is the host that hands them over: several hosts may do so at the same
// time. No name of a host contains a plus sign. No host watches these keys: the registration of the former owner says when it has
// written them.
const (
	// handedTime is the time after which templates that were not taken over end: they have an age, which does not include this time.
	handedTime = 60 * time.Second
	// mostTemplates is the size of the largest value in bytes; devices with more send their templates again by themselves.
	mostTemplates = 256 << 10
	// A call takes over mostTaken bytes and mostTakenKeys devices at most, in takeTime.
	mostTaken, mostTakenKeys, takeTime = 64 << 20, 20_000, 5 * time.Second
	// mostBatch is the size of the values in one request, and batchKeys their number: etcd refuses requests of more than 1.5 MiB
	// or 128 operations.
	mostBatch, batchKeys = 1 << 20, 100
	// readKeys is the number of values that one request reads. Whoever can write to etcd chooses their size, up to that of a request.
	readKeys = 16
)

// HandOver writes the templates of devices for another host.
func (e *Etcd) HandOver(ctx context.Context, to string, late bool, templates map[netip.Addr][]byte) error {
	client, err := e.connect()
	if err != nil {
		return err
	}
	e.mu.Lock()
	registered := e.lease != 0
	e.mu.Unlock()
	if !registered {
		return fmt.Errorf("hand over templates: this host is not registered")
	}
	short, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	lease, err := client.Grant(short, int64(handedTime.Seconds()))
	if err != nil {
		return fmt.Errorf("hand over templates: %w", err)
	}
	prefix := e.templatesOf(to, late)
	if late {
		prefix += e.config.Host.Name + "/"
	}
	if err := writeTemplates(ctx, client, prefix, lease.ID, templates); err != nil {
		return fmt.Errorf("hand over templates: %w", err)
	}
	return nil
}

// writeTemplates writes the templates of devices to the keys that begin with prefix, with a lease, and removes the key of a device without a value.
func writeTemplates(ctx context.Context, client *clientv3.Client, prefix string, lease clientv3.LeaseID, templates map[netip.Addr][]byte) error {
	var operations []clientv3.Op
	size := 0
	commit := func() error {
		if len(operations) == 0 {
			return nil
		}
		ctx, cancel := context.WithTimeout(ctx, requestTimeout)
		defer cancel()
		_, err := client.Txn(ctx).Then(operations...).Commit()
		operations, size = nil, 0
		return err
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
		if value == nil {
			operations = append(operations, clientv3.OpDelete(prefix+a.String()))
		} else {
			operations = append(operations, clientv3.OpPut(prefix+a.String(), string(value), clientv3.WithLease(lease)))
		}
		size += len(value)
	}
	return commit()
}

// TakeOver reads and removes the templates for this host. The values are those of whoever can write to etcd: a value that is too
// large is left out, and what cannot be read is removed. Values that another host writes meanwhile stay, for the next call.
func (e *Etcd) TakeOver(ctx context.Context, late bool) (handed []map[netip.Addr][]byte, more bool, err error) {
	client, err := e.connect()
	if err != nil {
		return nil, false, err
	}
	prefix := e.templatesOf(e.config.Host.Name, late)
	values, err := readTemplates(ctx, client, prefix, clientv3.GetPrefixRangeEnd(prefix))
	if status.Code(err) == codes.ResourceExhausted {
		// Keys that are too long for a response would keep all devices from moving to this host.
		short, cancel := context.WithTimeout(ctx, takeTime) // the answer may have used up the time
		defer cancel()
		if _, bad := client.Delete(short, prefix, clientv3.WithPrefix()); bad == nil {
			return nil, false, nil
		}
	}
	byHost := make(map[string]map[netip.Addr][]byte)
	for key, value := range values.values {
		name, host := strings.TrimPrefix(key, prefix), ""
		if late {
			host, name, _ = strings.Cut(name, "/")
		}
		address, bad := netip.ParseAddr(name)
		if bad != nil || len(value) > mostTemplates {
			continue
		}
		if byHost[host] == nil {
			byHost[host] = make(map[netip.Addr][]byte)
		}
		byHost[host][address] = value
	}
	if n := len(values.keys); n > 0 {
		err = e.removeTemplates(ctx, client, values.keys[0], values.keys[n-1], values.revision)
	}
	if err != nil {
		err = fmt.Errorf("take over templates: %w", err)
	}
	for _, host := range slices.Sorted(maps.Keys(byHost)) {
		handed = append(handed, byHost[host])
	}
	return handed, values.more, err
}

// templatesOf returns the beginning of the keys with templates for a host.
func (e *Etcd) templatesOf(host string, late bool) string {
	if late {
		host += "+late"
	}
	return "sockeye/" + e.config.Fleet + ".templates/" + host + "/"
}

// someTemplates are templates that were read together.
type someTemplates struct {
	keys     []string // in their order
	values   map[string][]byte
	revision int64
	more     bool // there are further keys, or an error
}

// readTemplates reads the templates of the keys from one to before another one: mostTaken bytes and mostTakenKeys keys at most, in takeTime. With
// an error, it returns what it has read.
func readTemplates(ctx context.Context, client *clientv3.Client, from, end string) (t someTemplates, err error) {
	ctx, cancel := context.WithTimeout(ctx, takeTime)
	defer cancel()
	keys, err := client.Get(ctx, from, clientv3.WithRange(end), clientv3.WithKeysOnly(), clientv3.WithLimit(mostTakenKeys))
	if err != nil {
		return someTemplates{more: true}, err
	}
	t = someTemplates{values: make(map[string][]byte), revision: keys.Header.Revision, more: keys.More}
	size := 0
	for some := range slices.Chunk(keys.Kvs, readKeys) {
		if size > mostTaken {
			t.more = true
			break
		}
		reads := make([]clientv3.Op, len(some))
		for i, kv := range some {
			reads[i] = clientv3.OpGet(string(kv.Key))
		}
		values, err := client.Txn(ctx).Then(reads...).Commit()
		if err != nil {
			t.more = true
			return t, err
		}
		for _, kv := range some {
			t.keys = append(t.keys, string(kv.Key))
		}
		for _, one := range values.Responses {
			for _, kv := range one.GetResponseRange().GetKvs() {
				t.values[string(kv.Key)] = kv.Value
				size += len(kv.Value)
			}
		}
	}
	return t, nil
}

// removeTemplates removes the keys from the first to the last one that have not changed since a revision.
func (e *Etcd) removeTemplates(ctx context.Context, client *clientv3.Client, first, last string, revision int64) error {
	ctx, cancel := context.WithTimeout(ctx, takeTime) // the reads may have used up the time
	defer cancel()
	end := last + "\x00"
	unchanged := clientv3.Compare(clientv3.ModRevision(first).WithRange(end), "<", revision+1)
	all, err := client.Txn(ctx).If(unchanged).Then(clientv3.OpDelete(first, clientv3.WithRange(end))).Commit()
	if err != nil || all.Succeeded {
		return err
	}
	// Other hosts write keys: key by key.
	old, err := client.Get(ctx, first, clientv3.WithRange(end), clientv3.WithKeysOnly(), clientv3.WithMaxModRev(revision))
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
