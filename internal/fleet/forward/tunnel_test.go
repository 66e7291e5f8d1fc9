// SPDX-License-Identifier: Apache-2.0

package forward_test

import (
	"errors"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"sockeye/internal/clsact"
	"sockeye/internal/fleet/forward"
)

// ingressQdisc excludes clsact, so that no filter can be attached.
func ingressQdisc(index int) netlink.Qdisc {
	return &netlink.Ingress{QdiscAttrs: netlink.QdiscAttrs{LinkIndex: index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_INGRESS}}
}

func clsactQdisc(index int) netlink.Qdisc {
	return &netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{LinkIndex: index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT}}
}

// tunnelState returns the index of the tunnel, and whether it is up and has its filter.
func (n *node) tunnelState(t testing.TB) (index int, up, filtered bool) {
	t.Helper()
	link, err := n.nl.LinkByName(forward.TunnelName)
	check(t, err)
	index = link.Attrs().Index
	n.do(t, func() error {
		all, err := clsact.Open()
		if err != nil {
			return err
		}
		defer all.Close()
		filtered, err = all.Has(index, clsact.Ingress, "sockeye-fleet/tunnel")
		return err
	})
	return index, link.Attrs().Flags&net.FlagUp != 0, filtered
}

// TestTunnelIsGuarded is that the tunnel is never up without its program, which drops what no peer has sent: not before the program
// is attached, not if the program of an interface cannot be attached, and not if its own cannot.
func TestTunnelIsGuarded(t *testing.T) {
	a := newFleetBy(t, 1, true).hosts[0]
	check(t, a.nl.QdiscDel(clsactQdisc(a.index)))
	check(t, a.nl.QdiscAdd(ingressQdisc(a.index)))
	var events *nl.NetlinkSocket
	a.do(t, func() (err error) {
		events, err = nl.Subscribe(unix.NETLINK_ROUTE, unix.RTNLGRP_LINK, unix.RTNLGRP_TC)
		return err
	})
	defer events.Close()
	check(t, events.SetReceiveTimeout(&unix.Timeval{Usec: 100_000}))
	services := []netip.Addr{service4, service6}
	fails := func(what string) {
		t.Helper()
		a.do(t, func() error {
			index, err := a.path.OpenTunnel(services)
			if err == nil {
				err = a.path.Attach([]int{a.index}, index)
			}
			if err == nil || !strings.Contains(err.Error(), "ingress qdisc") {
				t.Errorf("%s: %v", what, err)
			}
			return nil
		})
	}
	fails("an ingress qdisc on eth0")
	index, up, filtered := a.tunnelState(t)
	if !up || !filtered {
		t.Errorf("an ingress qdisc on eth0: the tunnel is up: %v, with its filter: %v", up, filtered)
	}
	// The kernel sends the events in the order of the changes.
	var order []string
	for {
		messages, _, err := events.Receive()
		if errors.Is(err, unix.EAGAIN) {
			break
		}
		check(t, err)
		for _, m := range messages {
			switch m.Header.Type {
			case unix.RTM_NEWLINK:
				if link := nl.DeserializeIfInfomsg(m.Data); int(link.Index) == index && link.Flags&unix.IFF_UP != 0 {
					order = append(order, "up")
				}
			case unix.RTM_NEWTFILTER:
				if int(nl.DeserializeTcMsg(m.Data).Ifindex) == index {
					order = append(order, "filter")
				}
			}
		}
	}
	if len(order) < 2 || order[0] != "filter" || !slices.Contains(order, "up") {
		t.Errorf("the order of events: %q", order)
	}

	// The interface that lacks the program is set down, the others get theirs.
	check(t, a.nl.QdiscDel(ingressQdisc(a.index)))
	check(t, a.nl.QdiscDel(clsactQdisc(index)))
	check(t, a.nl.QdiscAdd(ingressQdisc(index)))
	fails("an ingress qdisc on the tunnel")
	if _, up, filtered = a.tunnelState(t); up || filtered {
		t.Errorf("an ingress qdisc on the tunnel: it is up: %v, with its filter: %v", up, filtered)
	}
	if names, _ := a.filters(t); len(names) != 2 {
		t.Errorf("an ingress qdisc on the tunnel: eth0 has filters %q", names)
	}
	fails("an ingress qdisc on the tunnel, again") // OpenTunnel does not set it up
	if _, up, _ = a.tunnelState(t); up {
		t.Error("the tunnel is up without its filter")
	}

	// It recovers, also if others set it down.
	check(t, a.nl.QdiscDel(ingressQdisc(index)))
	for range 2 {
		a.openTunnel(t)
		if _, up, filtered = a.tunnelState(t); !up || !filtered {
			t.Errorf("recovered: the tunnel is up: %v, with its filter: %v", up, filtered)
		}
		link, err := a.nl.LinkByIndex(index)
		check(t, err)
		check(t, a.nl.LinkSetDown(link))
	}
}

// TestTunnelOpens is that the tunnel has its program, by a link or a filter, as soon as it is up, also before the interfaces have
// theirs.
func TestTunnelOpens(t *testing.T) {
	f := newFleet(t, 1)
	a := f.hosts[0]
	a.do(t, func() error {
		_, err := a.path.OpenTunnel([]netip.Addr{service4})
		return err
	})
	pins, err := filepath.Glob(filepath.Join(f.pins, "fleet_a@*", "tunnel"))
	check(t, err)
	if _, up, filtered := a.tunnelState(t); !up || !filtered && len(pins) != 1 {
		t.Errorf("the tunnel is up: %v, with its filter: %v, with links %q", up, filtered, pins)
	}
}
