// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink"

	"sockeye/internal/config"
	devices "sockeye/lab/traffic"
)

// 512 routers connect at once to four nfacctd, whose own backlog is 1.
func TestLoadNfacctd(t *testing.T) {
	for _, mode := range []config.Steering{config.Reuseport, config.Lookup} {
		t.Run(string(mode), func(t *testing.T) {
			h := newHost(t, mode)
			h.setPolicy(4)
			h.startAgent()
			n := &network{h, h.homes(4)}
			for slot := range 4 {
				n.startCollector(slot, 200)
			}
			n.ready(0, 1, 2, 3)
			all := addresses(512)
			_, failed := h.rush(all, devices.AppendInitiation(nil, "load", "load"))
			for a, l := range failed {
				t.Errorf("connection of %v: %v", a, landing{tcp: l})
			}
			h.eventually("512 sessions", func() error {
				sessions, err := h.lab.Sessions()
				h.must(err)
				for a, slot := range sessions {
					if slot != n.home(a) {
						h.Fatalf("session of %v is in slot %d, home is %d", a, slot, n.home(a))
					}
				}
				if len(sessions) != len(all) {
					return fmt.Errorf("%d sessions", len(sessions))
				}
				return nil
			})
			// All are read, none is closed.
			h.eventually("nfacctd to read", func() error { return h.unread(bmpPort) })
			if sessions, err := h.lab.Sessions(); err != nil || len(sessions) != len(all) {
				t.Errorf("%d sessions, %v", len(sessions), err)
			}
		})
	}
}

// unread fails while a connection to a port has data that nobody read.
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

// 10,000 devices connect at once to four plain receivers.
func TestLoad10000(t *testing.T) {
	for _, mode := range []config.Steering{config.Reuseport, config.Lookup} {
		t.Run(string(mode), func(t *testing.T) {
			h := up(t, mode, 4)
			home := h.homes(4)
			all := addresses(10_000)
			open, failed := h.rush(all, nil)
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
				t.Errorf("%d connections are not where they belong: %v", len(wrong), wrong)
			}
			h.nothingMisplaced(home, len(all))
		})
	}
}
