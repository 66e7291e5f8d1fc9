// SPDX-License-Identifier: Apache-2.0

package isolatecmd

import (
	"errors"
	"fmt"
	"io/fs"
	"os/exec"
	"strings"

	"golang.org/x/sys/unix"

	"sockeye/internal/cli/command"
	"sockeye/internal/fault"
	"sockeye/internal/gateway"
	"sockeye/internal/isolate"
	"sockeye/internal/sysctl"
)

// exitCode returns an error without a message that carries the program's exit code.
func exitCode(code int) error {
	return &command.Reported{Err: &fault.Error{Err: errors.New("the program failed"), Code: code}}
}

// guestError adds a hint and an exit code to an error of isolate.Run.
func guestError(err error, guest *isolate.Guest) error {
	if incomplete, ok := errors.AsType[*isolate.IncompleteError](err); ok {
		return &fault.Error{Err: incomplete, Hint: "without --require-sandbox the program starts anyway", Code: fault.CodeUnsupported}
	}
	failed, ok := errors.AsType[*isolate.StepError](err)
	if !ok {
		return err
	}
	switch failed.Step {
	case isolate.StepListen:
		return listenError(failed.Err, guest.Watched)
	case isolate.StepPrepare:
		return tooManyFiles(failed.Err)
	case isolate.StepUser:
		return notPermitted(failed.Err, "this process lacks CAP_SETUID or CAP_SETGID: use --as-root")
	}
	hint, code := stepHint(failed, guest.Existing != nil)
	return &fault.Error{Err: err, Hint: hint, Code: code}
}

// listenError adds a hint to an error of opening a port of the host, either published or of a service's member.
func listenError(err error, member bool) error {
	failed, ok := errors.AsType[*gateway.ListenError](err)
	if !ok {
		return err
	}
	port := int(failed.At.Port())
	another := fmt.Sprintf("publish another port of the host, as in -p %d:%d", freePort(port), port)
	switch {
	case errors.Is(err, unix.EADDRINUSE):
		if member {
			another = "members of a service must run as one user, and no other program may use the port"
		}
		return &fault.Error{Err: err, Hint: another, Code: fault.CodeConflict}
	case errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM):
		var hints []string
		if first, ok := sysctl.Number("net.ipv4.ip_unprivileged_port_start"); ok && int64(port) < first {
			hints = append(hints, fmt.Sprintf("ports below %d need root (sysctl net.ipv4.ip_unprivileged_port_start)", first))
		}
		if !member {
			hints = append(hints, another)
		}
		return &fault.Error{Err: err, Hint: strings.Join(hints, "; "), Code: fault.CodeNotPermitted}
	case errors.Is(err, unix.EADDRNOTAVAIL):
		return fault.Usage(err, "the host has no such address")
	case errors.Is(err, unix.EAFNOSUPPORT):
		return &fault.Error{Err: err, Hint: "this kernel does not support IPv6", Code: fault.CodeUnsupported}
	}
	return tooManyFiles(err)
}

// freePort returns another, unprivileged port for a hint.
func freePort(port int) int {
	if port < 57536 {
		return port + 8000
	}
	return port - 8000
}

func tooManyFiles(err error) error {
	if errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) {
		return &fault.Error{Err: err, Hint: "publish fewer ports, or raise the limit of open files (ulimit -Hn)", Code: fault.CodeFailed}
	}
	return err
}

// stepHint returns the hint and the exit code for a step that failed. An existing namespace has a user namespace of its own.
func stepHint(failed *isolate.StepError, exists bool) (hint string, code int) {
	err := failed.Err
	refused := errors.Is(err, fs.ErrPermission)
	code = fault.CodeFailed
	switch failed.Step {
	case isolate.StepNamespaces, isolate.StepRights:
		switch {
		case refused, errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EUSERS):
			hint, code = userNamespaceHint(), fault.CodeNotPermitted
		case errors.Is(err, unix.EINVAL), errors.Is(err, unix.ENOSYS):
			hint, code = "the kernel does not support user namespaces (CONFIG_USER_NS)", fault.CodeUnsupported
		}
	case isolate.StepDevice:
		switch {
		case refused:
			hint, code = "on most hosts all users may open it: chmod 0666 /dev/net/tun", fault.CodeNotPermitted
		case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ENODEV), errors.Is(err, unix.ENXIO):
			hint, code = "load the module with modprobe tun; in a container, add the device", fault.CodeUnsupported
		}
	case isolate.StepInterface:
		switch {
		case refused && exists:
			hint, code = "you must be root in the namespace's user namespace", fault.CodeNotPermitted
		case refused:
			hint, code = userNamespaceHint(), fault.CodeNotPermitted
		case errors.Is(err, unix.EBUSY), errors.Is(err, fs.ErrExist):
			hint, code = "the namespace must not have an interface "+isolate.InterfaceName+" (of another gateway) or a default route", fault.CodeConflict
		}
	case isolate.StepExpose, isolate.StepFiles:
		hint, code = pathHint, fault.CodeUsage
	case isolate.StepLandlock:
		hint, code = "--read and --write need Landlock (Linux 5.13)", fault.CodeUnsupported
	case isolate.StepResolver:
		hint = "--no-dns keeps the host's file"
	case isolate.StepJoin:
		hint, code = "you must be root in the namespace's user namespace", fault.CodeNotPermitted
		if errors.Is(err, exec.ErrNotFound) {
			hint, code = "install util-linux", fault.CodeFailed
		}
	}
	return hint, code
}

// userNamespaceHint returns a hint with the sysctl that denies user namespaces, or with all such sysctls if none is set.
func userNamespaceHint() string {
	for _, c := range []struct {
		name   string
		forbid int64
		hint   string
	}{
		{"kernel.unprivileged_userns_clone", 0, "set sysctl kernel.unprivileged_userns_clone to 1"},
		{"user.max_user_namespaces", 0, "raise sysctl user.max_user_namespaces, which is 0; or, inside an isolated program, start that program with --allow-userns"},
		{"user.max_pid_namespaces", 0, "raise sysctl user.max_pid_namespaces, which is 0"},
		{"user.max_net_namespaces", 0, "raise sysctl user.max_net_namespaces, which is 0"},
		{"user.max_mnt_namespaces", 0, "raise sysctl user.max_mnt_namespaces, which is 0"},
		{"user.max_ipc_namespaces", 0, "raise sysctl user.max_ipc_namespaces, which is 0"},
		{"kernel.apparmor_restrict_unprivileged_userns", 1, "set sysctl kernel.apparmor_restrict_unprivileged_userns to 0, or allow user namespaces for sockeye in an AppArmor profile"},
	} {
		if v, ok := sysctl.Number(c.name); ok && v == c.forbid {
			return c.hint
		}
	}
	return "user namespaces may be disabled: see sysctls kernel.unprivileged_userns_clone, user.max_user_namespaces and kernel.apparmor_restrict_unprivileged_userns"
}
