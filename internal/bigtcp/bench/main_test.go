// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"sockeye/internal/bigtcp/netif"
	"sockeye/internal/bigtcp/sizing"
	"sockeye/internal/testenv"
)

func TestMain(m *testing.M) {
	if os.Getenv(envServe) != "" { // in the namespaces of who started it
		os.Exit(m.Run())
	}
	testenv.Main(m)
}

// quick are options of runs that take a fraction of a second together.
func quick() Options {
	o := Defaults()
	o.Rounds, o.For, o.Warmup, o.Path = 2, 20*time.Millisecond, 10*time.Millisecond, PathVeth
	return o
}

// hosts are two namespaces with a link between them, each with a store and with
// sizes of its own.
type hosts struct {
	*lab
	client, server         *space
	clientStore, serverDir string
	store                  *sizing.Store
	before                 map[*space]netif.Sizes
}

func newHosts(t *testing.T) *hosts {
	t.Helper()
	h := &hosts{lab: &lab{}, clientStore: t.TempDir(), serverDir: t.TempDir(), before: map[*space]netif.Sizes{}}
	t.Cleanup(func() {
		if err := h.close(); err != nil {
			t.Error(err)
		}
	})
	if err := h.build(PathVeth); err != nil {
		t.Fatal(err)
	}
	h.client, h.server = h.spaces[0], h.spaces[1]
	var err error
	if h.store, err = sizing.OpenStore(h.clientStore); err != nil {
		t.Fatal(err)
	}
	for i, s := range h.spaces {
		size := uint32(70000 + 1000*i)
		sizes := netif.Sizes{GSO: size, GRO: size + 100, GSOIPv4: size + 200, GROIPv4: size + 300}
		dev, err := s.nl.LinkByName(device)
		if err == nil {
			err = s.network.Set(dev.Attrs().Index, sizes)
		}
		if err != nil {
			t.Fatal(err)
		}
		h.before[s] = sizes
	}
	return h
}

func (s *space) sizes(t *testing.T) netif.Sizes {
	t.Helper()
	i, err := s.network.Interface(device)
	if err != nil {
		t.Fatal(err)
	}
	return i.Sizes
}

// asBefore fails unless both ends have the sizes that they had, and no records.
func (h *hosts) asBefore(t *testing.T) {
	t.Helper()
	for i, s := range h.spaces {
		if got := s.sizes(t); got != h.before[s] {
			t.Errorf("host %d has sizes %+v, had %+v", i, got, h.before[s])
		}
	}
	for _, dir := range []string{h.clientStore, h.serverDir} {
		store, err := sizing.OpenStore(dir)
		if err != nil {
			t.Fatal(err)
		}
		records, err := store.Records()
		if err != nil || len(records) > 0 {
			t.Errorf("records are left: %+v, %v", records, err)
		}
	}
}

// serverAsBefore waits until the server has its sizes back.
func (h *hosts) serverAsBefore(t *testing.T) {
	t.Helper()
	// The kernel has no message for a change of sizes.
	for end := time.Now().Add(20 * time.Second); h.server.sizes(t) != h.before[h.server]; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("the server still has sizes %+v, had %+v", h.server.sizes(t), h.before[h.server])
		}
	}
}

func (h *hosts) run(t *testing.T, s *Server, o Options) (*Result, error) {
	t.Helper()
	return Run(t.Context(), h.client.network, h.store, h.address(IPv6).String(), portOf(t, s), s.Key(), o)
}

func kindOf(err error) (netif.Kind, bool) {
	known, ok := errors.AsType[*netif.Error](err)
	if !ok {
		return 0, false
	}
	return known.Kind, true
}

// descriptors are what this process has open.
func descriptors(t *testing.T) []string {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	var open []string
	for _, e := range entries {
		// That of the directory itself is closed by now.
		if target, err := os.Readlink(filepath.Join("/proc/self/fd", e.Name())); err == nil {
			open = append(open, e.Name()+" "+target)
		}
	}
	slices.Sort(open)
	return open
}
