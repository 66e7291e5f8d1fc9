// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"
)

// TrafficConfig limits the flows between the routers.
type TrafficConfig struct {
	Interval time.Duration // between two packets of one flow; at least 1 ms; default 200 ms
	Fanout   int           // number of other routers to which each router sends, over IPv4 and over IPv6; default 3, or all if fewer
}

const (
	flowPort = 9000
	sinkPort = 9 // discard
)

// StartTraffic sends small UDP packets from each router's prefixes to the prefixes of the routers with higher numbers,
// until the lab closes or stop is called.
func (l *Lab) StartTraffic(c TrafficConfig) (stop func(), err error) {
	if c.Interval == 0 {
		c.Interval = 200 * time.Millisecond
	}
	if c.Fanout == 0 {
		c.Fanout = 3
	}
	n := len(l.routers)
	c.Fanout = min(c.Fanout, n-1)
	if c.Interval < time.Millisecond || c.Fanout < 1 {
		return nil, fmt.Errorf("start traffic: %d routers, fan-out %d, interval %v", n, c.Fanout, c.Interval)
	}
	type flow struct {
		from net.PacketConn
		to   *net.UDPAddr
	}
	var flows []flow
	var conns []net.PacketConn
	closeAll := func() {
		for _, c := range conns {
			c.Close()
		}
	}
	udp := func(a netip.Addr, port uint16) *net.UDPAddr {
		return net.UDPAddrFromAddrPort(netip.AddrPortFrom(a, port))
	}
	for i, r := range l.routers {
		for _, own := range []netip.Prefix{r.Prefix4, r.Prefix6} {
			var from net.PacketConn
			err := r.Namespace.Do(func() (err error) {
				if from, err = net.ListenUDP("udp", udp(host(own), flowPort)); err != nil {
					return err
				}
				conns = append(conns, from)
				// This socket only prevents ICMP port unreachable messages. The data is not read.
				sink, err := net.ListenUDP("udp", udp(host(own), sinkPort))
				if err == nil {
					conns = append(conns, sink)
					err = sink.SetReadBuffer(1)
				}
				return err
			})
			for k := 1; k <= c.Fanout && err == nil; k++ {
				to := l.routers[(i+k)%n]
				prefix, gateway := to.Prefix4, to.IPv4
				if own.Addr().Is6() {
					prefix, gateway = to.Prefix6, to.IPv6
				}
				err = r.Namespace.AddRoute(prefix, gateway)
				flows = append(flows, flow{from, udp(host(prefix), sinkPort)})
			}
			if err != nil {
				closeAll()
				return nil, fmt.Errorf("start traffic of %s: %w", r.Name, err)
			}
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		closeAll()
		return nil, errors.New("start traffic: lab is closed")
	}
	stopped := make(chan struct{})
	ended := make(chan struct{})
	l.background.Go(func() {
		defer close(ended)
		defer closeAll()
		tick := time.NewTicker(c.Interval)
		defer tick.Stop()
		for payload := make([]byte, 64); ; {
			select {
			case <-tick.C:
				for _, f := range flows {
					_, _ = f.from.WriteTo(payload, f.to) // packets may be lost
				}
			case <-stopped:
				return
			case <-l.stopping:
				return
			}
		}
	})
	return func() {
		select {
		case <-stopped:
		default:
			close(stopped)
		}
		<-ended
	}, nil
}

// host returns the source and destination address of flows in a router's prefix.
func host(p netip.Prefix) netip.Addr {
	a := p.Addr().AsSlice()
	a[len(a)-1] = 10
	h, _ := netip.AddrFromSlice(a)
	return h
}
