// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"context"
	"fmt"
	"net/netip"
	"sync"
	"testing"
	"time"

	"sockeye/internal/config"
	"sockeye/lab"
	devices "sockeye/lab/traffic"
)

// TestRestartRouters kills an nfacctd, and starts it again, while four FRR routers send 500 route updates a second by BMP, and
// export flows: by nfprobe, and by exporters that have sent their templates once. All records are decoded and have routes.
func TestRestartRouters(t *testing.T) {
	inBothModes(t, func(t *testing.T, mode config.Steering) {
		h := newHostWith(t, mode, 4)
		h.setPolicy(2, "when_empty: {wait: 60s}")
		h.startAgent()
		f := h.newRouters()
		f.drive(time.Second)
		f.complete("before the restart")
		f.bare, f.others = 0, 0
		refused := f.refused()
		slot := f.home(f.all[0])
		h.kill(slot)
		var sending sync.WaitGroup
		sending.Go(func() { f.drive(10 * time.Second) })
		f.startCollector(slot, 20)
		f.ready(0, 1)
		sending.Wait()
		f.complete("after the restart")
		f.checkExporters()
		if f.bare > 0 {
			t.Errorf("%d records have no routes", f.bare)
		}
		f.eventually("records of nfprobe", func() error {
			f.complete("after the restart")
			if f.others == 0 {
				return fmt.Errorf("none")
			}
			return nil
		})
		if after := f.refused(); after != refused {
			t.Errorf("%d SYNs and datagrams refused", after-refused)
		}
	})
}

// refused returns the number of SYNs and datagrams that were refused.
func (f *flows) refused() (sum uint64) {
	f.Helper()
	for _, s := range f.slots() {
		for _, n := range s.Refused {
			sum += n
		}
	}
	return sum
}

const (
	feederAS     = 64900
	updatedRoute = 200 // routes of the feeder, which are announced again and again
)

var feederAddress = netip.MustParseAddr("10.76.0.250")

// feederRate is the number of routes that the feeder announces in a second to all routers together. nfacctd 1.7.7 replaces the attributes
// of a route in one thread while another one reads them for a flow record: at higher rates it crashes sooner.
const feederRate = 100

// newRouters starts two nfacctd, and the routers with a BGP speaker that announces routes all the time.
func (h *host) newRouters() *flows {
	h.Helper()
	f := &flows{network: &network{h, h.homes(2)}, decoded: map[netip.Addr]uint64{}, offsets: map[string]int64{}}
	for slot := range 2 {
		f.startCollector(slot, 20)
	}
	f.ready(0, 1)
	feeder, err := h.lab.Attach("feeder", netip.PrefixFrom(feederAddress, 24))
	h.must(err)
	for i, r := range h.lab.Routers() {
		to := lab.CollectorIPv4
		if i%2 == 1 {
			to = lab.CollectorIPv6
		}
		_, err := h.lab.StartRouter(lab.RouterConfig{Router: i, Collector: netip.AddrPortFrom(to, bmpPort), Extra: []string{
			fmt.Sprintf("router bgp %d", r.ASN),
			fmt.Sprintf(" neighbor %v remote-as %d", feederAddress, feederAS),
			fmt.Sprintf(" neighbor %v passive", feederAddress),
			" address-family ipv4 unicast",
			fmt.Sprintf("  neighbor %v activate", feederAddress),
			" exit-address-family",
			"exit",
		}})
		h.must(err)
		f.all = append(f.all, r.BMP)
	}
	_, err = h.lab.StartTraffic(lab.TrafficConfig{})
	h.must(err)
	for i, r := range h.lab.Routers() {
		_, err := h.lab.StartExporter(lab.ExporterConfig{Router: i})
		h.must(err)
		flow := loadFlow
		flow.Dst = prefixOf(i).Addr().Next()
		h.must(r.Namespace.Do(func() error {
			e, err := devices.NewExporter(devices.ExporterConfig{Source: r.BMP, Target: target(r.BMP, ipfixPort), Domain: 100, Messages: [][]devices.Flow{{flow}}, TemplateRefresh: time.Hour})
			if err == nil {
				f.exporters = append(f.exporters, e)
			}
			return err
		}))
	}
	ctx, cancel := context.WithCancel(h.Context())
	var feeding sync.WaitGroup
	h.Cleanup(func() {
		cancel()
		feeding.Wait()
		for _, e := range f.exporters {
			e.Close()
		}
	})
	for _, r := range h.lab.Routers() {
		var s *devices.BGPSession
		h.eventually("the BGP session of "+r.Name, func() error {
			return feeder.Do(func() (err error) {
				s, err = devices.DialBGP(ctx, devices.BGPConfig{
					Local: devices.Peer{Address: feederAddress, AS: feederAS}, Target: netip.AddrPortFrom(r.BGP4, 179),
				})
				return err
			})
		})
		feeding.Go(func() {
			defer s.Close()
			_, err := devices.Drive(ctx, devices.Limit{Rate: feederRate / float64(len(h.lab.Routers())), Batch: 1}, updatedRoute, func(i, n int) (int, error) {
				return n, s.Announce(routeOf(i, time.Now()))
			})
			if err != nil && ctx.Err() == nil {
				h.Errorf("routes of %s: %v", r.Name, err)
			}
		})
	}
	f.collect(0, 1)
	f.eventually("routes in all collectors", func() error {
		f.bare = 0
		f.drive(200 * time.Millisecond)
		f.complete("before the restart")
		if f.bare > 0 {
			return fmt.Errorf("%d records have no routes", f.bare)
		}
		return nil
	})
	return f
}

// prefixOf returns the prefix of a route of the feeder.
func prefixOf(i int) netip.Prefix {
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{32, 0, byte(i), 0}), 24)
}

// routeOf returns a route of the feeder with communities that change.
func routeOf(i int, at time.Time) devices.Route {
	return devices.Route{
		Prefixes: []netip.Prefix{prefixOf(i)}, NextHop: feederAddress, ASPath: []uint32{feederAS, 65000},
		Communities: []uint32{devices.Community(feederAS, uint16(at.UnixMilli()))},
	}
}
