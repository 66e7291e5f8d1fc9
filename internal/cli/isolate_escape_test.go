// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"sockeye/internal/testenv"
)

// escape runs one action of a hostile program inside, and prints the kernel's error, or "" if the action succeeded.
func escape(args []string) error {
	try, ok := escapes[args[0]]
	if !ok {
		return fmt.Errorf("unknown action %s", args[0])
	}
	err := try(args[1:])
	switch number, isErrno := errors.AsType[syscall.Errno](err); {
	case err == nil:
		fmt.Println("through")
	case isErrno:
		fmt.Println(unix.ErrnoName(number))
	default:
		return err
	}
	return nil
}

// above is a bit beyond the 32 bits that the kernel uses; a filter that compares 64 bits would not match.
const above = 1 << 32

var escapes = map[string]func(args []string) error{
	"vsock":            call(unix.SYS_SOCKET, unix.AF_VSOCK, unix.SOCK_STREAM, 0),
	"vsock, bit above": call(unix.SYS_SOCKET, unix.AF_VSOCK|above, unix.SOCK_STREAM, 0),
	"vsock by x32":     call(unix.SYS_SOCKET|0x40000000, unix.AF_VSOCK, unix.SOCK_STREAM, 0),
	"vsock by int80":   func([]string) error { return int80(359, unix.AF_VSOCK, unix.SOCK_STREAM, 0) },
	"packet":           call(unix.SYS_SOCKET, unix.AF_PACKET, unix.SOCK_RAW, 0),
	"alg":              call(unix.SYS_SOCKET, unix.AF_ALG, unix.SOCK_SEQPACKET, 0),
	"socketpair":       func([]string) error { _, err := unix.Socketpair(unix.AF_TIPC, unix.SOCK_STREAM, 0); return err },
	"sctp":             call(unix.SYS_SOCKET, unix.AF_INET, unix.SOCK_STREAM, unix.IPPROTO_SCTP),
	"mptcp":            call(unix.SYS_SOCKET, unix.AF_INET, unix.SOCK_STREAM, unix.IPPROTO_MPTCP),
	"netlink":          call(unix.SYS_SOCKET, unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_ROUTE),
	"io_uring": func([]string) error {
		var parameters [120]byte
		_, _, errno := unix.Syscall(unix.SYS_IO_URING_SETUP, 1, uintptr(unsafe.Pointer(&parameters)), 0)
		return orNil(errno)
	},
	// The lowest priority, for the whole process group.
	"setpriority":            call(unix.SYS_SETPRIORITY, unix.PRIO_PGRP, 0, 19),
	"setpriority, bit above": call(unix.SYS_SETPRIORITY, unix.PRIO_PGRP|above, 0, 19),
	"ioprio_set":             call(unix.SYS_IOPRIO_SET, 2, 0, 3<<13),
	"own priority":           call(unix.SYS_SETPRIORITY, unix.PRIO_PROCESS, 0, 19),
	"keyring":                call(unix.SYS_KEYCTL, unix.KEYCTL_GET_KEYRING_ID, ^uintptr(2), 0), // KEY_SPEC_SESSION_KEYRING
	"userfault":              call(unix.SYS_USERFAULTFD, 1, 0, 0),
	"clone": func([]string) error {
		cmd := exec.Command("true")
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWUSER}
		return cmd.Run()
	},
	"clone3": func([]string) error {
		args := [11]uint64{0: unix.CLONE_NEWUSER, 4: uint64(unix.SIGCHLD)}
		pid, _, errno := unix.RawSyscall(unix.SYS_CLONE3, uintptr(unsafe.Pointer(&args)), unsafe.Sizeof(args), 0)
		if errno == 0 && pid == 0 {
			_, _, _ = unix.RawSyscall(unix.SYS_EXIT_GROUP, 0, 0, 0)
		}
		return orNil(errno)
	},
	"TIOCSTI":            terminalRequest(unix.TIOCSTI),
	"TIOCSTI, bit above": terminalRequest(unix.TIOCSTI | above),
	"TIOCLINUX":          terminalRequest(unix.TIOCLINUX),
	"TIOCSETD":           terminalRequest(unix.TIOCSETD),
	"connect": func(args []string) error {
		c, err := net.DialTimeout("unix", args[0], 5*time.Second)
		if err != nil {
			return err
		}
		defer c.Close()
		line, err := bufio.NewReader(c).ReadString('\n')
		fmt.Print(line)
		return err
	},
}

func orNil(errno syscall.Errno) error {
	if errno == 0 {
		return nil
	}
	return errno
}

func call(number, a, b, c uintptr) func([]string) error {
	return func([]string) error {
		_, _, errno := unix.Syscall(number, a, b, c)
		return orNil(errno)
	}
}

// terminalRequest inserts a line into the input of the terminal, from which the shell outside reads next.
func terminalRequest(request uintptr) func([]string) error {
	return func([]string) error {
		for _, c := range []byte("pushed\n") {
			if _, _, errno := unix.Syscall(unix.SYS_IOCTL, 0, request, uintptr(unsafe.Pointer(&c))); errno != 0 {
				return errno
			}
		}
		return nil
	}
}

// int80 makes a 32-bit (i386) system call.
func int80(number, a, b, c uint32) error {
	if runtime.GOARCH != "amd64" {
		return unix.ENOSYS
	}
	code, err := unix.Mmap(-1, 0, 4096, unix.PROT_READ|unix.PROT_WRITE|unix.PROT_EXEC, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return err
	}
	const result = 2048
	le := func(b []byte, v uint64, n int) []byte {
		for range n {
			b, v = append(b, byte(v)), v>>8
		}
		return b
	}
	p := le([]byte{0xb8}, uint64(number), 4) // mov eax, number
	p = le(append(p, 0xbb), uint64(a), 4)    // mov ebx, a
	p = le(append(p, 0xb9), uint64(b), 4)    // mov ecx, b
	p = le(append(p, 0xba), uint64(c), 4)    // mov edx, c
	p = append(p, 0xcd, 0x80)                // int 0x80
	at := uint64(uintptr(unsafe.Pointer(&code[0]))) + result
	p = le(append(p, 0xa3), at, 8) // mov [at], eax
	copy(code, append(p, 0xc3))    // ret
	entry := &code[0]
	f := &entry
	(*(*func())(unsafe.Pointer(&f)))()
	if r := *(*int32)(unsafe.Pointer(&code[result])); r < 0 {
		return syscall.Errno(-r)
	}
	return nil
}

// TestIsolateSystemCalls checks that system calls that lead out of the namespaces, or to parts of the kernel that
// programs do not need, fail, also with arguments or numbers that a careless filter would not match.
func TestIsolateSystemCalls(t *testing.T) {
	addAddresses(t)
	for name, want := range map[string]string{
		"vsock": "EAFNOSUPPORT", "vsock, bit above": "EAFNOSUPPORT", "vsock by x32": "ENOSYS", "packet": "EAFNOSUPPORT", "alg": "EAFNOSUPPORT",
		"socketpair": "EAFNOSUPPORT", "sctp": "EPROTONOSUPPORT", "io_uring": "EPERM", "keyring": "EPERM", "userfault": "EPERM",
		"setpriority": "EPERM", "setpriority, bit above": "EPERM", "ioprio_set": "EPERM", "own priority": "through",
		"clone": "EPERM", "clone3": "ENOSYS", "netlink": "through", "mptcp": "through",
	} {
		t.Run(name, func(t *testing.T) {
			out, stderr, code := resultOf(t, ordinary(t, "", "isolate", "--no-outbound", "--", itself, "inside", "escape", name))
			if name == "mptcp" && out == "ENOPROTOOPT\n" {
				t.Skip("kernel: no MPTCP, or turned off")
			}
			if out != want+"\n" || code != 0 {
				t.Errorf("%q, code %d, want %s\n%s", out, code, want, stderr)
			}
		})
	}
	t.Run("vsock by int80", func(t *testing.T) {
		if runtime.GOARCH != "amd64" {
			t.Skip("CPU: it has no int 0x80")
		}
		out, stderr, code := resultOf(t, ordinary(t, "", "isolate", "--no-outbound", "--", itself, "inside", "escape", "vsock by int80"))
		if want := 128 + int(unix.SIGSYS); out != "" || code != want {
			t.Errorf("%q, code %d, want %d\n%s", out, code, want, stderr)
		}
	})
}

// TestIsolateUserNamespaces checks that the program can create a user namespace only on request: in it, it would have
// all capabilities.
func TestIsolateUserNamespaces(t *testing.T) {
	addAddresses(t)
	const script = "cat /proc/sys/user/max_user_namespaces; unshare -U true && echo one; unshare -r sh -c 'id -u'; true"
	for _, test := range []struct {
		flags []string
		ok    bool
	}{{nil, false}, {[]string{"--allow-userns"}, true}} {
		args := append(append([]string{"isolate"}, test.flags...), "--", "sh", "-c", script)
		out, stderr, code := resultOf(t, ordinary(t, "", args...))
		limit, rest, _ := strings.Cut(out, "\n")
		if ok := rest == "one\n0\n"; ok != test.ok || (limit == "0") == test.ok || code != 0 {
			t.Errorf("%v: %q, code %d\n%s", test.flags, out, code, stderr)
		}
	}
}

// pty is a pseudoterminal: the test types on master, and programs use slave.
func pty(t *testing.T) (master, slave *os.File) {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { master.Close() })
	control, err := master.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var number int
	if err := errors.Join(control.Control(func(fd uintptr) {
		if err = unix.IoctlSetPointerInt(int(fd), unix.TIOCSPTLCK, 0); err == nil {
			number, err = unix.IoctlGetInt(int(fd), unix.TIOCGPTN)
		}
	}), err); err != nil {
		t.Fatal(err)
	}
	if slave, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|unix.O_NOCTTY, 0); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { slave.Close() })
	// The terminal of an ordinary user belongs to the user.
	if err := slave.Chown(65534, 65534); err != nil {
		t.Fatal(err)
	}
	if err := master.SetReadDeadline(time.Now().Add(20 * time.Second)); err != nil {
		t.Fatal(err)
	}
	return master, slave
}

// onTerminal runs a command as the session leader of a terminal, types each line when the text before it has
// appeared, and returns the output.
func onTerminal(t *testing.T, cmd *exec.Cmd, typed ...[2]string) (screen string) {
	t.Helper()
	master, slave := pty(t)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = slave, slave, slave
	cmd.SysProcAttr.Setsid, cmd.SysProcAttr.Setctty = true, true
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	slave.Close()
	var seen strings.Builder
	from := 0 // start of the output that was not searched yet
	b := make([]byte, 4096)
	for {
		n, err := master.Read(b)
		seen.Write(b[:n])
		for len(typed) > 0 {
			at := strings.Index(seen.String()[from:], typed[0][0])
			if at < 0 {
				break
			}
			from += at + len(typed[0][0])
			if _, err := master.WriteString(typed[0][1]); err != nil {
				t.Fatal(err)
			}
			typed = typed[1:]
		}
		if err != nil { // EIO: no process has the terminal open
			break
		}
	}
	if err := cmd.Wait(); err != nil || len(typed) > 0 {
		t.Errorf("%v; not seen: %q\n%s", err, typed, seen.String())
	}
	return strings.ReplaceAll(seen.String(), "\r", "")
}

// calledByShell keeps the calling shell and lets it read a line afterwards.
func calledByShell(cmd *exec.Cmd) *exec.Cmd {
	script := slices.IndexFunc(cmd.Args, func(arg string) bool { return strings.Contains(arg, "\nexec setpriv") })
	cmd.Args[script] = strings.Replace(cmd.Args[script], "\nexec setpriv", "\nsetpriv", 1) + "\necho asks; read line; echo \"outside: $line\""
	return cmd
}

// TestIsolateTypesNothing checks that the program cannot insert input for the shell that started it, with both values
// of dev.tty.legacy_tiocsti.
func TestIsolateTypesNothing(t *testing.T) {
	addAddresses(t)
	for _, request := range []string{"TIOCSTI", "TIOCSTI, bit above", "TIOCLINUX", "TIOCSETD"} {
		t.Run(request, func(t *testing.T) {
			// This shell runs outside. EPERM comes from the filter; the sysctl would return EIO.
			cmd := calledByShell(ordinary(t, "", "isolate", "--", itself, "inside", "escape", request))
			screen := onTerminal(t, cmd, [2]string{"asks", "typed\n"})
			if !strings.Contains(screen, "EPERM\n") || !strings.Contains(screen, "outside: typed\n") {
				t.Errorf("%s", screen)
			}
		})
	}
}

// TestIsolateShell checks that a shell inside has job control, and that the caller gets the terminal back.
func TestIsolateShell(t *testing.T) {
	addAddresses(t)
	cmd := calledByShell(ordinary(t, "", "isolate", "--", "bash", "--norc", "-i"))
	cmd.Env = append(os.Environ(), "PS1=inside> ")
	screen := onTerminal(t, cmd,
		[2]string{"inside> ", "sh -c 'echo be\"\"gun; exec sleep 60'\n"}, [2]string{"begun", "\x1a"}, [2]string{"Stopped", "jobs\n"}, [2]string{"Stopped", "exec true\n"},
		[2]string{"asks", "typed\n"})
	if !strings.Contains(screen, "outside: typed\n") || strings.Contains(screen, "no job control") {
		t.Errorf("%s", screen)
	}
}

// hostFolder mounts an empty directory over a directory of the tests' host until the test ends.
func hostFolder(t *testing.T, path, options string) {
	t.Helper()
	if err := unix.Mount("tmpfs", path, "tmpfs", 0, options); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(path, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
}

// answersAt runs a server on a Unix socket that is accessible to all users.
func answersAt(t *testing.T, path string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("unix", path)
	if err == nil {
		err = os.Chmod(path, 0o777)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			fmt.Fprintln(c, "reached")
			c.Close()
		}
	}()
}

// TestIsolateHostSockets checks that services of the host on the usual Unix sockets are unreachable unless they are
// named.
func TestIsolateHostSockets(t *testing.T) {
	addAddresses(t)
	hostFolder(t, "/run", "mode=755")
	hostFolder(t, "/tmp", "mode=1777")
	const bus, docker, agentSocket, odd = "/run/user/65534/bus", "/run/docker.sock", "/tmp/ssh-abcdef/agent.7", "/srv/odd/agent"
	hostFolder(t, "/srv", "mode=755")
	for _, path := range []string{
		bus, docker, agentSocket, odd, "/run/dbus/system_bus_socket", "/run/nscd/socket", "/run/podman/podman.sock", "/run/containerd/containerd.sock",
		"/run/systemd/private", "/run/systemd/resolve/io.systemd.Resolve", "/run/systemd/userdb/io.systemd.DynamicUser", "/run/systemd/journal/socket",
		"/tmp/.X11-unix/X0", "/tmp/tmux-65534/default", "/run/mine/socket", "/srv/kept/socket",
	} {
		answersAt(t, path)
	}
	if err := os.Chmod("/run/user/65534", 0o700); err != nil {
		t.Fatal(err)
	}
	for _, own := range []string{"/run/user/65534", "/tmp/ssh-abcdef", "/tmp/tmux-65534"} {
		if err := os.Chown(own, 65534, 65534); err != nil {
			t.Fatal(err)
		}
	}
	// Another user creates names in /tmp that would hide a directory from every program, and many directories to mount
	// over.
	for i := range 2000 {
		evil := fmt.Sprintf("/tmp/ssh-evil%d", i)
		if err := os.Mkdir(evil, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Chown(evil, 12345, 12345); err != nil {
			t.Fatal(err)
		}
	}
	for _, evil := range []string{"/tmp/ssh-link", "/tmp/mysql.sock"} {
		if err := os.Symlink("/srv/kept", evil); err != nil {
			t.Fatal(err)
		}
		if err := os.Lchown(evil, 12345, 12345); err != nil {
			t.Fatal(err)
		}
	}
	environment := append(os.Environ(), "XDG_RUNTIME_DIR=/run/user/65534", "DBUS_SESSION_BUS_ADDRESS=unix:path="+bus+",guid=1", "SSH_AUTH_SOCK="+odd,
		"SSH_AGENT_PID=7", "DOCKER_HOST=unix://"+docker, "DISPLAY=:0.0", "TMUX=/tmp/tmux-65534/default,1,0")
	connect := func(dir, path string, flags ...string) (bool, string) {
		t.Helper()
		cmd := ordinary(t, "", append(append([]string{"isolate"}, flags...), "--", itself, "inside", "escape", "connect", path)...)
		cmd.Dir, cmd.Env = dir, environment
		out, stderr, _ := resultOf(t, cmd)
		return out == "reached\nthrough\n", out + stderr
	}
	for _, path := range []string{
		bus, docker, agentSocket, odd, "/run/dbus/system_bus_socket", "/var/run/docker.sock", "/run/nscd/socket", "/run/podman/podman.sock",
		"/run/containerd/containerd.sock", "/run/systemd/private", "/run/systemd/resolve/io.systemd.Resolve", "/run/systemd/userdb/io.systemd.DynamicUser",
		"/tmp/.X11-unix/X0", "/tmp/tmux-65534/default",
	} {
		if ok, said := connect("/", path); ok {
			t.Errorf("%s is reached: %s", path, said)
		}
	}
	// Through the working directory, which is hidden.
	for path, dir := range map[string]string{"bus": "/run/user/65534", "../docker.sock": "/run/mine", "docker.sock": "/run"} {
		if ok, said := connect(dir, path); ok {
			t.Errorf("%s is reached from %s: %s", path, dir, said)
		}
	}
	if _, said := connect("/run/user/65534", "bus"); !strings.Contains(said, "sockeye: the program starts in /: /run/user/65534 is hidden inside; use --expose\n") {
		t.Errorf("access to a hidden directory: %s", said)
	}
	for _, path := range []string{"/run/mine/socket", "/run/systemd/journal/socket", "/srv/kept/socket"} {
		if ok, said := connect("/", path); !ok {
			t.Errorf("%s is not reached: %s", path, said)
		}
	}
	for expose, path := range map[string]string{
		bus: bus, "/run/user/65534": bus, "/run/user": bus, "/run": docker, docker: docker, "/var/run/docker.sock": "/run/docker.sock",
		odd: odd, "/srv/odd": odd, "/tmp/tmux-65534": "/tmp/tmux-65534/default", "/run/systemd": "/run/systemd/private",
	} {
		if ok, said := connect("/", path, "--expose", expose); !ok {
			t.Errorf("--expose %s: %s is not reached: %s", expose, path, said)
		}
	}
	if ok, said := connect("/", docker, "--expose", bus); ok {
		t.Errorf("--expose %s: %s is reached: %s", bus, docker, said)
	}
	for flags, want := range map[string]string{
		"":                   "",
		"--expose=" + docker: "DOCKER_HOST\n",
		"--expose=" + odd:    "SSH_AGENT_PID\nSSH_AUTH_SOCK\n",
		"--expose=" + bus:    "DBUS_SESSION_BUS_ADDRESS\nXDG_RUNTIME_DIR\n",
	} {
		args := append(strings.Fields("isolate "+flags), "--", "sh", "-c", "env | cut -d= -f1 | grep -E '^(XDG_RUN|DBUS|SSH_A|DOCKER|DISPLAY|TMUX)' | sort")
		cmd := ordinary(t, "", args...)
		cmd.Env = environment
		if out, stderr, _ := resultOf(t, cmd); out != want {
			t.Errorf("%s: variables %q, want %q\n%s", flags, out, want, stderr)
		}
	}
	// The covering directory is read-only, and the hidden directory cannot be uncovered.
	cmd := ordinary(t, "", "isolate", "--", "sh", "-c", "touch /run/x; mkdir /run/user; umount /run; umount -l /run; ls -d /run/x /run/user /run/docker.sock /run/mine")
	if out, stderr, _ := resultOf(t, cmd); out != "/run/mine\n" {
		t.Errorf("/run has %q\n%s", out, stderr)
	}
	cmd = ordinary(t, "", "isolate", "--allow-userns", "--", "unshare", "-rmpf", "--mount-proc", "sh", "-c", "umount -l /run; umount /run; umount -l /proc; test -e /run/docker.sock || echo covered; ls -d /proc/[0-9]* | wc -l")
	if out, stderr, _ := resultOf(t, cmd); !strings.HasPrefix(out, "covered\n") {
		t.Errorf("from a nested user namespace: %q\n%s", out, stderr)
	}
	for _, path := range []string{"/nosuch/socket", "/run/user/65534/nosuch"} {
		_, stderr, code := resultOf(t, ordinary(t, "", "isolate", "--expose", path, "--", "true"))
		want := "sockeye: --expose " + path + ": no such file or directory\nhint: name an existing path that the program's user can access\n"
		if stderr != want || code != 2 {
			t.Errorf("code %d\n%s", code, stderr)
		}
	}
}

// TestIsolateOwnSocketFolders checks that the program can create sockets in directories where its user has sockets
// outside, and that they are invisible outside. tmux refuses a directory that it cannot write to or that others may
// enter. Directories of other users keep their modes.
func TestIsolateOwnSocketFolders(t *testing.T) {
	addAddresses(t)
	hostFolder(t, "/tmp", "mode=1777")
	hostFolder(t, "/srv", "mode=755")
	const own, ofRoot, runtimeDir = "/tmp/tmux-65534", "/tmp/tmux-0", "/srv/runtime"
	for _, path := range []string{own + "/default", ofRoot + "/default", runtimeDir + "/bus"} {
		answersAt(t, path)
	}
	for _, path := range []string{own, runtimeDir} {
		if err := errors.Join(os.Chmod(path, 0o700), os.Chown(path, 65534, 65534)); err != nil {
			t.Fatal(err)
		}
	}
	isolated := func(args ...string) (out, stderr string) {
		t.Helper()
		cmd := ordinary(t, "", append([]string{"isolate", "--"}, args...)...)
		// The shell of nobody is nologin, which tmux would run.
		cmd.Env = append(os.Environ(), "XDG_RUNTIME_DIR="+runtimeDir, "SHELL=/bin/sh")
		out, stderr, _ = resultOf(t, cmd)
		return out, stderr
	}
	const script = `for d in ` + own + ` ` + runtimeDir + ` ` + ofRoot + `; do
stat -c '%a %U' $d; ls -A $d; touch $d/made 2>/dev/null && echo wrote; done`
	const want = "700 nobody\nwrote\n700 nobody\nwrote\n755 nobody\ndefault\n"
	if out, stderr := isolated("sh", "-c", script); out != want {
		t.Errorf("%q, want %q\n%s", out, want, stderr)
	}
	for _, path := range []string{own, ofRoot, runtimeDir} {
		if _, err := os.Lstat(path + "/made"); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s/made is outside: %v", path, err)
		}
	}
	if _, err := exec.LookPath("tmux"); err != nil {
		t.Log("not tested with tmux: not installed")
		return
	}
	if out, stderr := isolated("sh", "-c", "tmux -f /dev/null new-session -d 'sleep 60' && tmux list-sessions | wc -l; tmux kill-server"); out != "1\n" {
		t.Errorf("tmux: %q\n%s", out, stderr)
	}
}

// TestIsolateHostMounts checks that file systems of host processes and message queues appear empty, whatever their
// names are.
func TestIsolateHostMounts(t *testing.T) {
	const prepare = `mkdir /mnt/proc "/mnt/my queues" && mount -t proc proc /mnt/proc && mount -t mqueue mqueue "/mnt/my queues" &&
		touch "/mnt/my queues/sockeye-test" && chmod 666 "/mnt/my queues/sockeye-test" || exit 98`
	t.Cleanup(func() { // message queues belong to the IPC namespace, not to the mount
		if out, err := exec.Command("unshare", "-m", "sh", "-c", "mount -t mqueue mqueue /mnt && rm /mnt/sockeye-test").CombinedOutput(); err != nil {
			t.Errorf("%v: %s", err, out)
		}
	})
	const script = `ls -A /mnt/proc "/mnt/my queues"; cat /mnt/proc/1/net/tcp "/mnt/my queues/sockeye-test" 2>/dev/null | wc -l; ls -d /proc/self | wc -l`
	out, stderr, _ := resultOf(t, ordinary(t, prepare, "isolate", "--", "sh", "-c", script))
	if want := "/mnt/my queues:\n\n/mnt/proc:\n0\n1\n"; out != want {
		t.Errorf("%q, want %q\n%s", out, want, stderr)
	}
}

// TestIsolateWayAround checks that a covered directory is not accessible through the working directory or a standard
// stream.
func TestIsolateWayAround(t *testing.T) {
	const prepare = `mkdir /mnt/x && mount -t tmpfs none /mnt/x && echo secret > /mnt/x/secret && cd /mnt/x && umount -l /mnt/x || exit 98`
	cmd := ordinary(t, prepare, "isolate", "--", "sh", "-c", "pwd -P; cat secret 2>/dev/null")
	if out, stderr, _ := resultOf(t, cmd); out != "/\n" || !strings.Contains(stderr, "sockeye: the program starts in /: the working directory was removed, or is in another mount namespace") {
		t.Errorf("%q, %q", out, stderr)
	}
	directory, err := os.Open("/")
	if err != nil {
		t.Fatal(err)
	}
	defer directory.Close()
	cmd = ordinary(t, "", "isolate", "--", "ls", "/proc/self/fd/0/")
	cmd.Stdin = directory
	if out, stderr, code := resultOf(t, cmd); code != 2 || out != "" || !strings.Contains(stderr, "standard input is a directory") {
		t.Errorf("%d, %q, %q", code, out, stderr)
	}
	// A socket of the host could be connected to any address: inetd starts programs with one.
	for _, family := range []int{unix.AF_INET, unix.AF_INET6, unix.AF_UNIX} {
		for _, kind := range []int{unix.SOCK_STREAM, unix.SOCK_DGRAM} {
			fd, err := unix.Socket(family, kind|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				t.Fatal(err)
			}
			socket := os.NewFile(uintptr(fd), "socket")
			defer socket.Close()
			cmd := ordinary(t, "", "isolate", "--", "true")
			cmd.Stdin = socket
			out, stderr, code := resultOf(t, cmd)
			if family == unix.AF_UNIX {
				if code != 0 {
					t.Errorf("Unix socket: %d, %q, %q", code, out, stderr)
				}
			} else if code != 2 || !strings.Contains(stderr, "standard input is a network socket of the host") || !strings.Contains(stderr, "hint: let the program listen") {
				t.Errorf("family %d: %d, %q, %q", family, code, out, stderr)
			}
		}
	}
}

// TestIsolateProc checks that sockets and processes of the host are invisible.
func TestIsolateProc(t *testing.T) {
	addAddresses(t)
	l, err := net.Listen("tcp4", "192.0.2.10:7399")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	const script = "cat /proc/[0-9]*/net/tcp | grep -ci :1CE7; cat /proc/1/cmdline | tr '\\0' ' '; echo; ls -d /proc/[0-9]* | wc -l"
	out, stderr, _ := resultOf(t, ordinary(t, "", "isolate", "--", "sh", "-c", script))
	lines := strings.Split(out, "\n")
	if len(lines) < 3 || lines[0] != "0" || !strings.Contains(lines[1], "isolate-inside") {
		t.Fatalf("%q\n%s", out, stderr)
	}
	if n, err := strconv.Atoi(strings.TrimSpace(lines[2])); err != nil || n > 6 {
		t.Errorf("%q processes", lines[2])
	}
	for _, name := range []string{"user", "net", "mnt", "pid", "ipc"} {
		here, err := os.Readlink("/proc/self/ns/" + name)
		if err != nil {
			t.Fatal(err)
		}
		if out, stderr, _ := resultOf(t, ordinary(t, "", "isolate", "--", "readlink", "/proc/self/ns/"+name)); out == here+"\n" || !strings.HasPrefix(out, name+":") {
			t.Errorf("%s namespace %q, here %q\n%s", name, out, here, stderr)
		}
	}
	// The program may not inspect the process that started it either.
	out, _, _ = resultOf(t, ordinary(t, "", "isolate", "--", "sh", "-c", "ls /proc/1/fd; cat /proc/1/environ; readlink /proc/1/cwd; grep CapPrm /proc/1/status"))
	if out != "CapPrm:\t0000000000000000\n" {
		t.Errorf("access to the first process: %q", out)
	}
}

// TestIsolateOrphans checks that orphans are reaped, and that all processes of the program end with it.
func TestIsolateOrphans(t *testing.T) {
	addAddresses(t)
	g := started(t, ordinary(t, "", "isolate", "--", "sh", "-c", "setsid sh -c 'sleep 61 & sleep 0.1' & wait; echo ready $$; read line; ps -o stat= -A | grep -c Z"))
	var left []int
	for end := time.Now().Add(patience); len(left) != 1; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("processes %v are still running", left)
		}
		left = nil
		for _, pid := range descendants(g.Process.Pid) { // on a busy host, the process may not have executed sleep yet
			if command, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid)); strings.HasPrefix(string(command), "sleep\x0061") {
				left = append(left, pid)
			}
		}
	}
	fmt.Fprintln(g.In, "go on")
	if n := g.line(t); n != "0" {
		t.Errorf("%s zombies", n)
	}
	if code := g.end(t); code != 1 { // of grep
		t.Errorf("code %d\n%s", code, g.Err)
	}
	gone(t, left[0])
}

// TestIsolateCgroups checks that the program cannot freeze or kill the processes in a cgroup of its user, such as the
// cgroup of a user manager.
func TestIsolateCgroups(t *testing.T) {
	addAddresses(t)
	group := testenv.Cgroup() + "/delegated"
	if err := os.Mkdir(group, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.Remove(group + "/inside"); os.Remove(group) })
	if err := os.Chown(group, 65534, 65534); err != nil {
		t.Fatal(err)
	}
	out, stderr, code := resultOf(t, ordinary(t, "", "isolate", "--require-sandbox", "--", "mkdir", group+"/inside"))
	if code == 0 || !strings.Contains(stderr, "Read-only file system") {
		t.Errorf("exit code %d: %s%s", code, out, stderr)
	}
}
