// SPDX-License-Identifier: Apache-2.0

package netif_test

import (
	"context"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"sockeye/internal/bigtcp/netif"
	"sockeye/internal/bigtcp/netif/netiftest"
)

// await waits for changes until the condition holds, and fails if no change is signalled.
func await(t *testing.T, changes <-chan struct{}, what string, so func() bool) {
	t.Helper()
	late := time.After(20 * time.Second)
	for {
		select {
		case _, more := <-changes:
			if !more {
				t.Fatalf("the watch ends before %s", what)
			}
			if so() {
				return
			}
		case <-late:
			t.Fatalf("no change tells that %s", what)
		}
	}
}

func TestWatch(t *testing.T) {
	path := netiftest.NamedNetns(t, "watched")
	h := netiftest.Kernel(t, path)
	n := netiftest.Open(t, path)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	changes, err := n.Watch(ctx)
	if err != nil {
		t.Fatal(err)
	}
	there := func(name string) func() bool {
		return func() bool { _, err := n.Interface(name); return err == nil }
	}
	v := &netlink.Veth{LinkAttrs: netiftest.Named("late0"), PeerName: "late1"}
	netiftest.Add(t, h, v)
	await(t, changes, "late0 appears", there("late0"))
	if err := h.LinkSetMTU(v, 1400); err != nil {
		t.Fatal(err)
	}
	await(t, changes, "its MTU changes", func() bool {
		i, err := n.Interface("late0")
		return err == nil && i.MTU == 1400
	})
	if err := h.LinkDel(v); err != nil {
		t.Fatal(err)
	}
	await(t, changes, "late0 vanishes", func() bool { return !there("late0")() })

	cancel()
	late := time.After(10 * time.Second)
	for {
		select {
		case _, more := <-changes:
			if !more {
				return
			}
		case <-late:
			t.Fatal("the watch does not end")
		}
	}
}

func TestWatchEndsAtOnce(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	changes, err := netiftest.Open(t, "").Watch(ctx)
	if err != nil {
		t.Fatal(err)
	}
	for range changes {
	}
}

// watchOnce begins a watch, cancels it, and waits for its end.
func watchOnce(t *testing.T, n *netif.Namespace) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	changes, err := n.Watch(ctx)
	if err != nil {
		t.Fatal(err)
	}
	cancel()
	for range changes {
	}
}

// TestWatchEndsClosed cancels watches while they read: the channel is closed after the socket.
func TestWatchEndsClosed(t *testing.T) {
	n := netiftest.Open(t, netiftest.NamedNetns(t, "watched"))
	before := netiftest.Descriptors(t)
	for range 2000 {
		watchOnce(t, n)
		if after := netiftest.Descriptors(t); after > before {
			t.Fatalf("%d descriptors before, %d after", before, after)
		}
	}
}
