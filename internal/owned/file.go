// SPDX-License-Identifier: Apache-2.0

package owned

import (
	"fmt"
	"io"
	"os"
	"syscall"

	"golang.org/x/sys/unix"

	"sockeye/internal/fault"
)

// ReadFile reads a regular file of at most most bytes. A secret belongs to root or to the user of the agent, and users other than the owner
// and the group must not be able to read it.
func ReadFile(path string, secret bool, most int64) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0) // a FIFO would wait for a writer
	if err != nil {
		return nil, fault.Unreadable(err, "")
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, fault.Usage(fmt.Errorf("%s is not a regular file", path), "")
	}
	if secret && info.Mode()&0o007 != 0 {
		return nil, fault.Usage(fmt.Errorf("%s has mode %04o, so that all users may use it", path, info.Mode().Perm()), "chmod 0600 "+path)
	}
	if owner := info.Sys().(*syscall.Stat_t).Uid; secret && owner != 0 && owner != uint32(os.Geteuid()) {
		return nil, fault.Usage(fmt.Errorf("%s belongs to user %d, who can read and replace it", path, owner), "chown root "+path)
	}
	text, err := io.ReadAll(io.LimitReader(f, most+1))
	if err == nil && int64(len(text)) > most {
		err = fault.Usage(fmt.Errorf("%s has more than %d bytes", path, most), "")
	}
	return text, err
}
