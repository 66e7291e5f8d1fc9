// SPDX-License-Identifier: Apache-2.0

package cli

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

// What a command prints names processes, interfaces and hosts as others have called them, and
// may be shown by a terminal, which takes some of it for commands. So
//   - all that a command writes to its output and its errors goes through a screen;
//   - what becomes a table or lines has no line feed or tab in it (see show and text.line);
//   - JSON has the same characters escaped (see escapeJSON);
//   - the commands to the terminal of our own go past the screen (see toTerminal).

// shown tells whether a terminal may be sent a character: none that controls it (C0, DEL, C1),
// changes the direction of others, is not seen or ends a line for some (U+2028).
func shown(r rune) bool { return unicode.IsPrint(r) }

// printable replaces what is not to reach a terminal, and what is no UTF-8.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if shown(r) {
			return r
		}
		return unicode.ReplacementChar
	}, strings.ToValidUTF8(s, string(unicode.ReplacementChar)))
}

// screen passes on what a terminal may be sent. In the place of all else but line feeds and
// tabs there is U+FFFD.
type screen struct {
	to      io.Writer
	mu      sync.Mutex
	partial []byte // the beginning of a character
}

// Write writes all of p; of a character whose end is missing, it waits for that.
func (s *screen) Write(p []byte) (int, error) {
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
	if _, err := s.to.Write(out.Bytes()); err != nil {
		return 0, err
	}
	return len(p), nil
}

// end writes what there is of a character that never ended.
func (s *screen) end() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.partial) > 0 {
		s.partial = nil
		// Nobody is left to tell of an error.
		_, _ = io.WriteString(s.to, string(unicode.ReplacementChar))
	}
}

// behind is what a command's output or errors go to in the end.
func behind(w io.Writer) io.Writer {
	if s, ok := w.(*screen); ok {
		return s.to
	}
	return w
}

// toTerminal writes what has commands to the terminal in it. The caller has made the rest of it
// printable.
func toTerminal(w io.Writer, text string) error {
	_, err := io.WriteString(behind(w), text)
	return err
}

// escapeJSON escapes the characters of a JSON text that a terminal is not to be sent, which
// encoding/json leaves as they are. They stand in strings only, but for white space.
func escapeJSON(text []byte) []byte {
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

// cleanStrings makes all strings printable that a slice has, or what a pointer points to, line feeds
// and tabs too: a command line could have others look like rows of the table.
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
			v.SetString(printable(v.String()))
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

// cleaned is a value with clean strings, in a place of its own.
func cleaned(v reflect.Value) reflect.Value {
	place := reflect.New(v.Type()).Elem()
	place.Set(v)
	clean(place)
	return place
}
