// SPDX-License-Identifier: Apache-2.0

package member

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// silent mounts a file system whose server answers nothing after the mount (include/uapi/linux/fuse.h).
func silent(t *testing.T) (dir string) {
	t.Helper()
	device, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENODEV) || errors.Is(err, unix.ENXIO) {
		t.Skip("kernel: no FUSE")
	}
	check(t, err)
	dir = t.TempDir()
	check(t, unix.Mount("silent", dir, "fuse", 0, fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0", device)))
	t.Cleanup(func() {
		check(t, unix.Unmount(dir, unix.MNT_DETACH))
		check(t, unix.Close(device)) // ends the requests that wait
	})
	request := make([]byte, 1<<16)
	_, err = unix.Read(device, request)
	check(t, err)
	answer := make([]byte, 16+64) // fuse_out_header, fuse_init_out
	binary.NativeEndian.PutUint32(answer, uint32(len(answer)))
	copy(answer[8:16], request[8:16])              // unique
	binary.NativeEndian.PutUint32(answer[16:], 7)  // major
	binary.NativeEndian.PutUint32(answer[20:], 31) // minor
	binary.NativeEndian.PutUint32(answer[36:], 1<<17)
	_, err = unix.Write(device, answer)
	check(t, err)
	return dir
}

// TestSilentFileSystem reads the attributes of a file whose file system never answers, as that of another process's executable.
func TestSilentFileSystem(t *testing.T) {
	dir := silent(t)
	fd, err := unix.Open(dir, unix.O_PATH|unix.O_CLOEXEC, 0)
	check(t, err)
	file := os.NewFile(uintptr(fd), dir)
	defer file.Close()
	asked := make(chan error, 1)
	go func() {
		_, err := identify(fd, "", unix.AT_EMPTY_PATH)
		asked <- errors.Join(err, func() error { _, err := Stat(fmt.Sprintf("/proc/self/fd/%d", fd)); return err }())
	}()
	select {
	case err := <-asked:
		check(t, err)
	case <-time.After(10 * time.Second):
		t.Error("the server is asked")
	}
}
