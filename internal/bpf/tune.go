// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// TuneConfig says what the tuning of one cgroup consists of.
type TuneConfig struct {
	// Dir is the cgroup's folder in the bpffs. The layout's hash ends its name.
	Dir string
	// Cgroup is the folder of the cgroup whose sockets are tuned.
	Cgroup string
	// Ready, unless nil, prepares the maps: no program of this layout runs
	// before it returns. If it fails, nothing is attached or replaced.
	Ready func(*Tune) error
}

// TuneRules is a list of rules, compiled: what Install makes the program use.
type TuneRules struct {
	MatchRules
	// Rules have neither Seed nor Retired: Install fills them in.
	Rules []TuneRule
}

// Tune is the tuning of one cgroup: pinned maps and a pinned link. It goes on
// without this process.
type Tune struct {
	dir    string
	cgroup string
	banks
	link    link.Link
	program *ebpf.Program
}

const pinTuneLink = "link_sockops"

// Hz is the number of the kernel's ticks in a second. The coarse clocks move
// once a tick (hrtimer_get_res in kernel/time/hrtimer.c, Linux 6.18), so that
// no kernel configuration needs to be found.
func Hz() (uint32, error) {
	var resolution unix.Timespec
	if err := unix.ClockGetres(unix.CLOCK_MONOTONIC_COARSE, &resolution); err != nil {
		return 0, fmt.Errorf("read resolution of coarse clock: %w", err)
	}
	ns := resolution.Nano()
	if ns <= 0 {
		return 0, errors.New("read resolution of coarse clock: it is 0")
	}
	return uint32((int64(time.Second) + ns/2) / ns), nil
}

// OpenTune makes the tuning of a cgroup, or adopts what is pinned in c.Dir in
// this version's layout: maps keep their contents. New connections get no rule
// until Install, in a tuning that is new.
//
// Pins of another layout are replaced: their link gets the new program in one
// step, then they are removed. What was learned is kept if its own layout is the
// same. Rules, their counts and the rules of open connections are not: options
// that were set stay set.
//
// A pin that cannot be this layout's gives an *IncompatibleError.
func OpenTune(c TuneConfig) (_ *Tune, err error) {
	dir, err := inLayout(c.Dir, tuneLayout)
	if err != nil {
		return nil, err
	}
	t := &Tune{dir: dir, cgroup: c.Cgroup, banks: banks{maps: make(map[string]*ebpf.Map), inner: make(map[string]*ebpf.MapSpec)}}
	defer func() {
		if err != nil {
			t.Close()
		}
	}()
	cgroup, err := os.Open(c.Cgroup)
	if err != nil {
		return nil, fmt.Errorf("open cgroup: %w", err)
	}
	defer cgroup.Close()
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("create pin directory: %w", err)
	}
	spec, err := loadTuneSockops()
	if err != nil {
		return nil, err
	}
	others, err := otherLayouts(c.Dir, dir)
	if err != nil {
		return nil, err
	}
	for name, m := range spec.Maps {
		if m.Type == ebpf.ArrayOfMaps {
			t.inner[name] = m.InnerMap
		}
		if isVariables(name) {
			continue
		}
		pin := name
		if name == "learned" {
			pin += layoutMark + layoutHash(map[string]*ebpf.MapSpec{name: m}, nil)
			if err := sharePin(pin, dir, others); err != nil {
				return nil, err
			}
		}
		if t.maps[name], err = openMapAs(dir, pin, m); err != nil {
			return nil, err
		}
	}
	hz, err := Hz()
	if err != nil {
		return nil, err
	}
	if err := spec.Variables["hz"].Set(hz); err != nil {
		return nil, err
	}
	if t.program, err = loadProgram(spec, "tune_sockops", t.maps); err != nil {
		return nil, err
	}
	if c.Ready != nil {
		if err := c.Ready(t); err != nil {
			return nil, err
		}
	}
	for _, other := range others {
		if err := t.replace(other, cgroup); err != nil {
			return nil, err
		}
	}
	t.link, err = t.attach(cgroup)
	return t, err
}

// sharePin pins a map in dir that is pinned under the same name in another
// directory, unless there is one already.
func sharePin(name, dir string, others []string) error {
	path := filepath.Join(dir, name)
	if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
		return err
	}
	for _, other := range others {
		m, err := ebpf.LoadPinnedMap(filepath.Join(other, name), nil)
		if err != nil {
			continue // none, or none that can be used
		}
		// Cloned: a map that knows its pin would move it.
		clone, err := m.Clone()
		m.Close()
		if err != nil {
			return fmt.Errorf("adopt map %s: %w", name, err)
		}
		err = clone.Pin(path)
		clone.Close()
		if err != nil {
			return fmt.Errorf("pin map %s: %w", name, err)
		}
		return nil
	}
	return nil
}

// replace gives the program to the link that another layout has pinned, takes the
// link's pin, and removes what remains of that layout.
func (t *Tune) replace(other string, cgroup *os.File) error {
	from, to := filepath.Join(other, pinTuneLink), filepath.Join(t.dir, pinTuneLink)
	_, err := os.Stat(to)
	if l, linkErr := link.LoadPinnedLink(from, nil); linkErr == nil && errors.Is(err, os.ErrNotExist) {
		defer l.Close()
		if same, err := attachedTo(l, cgroup); err == nil && same {
			if err := l.Update(t.program); err != nil {
				return fmt.Errorf("update %s: %w", pinTuneLink, err)
			}
			if err := os.Rename(from, to); err != nil {
				return fmt.Errorf("move %s: %w", pinTuneLink, err)
			}
		}
	}
	return removeTune(other)
}

func (t *Tune) attach(cgroup *os.File) (link.Link, error) {
	return ensureLink(t.dir, pinTuneLink, t.program, cgroup, func() (link.Link, error) {
		return link.AttachCgroup(link.CgroupOptions{Path: cgroup.Name(), Attach: ebpf.AttachCGroupSockOps, Program: t.program})
	})
}

// Move attaches the program, as it is loaded, with the rules that it has, to another
// cgroup, given by its folder: one that was made in the place of the one before.
func (t *Tune) Move(path string) error {
	cgroup, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("open cgroup: %w", err)
	}
	defer cgroup.Close()
	l, err := t.attach(cgroup)
	if err != nil {
		return err
	}
	old := t.link
	t.link, t.cgroup = l, path
	return old.Close()
}

// isVariables tells the maps that hold a program's variables from others.
func isVariables(name string) bool { return name[0] == '.' }

// Close releases this process' hold. Pinned maps and the link stay.
func (t *Tune) Close() error {
	var errs []error
	if t.link != nil {
		errs = append(errs, t.link.Close())
	}
	if t.program != nil {
		errs = append(errs, t.program.Close())
	}
	for _, m := range t.maps {
		if m != nil {
			errs = append(errs, m.Close())
		}
	}
	return errors.Join(errs...)
}

// RemoveTune ends the tuning whose pins are in dir, in any layout. Open
// connections keep what was set on them.
func RemoveTune(dir string) error { return eachLayout(dir, removeTune) }

func removeTune(dir string) error {
	path := filepath.Join(dir, pinTuneLink)
	l, err := link.LoadPinnedLink(path, nil)
	if err == nil {
		err = errors.Join(l.Detach(), l.Unpin())
		l.Close()
		if err != nil {
			return fmt.Errorf("remove %s: %w", pinTuneLink, err)
		}
	}
	return os.RemoveAll(dir)
}

// Unpin removes the pins: the tuning ends with this process.
func (t *Tune) Unpin() error {
	if err := os.RemoveAll(t.dir); err != nil {
		return fmt.Errorf("remove pins: %w", err)
	}
	return nil
}

// SetScope keeps a record with the pins.
func (t *Tune) SetScope(s Scope) error { return setScope(t.dir, s) }

// TuningID tells the tuning that is pinned in dir from one that was there before:
// it is the id of its map of connections.
func TuningID(dir string) (ebpf.MapID, error) {
	m, err := tunedConnections(dir)
	if err != nil {
		return 0, err
	}
	defer m.Close()
	info, err := m.Info()
	if err != nil {
		return 0, fmt.Errorf("read tuning: %w", err)
	}
	id, _ := info.ID() // known since Linux 4.13
	return id, nil
}

// tunedConnections opens the map of the connections of a pinned tuning.
func tunedConnections(dir string) (*ebpf.Map, error) {
	dir, err := inLayout(dir, tuneLayout)
	if err != nil {
		return nil, err
	}
	path := filepath.Join(dir, "connections")
	m, err := ebpf.LoadPinnedMap(path, nil)
	if err != nil {
		return nil, fmt.Errorf("open pinned map %s: %w", path, err)
	}
	return m, nil
}

// Attached tells whether the cgroup that stands where it did is the one that is
// tuned: it may have been removed, and made anew.
func (t *Tune) Attached() bool {
	cgroup, err := os.Open(t.cgroup)
	if err != nil {
		return false
	}
	defer cgroup.Close()
	same, err := attachedTo(t.link, cgroup)
	return err == nil && same
}

// Install makes rules take effect, in one step: a connection is decided by
// the rules before or by these. Connections that have a rule keep it. A rule
// whose content was there before keeps its number, and so its counts.
func (t *Tune) Install(r *TuneRules) error {
	ids, err := t.installRules(r.Rules)
	if err != nil {
		return err
	}
	if err := t.install(&r.MatchRules, ids); err != nil {
		return err
	}
	return t.retireRules(ids)
}

// Rules are all rules that are remembered, by number: those in force, and
// those that connections still have.
func (t *Tune) Rules() (map[uint32]*TuneRule, error) {
	rules := make(map[uint32]*TuneRule)
	var (
		id   uint32
		rule TuneRule
	)
	entries := t.maps["rules"].Iterate()
	for entries.Next(&id, &rule) {
		copied := rule
		rules[id] = &copied
	}
	if err := entries.Err(); err != nil {
		return nil, fmt.Errorf("read rules: %w", err)
	}
	return rules, nil
}

// installRules finds or makes the numbers of rules.
func (t *Tune) installRules(wanted []TuneRule) ([]uint32, error) {
	known, err := t.Rules()
	if err != nil {
		return nil, err
	}
	last := uint32(0)
	for id := range known {
		last = max(last, id)
	}
	ids := make([]uint32, len(wanted))
	for i, rule := range wanted {
		for _, id := range slices.Sorted(maps.Keys(known)) {
			if !slices.Contains(ids[:i], id) && sameRule(known[id], &rule) {
				ids[i] = id
			}
		}
		if ids[i] != 0 {
			if old := known[ids[i]]; old.Retired != 0 {
				old.Retired = 0
				if err := t.maps["rules"].Put(ids[i], old); err != nil {
					return nil, fmt.Errorf("write rule: %w", err)
				}
			}
			continue
		}
		last++
		ids[i] = last
		rule.Seed = randomSeed()
		// Counts first: a rule is counted from its first connection on.
		for arm := range TuneArms {
			if err := t.maps["stats"].Put(TuneStatsKey{Rule: last, Arm: uint32(arm)}, &TuneStats{}); err != nil {
				return nil, fmt.Errorf("make counts of rule: %w", err)
			}
		}
		if err := t.maps["rules"].Put(last, &rule); err != nil {
			return nil, fmt.Errorf("write rule: %w", err)
		}
	}
	return ids, nil
}

func randomSeed() uint32 {
	var b [4]byte
	rand.Read(b[:])
	return binary.LittleEndian.Uint32(b[:])
}

// sameRule compares what rules do.
func sameRule(a, b *TuneRule) bool {
	x, y := *a, *b
	x.Seed, x.Retired, y.Seed, y.Retired = 0, 0, 0, 0
	return x == y
}

// A handshake that began with a rule that is dropped still gets all of it: a
// SYN is repeated for less than this (tcp_syn_retries of 6).
const handshakes = 150 * time.Second

// maxRetired bounds the rules kept for connections that still have them.
const maxRetired = 1024

// retireRules marks the rules that are not in force, and forgets those that no
// connection can have any more.
func (t *Tune) retireRules(inForce []uint32) error {
	rules, err := t.Rules()
	if err != nil {
		return err
	}
	now := bootTime()
	var retired []uint32
	for _, id := range slices.Sorted(maps.Keys(rules)) {
		rule := rules[id]
		switch {
		case slices.Contains(inForce, id):
		case rule.Retired == 0:
			rule.Retired = uint64(now)
			if err := t.maps["rules"].Put(id, rule); err != nil {
				return fmt.Errorf("write rule: %w", err)
			}
			retired = append(retired, id)
		default:
			retired = append(retired, id)
		}
	}
	for i, id := range retired {
		used, err := t.used(id, rules[id])
		if err != nil {
			return err
		}
		age := now - time.Duration(rules[id].Retired)
		if used && len(retired)-i <= maxRetired || age < handshakes && len(retired)-i <= maxRetired {
			continue
		}
		if err := t.forgetRule(id); err != nil {
			return err
		}
	}
	return nil
}

// used tells whether a connection may still have the rule.
func (t *Tune) used(id uint32, rule *TuneRule) (bool, error) {
	if rule.Flags&(TuneFlagLive|TuneFlagClose) == 0 {
		return false, nil
	}
	for arm := range TuneArms {
		s, err := t.Stats(id, arm)
		if err != nil {
			return false, err
		}
		if s.Connections > s.Closed {
			return true, nil
		}
	}
	return false, nil
}

func (t *Tune) forgetRule(id uint32) error {
	errs := []error{t.maps["rules"].Delete(id)}
	for arm := range TuneArms {
		errs = append(errs, t.maps["stats"].Delete(TuneStatsKey{Rule: id, Arm: uint32(arm)}))
	}
	failures, err := t.Failures()
	errs = append(errs, err)
	for f := range failures {
		if f.Rule == id {
			errs = append(errs, t.maps["failures"].Delete(f))
		}
	}
	for i, err := range errs {
		if errors.Is(err, ebpf.ErrKeyNotExist) {
			errs[i] = nil
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("forget rule %d: %w", id, err)
	}
	return nil
}

// bootTime is CLOCK_BOOTTIME, as bpf_ktime_get_boot_ns reads it.
func bootTime() time.Duration {
	var now unix.Timespec
	// It cannot fail for a clock that every kernel has.
	_ = unix.ClockGettime(unix.CLOCK_BOOTTIME, &now)
	return time.Duration(now.Nano())
}

// Stats are the counts of a rule's arm, 0 to TuneArms-1. A rule that is not
// known has none.
func (t *Tune) Stats(rule uint32, arm int) (*TuneStats, error) {
	var s TuneStats
	err := t.maps["stats"].Lookup(TuneStatsKey{Rule: rule, Arm: uint32(arm)}, &s)
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return nil, fmt.Errorf("read counts of rule %d: %w", rule, err)
	}
	return &s, nil
}

// Failures counts the options that could not be set, by rule, option and errno.
func (t *Tune) Failures() (map[TuneFailure]uint64, error) {
	failures := make(map[TuneFailure]uint64)
	var (
		key   TuneFailure
		count uint64
	)
	entries := t.maps["failures"].Iterate()
	for entries.Next(&key, &count) {
		failures[key] = count
	}
	if err := entries.Err(); err != nil {
		return nil, fmt.Errorf("read failures: %w", err)
	}
	return failures, nil
}

// Learned is what is known of prefixes.
func (t *Tune) Learned() (map[TuneLearnedKey]TuneLearned, error) {
	learned := make(map[TuneLearnedKey]TuneLearned)
	var (
		key   TuneLearnedKey
		value TuneLearned
	)
	entries := t.maps["learned"].Iterate()
	for entries.Next(&key, &value) {
		learned[key] = value
	}
	if err := entries.Err(); err != nil {
		return nil, fmt.Errorf("read what is learned: %w", err)
	}
	return learned, nil
}

// Connection is what is known of the connection of a socket; nil if no rule
// has matched it.
func (t *Tune) Connection(fd int) (*TuneConnection, error) {
	var c TuneConnection
	err := t.maps["connections"].Lookup(int32(fd), &c)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read rule of socket: %w", err)
	}
	return &c, nil
}

// Storage is the descriptor of the sk_storage map that Connection reads. sock_diag(7)
// reads it of sockets without a descriptor; see DecodeConnection.
func (t *Tune) Storage() int { return t.maps["connections"].FD() }

// DecodeConnection reads a value of the map of Storage; nil for none.
func DecodeConnection(value []byte) (*TuneConnection, error) {
	if len(value) == 0 {
		return nil, nil
	}
	var c TuneConnection
	n, err := binary.Decode(value, binary.NativeEndian, &c)
	if err == nil && n != len(value) {
		err = fmt.Errorf("it has %d bytes, want %d", len(value), n)
	}
	if err != nil {
		return nil, fmt.Errorf("read rule of socket: %w", err)
	}
	return &c, nil
}

// Live gives rules to sockets that are open already. It is attached to the
// cgroup until it is closed.
type Live struct {
	link  link.Link
	nonce uint64
}

// Live attaches the hook. If the kernel does not let it set options, the error
// wraps ebpf.ErrNotSupported.
func (t *Tune) Live() (_ *Live, err error) {
	l := &Live{}
	defer func() {
		if err != nil {
			l.Close()
		}
	}()
	var b [8]byte
	rand.Read(b[:])
	l.nonce = binary.LittleEndian.Uint64(b[:])
	hook, err := t.loadLive("tune_live", l.nonce)
	if lacksHelper(err) {
		return nil, fmt.Errorf("set options of open connections: %w before Linux 5.15: %w", ebpf.ErrNotSupported, err)
	}
	if err != nil {
		return nil, err
	}
	defer hook.Close()
	l.link, err = link.AttachCgroup(link.CgroupOptions{Path: t.cgroup, Attach: ebpf.AttachCGroupSetsockopt, Program: hook})
	if err != nil {
		return nil, fmt.Errorf("attach tune_live to cgroup %s: %w", t.cgroup, err)
	}
	return l, nil
}

// lacksHelper tells whether the verifier refused a function of the kernel.
func lacksHelper(err error) bool {
	var refused *ebpf.VerifierError
	return errors.As(err, &refused) && slices.ContainsFunc(refused.Log, func(line string) bool {
		return strings.Contains(line, "unknown func") || strings.Contains(line, "cannot use helper")
	})
}

func (t *Tune) loadLive(name string, nonce uint64) (*ebpf.Program, error) {
	spec, err := loadTuneLive()
	if err != nil {
		return nil, err
	}
	if err := spec.Variables["nonce"].Set(nonce); err != nil {
		return nil, err
	}
	for other := range spec.Programs {
		if other != name {
			delete(spec.Programs, other)
		}
	}
	return loadProgram(spec, name, t.maps)
}

// Close detaches the hook.
func (l *Live) Close() error {
	if l.link == nil {
		return nil
	}
	return l.link.Close()
}

// Adopt gives the connection of a socket the rule that it would have had, and
// what of the rule can be set on an open connection. Tune.Connection tells
// which it was.
func (l *Live) Adopt(fd int, role uint32) error {
	return l.call(fd, TuneLiveAdopt, TuneLiveRequest{Role: role})
}

// Set sets an option as bpf_setsockopt does.
func (l *Live) Set(fd int, level, name uint32, value int32) error {
	return l.call(fd, TuneLiveSet, TuneLiveRequest{Level: level, Name: name, Value: value})
}

// Forget takes the rule off a connection. What was set stays set.
func (l *Live) Forget(fd int) error { return l.call(fd, TuneLiveForget, TuneLiveRequest{}) }

// Listen prepares a listener for tags. Its error wraps ebpf.ErrNotSupported if
// the kernel lets it read tags only.
func (l *Live) Listen(fd int) error {
	err := l.call(fd, TuneLiveListen, TuneLiveRequest{})
	if errors.Is(err, unix.EPERM) {
		// The hook's answer when callbacks cannot be switched on.
		return fmt.Errorf("write tags into SYN-ACKs of an open listener: %w before Linux 6.12: %w", ebpf.ErrNotSupported, err)
	}
	return err
}

func (l *Live) call(fd int, name uint32, r TuneLiveRequest) error {
	r.Nonce = l.nonce
	value := unsafe.String((*byte)(unsafe.Pointer(&r)), unsafe.Sizeof(r))
	// A socket outside of the hook's cgroup gives ENOPROTOOPT.
	return os.NewSyscallError("setsockopt", unix.SetsockoptString(fd, TuneLiveLevel, int(name), value))
}

// Decide asks the rules in force which rule a connection would have, by the
// program's own code. 0 is none.
func (t *Tune) Decide(questions ...MatchQuestion) ([]uint32, error) {
	p, err := t.loadLive("tune_decide", 0)
	if err != nil {
		return nil, err
	}
	defer p.Close()
	answers := make([]uint32, len(questions))
	for i := range questions {
		packet := make([]byte, 14, 14+unsafe.Sizeof(questions[i]))
		packet = append(packet, unsafe.Slice((*byte)(unsafe.Pointer(&questions[i])), unsafe.Sizeof(questions[i]))...)
		if answers[i], _, err = p.Test(packet); err != nil {
			return nil, fmt.Errorf("ask tune_decide: %w", err)
		}
	}
	return answers, nil
}

// ProgramID is the number of the program that is attached.
func (t *Tune) ProgramID() (uint32, error) {
	info, err := t.link.Info()
	if err != nil {
		return 0, fmt.Errorf("read link: %w", err)
	}
	return uint32(info.Program), nil
}

// SockOps lists the sock_ops programs that are attached to a cgroup itself, by
// number, in the order in which they run. It needs CAP_NET_ADMIN.
func SockOps(cgroup string) ([]uint32, error) {
	dir, err := os.Open(cgroup)
	if err != nil {
		return nil, fmt.Errorf("open cgroup: %w", err)
	}
	defer dir.Close()
	attached, err := link.QueryPrograms(link.QueryOptions{Target: int(dir.Fd()), Attach: ebpf.AttachCGroupSockOps})
	if err != nil {
		return nil, fmt.Errorf("list sock_ops programs of cgroup %s: %w", cgroup, err)
	}
	ids := make([]uint32, len(attached.Programs))
	for i, p := range attached.Programs {
		ids[i] = uint32(p.ID)
	}
	return ids, nil
}
