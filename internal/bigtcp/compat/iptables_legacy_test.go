// SPDX-License-Identifier: Apache-2.0

package compat

import (
	"errors"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// TestLegacyTables creates the tables filter in a namespace, as iptables-legacy does, and
// finds them.
func TestLegacyTables(t *testing.T) {
	n := newNamespace(t)
	host, _ := findAll(t, n)
	wantNotFound(t, host, iptablesLegacy)
	for _, c := range []struct {
		table         string
		domain, level int
	}{{"iptables filter", unix.AF_INET, unix.SOL_IP}, {"ip6tables filter", unix.AF_INET6, unix.SOL_IPV6}} {
		err := n.Do(func() error { return makeLegacyTable(c.domain, c.level) })
		if errors.Is(err, unix.ENOPROTOOPT) || errors.Is(err, unix.ENOENT) {
			t.Skipf("kernel: it has no %s: %v", c.table, err)
		}
		must(t, err)
		host, _ = findAll(t, n)
		wantFound(t, host, iptablesLegacy, c.table)
	}
}

// makeLegacyTable requests the table filter, which creates the table.
func makeLegacyTable(domain, level int) error {
	socket, err := unix.Socket(domain, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(socket)
	const getInfo = 64 // IPT_SO_GET_INFO, and IP6T_SO_GET_INFO
	var info [84]byte  // struct ipt_getinfo
	copy(info[:], "filter")
	size := uint32(len(info))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(socket), uintptr(level), getInfo,
		uintptr(unsafe.Pointer(&info[0])), uintptr(unsafe.Pointer(&size)), 0)
	if errno != 0 {
		return errno
	}
	return nil
}
