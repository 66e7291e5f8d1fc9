// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"sockeye/internal/cli/command"
)

// unitSandbox is the sandbox that systemd sets up from the agent's unit, as far as a process can set it up for
// itself.
type unitSandbox struct {
	Writable     []string // ReadWritePaths= and the unit's own directories
	Visible      []string // directories with the files of the test, despite PrivateTmp=
	ReadOnly     []string
	Cgroups      bool // writable
	Capabilities uint64
	Umask        int
	Filter       []unix.SockFilter
}

// emulated lists the directives that sandboxOf applies with their values, and the directives that it always applies.
// A unit with another value of the latter is refused, so that the test covers the installed unit.
var emulated = map[string]string{
	"ProtectSystem": "strict", "ProtectHome": "yes", "PrivateTmp": "yes", "PrivateDevices": "yes", "PrivateMounts": "yes",
	"ProtectKernelLogs": "yes", "ProtectKernelModules": "yes", "ProtectKernelTunables": "yes", "ProtectProc": "default", "ProcSubset": "all",
	"NoNewPrivileges": "yes", "LockPersonality": "yes", "MemoryDenyWriteExecute": "yes", "ProtectClock": "yes", "ProtectHostname": "yes",
	"RestrictRealtime": "yes", "RestrictSUIDSGID": "yes", "SystemCallArchitectures": "native", "SystemCallErrorNumber": "EPERM",
	// These directives do not restrict the agent.
	"Type": "notify", "Restart": "always", "RestartSec": "500ms", "KillMode": "process", "LimitMEMLOCK": "infinity",
	"RuntimeDirectory": "sockeye", "RuntimeDirectoryPreserve": "yes", "StateDirectory": "sockeye", "StateDirectoryMode": "0700",
}

// sandboxOf parses the unit and its drop-ins.
func (h *host) sandboxOf(dropIns ...string) *unitSandbox {
	h.t.Helper()
	s := &unitSandbox{Writable: []string{h.state, h.run, h.pins}, Visible: []string{h.dir, filepath.Dir(h.pins)}}
	allowed := make(map[string]bool)
	namespaces, families := "no", []string{}
	files := []string{"../../dist/sockeye.service"}
	for _, name := range dropIns {
		files = append(files, "../../dist/sockeye.service.d/"+name)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			h.t.Fatal(err)
		}
		_, service, _ := strings.Cut(string(text), "[Service]\n")
		service, _, _ = strings.Cut(service, "[Install]")
		for line := range strings.Lines(service) {
			key, value, ok := strings.Cut(strings.TrimSpace(line), "=")
			if !ok || strings.HasPrefix(key, "#") {
				continue
			}
			switch key {
			case "ExecStart", "ExecStartPre", "ExecReload":
			case "ReadWritePaths":
				if strings.TrimPrefix(value, "-") != command.DefaultPins {
					h.t.Fatalf("ReadWritePaths=%s", value)
				}
			case "ReadOnlyPaths":
				s.ReadOnly = append(s.ReadOnly, strings.Fields(value)...)
			case "ProtectControlGroups":
				s.Cgroups = value == "no"
			case "UMask":
				mask, err := strconv.ParseInt(value, 8, 32)
				if err != nil {
					h.t.Fatal(err)
				}
				s.Umask = int(mask)
			case "CapabilityBoundingSet":
				for _, name := range strings.Fields(value) {
					s.Capabilities |= 1 << h.capability(name)
				}
			case "RestrictNamespaces":
				namespaces = value
			case "RestrictAddressFamilies":
				families = strings.Fields(value)
			case "SystemCallFilter":
				names, without := strings.CutPrefix(value, "~")
				for name := range h.systemCalls(strings.Fields(names)...) {
					if allowed[name] = !without; without {
						delete(allowed, name)
					}
				}
			default:
				if emulated[key] != value {
					h.t.Fatalf("%s=%s is not emulated", key, value)
				}
			}
		}
	}
	s.Filter = h.filter(allowed, namespaces, families)
	return s
}

// capability returns the number of a capability by its name in systemd.
func (h *host) capability(name string) uint {
	h.t.Helper()
	out, err := exec.Command("systemd-analyze", "--no-pager", "capability", strings.ToLower(name)).Output()
	if err != nil {
		h.t.Fatal(err)
	}
	fields := strings.Fields(string(out))
	number, err := strconv.ParseUint(fields[len(fields)-1], 10, 8)
	if err != nil {
		h.t.Fatalf("%v in %s", err, out)
	}
	return uint(number)
}

// systemCalls resolves the names and groups of systemd.exec(5) as the installed systemd does. The calls of @default
// are always permitted.
func (h *host) systemCalls(names ...string) map[string]bool {
	h.t.Helper()
	found := make(map[string]bool)
	var groups []string
	for _, name := range names {
		if strings.HasPrefix(name, "@") {
			groups = append(groups, name)
		} else {
			found[name] = true
		}
	}
	if len(groups) == 0 {
		return found
	}
	out, err := exec.Command("systemd-analyze", append([]string{"--no-pager", "syscall-filter"}, groups...)...).Output()
	if err != nil {
		h.t.Fatal(err)
	}
	var below []string
	for line := range strings.Lines(string(out)) {
		name := strings.TrimSpace(line)
		switch {
		case name == "" || strings.HasPrefix(name, "#") || !strings.HasPrefix(line, " "):
		case strings.HasPrefix(name, "@"):
			below = append(below, name)
		default:
			found[name] = true
		}
	}
	if len(below) > 0 {
		maps.Copy(found, h.systemCalls(below...))
	}
	return found
}

// numbers maps the system calls of this architecture to their numbers in golang.org/x/sys.
func (h *host) numbers() map[string]uint32 {
	h.t.Helper()
	dir, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "golang.org/x/sys").Output()
	if err != nil {
		h.t.Fatal(err)
	}
	text, err := os.ReadFile(filepath.Join(strings.TrimSpace(string(dir)), "unix", "zsysnum_linux_"+runtime.GOARCH+".go"))
	if err != nil {
		h.t.Fatal(err)
	}
	numbers := make(map[string]uint32)
	for _, match := range regexp.MustCompile(`(?m)^\s+SYS_(\w+)\s+= (\d+)$`).FindAllStringSubmatch(string(text), -1) {
		n, err := strconv.ParseUint(match[2], 10, 32)
		if err != nil {
			h.t.Fatal(err)
		}
		numbers[strings.ToLower(match[1])] = uint32(n)
	}
	if runtime.GOARCH == "amd64" {
		numbers["fstatat64"] = numbers["newfstatat"]
	}
	return numbers
}

const allNamespaces = unix.CLONE_NEWUSER | unix.CLONE_NEWNS | unix.CLONE_NEWNET | unix.CLONE_NEWPID | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS | unix.CLONE_NEWCGROUP

// filter returns the seccomp program that systemd (src/shared/seccomp-util.c) would build from the directives.
func (h *host) filter(allowed map[string]bool, namespaces string, families []string) []unix.SockFilter {
	h.t.Helper()
	numbers := h.numbers()
	for name := range h.systemCalls("@default") {
		allowed[name] = true
	}
	const (
		load  = unix.BPF_LD | unix.BPF_W | unix.BPF_ABS
		equal = unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K
		any   = unix.BPF_JMP | unix.BPF_JSET | unix.BPF_K
		and   = unix.BPF_ALU | unix.BPF_AND | unix.BPF_K
		ret   = unix.BPF_RET | unix.BPF_K
	)
	var program []unix.SockFilter
	add := func(code uint16, k uint32, jt, jf uint8) {
		program = append(program, unix.SockFilter{Code: code, K: k, Jt: jt, Jf: jf})
	}
	fail := func(errno unix.Errno) uint32 { return unix.SECCOMP_RET_ERRNO | uint32(errno) }
	argument := func(n int) uint32 { return uint32(16 + 8*n) } // the low half, little-endian
	// on ends the checks of the current system call.
	on := func(name string, checks func()) {
		number, ok := numbers[name]
		if !ok {
			return
		}
		at := len(program)
		add(equal, number, 0, 0)
		checks()
		add(load, 0, 0, 0) // the number again
		program[at].Jf = uint8(len(program) - at - 1)
	}
	refuse := func(name string, errno unix.Errno) {
		on(name, func() { add(ret, fail(errno), 0, 0) })
	}
	mask := uint32(allNamespaces)
	if namespaces == "net" {
		mask &^= unix.CLONE_NEWNET
	} else if namespaces != "yes" {
		h.t.Fatalf("RestrictNamespaces=%s", namespaces)
	}
	add(load, 0, 0, 0)
	refuse("clone3", unix.ENOSYS)
	for _, name := range []string{"clone", "unshare"} {
		on(name, func() {
			add(load, argument(0), 0, 0)
			add(any, mask, 0, 1)
			add(ret, fail(unix.EPERM), 0, 0)
		})
	}
	on("setns", func() {
		add(load, argument(1), 0, 0)
		if namespaces == "net" {
			add(equal, unix.CLONE_NEWNET, 1, 0)
		}
		add(ret, fail(unix.EPERM), 0, 0)
	})
	on("socket", func() {
		add(load, argument(0), 0, 0)
		known := map[string]uint32{"AF_UNIX": unix.AF_UNIX, "AF_INET": unix.AF_INET, "AF_INET6": unix.AF_INET6, "AF_NETLINK": unix.AF_NETLINK}
		for i, family := range families {
			number, ok := known[family]
			if !ok {
				h.t.Fatalf("RestrictAddressFamilies=%s", family)
			}
			add(equal, number, uint8(len(families)-i), 0)
		}
		add(ret, fail(unix.EAFNOSUPPORT), 0, 0)
	})
	on("mmap", func() {
		add(load, argument(2), 0, 0)
		add(and, unix.PROT_WRITE|unix.PROT_EXEC, 0, 0)
		add(equal, unix.PROT_WRITE|unix.PROT_EXEC, 0, 1)
		add(ret, fail(unix.EPERM), 0, 0)
	})
	for _, name := range []string{"mprotect", "pkey_mprotect"} {
		on(name, func() {
			add(load, argument(2), 0, 0)
			add(any, unix.PROT_EXEC, 0, 1)
			add(ret, fail(unix.EPERM), 0, 0)
		})
	}
	for name, mode := range map[string]int{"chmod": 1, "fchmod": 1, "fchmodat": 2, "mkdir": 1, "mkdirat": 2, "mknod": 1, "mknodat": 2} {
		on(name, func() {
			add(load, argument(mode), 0, 0)
			add(any, unix.S_ISUID|unix.S_ISGID, 0, 1)
			add(ret, fail(unix.EPERM), 0, 0)
		})
	}
	refuse("openat2", unix.ENOSYS)
	on("personality", func() {
		add(load, argument(0), 0, 0)
		add(equal, 0, 2, 0)
		add(equal, 0xffffffff, 1, 0)
		add(ret, fail(unix.EPERM), 0, 0)
	})
	for _, name := range slices.Sorted(maps.Keys(allowed)) {
		if number, ok := numbers[name]; ok {
			add(equal, number, 0, 1)
			add(ret, unix.SECCOMP_RET_ALLOW, 0, 0)
		}
	}
	// System calls that are unknown to the installed systemd fail with ENOSYS, so that programs use their fallback.
	known := make(map[string]bool)
	out, err := exec.Command("systemd-analyze", "--no-pager", "syscall-filter").Output()
	if err != nil {
		h.t.Fatal(err)
	}
	for line := range strings.Lines(string(out)) {
		known[strings.TrimSpace(line)] = true
	}
	for _, name := range slices.Sorted(maps.Keys(numbers)) {
		if !known[name] && !allowed[name] {
			add(equal, numbers[name], 0, 1)
			add(ret, fail(unix.ENOSYS), 0, 0)
		}
	}
	add(ret, fail(unix.EPERM), 0, 0)
	return program
}

// becomeHardened enters the sandbox described in a file and runs a role in it.
func becomeHardened(args []string) {
	runtime.LockOSThread()
	text, err := os.ReadFile(args[0])
	if err == nil {
		var s unitSandbox
		if err = json.Unmarshal(text, &s); err == nil {
			err = s.enter()
		}
	}
	if err == nil {
		err = unix.Exec("/proc/self/exe", append([]string{"sockeye"}, args[1:]...), os.Environ())
	}
	fmt.Fprintln(os.Stderr, "sandbox:", err)
	os.Exit(1)
}

func (s *unitSandbox) enter() error {
	for _, dir := range s.Writable {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return err
		}
	}
	if err := s.mounts(); err != nil {
		return err
	}
	unix.Umask(s.Umask)
	for c := range uintptr(unix.CAP_LAST_CAP + 1) {
		if s.Capabilities&(1<<c) == 0 {
			if err := unix.Prctl(unix.PR_CAPBSET_DROP, c, 0, 0, 0); err != nil {
				return fmt.Errorf("drop capability %d: %w", c, err)
			}
		}
	}
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var caps [2]unix.CapUserData
	for i := range caps {
		caps[i].Permitted = uint32(s.Capabilities >> (32 * i))
		caps[i].Effective = caps[i].Permitted
	}
	if err := unix.Capset(&header, &caps[0]); err != nil {
		return fmt.Errorf("limit capabilities: %w", err)
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("set no_new_privs: %w", err)
	}
	program := unix.SockFprog{Len: uint16(len(s.Filter)), Filter: &s.Filter[0]}
	if err := unix.Prctl(unix.PR_SET_SECCOMP, unix.SECCOMP_MODE_FILTER, uintptr(unsafe.Pointer(&program)), 0, 0); err != nil {
		return fmt.Errorf("filter system calls: %w", err)
	}
	return nil
}

// mounts creates the unit's mount namespace: only the paths that the unit names are writable.
func (s *unitSandbox) mounts() error {
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("unshare: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SLAVE, ""); err != nil {
		return fmt.Errorf("make mounts slaves: %w", err)
	}
	mount := func(source, target, kind string, flags uintptr) error {
		if err := unix.Mount(source, target, kind, flags, ""); err != nil {
			return fmt.Errorf("mount %s on %s: %w", source, target, err)
		}
		return nil
	}
	// PrivateTmp=: the directories of the test, which a real host does not have there, stay visible.
	visible := make(map[string]int)
	for _, dir := range s.Visible {
		fd, err := unix.OpenTree(unix.AT_FDCWD, dir, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_RECURSIVE)
		if err != nil {
			return fmt.Errorf("open %s: %w", dir, err)
		}
		visible[dir] = fd
	}
	if err := mount("tmpfs", "/tmp", "tmpfs", 0); err != nil {
		return err
	}
	for dir, fd := range visible {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
		if err := unix.MoveMount(fd, "", unix.AT_FDCWD, dir, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
			return fmt.Errorf("move mount to %s: %w", dir, err)
		}
	}
	// PrivateDevices=.
	devices := map[string]int{}
	for _, name := range []string{"null", "zero", "full", "random", "urandom"} {
		fd, err := unix.OpenTree(unix.AT_FDCWD, "/dev/"+name, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
		if err != nil {
			return fmt.Errorf("open /dev/%s: %w", name, err)
		}
		devices[name] = fd
	}
	if err := mount("tmpfs", "/dev", "tmpfs", 0); err != nil {
		return err
	}
	for name, fd := range devices {
		if err := os.WriteFile("/dev/"+name, nil, 0o600); err != nil {
			return err
		}
		if err := unix.MoveMount(fd, "", unix.AT_FDCWD, "/dev/"+name, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
			return fmt.Errorf("move mount to /dev/%s: %w", name, err)
		}
	}
	// ProtectHome=, ProtectKernelLogs=, ProtectKernelModules=, ProtectKernelTunables=.
	for _, path := range []string{"/home", "/root", "/run/user", "/usr/lib/modules", "/proc/kallsyms", "/proc/kcore", "/proc/kmsg"} {
		info, err := os.Stat(path)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		if info.IsDir() {
			err = unix.Mount("tmpfs", path, "tmpfs", 0, "mode=000")
		} else {
			err = unix.Mount("/dev/null", path, "", unix.MS_BIND, "")
		}
		if err != nil {
			return fmt.Errorf("hide %s: %w", path, err)
		}
	}
	writable := slices.Clone(s.Writable)
	if s.Cgroups {
		writable = append(writable, "/sys/fs/cgroup")
	}
	for _, dir := range writable {
		if err := mount(dir, dir, "", unix.MS_BIND|unix.MS_REC); err != nil {
			return err
		}
	}
	if err := unix.MountSetattr(unix.AT_FDCWD, "/", unix.AT_RECURSIVE, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY}); err != nil {
		return fmt.Errorf("make all read-only: %w", err)
	}
	for _, dir := range append(writable, "/tmp", "/dev") {
		if err := unix.MountSetattr(unix.AT_FDCWD, dir, 0, &unix.MountAttr{Attr_clr: unix.MOUNT_ATTR_RDONLY}); err != nil {
			return fmt.Errorf("make %s writable: %w", dir, err)
		}
	}
	if s.Cgroups {
		return unix.MountSetattr(unix.AT_FDCWD, "/sys/fs/cgroup", unix.AT_RECURSIVE, &unix.MountAttr{Attr_clr: unix.MOUNT_ATTR_RDONLY})
	}
	if !slices.Contains(s.ReadOnly, "/proc") {
		return unix.MountSetattr(unix.AT_FDCWD, "/proc", 0, &unix.MountAttr{Attr_clr: unix.MOUNT_ATTR_RDONLY})
	}
	return nil
}

// harden writes the sandbox of the unit and its drop-ins to files, for the start command and for the process.
func (h *host) harden(dropIns ...string) (file string) {
	h.t.Helper()
	if binary.NativeEndian.Uint16([]byte{1, 0}) != 1 {
		h.t.Skip("kernel: big-endian: the filter is for little-endian")
	}
	text, err := json.Marshal(h.sandboxOf(dropIns...))
	if err != nil {
		h.t.Fatal(err)
	}
	path := filepath.Join(h.dir, "sandbox.json")
	if err := os.WriteFile(path, text, 0o644); err != nil {
		h.t.Fatal(err)
	}
	return path
}
