// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"sockeye/internal/bigtcp/netif"
	"sockeye/internal/bpf"
	"sockeye/internal/config"
	"sockeye/internal/owned"
	"sockeye/internal/steer"
)

// Exit codes of every command, and the code field of every error in JSON.
const (
	CodeFailed       = 1
	CodeUsage        = 2
	CodeUnsupported  = 3 // the kernel cannot
	CodeNotPermitted = 4
	CodeConflict     = 5
)

// Error is an error with what a person needs besides: a hint and a code.
type Error struct {
	Err  error
	Hint string
	Code int
}

func (e *Error) Error() string { return e.Err.Error() }
func (e *Error) Unwrap() error { return e.Err }

func withHint(err error, hint string) error {
	return &Error{Err: err, Hint: hint, Code: Code(err)}
}

// Usage makes an error of the caller's mistake.
func Usage(err error, hint string) error {
	return &Error{Err: err, Hint: hint, Code: CodeUsage}
}

func conflict(err error, hint string) error {
	return &Error{Err: err, Hint: hint, Code: CodeConflict}
}

// Unreadable makes an error about a file that the caller named.
func Unreadable(err error, hint string) error {
	if errors.Is(err, fs.ErrPermission) {
		return err
	}
	return Usage(err, hint)
}

// maxFlaws bounds what a person is told of one policy file.
const maxFlaws = 20

// Message is what an error says to a person. Of a policy file with many
// errors it has the first, and how many more there are.
func Message(err error) string {
	text := err.Error()
	var flaws config.Errors
	if errors.As(err, &flaws) && len(flaws) > maxFlaws {
		short := fmt.Sprintf("%v\nand %d more", flaws[:maxFlaws], len(flaws)-maxFlaws)
		text = strings.Replace(text, flaws.Error(), short, 1)
	}
	return text
}

// joined makes one error of one line of several.
func joined(errs ...error) error {
	errs = slices.DeleteFunc(errs, func(err error) bool { return err == nil })
	switch len(errs) {
	case 0:
		return nil
	case 1:
		return errs[0]
	}
	return &list{errs}
}

type list struct{ errs []error }

func (l *list) Error() string {
	texts := make([]string, len(l.errs))
	for i, err := range l.errs {
		texts[i] = err.Error()
	}
	return strings.Join(texts, "; ")
}

func (l *list) Unwrap() []error { return l.errs }

// codeOfKind has the exit codes of what package bigtcp refuses.
var codeOfKind = map[netif.Kind]int{
	netif.KindUsage:       CodeUsage,
	netif.KindUnsupported: CodeUnsupported,
	netif.KindConflict:    CodeConflict,
}

// Code finds the exit code of an error by its kind.
func Code(err error) int {
	var (
		own          *Error
		sizes        *netif.Error
		policy       *config.Error
		devices      *steer.DeviceMapError
		incompatible *bpf.IncompatibleError
		untrusted    *owned.UntrustedError
		refused      *bpf.RefusedError
	)
	switch {
	case err == nil:
		return 0
	case errors.As(err, &own):
		return own.Code
	case errors.As(err, &sizes):
		return codeOfKind[sizes.Kind]
	case errors.As(err, &policy), errors.As(err, &devices):
		return CodeUsage
	case errors.As(err, &incompatible), errors.As(err, &untrusted), errors.Is(err, bpf.ErrLocked), errors.Is(err, unix.EADDRINUSE):
		return CodeConflict
	case errors.Is(err, ebpf.ErrNotSupported), errors.As(err, &refused):
		return CodeUnsupported
	case errors.Is(err, fs.ErrPermission), errors.Is(err, unix.EPERM):
		return CodeNotPermitted
	}
	return CodeFailed
}

// Hint finds what to advise about an error, or "".
func Hint(err error) string {
	var (
		own          *Error
		sizes        *netif.Error
		incompatible *bpf.IncompatibleError
		untrusted    *owned.UntrustedError
		refused      *bpf.RefusedError
	)
	switch {
	case errors.As(err, &own) && own.Hint != "":
		return own.Hint
	case errors.As(err, &sizes) && sizes.Hint != "":
		return sizes.Hint
	case errors.As(err, &incompatible):
		return "sockeye reset removes the pins of another version; steering stops until the agent starts again"
	case errors.As(err, &untrusted):
		return "somebody else than root could put files there: remove it, or name a directory that only root may write, with all above it"
	case errors.Is(err, bpf.ErrLocked):
		return "one agent works with a pin directory; see sockeye status, or give this one its own --pins"
	case errors.Is(err, ebpf.ErrNotSupported):
		return "sockeye doctor shows what this kernel can do"
	case errors.As(err, &refused):
		return "this kernel and this version of Sockeye do not fit together: report the message with what uname -r and sockeye version print"
	case errors.Is(err, fs.ErrPermission), errors.Is(err, unix.EPERM):
		return "run as root, or with the capabilities that sockeye doctor names"
	}
	return ""
}
