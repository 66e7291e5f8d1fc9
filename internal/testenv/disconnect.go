// SPDX-License-Identifier: Apache-2.0

package testenv

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Disconnect ends the connection of a UDP socket, by connect(2) to AF_UNSPEC. A socket in a SO_REUSEPORT group that has been connected is in
// no group afterwards.
func Disconnect(fd int) error {
	none := unix.RawSockaddrInet6{Family: unix.AF_UNSPEC}
	_, _, errno := unix.Syscall(unix.SYS_CONNECT, uintptr(fd), uintptr(unsafe.Pointer(&none)), unsafe.Sizeof(none))
	if errno != 0 {
		return fmt.Errorf("disconnect: %w", errno)
	}
	return nil
}
