// SPDX-License-Identifier: Apache-2.0

package config

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"

	"golang.org/x/sys/unix"
)

// Limits of the files that match.remote_file names.
const (
	maxPrefixLines  = 1000 * 1000
	maxPrefixFile   = 64 << 20 // bytes
	maxPrefixLine   = 4 << 10  // bytes
	maxPrefixErrors = 20       // listed; the rest are counted
)

// prefixFile returns the prefixes of a file, which is read once for all rules. Errors are reported at path with the name
// of the file and the line, and the result is nil.
func (d *decoder) prefixFile(path, name string) []PrefixTerm {
	if terms, ok := d.files[name]; ok {
		return terms
	}
	d.files[name] = nil
	terms, flaws, err := readPrefixes(name)
	switch {
	case err != nil:
		d.refuseAt(path, err.Error(), "")
		return nil
	case len(flaws) > 0:
		for _, f := range flaws[:min(len(flaws), maxPrefixErrors)] {
			d.refuseAt(path, fmt.Sprintf("%s:%d: %s", name, f.line, f.message), f.hint)
		}
		if more := len(flaws) - maxPrefixErrors; more > 0 {
			d.refuseAt(path, fmt.Sprintf("%s: %d more lines are wrong", name, more), "")
		}
		return nil
	case len(terms) == 0:
		d.refuseAt(path, name+": has no prefix", "leave remote_file out to match everything")
	}
	d.files[name] = terms
	return terms
}

// prefixFlaw is an error in a line.
type prefixFlaw struct {
	line          int
	message, hint string
}

func readPrefixes(name string) ([]PrefixTerm, []prefixFlaw, error) {
	// O_NONBLOCK: opening a FIFO must not block.
	f, err := os.OpenFile(name, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, nil, err
	}
	defer f.Close()
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() {
		return nil, nil, &os.PathError{Op: "read", Path: name, Err: errors.New("not a regular file")}
	}
	terms, flaws, err := parsePrefixes(f)
	if err != nil {
		err = fmt.Errorf("read %s: %w", name, err)
	}
	return terms, flaws, err
}

// parsePrefixes reads a file with one prefix or address per line, after an optional !. Lines may be empty, and a # starts
// a comment.
func parsePrefixes(r io.Reader) (terms []PrefixTerm, flaws []prefixFlaw, err error) {
	limited := &io.LimitedReader{R: r, N: maxPrefixFile + 1}
	lines := bufio.NewReaderSize(limited, maxPrefixLine)
	seen := map[netip.Prefix]int{}
	for n := 1; ; n++ {
		line, err := lines.ReadSlice('\n')
		tooLong := errors.Is(err, bufio.ErrBufferFull)
		for errors.Is(err, bufio.ErrBufferFull) {
			_, err = lines.ReadSlice('\n')
		}
		switch {
		case err != nil && err != io.EOF:
			return nil, nil, err
		case limited.N == 0:
			return nil, nil, fmt.Errorf("larger than %d bytes", maxPrefixFile)
		case n > maxPrefixLines && len(line) > 0:
			return nil, nil, fmt.Errorf("more than %d lines", maxPrefixLines)
		}
		if n == 1 {
			line = bytes.TrimPrefix(line, []byte("\ufeff"))
		}
		line, _, _ = bytes.Cut(line, []byte("#"))
		line = bytes.TrimSpace(line)
		switch {
		case tooLong:
			flaws = append(flaws, prefixFlaw{n, fmt.Sprintf("line is longer than %d bytes", maxPrefixLine), ""})
		case len(line) > 0:
			term, message, hint := parsePrefixTerm(string(line))
			if first := seen[term.Prefix]; message == "" && first > 0 {
				message = fmt.Sprintf("%s is already in line %d", term.Prefix, first)
			}
			if message != "" {
				flaws = append(flaws, prefixFlaw{n, message, hint})
				break
			}
			seen[term.Prefix] = n
			terms = append(terms, term)
		}
		if err == io.EOF {
			return terms, flaws, nil
		}
	}
}
