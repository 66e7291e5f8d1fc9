// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"net/netip"
	"testing"
	"time"
)

// TestKernelHash is the baseline without Sockeye: six routers, and four collectors that share their ports by the
// kernel's hash. It checks that exactly the records that reach the collector with their router's BMP session have
// communities and AS paths. This holds for every distribution of the routers.
func TestKernelHash(t *testing.T) {
	l, ctx := newLab(t, Options{Routers: 6})
	for i := range 4 {
		_, err := l.StartCollector(CollectorConfig{Slot: i})
		must(t, err)
	}
	must(t, l.WaitListeners(ctx))
	for i := range 6 {
		to := CollectorIPv4
		if i >= 4 {
			to = CollectorIPv6
		}
		_, err := l.StartRouter(RouterConfig{Router: i, Collector: netip.AddrPortFrom(to, 1790)})
		must(t, err)
	}
	_, err := l.StartTraffic(TrafficConfig{})
	must(t, err)
	must(t, l.WaitCollectors(ctx))
	must(t, l.WaitSessions(ctx))
	for i := range 6 {
		for k := range 2 {
			_, err := l.StartExporter(ExporterConfig{Router: i, Instance: k})
			must(t, err)
		}
	}
	must(t, l.WaitBGP(ctx))
	must(t, l.WaitRecords(ctx))
	var o Outcome
	err = l.WaitFor(ctx, "correlation of exactly the records that reach the BMP session", func() (ok bool, err error) {
		o, err = l.Measure(ctx, 3*time.Second)
		ok = err == nil
		for _, r := range o.Routers {
			ok = ok && r.TCPSlot >= 0 && r.UDPSlot >= 0 && r.Records > 0 && r.Correlated == r.WithBMP
		}
		return ok, err
	})
	for _, r := range o.Routers {
		t.Logf("%+v", r)
	}
	t.Logf("correlated share %.2f", o.CorrelatedShare)
	must(t, err)
}
