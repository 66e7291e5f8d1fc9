// SPDX-License-Identifier: Apache-2.0

package testenv

import (
	"errors"
	"os"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Of linux/userfaultfd.h.
const (
	uffdAPI     = 0xaa
	uffdioAPI   = 0xc018aa3f
	uffdioJoin  = 0xc020aa00 // UFFDIO_REGISTER
	uffdMissing = 1          // UFFDIO_REGISTER_MODE_MISSING
)

// HoldLock holds the lock of a connected TCP socket until release is called, at the latest at the end of the test: a thread sends from a
// page that is not there, and nobody answers the fault. A local user can do the same to a socket with a page of a FUSE file.
func HoldLock(t testing.TB, fd int) (release func()) {
	t.Helper()
	number, _, errno := unix.Syscall(unix.SYS_USERFAULTFD, unix.O_CLOEXEC|unix.O_NONBLOCK, 0, 0)
	if errors.Is(errno, unix.ENOSYS) || errors.Is(errno, unix.EPERM) {
		t.Skip("kernel: no userfaultfd(2)")
	}
	if errno != 0 {
		t.Fatalf("userfaultfd: %v", errno)
	}
	faults, length := int(number), os.Getpagesize()
	page, err := unix.Mmap(-1, 0, length, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		unix.Close(faults)
		t.Fatalf("map page: %v", err)
	}
	waiting := false
	t.Cleanup(func() {
		if !waiting {
			unix.Close(faults)
			_ = unix.Munmap(page)
		}
	})
	version := struct{ api, features, ioctls uint64 }{api: uffdAPI}
	area := struct{ start, length, mode, ioctls uint64 }{start: uint64(uintptr(unsafe.Pointer(&page[0]))), length: uint64(length), mode: uffdMissing}
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, number, uffdioAPI, uintptr(unsafe.Pointer(&version))); errno != 0 {
		t.Fatalf("UFFDIO_API: %v", errno)
	}
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, number, uffdioJoin, uintptr(unsafe.Pointer(&area))); errno != 0 {
		t.Fatalf("UFFDIO_REGISTER: %v", errno)
	}
	own, err := unix.Dup(fd)
	if err != nil {
		t.Fatalf("duplicate socket: %v", err)
	}
	waiting = true
	ended := make(chan error, 1)
	go func() {
		_, err := unix.Write(own, page)
		ended <- err
	}()
	released := false
	release = func() {
		if released {
			return
		}
		released = true
		unix.Close(faults) // the kernel answers the fault with an empty page
		if err := <-ended; err != nil {
			t.Errorf("send: %v", err)
		}
		unix.Close(own)
		_ = unix.Munmap(page)
	}
	t.Cleanup(release)
	// The fault can be read as soon as the thread waits with the lock.
	var message [32]byte
	Within(t, "the fault", func() bool {
		_, err := unix.Read(faults, message[:])
		return err == nil
	})
	return release
}
