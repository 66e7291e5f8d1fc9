// SPDX-License-Identifier: Apache-2.0

package tracecmd

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/cli/command"
	"sockeye/internal/fault"
	"sockeye/internal/trace/measure"
)

// SavedTrace is the content of a file of trace save.
type SavedTrace struct {
	Format  string           `json:"format"`         // savedFormat
	Number  int              `json:"format_version"` // savedVersion; readers refuse others
	Version string           `json:"version"`        // of Sockeye
	Host    string           `json:"host"`
	Kernel  string           `json:"kernel"`
	Saved   time.Time        `json:"saved"`
	Select  string           `json:"select"`
	Partial bool             `json:"partial"`
	Slices  []measure.Period `json:"slices"` // oldest first; the last field, so that readers need not keep them
}

const (
	savedFormat  = "sockeye-trace"
	savedVersion = 1
)

// The limits of a file that is read. A file may be made by anybody, and 45 bytes of it are a histogram of 4 KB, so the
// reader keeps a sum per slice.
const (
	savedLimit  = 1 << 30 // bytes; an hour of 4096 groups is smaller
	savedSlices = 1000    // an hour has 360
	savedGroups = 1 << 16 // different ones; a policy has 4160 at most
	savedValue  = 1 << 20 // bytes of one value; a result of eight full histograms has 60 KB
	savedCount  = 1 << 40 // messages of a result
)

// savedHint is the hint of errors for files that trace save has not written.
const savedHint = "save the measurements with sockeye trace save FILE"

// savedReader reads a file of trace save, result by result.
type savedReader struct {
	path     string
	from     io.Reader
	left     int // bytes that may be read for the next value
	json     *json.Decoder
	finder   *measure.Finder
	side     *comparedSide
	slices   int
	measured bool // a result has messages
}

// readSaved reads the groups that a selector matches from a file of trace save.
func readSaved(path, selector string) (*comparedSide, error) {
	// O_NONBLOCK: opening a FIFO must not block.
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, fault.Unreadable(fmt.Errorf("read saved trace: %w", err), savedHint)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("read saved trace: %w", err)
	}
	switch {
	case !info.Mode().IsRegular():
		return nil, fault.Usage(fmt.Errorf("%s is not a regular file", path), savedHint)
	case info.Size() == 0:
		return nil, fault.Usage(fmt.Errorf("%s is empty", path), savedHint)
	case info.Size() > savedLimit:
		return nil, fault.Usage(fmt.Errorf("%s has %s, maximum %s", path, command.Bytes(info.Size()), command.Bytes(int64(savedLimit))), savedHint)
	}
	finder, err := measure.NewFinder(selector)
	if err != nil {
		return nil, err
	}
	r := &savedReader{path: path, from: io.LimitReader(f, savedLimit), finder: finder, side: &comparedSide{File: path, Select: selector, finder: finder}}
	r.json = json.NewDecoder(r)
	if err := r.read(); err != nil {
		return nil, err
	}
	if !r.measured {
		return nil, fault.Usage(fmt.Errorf("%s has no measurements", path), "save the measurements again, after messages were sent")
	}
	return r.side, nil
}

// errLargeValue is the error of a value that is larger than any that trace save writes.
var errLargeValue = errors.New("a value is too large")

// Read reads from the file for the decoder.
func (r *savedReader) Read(p []byte) (int, error) {
	if r.left <= 0 {
		return 0, errLargeValue
	}
	n, err := r.from.Read(p)
	r.left -= n
	return n, err
}

// read reads the file.
func (r *savedReader) read() error {
	var s SavedTrace
	fields := map[string]any{
		"format": &s.Format, "format_version": &s.Number, "version": &s.Version, "host": &s.Host, "kernel": &s.Kernel,
		"select": &s.Select, "partial": &s.Partial,
	}
	if !r.token('{') {
		return r.foreign()
	}
	for {
		key, err := r.key()
		if err == nil && key == "" {
			break
		}
		if err == nil && key == "slices" {
			if err := r.known(&s); err != nil {
				return err
			}
			err = r.readSlices()
		} else if err == nil {
			err = r.next(fields[key])
		}
		if err != nil && s.Format != savedFormat {
			return r.foreign()
		}
		if err != nil {
			return r.damaged(err)
		}
	}
	r.side.Host, r.side.Kernel, r.side.Saved, r.side.partial = s.Host, s.Kernel, s.Select, s.Partial
	return r.known(&s)
}

// foreign returns the error for a file that trace save has not written.
func (r *savedReader) foreign() error {
	return fault.Usage(fmt.Errorf("%s is not a saved trace", r.path), savedHint)
}

// known returns an error for a file of another program or format.
func (r *savedReader) known(s *SavedTrace) error {
	switch {
	case s.Format != savedFormat:
		return r.foreign()
	case s.Number != savedVersion:
		return fault.Usage(fmt.Errorf("%s has format %d of Sockeye %s; this version reads format %d", r.path, s.Number, command.Printable(s.Version), savedVersion),
			"compare the files with the newer of the two versions, or save the measurements again")
	}
	return nil
}

// damaged returns the error for a file that cannot be read further.
func (r *savedReader) damaged(err error) error {
	text := fmt.Sprintf("%s is damaged at byte %d", r.path, r.json.InputOffset())
	if _, typed := errors.AsType[*json.UnmarshalTypeError](err); !typed && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
		text += ": " + command.Printable(err.Error())
	}
	return fault.Usage(errors.New(text), "copy the file again, or save the measurements again")
}

// readSlices reads the slices.
func (r *savedReader) readSlices() error {
	return r.array(func() error {
		if r.slices++; r.slices > savedSlices {
			return fmt.Errorf("more than %d slices", savedSlices)
		}
		r.finder.Begin()
		if !r.token('{') {
			return errors.New("a slice is missing")
		}
		var from, to time.Time
		for {
			key, err := r.key()
			if err != nil {
				return err
			}
			switch key {
			case "":
				if r.slices == 1 {
					r.side.From = from
				}
				r.side.To = to
				return nil
			case "from":
				err = r.next(&from)
			case "to":
				err = r.next(&to)
			case "results":
				if from.IsZero() || to.IsZero() {
					return errors.New("a slice has no times")
				}
				err = r.array(func() error { return r.readResult(to) })
			default:
				err = r.next(nil)
			}
			if err != nil {
				return err
			}
		}
	})
}

// key reads the next key of an object; "" at its end.
func (r *savedReader) key() (string, error) {
	r.left = savedValue
	t, err := r.json.Token()
	if err != nil {
		return "", err
	}
	if k, ok := t.(string); ok {
		return k, nil
	}
	return "", nil // the decoder permits a string or the end
}

// array calls element for each element of an array.
func (r *savedReader) array(element func() error) error {
	if !r.token('[') {
		return errors.New("an array is missing")
	}
	for {
		r.left = savedValue
		if !r.json.More() {
			break
		}
		if err := element(); err != nil {
			return err
		}
	}
	if !r.token(']') {
		return io.ErrUnexpectedEOF
	}
	return nil
}

// token reads a delimiter, and returns whether it is the expected one.
func (r *savedReader) token(expected json.Delim) bool {
	r.left = savedValue
	t, err := r.json.Token()
	return err == nil && t == expected
}

// readResult reads the result of a group in a slice. Stages and outcomes of later versions are left out.
func (r *savedReader) readResult(ended time.Time) error {
	var result measure.Result
	if err := r.next(&result); err != nil {
		return err
	}
	for stage, h := range result.Stages {
		if h != nil && h.Count > savedCount {
			return fmt.Errorf("%d messages in 10 s", h.Count)
		}
		if !slices.Contains(measure.Stages, stage) {
			delete(result.Stages, stage)
		}
	}
	if n := max(result.Chosen, result.RXChosen); n > savedCount {
		return fmt.Errorf("%d messages in 10 s", n)
	}
	unknown := func(known []measure.Outcome) func(measure.Outcome, uint64) bool {
		return func(o measure.Outcome, _ uint64) bool { return !slices.Contains(known, o) }
	}
	maps.DeleteFunc(result.Outcomes, unknown(measure.Outcomes))
	maps.DeleteFunc(result.RXOutcomes, unknown(measure.RXOutcomes))
	r.measured = r.measured || result.Chosen+result.RXChosen > 0
	if r.finder.Add(&result, ended); r.finder.Seen() > savedGroups {
		return fmt.Errorf("more than %d groups", savedGroups)
	}
	return nil
}

// next reads a value, or skips it if the value is nil.
func (r *savedReader) next(value any) error {
	r.left = savedValue
	if value == nil {
		value = &json.RawMessage{}
	}
	return r.json.Decode(value)
}
