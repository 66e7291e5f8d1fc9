// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"bufio"
	"bytes"
	"cmp"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/api"
	"sockeye/internal/owned"
	"sockeye/internal/statedir"
)

const (
	// framesDir is the directory of the recorded frames in the state directory.
	framesDir    = "frames"
	framesSuffix = ".jsonl.gz"
	// recordedTime is how long frames are kept, in files of recordedPart.
	recordedTime = time.Hour
	recordedPart = 6 * time.Minute
	// recordedDevices is the number of devices of a service in a recorded frame: those with the highest rates.
	recordedDevices = 1000
	// mostFrame is the maximum size of a recorded frame in bytes. A longer one is damaged.
	mostFrame = 16 << 20
)

// recording keeps the frames of the last hour in files, each of which has the frames of recordedPart as gzip members. The
// name of a file is the Unix time of its first frame. A file that a killed agent has left incomplete is read up to there.
type recording struct {
	dir   string
	file  *os.File // nil before the first frame
	begun time.Time
	size  int64 // of the complete frames in file
}

// add records a frame.
func (r *recording) add(frame *api.Frame) error {
	if err := r.rotate(frame.Time); err != nil {
		return err
	}
	var packed bytes.Buffer
	w := gzip.NewWriter(&packed)
	err := json.NewEncoder(w).Encode(withFewerDevices(frame))
	if err = errors.Join(err, w.Close()); err != nil {
		return err
	}
	if err := statedir.CheckSpace(r.file); err != nil {
		return fmt.Errorf("record frame: %w", err)
	}
	if _, err := r.file.Write(packed.Bytes()); err != nil {
		// A part of the frame may be in the file.
		return fmt.Errorf("record frame: %w", errors.Join(err, r.file.Truncate(r.size)))
	}
	r.size += int64(packed.Len())
	return nil
}

// rotate begins a file if the current one is complete, and removes old files.
func (r *recording) rotate(now time.Time) error {
	if r.file != nil && now.Before(r.begun.Add(recordedPart)) && !now.Before(r.begun) {
		return nil
	}
	if err := owned.Make(r.dir, 0o700); err != nil {
		return fmt.Errorf("record frame: %w", err)
	}
	r.close()
	begun, err := r.list()
	if err != nil {
		return err
	}
	for _, t := range begun {
		// Also files of a clock that was ahead.
		if age := now.Sub(t); age > recordedTime+recordedPart || age < -recordedPart {
			if err := os.Remove(r.path(t)); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return fmt.Errorf("record frame: %w", err)
			}
		}
	}
	f, err := os.OpenFile(r.path(now), os.O_WRONLY|os.O_CREATE|os.O_TRUNC|os.O_APPEND|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return fmt.Errorf("record frame: %w", err)
	}
	r.file, r.begun, r.size = f, now, 0
	return nil
}

func (r *recording) close() {
	if r.file != nil {
		r.file.Close()
		r.file = nil
	}
}

func (r *recording) path(begun time.Time) string {
	return filepath.Join(r.dir, strconv.FormatInt(begun.Unix(), 10)+framesSuffix)
}

// each calls f with the recorded frames since a time, the oldest one first, as JSON without the newline, until f returns
// false. Damaged parts are left out.
func (r *recording) each(since time.Time, f func(frame []byte) bool) error {
	begun, err := r.list()
	if err != nil {
		return err
	}
	for _, t := range begun {
		if t.Add(recordedPart).Before(since) {
			continue
		}
		file, err := os.OpenFile(r.path(t), os.O_RDONLY|unix.O_NOFOLLOW, 0)
		if errors.Is(err, fs.ErrNotExist) {
			continue // removed meanwhile
		}
		if err != nil {
			return fmt.Errorf("read frames: %w", err)
		}
		more := eachIn(file, since, f)
		file.Close()
		if !more {
			break
		}
	}
	return nil
}

// list returns when the files begin, the oldest one first.
func (r *recording) list() ([]time.Time, error) {
	entries, err := os.ReadDir(r.dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read frames: %w", err)
	}
	var begun []time.Time
	for _, e := range entries {
		text, ok := strings.CutSuffix(e.Name(), framesSuffix)
		if n, err := strconv.ParseInt(text, 10, 64); ok && err == nil && e.Type().IsRegular() {
			begun = append(begun, time.Unix(n, 0))
		}
	}
	slices.SortFunc(begun, time.Time.Compare)
	return begun, nil
}

// eachIn calls f with the frames of a file. It returns false if f did.
func eachIn(file io.Reader, since time.Time, f func(frame []byte) bool) bool {
	unpacked, err := gzip.NewReader(file)
	if err != nil {
		return true
	}
	lines := bufio.NewScanner(unpacked)
	lines.Buffer(nil, mostFrame)
	for lines.Scan() {
		var frame struct {
			Time time.Time `json:"time"`
		}
		if json.Unmarshal(lines.Bytes(), &frame) != nil || frame.Time.Before(since) {
			continue
		}
		if !f(lines.Bytes()) {
			return false
		}
	}
	return true
}

// withFewerDevices returns a frame with the devices of the highest rates, and without the fleet, which no replay shows.
func withFewerDevices(frame *api.Frame) *api.Frame {
	fewer := *frame
	fewer.Services, fewer.Fleet = slices.Clone(frame.Services), nil
	for i := range fewer.Services {
		s := &fewer.Services[i]
		if len(s.Devices) <= recordedDevices {
			continue
		}
		devices := slices.Clone(s.Devices)
		slices.SortFunc(devices, func(a, b api.LiveDevice) int { return cmp.Compare(b.Total(), a.Total()) })
		s.Omitted += len(devices) - recordedDevices
		s.Devices = devices[:recordedDevices]
		slices.SortFunc(s.Devices, func(a, b api.LiveDevice) int { return a.Address.Compare(b.Address) })
	}
	return &fewer
}
