// SPDX-License-Identifier: Apache-2.0

package isolate

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"sockeye/internal/mountinfo"
)

// mounts changes the guest's mount namespace.
func (s *Setup) mounts(reply *setupReply) error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SLAVE, ""); err != nil {
		return &StepError{StepMounts, fmt.Errorf("make mounts private: %w", err)}
	}
	// /proc of the guest's PID namespace. The kernel denies the mount in a container whose /proc is partly covered.
	if err := unix.Mount("proc", "/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); errors.Is(err, unix.EPERM) {
		reply.Missing = append(reply.Missing, fmt.Sprintf("/proc shows the host's processes and their sockets: mount /proc: %v", err))
	} else if err != nil {
		return &StepError{StepMounts, fmt.Errorf("mount /proc: %w", err)}
	}
	list, err := mountinfo.Read()
	if err != nil {
		err = fmt.Errorf("list mounts: %w", err)
	}
	if err = errors.Join(err, sealCgroups(list), replaceNamespaces(list)); err != nil {
		reply.Missing = append(reply.Missing, err.Error())
	}
	warnings, err := s.hide()
	reply.Warnings = append(reply.Warnings, warnings...)
	if err != nil {
		if step := new(StepError); !errors.As(err, &step) {
			err = &StepError{StepMounts, err}
		}
		return err
	}
	if s.ResolvConf != "" {
		if err := replaceFile("/etc/resolv.conf", s.ResolvConf); err != nil {
			return &StepError{StepResolver, err}
		}
	}
	return nil
}

// outOfReach returns whether an error means that the program cannot access the path either.
func outOfReach(err error) bool {
	return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EACCES)
}

// sealCgroups makes cgroup file systems read-only. The program's user may own cgroups, as user managers do, and could freeze or
// kill processes of the host there.
func sealCgroups(list []mountinfo.Mount) error {
	var errs []error
	for _, m := range list {
		if !strings.HasPrefix(m.Type, "cgroup") {
			continue
		}
		flags := uintptr(unix.MS_REMOUNT | unix.MS_BIND | unix.MS_RDONLY)
		// The kernel refuses a remount that clears these flags.
		for option, flag := range map[string]uintptr{"nosuid": unix.MS_NOSUID, "nodev": unix.MS_NODEV, "noexec": unix.MS_NOEXEC} {
			if slices.Contains(m.Options, option) {
				flags |= flag
			}
		}
		if err := unix.Mount("", m.Point, "", flags, ""); err != nil && !outOfReach(err) {
			errs = append(errs, fmt.Errorf("cgroups may be written to: make %s read-only: %w", m.Point, err))
		}
	}
	return errors.Join(errs...)
}

// replaceNamespaces covers procfs and mqueue mounts elsewhere, as in chroots, which show the host's processes and message queues.
func replaceNamespaces(list []mountinfo.Mount) error {
	const flags = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
	var errs []error
	for _, m := range list {
		var err error
		switch {
		case m.Type == "proc" && m.Point != "/proc" && !strings.HasPrefix(m.Point, "/proc/"):
			err = unix.Mount("tmpfs", m.Point, "tmpfs", flags|unix.MS_RDONLY, "size=4k,mode=555")
		case m.Type == "mqueue":
			err = unix.Mount("mqueue", m.Point, "mqueue", flags, "")
		}
		if err != nil && !outOfReach(err) {
			errs = append(errs, fmt.Errorf("%s shows data of the host: mount over it: %w", m.Point, err))
		}
	}
	return errors.Join(errs...)
}

// scratch is a directory that exists on every host; it is temporarily covered in the guest's mount namespace.
const scratch = "/tmp"

// replaceFile mounts a file with the text over another file, in this mount namespace only. If that file does not exist, replaceFile
// does nothing.
func replaceFile(path, text string) error {
	target, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("open %s: %w", path, err)
	}
	defer unix.Close(target)
	if err := unix.Mount("tmpfs", scratch, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "size=1m,mode=755"); err != nil {
		return fmt.Errorf("mount over %s: %w", scratch, err)
	}
	file := scratch + "/resolv.conf"
	err = os.WriteFile(file, []byte(text), 0o644)
	if err == nil {
		err = os.Chmod(file, 0o644) // regardless of the umask
	}
	if err == nil {
		err = unix.Mount(file, fmt.Sprintf("/proc/self/fd/%d", target), "", unix.MS_BIND, "")
	}
	if err != nil {
		err = fmt.Errorf("mount over %s: %w", path, err)
	}
	return errors.Join(err, unix.Unmount(scratch, unix.MNT_DETACH))
}
