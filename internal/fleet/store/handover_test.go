// SPDX-License-Identifier: Apache-2.0

package store

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// take takes over the templates for a host that are not late.
func take(m *member) (map[netip.Addr][]byte, error) {
	all := make(map[netip.Addr][]byte)
	for {
		handed, more, err := m.TakeOver(context.Background(), false)
		for _, templates := range handed {
			maps.Copy(all, templates)
		}
		if err != nil || !more {
			return all, err
		}
	}
}

// TestHandOver hands templates of many devices from one host to another: all but one that is too large arrive, once. Late templates are
// apart, for each host that hands them over, and all keys end after a minute.
func TestHandOver(t *testing.T) {
	t.Parallel()
	_, endpoints := startCluster(t, 1)
	a, b := join(t, endpoints, "a"), join(t, endpoints, "b")
	a.awaitAlive("a b")
	templates := make(map[netip.Addr][]byte)
	for i := range 250 {
		templates[netip.AddrFrom4([4]byte{10, 0, 0, byte(i)})] = bytes.Repeat([]byte{byte(i)}, 10_000)
	}
	templates[netip.MustParseAddr("2001:db8::1")] = make([]byte, mostTemplates+1)
	if err := a.HandOver(t.Context(), "b", false, templates); err != nil {
		t.Fatal(err)
	}
	if got, err := take(a); err != nil || len(got) != 0 {
		t.Errorf("a takes %d over, %v", len(got), err)
	}
	got, err := take(b)
	seen := make(map[byte]bool)
	for address, value := range got {
		seen[value[0]] = len(value) == 10_000 && address.As4()[3] == value[0]
	}
	if err != nil || len(got) != 250 || len(seen) != 250 {
		t.Errorf("b takes %d of %d devices over, %v", len(got), len(seen), err)
	}
	if got, err := take(b); err != nil || len(got) != 0 {
		t.Errorf("b takes %d over again, %v", len(got), err)
	}
	// Late templates of the same device, from two hosts.
	device := netip.MustParseAddr("10.0.0.1")
	c := join(t, endpoints, "c")
	c.awaitAlive("a b c")
	for from, value := range map[*member]byte{a: 1, c: 3} {
		if err := from.HandOver(t.Context(), "b", true, map[netip.Addr][]byte{device: {value}}); err != nil {
			t.Fatal(err)
		}
	}
	if err := a.HandOver(t.Context(), "b", false, map[netip.Addr][]byte{device: {0}}); err != nil {
		t.Fatal(err)
	}
	keys, err := b.client.Get(t.Context(), "sockeye/test.templates/", clientv3.WithPrefix())
	if err != nil || len(keys.Kvs) != 3 {
		t.Fatalf("%+v, %v", keys, err)
	}
	for _, kv := range keys.Kvs {
		if lease, err := b.client.TimeToLive(t.Context(), clientv3.LeaseID(kv.Lease)); err != nil || lease.TTL < 1 || lease.TTL > 60 {
			t.Errorf("the key %s ends in %d s, %v", kv.Key, lease.TTL, err)
		}
	}
	handed, more, err := b.TakeOver(t.Context(), true)
	if want := []map[netip.Addr][]byte{{device: {1}}, {device: {3}}}; err != nil || more || !reflect.DeepEqual(handed, want) {
		t.Errorf("late templates: %v, more %v, %v", handed, more, err)
	}
	if got, err := take(b); err != nil || len(got) != 1 || !bytes.Equal(got[device], []byte{0}) {
		t.Errorf("b takes %v over, %v", got, err)
	}
}

// TestCopies keeps copies of the templates of a host for the time after its death, also if the lease of the copies is lost.
func TestCopies(t *testing.T) {
	t.Parallel()
	_, endpoints := startCluster(t, 1)
	a, b := join(t, endpoints, "a"), join(t, endpoints, "b")
	a.awaitAlive("a b")
	number, err := a.RenewCopies(t.Context())
	if err != nil || number == 0 {
		t.Fatalf("%d, %v", number, err)
	}
	if again, err := a.RenewCopies(t.Context()); err != nil || again != number {
		t.Errorf("%d, then %d, %v", number, again, err)
	}
	a.mu.Lock()
	a.copies.renewed -= 2 * copyRenew
	a.mu.Unlock()
	if again, err := a.RenewCopies(t.Context()); err != nil || again != number {
		t.Errorf("renewed: %d, then %d, %v", number, again, err)
	}
	templates := make(map[netip.Addr][]byte)
	for i := range 300 {
		templates[netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)})] = bytes.Repeat([]byte{byte(i)}, 10_000)
	}
	if err := a.CopyTemplates(t.Context(), number, templates); err != nil {
		t.Fatal(err)
	}
	for _, key := range []string{"rubbish", "10.0.9.9/1"} {
		if _, err := b.client.Put(t.Context(), b.copiesOf("a")+key, "x"); err != nil {
			t.Fatal(err)
		}
	}
	read := func(host string) map[netip.Addr][]byte {
		t.Helper()
		all := make(map[netip.Addr][]byte)
		for from := ""; ; {
			next, err := b.Copies(t.Context(), host, from, func(some map[netip.Addr][]byte) { maps.Copy(all, some) })
			if err != nil {
				t.Fatal(err)
			}
			if from = next; from == "" {
				break
			}
		}
		return all
	}
	if got := read("a"); !reflect.DeepEqual(got, templates) {
		t.Errorf("%d of %d copies", len(got), len(templates))
	}
	if got := read("b"); len(got) != 0 {
		t.Errorf("%d copies of b", len(got))
	}
	gone := netip.MustParseAddr("10.0.0.7")
	if err := a.CopyTemplates(t.Context(), number, map[netip.Addr][]byte{gone: nil}); err != nil {
		t.Error(err)
	}
	if delete(templates, gone); !reflect.DeepEqual(read("a"), templates) {
		t.Error("a copy without a value is not removed")
	}
	// After an error, the next call goes on where the one before has ended.
	failing, cancel := context.WithCancel(t.Context())
	some := 0
	next, err := b.Copies(failing, "a", "", func(copies map[netip.Addr][]byte) {
		if some += len(copies); some > 100 {
			cancel()
		}
	})
	if err == nil || some >= len(templates) {
		t.Fatalf("%d of %d copies, next %q, %v", some, len(templates), next, err)
	}
	if _, err := b.Copies(t.Context(), "a", next, func(copies map[netip.Addr][]byte) { some += len(copies) }); err != nil || some != len(templates) {
		t.Errorf("%d of %d copies, %v", some, len(templates), err)
	}
	lease, err := b.client.TimeToLive(t.Context(), clientv3.LeaseID(number), clientv3.WithAttachedKeys())
	if err != nil || lease.GrantedTTL != int64(copyTime.Seconds()) || len(lease.Keys) != len(templates) {
		t.Errorf("the lease ends in %d s, and has %d keys, %v", lease.GrantedTTL, len(lease.Keys), err)
	}

	if _, err := b.client.Revoke(t.Context(), clientv3.LeaseID(number)); err != nil {
		t.Fatal(err)
	}
	if err := a.CopyTemplates(t.Context(), number, templates); err == nil {
		t.Error("copied with a lease that has ended")
	}
	again, err := a.RenewCopies(t.Context())
	if err != nil || again == number {
		t.Fatalf("%d again, %v", again, err)
	}
	if err := a.CopyTemplates(t.Context(), again, templates); err != nil {
		t.Error(err)
	}
	if got := read("a"); len(got) != len(templates) {
		t.Errorf("%d of %d copies", len(got), len(templates))
	}
}

// TestHandOverMeanwhile is that a host loses no templates that another host hands over while it takes over those of a third one.
func TestHandOverMeanwhile(t *testing.T) {
	t.Parallel()
	_, endpoints := startCluster(t, 1)
	a, b, c := join(t, endpoints, "a"), join(t, endpoints, "b"), join(t, endpoints, "c")
	a.awaitAlive("a b c")
	const each = 300
	var writers sync.WaitGroup
	var ended atomic.Int32
	for _, from := range []*member{a, c} {
		writers.Go(func() {
			defer ended.Add(1)
			for n := range each {
				device := netip.AddrFrom4([4]byte{10, 0, byte(n >> 8), byte(n)})
				if err := from.HandOver(t.Context(), "b", true, map[netip.Addr][]byte{device: {1}}); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	taken, calls := make(map[netip.Addr]int), 0
	for last := false; !last; calls++ {
		last = ended.Load() == 2
		handed, _, err := b.TakeOver(t.Context(), true)
		if err != nil {
			t.Fatal(err)
		}
		for _, templates := range handed {
			for device := range templates {
				taken[device]++
			}
		}
	}
	writers.Wait()
	wrong := 0
	for _, n := range taken {
		if n != 2 {
			wrong++
		}
	}
	if len(taken) != each || wrong > 0 || calls < 3 {
		t.Errorf("%d of %d devices taken over in %d calls, %d of them not twice", len(taken), each, calls, wrong)
	}
}

// TestInstance continues the registration of an earlier process with the same instance.
func TestInstance(t *testing.T) {
	t.Parallel()
	_, endpoints := startCluster(t, 1)
	same := func(c *EtcdConfig) { c.Instance, c.Host.Digests.Devices = "one", "7f" }
	a := join(t, endpoints, "a", same)
	watcher := join(t, endpoints, "b")
	if first := watcher.awaitAlive("a b").Hosts[0]; first.Digests.Devices != "7f" {
		t.Errorf("the digests of a are %+v", first.Digests)
	}
	a.stop()
	join(t, endpoints, "a", same).awaitAlive("a b")
	other := join(t, endpoints, "a", func(c *EtcdConfig) { c.Instance = "two" })
	other.await("the name to be taken", func(s *Snapshot) bool { return len(s.Problems) > 0 })
	for {
		select {
		case s := <-watcher.snapshots:
			if s.Connected && alive(s) != "a b" {
				t.Errorf("alive are %q", alive(s))
			}
			continue
		default:
		}
		break
	}
}

// TestRubbishTemplates writes keys of templates that no host writes: without an address, too large, and many of the largest size that
// etcd takes. A host leaves them out, removes them, and gets those of the others.
func TestRubbishTemplates(t *testing.T) {
	t.Parallel()
	_, endpoints := startCluster(t, 1)
	a, b := join(t, endpoints, "a"), join(t, endpoints, "b")
	a.awaitAlive("a b")
	good := netip.MustParseAddr("10.0.0.1")
	if err := a.HandOver(t.Context(), "b", false, map[netip.Addr][]byte{good: {7}}); err != nil {
		t.Fatal(err)
	}
	huge := string(make([]byte, 1<<20))
	for i := range 70 {
		if _, err := a.client.Put(t.Context(), fmt.Sprintf("%s192.0.2.%d", a.templatesOf("b", false), i), huge); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := a.client.Put(t.Context(), a.templatesOf("b", false)+"rubbish", "x"); err != nil {
		t.Fatal(err)
	}
	if got, err := take(b); err != nil || len(got) != 1 || len(got[good]) != 1 {
		t.Errorf("%d devices, %v", len(got), err)
	}
	if left, err := b.client.Get(t.Context(), b.templatesOf("b", false), clientv3.WithPrefix(), clientv3.WithCountOnly()); err != nil || left.Count != 0 {
		t.Errorf("%+v, %v", left, err)
	}
}

// TestLongKeys writes keys of templates whose names alone exceed the largest response: they are removed, and do not keep devices
// from moving to the host.
func TestLongKeys(t *testing.T) {
	t.Parallel()
	_, endpoints := startCluster(t, 1)
	a := join(t, endpoints, "a")
	a.awaitAlive("a")
	long := strings.Repeat("x", 1400<<10)
	for i := range 50 {
		if _, err := a.client.Put(t.Context(), fmt.Sprintf("%s%d%s", a.templatesOf("a", false), i, long), ""); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := take(a); err != nil || len(got) != 0 {
		t.Errorf("%d devices, %v", len(got), err)
	}
	if left, err := a.client.Get(t.Context(), a.templatesOf("a", false), clientv3.WithPrefix(), clientv3.WithCountOnly()); err != nil || left.Count != 0 {
		t.Errorf("%+v, %v", left, err)
	}
}
