// SPDX-License-Identifier: Apache-2.0

package isolatecmd

import (
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	"sockeye/internal/fault"
	"sockeye/internal/gateway"
	"sockeye/internal/isolate"
)

// TestIsolateNamespaceErrors checks the exit code if the kernel denies or does not support namespaces.
func TestIsolateNamespaceErrors(t *testing.T) {
	for _, test := range []struct {
		err  error
		code int
	}{
		{unix.EPERM, 4}, {unix.EACCES, 4}, {unix.EUSERS, 4}, {unix.ENOSPC, 4}, {unix.EINVAL, 3}, {unix.ENOSYS, 3}, {unix.ENOMEM, 1},
	} {
		err := guestError(&isolate.StepError{Step: isolate.StepNamespaces, Err: test.err}, &isolate.Guest{})
		if code := fault.Code(err); code != test.code {
			t.Errorf("%v: code %d, want %d", test.err, code, test.code)
		}
	}
}

// TestIsolateResolverError checks that the error about mounting over resolv.conf names the option to continue without
// it.
func TestIsolateResolverError(t *testing.T) {
	err := guestError(&isolate.StepError{Step: isolate.StepResolver, Err: unix.EACCES}, &isolate.Guest{})
	if fault.Code(err) != 1 || fault.Hint(err) != "--no-dns keeps the host's file" {
		t.Errorf("code %d, hint %q", fault.Code(err), fault.Hint(err))
	}
}

// TestMemberListenError checks the error about a port that is in use: a member publishes no ports.
func TestMemberListenError(t *testing.T) {
	for errno, want := range map[error]struct {
		code int
		hint string
	}{
		unix.EADDRINUSE: {5, "members of a service must run as one user, and no other program may use the port"},
		unix.EACCES:     {4, "ports below 1024 need root (sysctl net.ipv4.ip_unprivileged_port_start)"},
	} {
		err := listenError(&gateway.ListenError{At: netip.MustParseAddrPort("[::]:179"), Protocol: unix.IPPROTO_TCP, Err: errno}, true)
		if fault.Code(err) != want.code || fault.Hint(err) != want.hint {
			t.Errorf("%v: code %d, hint %q", errno, fault.Code(err), fault.Hint(err))
		}
	}
}
