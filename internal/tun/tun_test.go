// SPDX-License-Identifier: Apache-2.0

package tun_test

import (
	"net/netip"
	"os/exec"
	"runtime"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"sockeye/internal/netns"
	"sockeye/internal/testenv"
	"sockeye/internal/tun"
)

func TestMain(m *testing.M) { testenv.Main(m) }

// TestAddressesAreLocal opens interfaces while other processes want the CPUs: the kernel adds the routes of IPv6 addresses
// in a work queue. Without the wait, one interface in 300 had no route yet.
func TestAddressesAreLocal(t *testing.T) {
	for range 6 * runtime.NumCPU() {
		busy := exec.Command("sh", "-c", "while :; do :; done")
		if err := busy.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			_ = busy.Process.Kill()
			_ = busy.Wait()
		})
	}
	guest := netip.MustParseAddr("fd96::2")
	for range 60 {
		namespace, err := netns.NewSmall()
		if err != nil {
			t.Fatal(err)
		}
		err = netns.Do(namespace, func() error {
			fd, err := tun.Open(tun.Interface{Name: "sockeye", MTU: 1500, Addresses: []netip.Addr{guest}})
			if err != nil {
				return err
			}
			defer unix.Close(fd)
			routes, err := netlink.RouteGet(guest.AsSlice())
			if err == nil && routes[0].Type != unix.RTN_LOCAL {
				t.Errorf("packets to %v are not delivered: %v", guest, routes)
			}
			return err
		})
		if err != nil {
			t.Error(err)
		}
		namespace.Close()
	}
}
