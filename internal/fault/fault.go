// SPDX-License-Identifier: Apache-2.0

// Package fault defines the error that the CLI prints: a message of one line, a hint, and the exit code of the
// command. Errors of other packages have a method Explain that returns their hint and code.
package fault

import (
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"sockeye/internal/config"
)

// Exit codes of every command, and the code field of every error in JSON.
const (
	CodeFailed       = 1
	CodeUsage        = 2
	CodeUnsupported  = 3 // the kernel cannot
	CodeNotPermitted = 4
	CodeConflict     = 5
)

// Error is an error with a hint and an exit code.
type Error struct {
	Err  error
	Hint string // what to do about the error, "" for none
	Code int    // one of the codes above
}

func (e *Error) Error() string { return e.Err.Error() }
func (e *Error) Unwrap() error { return e.Err }

// WithHint returns err with another hint and the same code.
func WithHint(err error, hint string) error {
	return &Error{Err: err, Hint: hint, Code: Code(err)}
}

// In returns err with the place of the error in front of the message, and with the same hint and code.
func In(place string, err error) error {
	return &Error{Err: fmt.Errorf("%s: %w", place, err), Hint: Hint(err), Code: Code(err)}
}

// Usage returns an error with CodeUsage, for a mistake of the caller.
func Usage(err error, hint string) error {
	return &Error{Err: err, Hint: hint, Code: CodeUsage}
}

// Unsupported returns an error with CodeUnsupported, for a request that the kernel or a device does not
// support.
func Unsupported(err error, hint string) error {
	return &Error{Err: err, Hint: hint, Code: CodeUnsupported}
}

// Conflict returns an error with CodeConflict, for a resource that another process or program has.
func Conflict(err error, hint string) error {
	return &Error{Err: err, Hint: hint, Code: CodeConflict}
}

// Unreadable returns an error about a file that the caller named: a mistake of the caller, unless
// the caller lacks the permission to read the file.
func Unreadable(err error, hint string) error {
	if errors.Is(err, fs.ErrPermission) {
		return err
	}
	return Usage(err, hint)
}

// maxFlaws bounds the errors of one policy file that Message shows.
const maxFlaws = 20

// Message returns the text of an error. For a policy file with more than 20 errors, the text has the first 20 and the
// number of the others.
func Message(err error) string {
	text := err.Error()
	var flaws config.Errors
	if errors.As(err, &flaws) && len(flaws) > maxFlaws {
		short := fmt.Sprintf("%v\nand %d more", flaws[:maxFlaws], len(flaws)-maxFlaws)
		text = strings.Replace(text, flaws.Error(), short, 1)
	}
	return text
}

// Join returns an error with the texts of all non-nil errs in one line, or nil if all are nil.
func Join(errs ...error) error {
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

// explained is an error that has an exit code and a hint of its own.
type explained interface {
	error
	// Explain returns the hint, "" for none, and the exit code.
	Explain() (hint string, code int)
}

// Code returns the exit code of an error: the code of the first Error in its tree, or else the code for the kind of
// the error. The code for nil is 0.
func Code(err error) int {
	var (
		own    *Error
		known  explained
		policy *config.Error
		code   = CodeUnsupported
	)
	if errors.As(err, &known) {
		_, code = known.Explain()
	}
	switch {
	case err == nil:
		return 0
	case errors.As(err, &own):
		return own.Code
	case errors.As(err, &policy):
		return CodeUsage
	case code != CodeUnsupported:
		return code
	case errors.Is(err, unix.EADDRINUSE):
		return CodeConflict
	case errors.Is(err, ebpf.ErrNotSupported), known != nil:
		return CodeUnsupported
	case errors.Is(err, fs.ErrPermission), errors.Is(err, unix.EPERM):
		return CodeNotPermitted
	}
	return CodeFailed
}

// Hint returns the hint of an error, or "".
func Hint(err error) string {
	var (
		own   *Error
		known explained
		hint  string
		code  int
	)
	if errors.As(err, &known) {
		hint, code = known.Explain()
	}
	switch {
	case errors.As(err, &own) && own.Hint != "":
		return own.Hint
	case hint != "" && code != CodeUnsupported:
		return hint
	case errors.Is(err, ebpf.ErrNotSupported):
		return "sockeye doctor shows what this kernel can do"
	case hint != "":
		return hint
	case errors.Is(err, fs.ErrPermission), errors.Is(err, unix.EPERM):
		return "run as root, or with the capabilities that sockeye doctor names"
	}
	return ""
}
