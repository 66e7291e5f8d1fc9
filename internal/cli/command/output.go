// SPDX-License-Identifier: Apache-2.0

package command

import (
	"bytes"
	"fmt"
	"io"
	"reflect"
	"strings"
	"sync"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"
)

// Output contains names that other users chose: command lines, interfaces, host names. A terminal
// interprets some characters as escape sequences. Therefore:
//   - all output and all errors of a command pass a Screen;
//   - cells of tables and lines of text contain no line feeds and tabs (see Command.Show, Text.Line);
//   - JSON escapes the same characters (see EscapeJSON);
//   - escape sequences that Sockeye sends itself bypass the Screen (see WriteTerminal).

// shown reports whether a character may be sent to a terminal. Control characters (C0, DEL, C1),
// bidirectional formatting, invisible characters and line separators (U+2028) may not.
func shown(r rune) bool { return unicode.IsPrint(r) }

// Screen is a writer that replaces unprintable characters by U+FFFD. It keeps line feeds and tabs.
type Screen struct {
	To      io.Writer
	mu      sync.Mutex
	partial []byte // the beginning of a character
}

// Write writes p. It keeps an incomplete character at the end of p until the next Write or End.
func (s *Screen) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out bytes.Buffer
	out.Grow(len(p))
	for rest := append(s.partial, p...); ; {
		if len(rest) == 0 || !utf8.FullRune(rest) {
			s.partial = append([]byte(nil), rest...)
			break
		}
		r, size := utf8.DecodeRune(rest)
		rest = rest[size:]
		if r != '\n' && r != '\t' && !shown(r) {
			r = unicode.ReplacementChar
		}
		out.WriteRune(r)
	}
	if out.Len() == 0 {
		return len(p), nil
	}
	if _, err := s.To.Write(out.Bytes()); err != nil {
		return 0, err
	}
	return len(p), nil
}

// End writes U+FFFD for a character that is still incomplete.
func (s *Screen) End() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.partial) > 0 {
		s.partial = nil
		// If this write fails, the error cannot be reported.
		_, _ = io.WriteString(s.To, string(unicode.ReplacementChar))
	}
}

// WriteTerminal writes text with escape sequences to the terminal. The caller has made the rest of
// text printable.
func WriteTerminal(w io.Writer, text string) error {
	_, err := io.WriteString(Underlying(w), text)
	return err
}

// Underlying returns the writer behind a Screen, or w.
func Underlying(w io.Writer) io.Writer {
	if s, ok := w.(*Screen); ok {
		return s.To
	}
	return w
}

// EscapeJSON escapes the characters of a JSON text that may not be sent to a terminal and that
// encoding/json does not escape. Apart from white space, they occur in strings only.
func EscapeJSON(text []byte) []byte {
	var out bytes.Buffer
	out.Grow(len(text))
	for len(text) > 0 {
		r, size := utf8.DecodeRune(text)
		switch {
		case shown(r) && (r != utf8.RuneError || size > 1), r == '\n':
			out.Write(text[:size])
		case r < ' ':
			out.WriteByte(' ')
		case r > 0xffff:
			a, b := utf16.EncodeRune(r)
			fmt.Fprintf(&out, `\u%04x\u%04x`, a, b)
		default:
			fmt.Fprintf(&out, `\u%04x`, r)
		}
		text = text[size:]
	}
	return out.Bytes()
}

// cleanStrings replaces unprintable characters, line feeds and tabs in all strings of a slice, or of
// the value behind a pointer. With a line feed, a command line could forge a row of a table.
func cleanStrings(v any) { clean(reflect.ValueOf(v)) }

func clean(v reflect.Value) {
	switch v.Kind() {
	case reflect.Pointer:
		if !v.IsNil() {
			clean(v.Elem())
		}
	case reflect.Interface:
		if !v.IsNil() && v.CanSet() {
			v.Set(cleaned(v.Elem()))
		}
	case reflect.String:
		if v.CanSet() {
			v.SetString(Printable(v.String()))
		}
	case reflect.Struct:
		for i := range v.NumField() {
			if v.Type().Field(i).IsExported() {
				clean(v.Field(i))
			}
		}
	case reflect.Slice, reflect.Array:
		for i := range v.Len() {
			clean(v.Index(i))
		}
	case reflect.Map:
		// Neither keys nor values of a map can be set.
		var pairs [][2]reflect.Value
		for _, key := range v.MapKeys() {
			pairs = append(pairs, [2]reflect.Value{cleaned(key), cleaned(v.MapIndex(key))})
			v.SetMapIndex(key, reflect.Value{})
		}
		for _, pair := range pairs {
			v.SetMapIndex(pair[0], pair[1])
		}
	}
}

// Printable replaces characters that may not be sent to a terminal, and invalid UTF-8, by U+FFFD.
func Printable(s string) string {
	return strings.Map(func(r rune) rune {
		if shown(r) {
			return r
		}
		return unicode.ReplacementChar
	}, strings.ToValidUTF8(s, string(unicode.ReplacementChar)))
}

// cleaned returns a copy of a value, with clean strings.
func cleaned(v reflect.Value) reflect.Value {
	place := reflect.New(v.Type()).Elem()
	place.Set(v)
	clean(place)
	return place
}
