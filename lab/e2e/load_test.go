// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"context"
	"fmt"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"sockeye/internal/config"
	devices "sockeye/lab/traffic"
)

// TestLoadNfacctd connects 512 routers at the same time to four nfacctd processes, which listen with a backlog of 1,
// and sends flows. Each nfacctd receives both streams of its routers with their addresses.
func TestLoadNfacctd(t *testing.T) {
	for _, mode := range []config.Steering{config.Reuseport, config.Lookup} {
		t.Run(string(mode), func(t *testing.T) { newHost(t, mode).loadsNfacctd() })
	}
}

func (h *host) loadsNfacctd() {
	h.Helper()
	h.setPolicy(4)
	h.startAgent()
	n := &network{h, h.homes(4)}
	for slot := range 4 {
		n.startCollector(slot, 200)
	}
	n.ready(0, 1, 2, 3)
	all := addresses(512)
	community := map[netip.Addr]string{} // identifies the router of an address
	greetings := map[netip.Addr][]byte{}
	for i, a := range all {
		community[a], greetings[a] = fmt.Sprintf("%d:%d", loadAS, i), h.routerGreeting(i)
	}
	_, failed := h.rush(all, func(a netip.Addr) []byte { return greetings[a] })
	for a, l := range failed {
		h.Errorf("connection of %v: %v", a, landing{tcp: l})
	}
	h.eventually("512 sessions", func() error {
		sessions, err := h.lab.Sessions()
		h.must(err)
		for a, slot := range sessions {
			if slot != n.home(a) {
				h.Fatalf("session of %v is in slot %d, home slot %d", a, slot, n.home(a))
			}
		}
		if len(sessions) != len(all) {
			return fmt.Errorf("%d sessions", len(sessions))
		}
		return nil
	})
	// All connections are read, and none is closed.
	h.eventually("nfacctd to read", func() error { return h.unread(bmpPort) })
	if sessions, err := h.lab.Sessions(); err != nil || len(sessions) != len(all) {
		h.Errorf("%d sessions, %v", len(sessions), err)
	}
	h.exportFlows(all)
	known := map[netip.Addr]bool{}
	read := map[int]int64{}
	h.eventually("flows of 512 routers with their communities", func() error {
		for _, c := range h.lab.Collectors() {
			records, to, err := c.Records(read[c.Slot])
			h.must(err)
			read[c.Slot] = to
			for _, r := range records {
				if community[r.Peer] == "" || c.Slot != n.home(r.Peer) || r.Comms != "" && r.Comms != community[r.Peer] {
					h.Fatalf("collector %d has %+v; home is %d, community %s", c.Slot, r, n.home(r.Peer), community[r.Peer])
				}
				if r.Comms != "" {
					known[r.Peer] = true
				}
			}
		}
		if len(known) != len(all) {
			return fmt.Errorf("%d", len(known))
		}
		return nil
	})
}

// loadAS is the AS of the peer of the routers, which announces loadPrefix.
const loadAS = 64512

var (
	loadPrefix = netip.MustParsePrefix("203.0.113.0/24")
	loadFlow   = devices.Flow{Src: netip.MustParseAddr("198.51.100.1"), Dst: loadPrefix.Addr().Next(), Protocol: unix.IPPROTO_TCP, Packets: 1, Octets: 1000}
)

// routerGreeting returns the BMP messages of the i-th router: one route with its own community.
func (h *host) routerGreeting(i int) []byte {
	h.Helper()
	peer := devices.Peer{Address: netip.MustParseAddr("192.0.2.2"), AS: loadAS, ID: netip.MustParseAddr("192.0.2.2")}
	update, err := devices.AppendUpdate(nil, devices.Route{
		Prefixes: []netip.Prefix{loadPrefix}, NextHop: peer.Address, ASPath: []uint32{loadAS},
		Communities: []uint32{devices.Community(loadAS, uint16(i))},
	})
	h.must(err)
	local := devices.Peer{Address: netip.MustParseAddr("192.0.2.1"), AS: loadAS, ID: netip.MustParseAddr("192.0.2.1")}
	b := devices.AppendInitiation(nil, "load", "load")
	b = devices.AppendPeerUp(b, peer, local, time.Now())
	return devices.AppendRouteMonitoring(b, peer, time.Now(), update)
}

// exportFlows sends IPFIX from each address periodically until the test ends, because nfacctd does not report when it
// has the routes.
func (h *host) exportFlows(all []netip.Addr) {
	h.Helper()
	var exporters []*devices.Exporter
	h.must(h.devices.Do(func() error {
		for _, a := range all {
			e, err := devices.NewExporter(devices.ExporterConfig{Source: a, Target: target(a, ipfixPort), Messages: [][]devices.Flow{{loadFlow}}, TemplateRefresh: time.Second})
			if err != nil {
				return err
			}
			exporters = append(exporters, e)
		}
		return nil
	}))
	ctx, stop := context.WithCancel(h.Context())
	var sending sync.WaitGroup
	sending.Go(func() {
		_, err := devices.Drive(ctx, devices.Limit{Rate: 2 * float64(len(all)), Batch: 1}, len(all), func(i, n int) (int, error) { return exporters[i].Send(n) })
		if err != nil {
			h.Error(err)
		}
	})
	h.Cleanup(func() {
		stop()
		sending.Wait()
		for _, e := range exporters {
			e.Close()
		}
	})
}

// unread returns an error while a connection to a port has unread data.
func (h *host) unread(port uint16) (err error) {
	h.must(h.collectors.Do(func() error {
		for _, family := range []uint8{netlink.FAMILY_V4, netlink.FAMILY_V6} {
			all, dump := netlink.SocketDiagTCP(family)
			if dump != nil {
				return dump
			}
			for _, s := range all {
				if s.State == 1 && s.ID.SourcePort == port && s.RQueue > 0 {
					err = fmt.Errorf("%d bytes of %v", s.RQueue, s.ID.Destination)
				}
			}
		}
		return nil
	}))
	return err
}

// TestLoad10000 connects 10,000 devices at the same time to four plain receivers.
func TestLoad10000(t *testing.T) {
	for _, mode := range []config.Steering{config.Reuseport, config.Lookup} {
		t.Run(string(mode), func(t *testing.T) {
			h := up(t, mode, 4)
			home := h.homes(4)
			all := addresses(10_000)
			open, failed := h.rush(all, noGreeting)
			if len(failed) > 0 {
				t.Errorf("%d connections fail: %v", len(failed), failed)
			}
			wrong := map[netip.Addr]int{}
			for a, fd := range open {
				if slot := said(fd); slot != home(a) {
					wrong[a] = slot
				}
			}
			if len(wrong) > 0 {
				t.Errorf("%d connections are not in their home slots: %v", len(wrong), wrong)
			}
			h.nothingMisplaced(home, len(all))
		})
	}
}
