// SPDX-License-Identifier: Apache-2.0

package netif

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// offloads reads features of ethtool -k by ioctl(SIOCETHTOOL) on any socket of the
// interface's namespace.
func offloads(socket int, name string) (Offloads, error) {
	var o Offloads
	for command, on := range map[uint32]*bool{
		unix.ETHTOOL_GGSO: &o.GSO,
		unix.ETHTOOL_GTSO: &o.TSO,
		unix.ETHTOOL_GGRO: &o.GRO,
	} {
		value, err := ethtoolValue(socket, name, command)
		if err != nil {
			return Offloads{}, fmt.Errorf("read offloads: %w", err)
		}
		*on = value != 0
	}
	return o, nil
}

// ethtoolValue runs an ethtool command whose reply is struct ethtool_value.
func ethtoolValue(socket int, name string, command uint32) (uint32, error) {
	value := struct{ command, data uint32 }{command, 0}
	// struct ifreq of <linux/if.h>; the one of x/sys is for its own commands.
	request := struct {
		name [unix.IFNAMSIZ]byte
		data unsafe.Pointer
		_    [16]byte
	}{data: unsafe.Pointer(&value)}
	copy(request.name[:unix.IFNAMSIZ-1], name)
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(socket), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&request)))
	if errno != 0 {
		return 0, errno
	}
	return value.data, nil
}

// driver returns the name of the interface's driver, or "" if it has none.
func driver(socket int, name string) (string, error) {
	info, err := unix.IoctlGetEthtoolDrvinfo(socket, name)
	switch err {
	case nil:
		return unix.ByteSliceToString(info.Driver[:]), nil
	case unix.EOPNOTSUPP:
		return "", nil
	}
	return "", fmt.Errorf("read driver: %w", err)
}
