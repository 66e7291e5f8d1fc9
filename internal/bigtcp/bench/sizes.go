// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"sockeye/internal/bigtcp/netif"
	"sockeye/internal/bigtcp/sizing"
)

// A setter turns BIG TCP on and off at one end.
type setter interface {
	set(on bool) error
	// restore sets what was before. It may be called twice.
	restore() error
}

// recorded sets the sizes of an interface and of what is below it, as records of
// the store, so that what is left of a killed bench can be reverted.
type recorded struct {
	network *netif.Network
	store   *sizing.Store
	name    string
	size    uint32
	changes []sizing.Change // what turning it on did
}

// begin turns it on, to see what comes of it.
func (r *recorded) begin() error {
	var err error
	r.changes, err = r.apply(r.size)
	return err
}

func (r *recorded) set(on bool) error {
	size := uint32(netif.Legacy)
	if on {
		size = r.size
	}
	_, err := r.apply(size)
	return err
}

func (r *recorded) apply(size uint32) ([]sizing.Change, error) {
	targets := []sizing.Target{{Interface: r.name, Want: sizing.Want{IPv6: size, IPv4: size}}}
	return r.store.Apply(r.network, sizing.ByBench, targets, false)
}

func (r *recorded) restore() error {
	_, err := r.store.Revert(func(rec sizing.Record) bool {
		return rec.Owner == sizing.ByBench && rec.NetnsID == r.network.ID() &&
			slices.ContainsFunc(r.changes, func(c sizing.Change) bool { return c.Index == rec.Index })
	}, false)
	if err != nil {
		return fmt.Errorf("give %s back its sizes: %w", r.name, err)
	}
	return nil
}

// notes are what is not as was asked for.
func (r *recorded) notes() (notes []string) {
	for _, c := range r.changes {
		for _, n := range c.Notes {
			notes = append(notes, c.Interface+": "+n)
		}
	}
	return notes
}

// fixed is for an end whose sizes may not be changed.
type fixed struct{}

func (fixed) set(bool) error { return nil }
func (fixed) restore() error { return nil }

// notPermitted tells the error of who has no right to change something.
func notPermitted(err error) bool {
	return errors.Is(err, fs.ErrPermission) || errors.Is(err, unix.EPERM)
}

// towards finds the interface through which the network sends to an address.
func towards(n *netif.Network, to netip.Addr) (name string, err error) {
	var link netlink.Link
	err = n.Do(func() error {
		if to.Zone() != "" {
			link, err = netlink.LinkByName(to.Zone())
			return err
		}
		routes, err := netlink.RouteGet(net.IP(to.AsSlice()))
		if err != nil {
			return err
		}
		if len(routes) == 0 {
			return errors.New("there is none")
		}
		link, err = netlink.LinkByIndex(routes[0].LinkIndex)
		return err
	})
	if err != nil {
		return "", fmt.Errorf("find the interface to %s: %w", to, err)
	}
	if link.Attrs().Flags&net.FlagLoopback != 0 {
		return "", usage("sockeye bigtcp bench --local measures within a host", "%s is this host itself", to)
	}
	return link.Attrs().Name, nil
}

// lacks returns an error if the kernel does not have BIG TCP for a family.
func lacks(n *netif.Network, family string) error {
	s, since := n.Support(), ""
	switch {
	case family == IPv6 && !s.IPv6:
		since = "IPv6, which Linux has since 5.19"
	case family == IPv4 && !s.IPv4:
		since = "IPv4, which Linux has since 6.3"
	default:
		return nil
	}
	return &netif.Error{Kind: netif.KindUnsupported, Err: fmt.Errorf("this kernel has no BIG TCP for %s", since)}
}
