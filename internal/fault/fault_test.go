// SPDX-License-Identifier: Apache-2.0

package fault_test

import (
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"sockeye/internal/bpf"
	"sockeye/internal/bpf/load"
	"sockeye/internal/bpf/pin"
	"sockeye/internal/config"
	"sockeye/internal/fault"
	"sockeye/internal/placement"
)

func TestCodeAndHint(t *testing.T) {
	_, badMap := placement.ParseDeviceMap(strings.NewReader("nonsense"), "devices.csv")
	_, badPolicy := config.Parse([]byte("[]"), "policy.yaml")
	const (
		asRoot  = "run as root, or with the capabilities that sockeye doctor names"
		doctor  = "sockeye doctor shows what this kernel can do"
		report  = "this kernel and this version of Sockeye do not fit together: report the message with what uname -r and sockeye version print"
		reset   = "sockeye reset removes the pins of another version; steering stops until the agent starts again"
		oneEach = "one agent works with a pin directory; see sockeye status"
	)
	wrap := func(err error) error { return fmt.Errorf("service a: %w", fault.Join(errors.New("first"), err)) }
	for _, c := range []struct {
		name string
		err  error
		code int
		hint string
	}{
		{"none", nil, 0, ""},
		{"any", errors.New("x"), 1, ""},
		{"usage", fault.Usage(errors.New("x"), "y"), 2, "y"},
		{"policy", badPolicy, 2, ""},
		{"device map", badMap, 2, ""},
		{"wrapped device map", wrap(badMap), 2, ""},
		{"not supported", wrap(ebpf.ErrNotSupported), 3, doctor},
		{"EPERM", wrap(unix.EPERM), 4, asRoot},
		{"EACCES", wrap(unix.EACCES), 4, asRoot},
		{"permission", wrap(fs.ErrPermission), 4, asRoot},
		{"verifier", wrap(&load.RefusedError{What: "program p", Err: &ebpf.VerifierError{Cause: unix.EACCES, Log: []string{"invalid access to map value"}}}), 3, report},
		{"verifier, an old kernel", wrap(fmt.Errorf("%w before 5.15: %w", ebpf.ErrNotSupported, &load.RefusedError{What: "program p", Err: &ebpf.VerifierError{Cause: unix.EINVAL, Log: []string{"unknown func"}}})), 3, doctor},
		{"conflict", wrap(fault.Conflict(errors.New("x"), "y")), 5, "y"},
		{"locked", wrap(bpf.ErrLocked), 5, oneEach},
		{"pins", wrap(&pin.IncompatibleError{Path: "p", Err: unix.EACCES}), 5, reset},
		{"address", wrap(unix.EADDRINUSE), 5, ""},
		{"hint kept", fault.WithHint(bpf.ErrLocked, "y"), 5, "y"},
		{"an own error without a hint", fault.Usage(unix.EPERM, ""), 2, asRoot},
		{"unreadable", fault.Unreadable(fs.ErrNotExist, "y"), 2, "y"},
		{"unreadable for rights", fault.Unreadable(fs.ErrPermission, "y"), 4, asRoot},
		{"wrapped usage", wrap(fault.Usage(errors.New("x"), "y")), 2, "y"},
		{"unsupported", wrap(fault.Unsupported(errors.New("x"), "")), 3, ""},
		{"conflict that wraps EPERM", wrap(fault.Conflict(unix.EPERM, "y")), 5, "y"},
	} {
		if code, hint := fault.Code(c.err), fault.Hint(c.err); code != c.code || hint != c.hint {
			t.Errorf("%s: code %d, hint %q; want %d, %q", c.name, code, hint, c.code, c.hint)
		}
	}
}

// TestForbiddenPins checks that a pin that bpf(2) may not open is not a pin of another version.
func TestForbiddenPins(t *testing.T) {
	err := fmt.Errorf("service a: %w", &pin.IncompatibleError{Path: "p", Err: fmt.Errorf("open: %w", unix.EPERM)})
	if code, hint := fault.Code(err), fault.Hint(err); code != fault.CodeNotPermitted || hint == "" || strings.Contains(hint, "reset") {
		t.Errorf("code %d, hint %q", code, hint)
	}
}

func TestJoined(t *testing.T) {
	a, b := errors.New("a"), errors.New("b")
	if err := fault.Join(); err != nil {
		t.Error(err)
	}
	if err := fault.Join(nil, nil); err != nil {
		t.Error(err)
	}
	if err := fault.Join(nil, a); !errors.Is(err, a) || errors.Is(err, b) {
		t.Error(err)
	}
	err := fault.Join(a, nil, b)
	if err.Error() != "a; b" || !errors.Is(err, a) || !errors.Is(err, b) {
		t.Error(err)
	}
}

func TestMessage(t *testing.T) {
	var flaws config.Errors
	for n := range 25 {
		flaws = append(flaws, &config.Error{File: "p", Line: n + 1, Column: 1, Message: "is wrong"})
	}
	for n, last := range map[int]string{1: "p:1:1: is wrong", 20: "p:20:1: is wrong", 21: "and 1 more", 25: "and 5 more"} {
		lines := strings.Split(fault.Message(fmt.Errorf("apply: %w", flaws[:n])), "\n")
		if got := strings.TrimPrefix(lines[len(lines)-1], "apply: "); got != last || !strings.HasPrefix(lines[0], "apply: p:1:1: ") {
			t.Errorf("%d errors: the last line is %q, want %q", n, got, last)
		}
	}
	if got := fault.Message(errors.New("x")); got != "x" {
		t.Error(got)
	}
}
