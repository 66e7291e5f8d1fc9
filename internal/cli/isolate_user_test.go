// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"sockeye/internal/fault"
)

// openTUN is the part of a script that opens the TUN device to all users, as on most hosts.
const openTUN = `mount -t tmpfs none /mnt && mknod /mnt/tun c 10 200 && chmod 666 /mnt/tun && mount --bind /mnt/tun /dev/net/tun || exit 99
`

// byRoot returns a command that runs sockeye as root with supplementary groups.
func byRoot(t *testing.T, prepare string, args ...string) *exec.Cmd {
	t.Helper()
	return prepared(t, openTUN+prepare, "setpriv --groups 0,4,27", args...)
}

// TestIsolateByRoot checks that root can choose the user of the program, and that the program cannot write to files of
// root or of a group of root.
func TestIsolateByRoot(t *testing.T) {
	addAddresses(t)
	dir := t.TempDir()
	for path := dir; path != os.TempDir() && path != "/"; path = filepath.Dir(path) {
		if err := os.Chmod(path, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for name, mode := range map[string]os.FileMode{"root": 0o600, "adm": 0o660} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("secret\n"), mode); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chown(filepath.Join(dir, "adm"), 0, 4); err != nil {
		t.Fatal(err)
	}
	// The files are opened for writing only: if the test fails, the host must not change.
	attack := fmt.Sprintf(`for f in /proc/sys/kernel/core_pattern %[1]s/root %[1]s/adm /etc/passwd; do { true >>$f; } 2>/dev/null && echo writes $f; done
cat %[1]s/root %[1]s/adm 2>/dev/null; grep -E '^(Uid|Gid|Groups|CapEff)' /proc/self/status; echo $HOME $USER; true`, dir)
	status := func(uid, gid int) string {
		return fmt.Sprintf("Uid:\t%[1]d\t%[1]d\t%[1]d\t%[1]d\nGid:\t%[2]d\t%[2]d\t%[2]d\t%[2]d\nGroups:\t \nCapEff:\t0000000000000000\n", uid, gid)
	}
	const missing = "sockeye: the program would have root's access to the host's files\nhint: name the user of the program, as in --user %s, or use --as-root\n"
	for _, test := range []struct {
		flags, sudo string
		code        int
		out, err    string
	}{
		{"", "", 2, "", fmt.Sprintf(missing, "nobody")},
		{"", "alice", 2, "", fmt.Sprintf(missing, "alice")},
		{"", "root", 2, "", fmt.Sprintf(missing, "nobody")},
		{"", "\x1b]0;x\a", 2, "", fmt.Sprintf(missing, "nobody")},
		{"--user nobody", "", 0, status(65534, 65534) + "/nonexistent nobody\n", ""},
		{"--user 65534", "", 0, status(65534, 65534) + "/nonexistent nobody\n", ""},
		{"--user nobody:daemon", "", 0, status(65534, 1) + "/nonexistent nobody\n", ""},
		{"--user 12345:23456", "", 0, status(12345, 23456) + "\n", ""},
		{"--user 12345", "", 2, "", "sockeye: user \"12345\": the user has no group: name one after a colon\nhint: as in --user nobody, --user 1000 or --user 1000:1000\n"},
		{"--user nosuchuser", "", 2, "", "sockeye: user \"nosuchuser\": there is no such user\nhint: as in --user nobody, --user 1000 or --user 1000:1000\n"},
		{"--user 4294967295:1", "", 2, "", "sockeye: user \"4294967295:1\": there is no such user\nhint: as in --user nobody, --user 1000 or --user 1000:1000\n"},
		{"--user nobody:nosuchgroup", "", 2, "", "sockeye: user \"nobody:nosuchgroup\": there is no group \"nosuchgroup\"\nhint: as in --user nobody, --user 1000 or --user 1000:1000\n"},
		{"--user root", "", 2, "", "sockeye: user \"root\" is root, with access to the host's files\nhint: name the user of the program, as in --user nobody, or use --as-root\n"},
		{"--user 0:65534", "alice", 2, "", "sockeye: user \"0:65534\" is root, with access to the host's files\nhint: name the user of the program, as in --user alice, or use --as-root\n"},
		{"--user nobody:0", "", 2, "", "sockeye: user \"nobody:0\" has root's group, with access to the host's files\nhint: name another group after a colon, as in --user nobody:nogroup, or use --as-root\n"},
		{"--user 1000:root", "", 2, "", "sockeye: user \"1000:root\" has root's group, with access to the host's files\nhint: name another group after a colon, as in --user nobody:nogroup, or use --as-root\n"},
		{"--user 65534:", "", 2, "", "sockeye: user \"65534:\": the group is missing after the colon\nhint: as in --user nobody, --user 1000 or --user 1000:1000\n"},
		{"--user nobody --expose=", "", 2, "", "sockeye: --expose names no path\nhint: name an existing path that the program's user can access\n"},
		{"--user nobody --read /usr --read=", "", 2, "", "sockeye: --read names no path\nhint: name an existing path that the program's user can access\n"},
		{"--user nobody --write=", "", 2, "", "sockeye: --write names no path\nhint: name an existing path that the program's user can access\n"},
		{"--user nobody --as-root", "", 2, "", "sockeye: --user and --as-root are mutually exclusive\nhint: both select the user of the program\n"},
	} {
		args := append(strings.Fields("isolate "+test.flags), "--", "sh", "-c", attack)
		cmd := byRoot(t, "", args...)
		cmd.Env = append(os.Environ(), "SUDO_USER="+test.sudo, "HOME=/root", "USER=root")
		if test.flags == "--user 12345:23456" {
			cmd.Env = append(cmd.Env, "HOME=", "USER=")
		}
		if out, stderr, code := resultOf(t, cmd); out != test.out || stderr != test.err || code != test.code {
			t.Errorf("%s: code %d, want %d\n%s%s---- want\n%s%s", test.flags, code, test.code, out, stderr, test.out, test.err)
		}
	}
	out, stderr, code := resultOf(t, byRoot(t, "", "isolate", "--as-root", "--", "sh", "-c", "id -u; cat "+filepath.Join(dir, "root")))
	if out != "0\nsecret\n" || code != 0 {
		t.Errorf("--as-root: %q, code %d\n%s", out, code, stderr)
	}
	// The executable is accessible to root, but not to the user.
	out, stderr, code = resultOf(t, byRoot(t, "cp /bin/true /mnt/mine && chmod 700 /mnt/mine || exit 98\n", "isolate", "--user", "nobody", "--", "/mnt/mine"))
	if want := "sockeye: start /mnt/mine: permission denied\nhint: the program's user may not execute that path or its interpreter: check the modes of both and of their parent directories\n"; out != "" || stderr != want || code != 4 {
		t.Errorf("root's program: %q, code %d\n%s---- want\n%s", out, code, stderr, want)
	}
	for flags, want := range map[string]string{
		"--user nobody -- true":         "sockeye: only root may change the user\nhint: omit --user: the program runs as your user\n",
		"--as-root -- true":             "sockeye: --as-root is for root\nhint: omit it: the program runs as your user\n",
		"--netns /mnt/x --user nobody":  "",
		"--pid 1 --expose /run -- true": "",
	} {
		_, stderr, code := resultOf(t, ordinary(t, "", append([]string{"isolate"}, strings.Fields(flags)...)...))
		if want != "" && stderr != want || code == 0 {
			t.Errorf("%s: code %d\n%s", flags, code, stderr)
		}
	}
}

// TestIsolateGatewayOfRoot checks that the gateway also runs as that user, and can still publish a port below 1024.
func TestIsolateGatewayOfRoot(t *testing.T) {
	addAddresses(t)
	g := started(t, byRoot(t, "", "isolate", "--user", "nobody", "-p", "192.0.2.10:82:80", "--", itself, "inside", "serve", "tcp", "80"))
	if got := hello(t, "tcp", "192.0.2.10:82"); got != "192.0.2.10" {
		t.Errorf("inside it is %q", got)
	}
	for _, pid := range append(descendants(g.Process.Pid), g.Process.Pid) {
		withoutRights(t, pid, "Uid:\t65534\t65534\t65534\t65534\n", "Gid:\t65534\t65534\t65534\t65534\n", "Groups:\t \n", "Seccomp:\t2")
	}
	g.In.Close()
	if code := g.end(t); code != 0 {
		t.Errorf("code %d\n%s", code, g.Err)
	}
}

// becomeWithoutLandlock runs a command as on a kernel without Landlock.
func becomeWithoutLandlock(args []string) {
	const number = 0
	filter := []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: number},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: unix.SYS_LANDLOCK_CREATE_RULESET, Jf: 1},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ERRNO | uint32(unix.ENOSYS)},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW},
	}
	program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
	if err == nil {
		if _, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_TSYNC, uintptr(unsafe.Pointer(&program))); errno != 0 {
			err = errno
		}
	}
	if err == nil {
		err = unix.Exec(args[0], args, os.Environ())
	}
	fmt.Fprintln(os.Stderr, "without landlock:", err)
	os.Exit(97)
}

// TestIsolateIncomplete checks that a missing kernel mechanism is reported, or that the command fails with
// --require-sandbox.
func TestIsolateIncomplete(t *testing.T) {
	if !scopesSignals() {
		t.Skip("kernel: landlock does not know signals")
	}
	addAddresses(t)
	const (
		// As a container runtime does.
		maskedProc = "mount --bind /dev/null /proc/version || exit 98"
		proc       = "/proc shows the host's processes and their sockets: mount /proc: operation not permitted"
		gateway    = "the gateway is not confined by landlock"
	)
	for _, test := range []struct {
		name, prepare string
		landlock      bool
		missing       []string // the first is known before the gateway is confined
	}{
		{"nothing", "", true, nil},
		{"a /proc of its own", maskedProc, true, []string{proc}},
		{"landlock", "", false, []string{lacksScopes, gateway}},
		{"both", maskedProc, false, []string{proc + "; " + lacksScopes, gateway}},
	} {
		for _, flag := range []string{"--verbose=false", "--require-sandbox"} {
			cmd := ordinary(t, test.prepare, "isolate", flag, "--", "echo", "started")
			if !test.landlock {
				for n, arg := range cmd.Args {
					cmd.Args[n] = strings.Replace(arg, " /proc/self/fd/9 sockeye", " /proc/self/fd/9 without-landlock /proc/self/fd/9 sockeye", 1)
				}
			}
			out, stderr, code := resultOf(t, cmd)
			want, wantErr, wantCode := "started\n", "", 0
			for _, m := range test.missing {
				for _, line := range strings.Split(m, "; ") {
					wantErr += "sockeye: the sandbox is incomplete: " + line + "\n"
				}
			}
			if flag == "--require-sandbox" && len(test.missing) > 0 {
				want, wantCode = "", fault.CodeUnsupported
				wantErr = "sockeye: the sandbox is incomplete: " + test.missing[0] + "\nhint: without --require-sandbox the program starts anyway\n"
			}
			if out != want || stderr != wantErr || code != wantCode {
				t.Errorf("%s, %s: code %d, want %d\n%s%s---- want\n%s%s", test.name, flag, code, wantCode, out, stderr, want, wantErr)
			}
		}
	}
	// A mechanism that an option requests is always required.
	cmd := ordinary(t, "", "isolate", "--read", "/mnt", "--", "true")
	for n, arg := range cmd.Args {
		cmd.Args[n] = strings.Replace(arg, " /proc/self/fd/9 sockeye", " /proc/self/fd/9 without-landlock /proc/self/fd/9 sockeye", 1)
	}
	_, stderr, code := resultOf(t, cmd)
	if want := "sockeye: restrict files (landlock): function not implemented\nhint: --read and --write need Landlock (Linux 5.13)\n"; stderr != want || code != fault.CodeUnsupported {
		t.Errorf("code %d\n%s", code, stderr)
	}
}

// TestIsolateFiles checks that the program can open the named paths, and the files that every program needs.
func TestIsolateFiles(t *testing.T) {
	addAddresses(t)
	abi, _, errno := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, 0, 0, unix.LANDLOCK_CREATE_RULESET_VERSION)
	if errors.Is(errno, unix.ENOSYS) || errors.Is(errno, unix.EOPNOTSUPP) {
		t.Skip("kernel: no landlock")
	}
	prepare := "mkdir -m 777 /mnt/in /mnt/out /mnt/other; for d in in out other; do echo $d >/mnt/$d/file; chmod 666 /mnt/$d/file; done"
	const script = `cat /mnt/in/file /mnt/out/file /mnt/other/file
{ echo x >>/mnt/in/file; } && echo wrote in; { echo x >/mnt/out/file; } && echo wrote out; { echo x >>/mnt/other/file; } && echo wrote other
touch /mnt/in/new && echo made in; mkdir /mnt/out/dir && mv /mnt/out/file /mnt/out/dir && echo made out; rm /mnt/other/file && echo removed other
ls /mnt/other /root /home >/dev/null && echo listed; cat /etc/machine-id /etc/adduser.conf 2>/dev/null && echo read etc
getent passwd nobody >/dev/null && echo names; echo x >/dev/null && echo null; true`
	all := "in\nout\nother\nwrote in\nwrote out\nwrote other\nmade in\nmade out\nremoved other\n"
	moved := "made out\n"
	if abi < 2 { // without LANDLOCK_ACCESS_FS_REFER nothing is moved to another folder
		moved = ""
	}
	for flags, want := range map[string]string{
		"--read /mnt/in --write /mnt/out": "in\nout\nwrote out\n" + moved + "names\nnull\n",
		"--read /mnt/in/file":             "in\nnames\nnull\n",
		"--write /mnt":                    all + "names\nnull\n",
	} {
		out, stderr, code := resultOf(t, ordinary(t, prepare, append(strings.Fields("isolate "+flags), "--", "sh", "-c", script)...))
		if out != want || code != 0 {
			t.Errorf("%s: %q, code %d, want %q\n%s", flags, out, code, want, stderr)
		}
	}
	_, stderr, code := resultOf(t, ordinary(t, "", "isolate", "--read", "/nosuch", "--", "true"))
	if want := "sockeye: --read /nosuch: no such file or directory\nhint: name an existing path that the program's user can access\n"; stderr != want || code != 2 {
		t.Errorf("code %d\n%s", code, stderr)
	}
}
