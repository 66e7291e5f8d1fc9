// SPDX-License-Identifier: Apache-2.0

package swarm

import (
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"sockeye/internal/netns"
	"sockeye/internal/testenv"
)

// TestResets closes connections of two devices by RST. The devices record those that are the present ones of their device, and a member
// records those that it has accepted, with the time of the RST.
func TestResets(t *testing.T) {
	ports := make([]atomic.Uint32, 2)
	s := &sender{Load: Load{Devices: len(ports)}, ports: ports}
	t.Run("devices", func(t *testing.T) {
		testResets(t, s.present, func(device int, port uint16) { s.ports[device].Store(uint32(port)) })
	})
	c := &collector{known: map[connectionKey]bool{}}
	t.Run("member", func(t *testing.T) {
		testResets(t, c.accepted, func(device int, port uint16) {
			c.mu.Lock()
			defer c.mu.Unlock()
			c.known[connectionKey{device, port}] = true
		})
	})
}

// testResets checks what watchResets records of connections of which present is true, and of others.
func testResets(t *testing.T, present func(device int, port uint16) bool, add func(device int, port uint16)) {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	if err := netlink.LinkSetUp(lo); err != nil {
		t.Fatal(err)
	}
	handle, err := netlink.NewHandle()
	if err != nil {
		t.Fatal(err)
	}
	defer handle.Close()
	packets, err := openResets()
	if err != nil {
		t.Fatal(err)
	}
	defer packets.Close()
	name := filepath.Join(t.TempDir(), "records")
	file, err := os.OpenFile(name, os.O_CREATE|os.O_RDWR|os.O_APPEND, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	go func() { _ = watchResets(packets, recorder{file}, present) }()
	from := int64(0)
	read := func() (records []Record) {
		records, next, err := readRecords(file, from)
		if err != nil {
			t.Fatal(err)
		}
		from = next
		return records
	}
	for device := range 2 {
		a := Address(device)
		address := &netlink.Addr{IPNet: &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(a.BitLen(), a.BitLen())}, Flags: unix.IFA_F_NODAD}
		if err := netlink.AddrAdd(lo, address); err != nil {
			t.Fatal(err)
		}
		defer func() { _ = netlink.AddrDel(lo, address) }()
		if err := netns.AwaitLocal(handle, a, time.Minute); err != nil {
			t.Fatal(err)
		}
		l, err := net.ListenTCP("tcp", net.TCPAddrFromAddrPort(netip.AddrPortFrom(a, 0)))
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		reset := func(added bool) (port uint16) {
			t.Helper()
			conn, err := net.DialTCP("tcp", net.TCPAddrFromAddrPort(netip.AddrPortFrom(a, 0)), l.Addr().(*net.TCPAddr))
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			other, err := l.AcceptTCP()
			if err != nil {
				t.Fatal(err)
			}
			port = conn.LocalAddr().(*net.TCPAddr).AddrPort().Port()
			if added {
				add(device, port)
			}
			if err := other.SetLinger(0); err != nil {
				t.Fatal(err)
			}
			if err := other.Close(); err != nil {
				t.Fatal(err)
			}
			return port
		}
		reset(false)
		begun := Now()
		port := reset(true)
		const slack = time.Minute // another process notes the time, and may wait for a CPU
		var records []Record
		testenv.Within(t, "a record", func() bool {
			// Loopback shows a packet as sent and as received: the second record of the former device may be late.
			records = slices.DeleteFunc(read(), func(r Record) bool { return r.Device < uint32(device) })
			return len(records) > 0
		})
		for _, r := range records {
			if r.Kind != Closed || r.Device != uint32(device) || r.Port != port || r.At < begun || r.At > begun+slack {
				t.Errorf("%+v, want device %d, port %d, after %v", r, device, port, begun)
			}
		}
	}
}
