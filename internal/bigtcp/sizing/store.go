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

	"sockeye/internal/bigtcp/netif"
)

const (
	recordsDir = "bigtcp"
	// damagedSuffix ends the names of records that were moved aside.
	damagedSuffix = ".damaged"
	// maxRecordSize is larger than any record, in bytes.
	maxRecordSize = 64 << 10
	lockWait      = 10 * time.Second
)

var (
	recordName = regexp.MustCompile(`^[0-9]+-[0-9]+\.json$`)
	// leftName is that of a record that was being written when its writer was killed.
	temporaryName = regexp.MustCompile(`^\.[0-9]+-[0-9]+\.json\.[0-9A-Z]+$`)
)

// Store keeps the records of what was set, a file each, in a folder of the state
// directory. Processes share it: who changes something has a lock on the folder,
// which the kernel gives up for a process that dies.
type Store struct {
	dir  string
	wait time.Duration
	// before is called before each change of the folder and of an interface, by tests.
	before func()
}

// OpenStore is the store in a state directory. The folder is made when there is
// something to record. KindUsage if something else has its name.
func OpenStore(stateDir string) (*Store, error) {
	if stateDir == "" {
		return nil, netif.NewError(netif.KindUsage, "", "no state directory")
	}
	dir, err := filepath.Abs(stateDir)
	if err != nil {
		return nil, fmt.Errorf("find state directory: %w", err)
	}
	s := &Store{filepath.Join(dir, recordsDir), lockWait, func() {}}
	switch info, err := os.Lstat(s.dir); {
	case errors.Is(err, unix.ENOTDIR):
		return nil, netif.NewError(netif.KindUsage, "", "state directory %s is no folder", dir)
	case err == nil && !info.IsDir():
		return nil, netif.NewError(netif.KindUsage, "remove it, or name another state directory", "%s is no folder", s.dir)
	}
	return s, nil
}

// folder is the store's folder, open.
type folder struct {
	*os.File
	before func()
}

// open opens the folder: fs.ErrNotExist if there is none.
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
		return nil, netif.NewError(netif.KindUsage, "", "open %s: it belongs to user %d, who could make this host's records", s.dir, st.Uid)
	}
	return d, nil
}

// create makes the folder where there is none, and opens it.
func (s *Store) create() (*folder, error) {
	if err := os.MkdirAll(filepath.Dir(s.dir), 0o700); err != nil {
		return nil, fmt.Errorf("create state directory: %w", err)
	}
	if err := os.Mkdir(s.dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, fmt.Errorf("create folder of records: %w", err)
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

// lock takes the folder for this process until it is closed, and waits for another
// process that has it: KindConflict if that takes too long.
func (s *Store) lock(d *folder) error {
	err := flock(d, unix.LOCK_EX|unix.LOCK_NB)
	if err == nil || !errors.Is(err, unix.EWOULDBLOCK) {
		return err
	}
	// By a descriptor of its own, which outlives a wait that is given up; the lock
	// is that of the open file, so it counts for both.
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
		return netif.NewError(netif.KindConflict, "try again when it is done", "%s works with %s", holder(d), s.dir)
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

// holder says who has the folder's lock, as /proc/locks shows it.
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
			return unknown // of another PID namespace
		}
		name, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
		if err != nil {
			return fmt.Sprintf("process %d", pid)
		}
		return fmt.Sprintf("process %d (%s)", pid, strings.TrimSpace(string(name)))
	}
	return unknown
}

// Records are the records of this life of the host, by namespace and index. Files
// that are no records are moved aside (see Damaged), and those of an earlier life
// removed. It fails with fs.ErrPermission for who may not read them.
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

// Damaged are the paths of files that were moved aside because they are no records.
// What they were about cannot be reverted.
func (s *Store) Damaged() ([]string, error) {
	entries, err := os.ReadDir(s.dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("read folder of records: %w", err)
	}
	var paths []string
	for _, e := range entries {
		if strings.HasSuffix(e.Name(), damagedSuffix) {
			paths = append(paths, filepath.Join(s.dir, e.Name()))
		}
	}
	return paths, nil
}

// errVoid means that a record is of an earlier life of the host.
var errEarlierBoot = errors.New("the host was booted since")

// list reads the records, and names the files that are to be cleaned away, with
// the reason: errVoid, or the damage.
func (d *folder) list() (records []Record, rest map[string]error, err error) {
	if _, err := d.Seek(0, io.SeekStart); err != nil {
		return nil, nil, fmt.Errorf("read folder of records: %w", err)
	}
	names, err := d.Readdirnames(-1)
	if err != nil {
		return nil, nil, fmt.Errorf("read folder of records: %w", err)
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
		case errors.Is(err, fs.ErrNotExist): // dropped meanwhile
		case errors.Is(err, errEarlierBoot), errors.As(err, &damage):
			rest[name] = err
		default:
			return nil, nil, err
		}
	}
	slices.SortFunc(records, compareRecords)
	return records, rest, nil
}

// clean is list with the folder locked: it removes what is void, moves aside what
// is damaged, and returns the paths of these.
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

func compareRecords(a, b Record) int {
	if a.NetnsID != b.NetnsID {
		if a.NetnsID < b.NetnsID {
			return -1
		}
		return 1
	}
	return a.Index - b.Index
}

// damageError says that a file is no record.
type damageError struct{ error }

func fileName(netns uint64, index int) string { return fmt.Sprintf("%d-%d.json", netns, index) }

// read fails with errVoid for a record of an earlier life of the host, and with a
// *damageError for what is none.
func (d *folder) read(name string) (r Record, err error) {
	// It may be a symlink or a pipe.
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
		return r, &damageError{errors.New("it is no file of a record")}
	}
	if info.Size() == 0 {
		return r, errEarlierBoot // as a file may be after a loss of power
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
	id, err := bootID()
	if err != nil {
		return r, err
	}
	if r.BootID != id {
		return r, errEarlierBoot
	}
	if name != fileName(r.NetnsID, r.Index) {
		return r, &damageError{errors.New("it is of another interface")}
	}
	return r, nil
}

// find is the record of an interface, nil if there is none that is good.
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

// write puts a record in the folder, in one step; if sync, it is on the disk before
// it gets its name. Who is killed loses nothing either way, and after a reboot all
// records are void.
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

// drop removes a record.
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
		// Something of another kind was moved aside before.
		aside = name + "." + rand.Text() + damagedSuffix
		err = unix.Renameat(int(d.Fd()), name, int(d.Fd()), aside)
	}
	if err != nil {
		return fmt.Errorf("move damaged record %s aside: %w", name, err)
	}
	return nil
}

func bootID() (string, error) {
	id, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("read the host's boot id: %w", err)
	}
	return strings.TrimSpace(string(id)), nil
}
