// SPDX-License-Identifier: Apache-2.0

package transfers

import (
	"fmt"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Commands of ethtool (include/uapi/linux/ethtool.h).
const (
	ethtoolSetTSO = 0x1f
	ethtoolSetGSO = 0x24
	ethtoolSetGRO = 0x2c
)

// setOffloads switches TSO, GSO and GRO of an interface of this thread's network namespace, as ethtool -K does.
func setOffloads(name string, on bool) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open socket for ethtool: %w", err)
	}
	defer unix.Close(fd)
	value := struct{ command, data uint32 }{}
	if on {
		value.data = 1
	}
	request := struct {
		name [unix.IFNAMSIZ]byte
		data unsafe.Pointer
		_    [16]byte // struct ifreq is of 40 bytes
	}{data: unsafe.Pointer(&value)}
	copy(request.name[:unix.IFNAMSIZ-1], name)
	for _, value.command = range []uint32{ethtoolSetTSO, ethtoolSetGSO, ethtoolSetGRO} {
		_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&request)))
		runtime.KeepAlive(&value)
		if errno != 0 {
			return fmt.Errorf("switch offloads of %s: %w", name, errno)
		}
	}
	return nil
}
