// SPDX-License-Identifier: Apache-2.0

package config

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"slices"
	"strings"
	"unicode/utf8"

	"go.yaml.in/yaml/v4"
	"go.yaml.in/yaml/v4/plugin/loaderlimits"
	"golang.org/x/sys/unix"
)

const (
	maxSize  = 1 << 20 // bytes of a policy file
	maxDepth = 32      // nesting; the deepest valid policy has 6 levels
)

// Load reads and validates the policy file at path. The error of an unreadable file wraps [*os.PathError]; the error of
// an invalid file is of type [Errors].
func Load(path string) (*Policy, error) {
	data, err := ReadFile(path)
	if err != nil {
		return nil, err
	}
	return Parse(data, path)
}

// ReadFile reads a policy file, and at most one byte more than Parse accepts. The error wraps [*os.PathError].
func ReadFile(path string) ([]byte, error) {
	// O_NONBLOCK: opening a FIFO that nobody writes must not block.
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("read policy file: %w", err)
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxSize+1))
	if err != nil {
		return nil, fmt.Errorf("read policy file: %w", err)
	}
	return data, nil
}

// Parse validates a policy file of at most 1 MiB. Messages name path, and paths in the policy are relative to its
// directory. Parse reads the files of match.remote_file. A non-nil error is of type [Errors] and has all errors.
func Parse(data []byte, path string) (*Policy, error) {
	d := &decoder{file: path, at: map[string]position{}, bad: map[string]bool{}, misspelt: map[string]bool{}, files: map[string][]PrefixTerm{}}
	root := d.document(data)
	var p Policy
	if root != nil {
		d.decode("", root, &p)
		if root.Kind == yaml.MappingNode && !d.given("services") && !d.given("tune") && !d.given("trace") && !d.given("bigtcp") && !d.given("fleet") {
			d.refuse("", positionOf(root), "must have services, tune, trace, bigtcp or fleet", "services: {} is a policy that does nothing")
		}
		d.check(&p)
	}
	if len(d.errs) > 0 {
		d.errs.Sort()
		return nil, d.errs
	}
	p.file, p.places = path, d.at
	slices.SortFunc(p.Services, func(a, b Service) int { return strings.Compare(a.Name, b.Name) })
	return &p, nil
}

// document returns the root of the single document, or nil after an error.
func (d *decoder) document(data []byte) *yaml.Node {
	if len(data) > maxSize {
		d.refuse("", position{1, 1}, fmt.Sprintf("is larger than %d bytes", maxSize), "")
		return nil
	}
	depth := yaml.WithPlugin(loaderlimits.New(loaderlimits.DepthValue(maxDepth)))
	loader, err := yaml.NewLoader(bytes.NewReader(data), depth)
	if err != nil {
		d.refuse("", position{1, 1}, err.Error(), "")
		return nil
	}
	var first, second yaml.Node
	if err := loader.Load(&first); err != nil && !errors.Is(err, io.EOF) {
		d.syntax(data, err)
		return nil
	}
	if len(first.Content) == 0 || first.Content[0].ShortTag() == "!!null" {
		d.refuse("", position{}, "is empty", "")
		return nil
	}
	switch err := loader.Load(&second); {
	case errors.Is(err, io.EOF):
		return first.Content[0]
	case err == nil:
		d.refuse("", position{second.Line, second.Column}, "a second document begins here", "a policy file is one document")
	default:
		d.syntax(data, err)
	}
	return nil
}

// syntax reports an error of the YAML library.
func (d *decoder) syntax(data []byte, err error) {
	at, message, hint := position{1, 1}, err.Error(), ""
	if le, ok := errors.AsType[*yaml.LoadError](err); ok {
		message = le.Message
		if le.ContextMsg != "" {
			message = le.ContextMsg + ": " + message
		}
		if at = (position{le.Mark.Line, le.Mark.Column}); at.line > 0 {
			hint = syntaxHint(data, offsetOf(data, at), message)
		} else {
			// Errors of the character encoding have only a byte offset.
			before := data[:min(le.Mark.Index, len(data))]
			at.line = 1 + bytes.Count(before, []byte("\n"))
			at.column = 1 + utf8.RuneCount(before[bytes.LastIndexByte(before, '\n')+1:])
		}
	}
	d.refuse("", position{max(at.line, 1), max(at.column, 1)}, message, hint)
}

// offsetOf returns the offset of a position in bytes, at most len(data).
func offsetOf(data []byte, at position) (offset int) {
	for line := 1; line < at.line; line++ {
		end := bytes.IndexByte(data[offset:], '\n')
		if end < 0 {
			return len(data)
		}
		offset += end + 1
	}
	for column := 1; column < at.column && offset < len(data); column++ {
		_, size := utf8.DecodeRune(data[offset:])
		offset += size
	}
	return offset
}

// unquotedIPv6 matches an IPv6 address in brackets at the end of the parsed part of a line.
var unquotedIPv6 = regexp.MustCompile(`\[[0-9a-fA-F]*:[0-9a-fA-F:.]*\]$`)

// syntaxHint returns the most likely mistake at a byte of the data that the YAML library cannot parse, or "".
func syntaxHint(data []byte, at int, message string) string {
	line, rest := data[bytes.LastIndexByte(data[:at], '\n')+1:at], data[at:]
	has := func(text string) bool { return strings.Contains(message, text) }
	switch {
	case bytes.HasPrefix(rest, []byte("\t")):
		return "indent with spaces, not with tabs"
	case has("while scanning a block scalar"), bytes.HasPrefix(rest, []byte(">")):
		return "put a value that begins with > in quotes"
	case has("unknown anchor"):
		return "put a value that begins with * in quotes"
	case has("cannot start any token") && len(rest) > 0:
		first, _ := utf8.DecodeRune(rest)
		return fmt.Sprintf("put a value that begins with %c in quotes", first)
	case has("did not find expected") && unquotedIPv6.Match(line):
		return `put an address that begins with [ in quotes, as in "[::]:1790"`
	case has("did not find expected key"):
		return "begin all keys of a mapping in the same column"
	case has("mapping values are not allowed"):
		return "write one key with its value in each line, and put a value with a colon and a space in quotes"
	case has("did not find expected ',' or ']'"):
		return "close the list with ]"
	case has("did not find expected ',' or '}'"):
		return "close the mapping with }"
	case has("escape c"): // "unknown escape character", "Unicode character escape code"
		return `write \\ for a backslash, or use single quotes`
	case has("while scanning a quoted scalar") && has("unexpected"):
		return "close the quotes"
	}
	return ""
}
