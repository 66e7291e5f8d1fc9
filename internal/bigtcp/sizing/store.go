// SPDX-License-Identifier: Apache-2.0

package sizing

import (
	"bufio"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/fault"
	"sockeye/internal/sysctl"
)

const (
	recordsDir = "bigtcp"
	// damagedSuffix is appended to the names of invalid records.
	damagedSuffix = ".damaged"
	// maxRecordSize bounds the size of a record, in bytes.
	maxRecordSize = 64 << 10
	lockWait      = 10 * time.Second
)

var (
	recordName = regexp.MustCompile(`^[0-9]+-[0-9]+\.json$`)
	// temporaryName matches a record whose writer was killed before the rename.
	temporaryName = regexp.MustCompile(`^\.[0-9]+-[0-9]+\.json\.[0-9A-Z]+$`)
)

// Store keeps the records, one file each, in a subdirectory of the state directory.
// Processes share it: a writer holds a lock on the directory (flock(2)), which the
// kernel releases when the process ends.
type Store struct {
	dir  string
	wait time.Duration
	// before is a hook of tests, called before each change of the directory and of an interface.
	before func()
}

// OpenStore returns the store of a state directory. The subdirectory is created with
// the first record. Returns a [fault.Error] with CodeUsage if a file with its name is
// not a directory.
func OpenStore(stateDir string) (*Store, error) {
	if stateDir == "" {
		return nil, fault.Usage(errors.New("no state directory"), "")
	}
	dir, err := filepath.Abs(stateDir)
	if err != nil {
		return nil, fmt.Errorf("find state directory: %w", err)
	}
	s := &Store{filepath.Join(dir, recordsDir), lockWait, func() {}}
	switch info, err := os.Lstat(s.dir); {
	case errors.Is(err, unix.ENOTDIR):
		return nil, fault.Usage(fmt.Errorf("state directory %s is not a directory", dir), "")
	case err == nil && !info.IsDir():
		return nil, fault.Usage(fmt.Errorf("%s is not a directory", s.dir), "remove it, or name another state directory")
	}
	return s, nil
}

// folder is the open directory of the store.
type folder struct {
	*os.File
	before func()
}

// create opens the directory, and creates it if there is none.
func (s *Store) create() (*folder, error) {
	if err := os.MkdirAll(filepath.Dir(s.dir), 0o700); err != nil {
		return nil, fmt.Errorf("create state directory: %w", err)
	}
	if err := os.Mkdir(s.dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, fmt.Errorf("create directory of records: %w", err)
	}
	d, err := s.open()
	if err != nil {
		return nil, err
	}
	if err := d.Chmod(0o700); err != nil {
		d.Close()
		return nil, fmt.Errorf("set mode of %s: %w", s.dir, err)
	}
	return d, nil
}

// Records returns the records of the current boot, sorted by namespace and index.
// Invalid files are moved aside (see Damaged), and records of earlier boots are
// removed. Returns fs.ErrPermission if the caller may not read the directory.
func (s *Store) Records() ([]Record, error) {
	d, err := s.open()
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer d.Close()
	records, rest, err := d.list()
	if err != nil || len(rest) == 0 {
		return records, err
	}
	if err := s.lock(d); err != nil {
		return nil, err
	}
	records, _, err = d.clean()
	return records, err
}

// open opens the directory. Returns fs.ErrNotExist if there is none.
func (s *Store) open() (*folder, error) {
	fd, err := unix.Open(s.dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", s.dir, err)
	}
	d := &folder{os.NewFile(uintptr(fd), s.dir), s.before}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		d.Close()
		return nil, fmt.Errorf("open %s: %w", s.dir, err)
	}
	if euid := os.Geteuid(); st.Uid != 0 && int(st.Uid) != euid {
		d.Close()
		return nil, fault.Usage(fmt.Errorf("open %s: it belongs to user %d, who could forge records", s.dir, st.Uid), "")
	}
	return d, nil
}

// lock locks the directory until d is closed. Returns a [fault.Error] with CodeConflict
// if another process holds the lock for longer than s.wait.
func (s *Store) lock(d *folder) error {
	err := flock(d, unix.LOCK_EX|unix.LOCK_NB)
	if err == nil || !errors.Is(err, unix.EWOULDBLOCK) {
		return err
	}
	// The waiter has a descriptor of its own, which may outlive d. The lock belongs to
	// the open file description, and so to both.
	fd, err := unix.FcntlInt(d.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("lock %s: %w", s.dir, err)
	}
	waiter := &folder{os.NewFile(uintptr(fd), s.dir), nil}
	locked := make(chan error, 1)
	go func() {
		locked <- flock(waiter, unix.LOCK_EX)
		waiter.Close()
	}()
	timeout := time.NewTimer(s.wait)
	defer timeout.Stop()
	select {
	case err := <-locked:
		return err
	case <-timeout.C:
		return fault.Conflict(fmt.Errorf("%s has locked %s", holder(d), s.dir), "try again later")
	}
}

func flock(d *folder, how int) error {
	for {
		err := unix.Flock(int(d.Fd()), how)
		if err == nil {
			return nil
		}
		if !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("lock %s: %w", d.Name(), err)
		}
	}
}

// holder names the process that holds the lock, from /proc/locks.
func holder(d *folder) string {
	const unknown = "another process"
	var st unix.Stat_t
	if err := unix.Fstat(int(d.Fd()), &st); err != nil {
		return unknown
	}
	f, err := os.Open("/proc/locks")
	if err != nil {
		return unknown
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		// 3: FLOCK  ADVISORY  WRITE 812 fe:00:262154 0 EOF; who waits has "->" second.
		fields := strings.Fields(lines.Text())
		if len(fields) < 6 || fields[1] != "FLOCK" || !strings.HasSuffix(fields[5], fmt.Sprintf(":%d", st.Ino)) {
			continue
		}
		pid, err := strconv.Atoi(fields[4])
		if err != nil || pid <= 0 {
			return unknown // the process is in another PID namespace
		}
		name, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
		if err != nil {
			return fmt.Sprintf("process %d", pid)
		}
		return fmt.Sprintf("process %d (%s)", pid, strings.TrimSpace(string(name)))
	}
	return unknown
}

// Damaged returns the paths of files that were moved aside because they are not valid
// records.
func (s *Store) Damaged() ([]string, error) {
	entries, err := os.ReadDir(s.dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("read directory of records: %w", err)
	}
	var paths []string
	for _, e := range entries {
		if strings.HasSuffix(e.Name(), damagedSuffix) {
			paths = append(paths, filepath.Join(s.dir, e.Name()))
		}
	}
	return paths, nil
}

// errEarlierBoot means that a record is of an earlier boot.
var errEarlierBoot = errors.New("record of an earlier boot")

// clean returns the valid records with the directory locked. It removes records of
// earlier boots, moves invalid files aside, and returns the new paths of these.
func (d *folder) clean() (records []Record, damaged []string, err error) {
	records, rest, err := d.list()
	if err != nil {
		return nil, nil, err
	}
	for name, why := range rest {
		if errors.Is(why, errEarlierBoot) {
			if err := d.unlink(name); err != nil {
				return nil, nil, err
			}
			continue
		}
		if err := d.moveAside(name); err != nil {
			return nil, nil, err
		}
		damaged = append(damaged, filepath.Join(d.Name(), name+damagedSuffix))
	}
	slices.Sort(damaged)
	return records, damaged, nil
}

// damageError means that a file is not a valid record.
type damageError struct{ error }

// list returns the valid records, and the names of the other files with the reason:
// errEarlierBoot or a *damageError.
func (d *folder) list() (records []Record, rest map[string]error, err error) {
	if _, err := d.Seek(0, io.SeekStart); err != nil {
		return nil, nil, fmt.Errorf("read directory of records: %w", err)
	}
	names, err := d.Readdirnames(-1)
	if err != nil {
		return nil, nil, fmt.Errorf("read directory of records: %w", err)
	}
	rest = map[string]error{}
	for _, name := range names {
		if temporaryName.MatchString(name) {
			rest[name] = errEarlierBoot
		}
		if !recordName.MatchString(name) {
			continue
		}
		var damage *damageError
		switch r, err := d.read(name); {
		case err == nil:
			records = append(records, r)
		case errors.Is(err, fs.ErrNotExist): // removed concurrently
		case errors.Is(err, errEarlierBoot), errors.As(err, &damage):
			rest[name] = err
		default:
			return nil, nil, err
		}
	}
	slices.SortFunc(records, compareRecords)
	return records, rest, nil
}

func compareRecords(a, b Record) int {
	if a.NetnsID != b.NetnsID {
		if a.NetnsID < b.NetnsID {
			return -1
		}
		return 1
	}
	return a.Index - b.Index
}

func fileName(netns uint64, index int) string { return fmt.Sprintf("%d-%d.json", netns, index) }

// find returns the record of an interface, nil if there is no valid one.
func (d *folder) find(netns uint64, index int) (*Record, error) {
	var damage *damageError
	switch r, err := d.read(fileName(netns, index)); {
	case err == nil:
		return &r, nil
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, errEarlierBoot), errors.As(err, &damage):
		return nil, nil
	default:
		return nil, err
	}
}

// read returns errEarlierBoot for a record of an earlier boot, and a *damageError for
// a file that is not a valid record.
func (d *folder) read(name string) (r Record, err error) {
	// The file may be a symlink or a FIFO.
	fd, err := unix.Openat(int(d.Fd()), name, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	switch {
	case errors.Is(err, unix.ELOOP), errors.Is(err, unix.ENXIO):
		return r, &damageError{err}
	case err != nil:
		return r, fmt.Errorf("read record %s: %w", name, err)
	}
	f := os.NewFile(uintptr(fd), name)
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return r, fmt.Errorf("read record %s: %w", name, err)
	}
	if !info.Mode().IsRegular() || info.Size() > maxRecordSize {
		return r, &damageError{errors.New("not a regular file of bounded size")}
	}
	if info.Size() == 0 {
		return r, errEarlierBoot // possible after a power failure
	}
	data, err := io.ReadAll(io.LimitReader(f, maxRecordSize))
	if err != nil {
		return r, fmt.Errorf("read record %s: %w", name, err)
	}
	if err := json.Unmarshal(data, &r); err != nil {
		return r, &damageError{err}
	}
	if r.BootID == "" || r.Index <= 0 || r.Before.GSO == 0 || r.Applied.GSO == 0 || r.Owner == "" {
		return r, &damageError{errors.New("fields are missing")}
	}
	id, err := sysctl.Read("kernel.random.boot_id")
	if err != nil {
		return r, err
	}
	if r.BootID != id {
		return r, errEarlierBoot
	}
	if name != fileName(r.NetnsID, r.Index) {
		return r, &damageError{errors.New("record of another interface")}
	}
	return r, nil
}

// write writes a record by a rename. With sync the file is on disk before the rename.
// Without sync nothing is lost when the process is killed; after a reboot no record is
// valid anyway.
func (d *folder) write(r *Record, sync bool) (err error) {
	data, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return fmt.Errorf("write record: %w", err)
	}
	d.before()
	name := fileName(r.NetnsID, r.Index)
	temporary := "." + name + "." + rand.Text()
	fd, err := unix.Openat(int(d.Fd()), temporary, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return fmt.Errorf("write record of %s: %w", r.Interface, err)
	}
	f := os.NewFile(uintptr(fd), temporary)
	defer func() {
		f.Close()
		if err != nil {
			_ = unix.Unlinkat(int(d.Fd()), temporary, 0)
			err = fmt.Errorf("write record of %s: %w", r.Interface, err)
		}
	}()
	if _, err := f.Write(append(data, '\n')); err != nil {
		return err
	}
	if sync {
		if err := f.Sync(); err != nil {
			return err
		}
	}
	d.before()
	err = unix.Renameat(int(d.Fd()), temporary, int(d.Fd()), name)
	if errors.Is(err, unix.EISDIR) {
		if err := d.moveAside(name); err != nil {
			return err
		}
		err = unix.Renameat(int(d.Fd()), temporary, int(d.Fd()), name)
	}
	return err
}

// remove removes a record.
func (d *folder) remove(r *Record) error { return d.unlink(fileName(r.NetnsID, r.Index)) }

func (d *folder) unlink(name string) error {
	d.before()
	if err := unix.Unlinkat(int(d.Fd()), name, 0); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove record %s: %w", name, err)
	}
	return nil
}

func (d *folder) moveAside(name string) error {
	d.before()
	aside := name + damagedSuffix
	err := unix.Renameat(int(d.Fd()), name, int(d.Fd()), aside)
	if errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.EISDIR) || errors.Is(err, unix.ENOTEMPTY) || errors.Is(err, unix.EEXIST) {
		// A directory and a file cannot replace each other.
		aside = name + "." + rand.Text() + damagedSuffix
		err = unix.Renameat(int(d.Fd()), name, int(d.Fd()), aside)
	}
	if err != nil {
		return fmt.Errorf("move damaged record %s aside: %w", name, err)
	}
	return nil
}
