// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/bpf"
	"sockeye/internal/config"
	"sockeye/internal/fault"
	"sockeye/internal/member"
	"sockeye/internal/steer/placement"
)

// service keeps one service of the policy in step with the host: its data
// path, and who sits in which slot. Packets never wait for it.
type service struct {
	host *steerHost
	log  *slog.Logger

	mu         sync.Mutex
	config     config.Service
	rules      []member.Rule
	users      []uint32 // to whom members and their sockets belong; none: those of claims decide
	memberHost *member.Host
	mapping    *placement.Mapping
	// The contents of the device map in force; nil: not known. And the one to come.
	installedEntries *placement.Entries
	pendingDevices   builtDeviceMap
	state            state
	path             *bpf.Steer
	events           *bpf.Events
	netns            *os.File
	netnsInode       uint64                         // of netns
	rows             [bpf.MaxListeners]bpf.Listener // zero: free
	listeners        map[int]config.Listener        // by row

	firstSeen      map[member.ID]*member.Process // as first seen: nfacctd writes over its arguments
	seats          map[int]*seat                 // by slot
	waiting        map[int]*waitingProcess       // by process id
	refusals       refusals                      // processes that only look like members
	probesLeft     int                           // how many more processes may be looked into for a refusal
	lastRefusalLog time.Time                     // when one was logged last
	waitingFull    bool                          // others wait, too
	socketOwners   map[uint64]member.ID          // whose a registered socket is, or was
	boundBy        map[uint64]int                // process id by cookie, of sockets not yet listening
	inspected      map[int]*inspections          // by process id, of processes that bound sockets lately
	keeperSockets  map[int]int                   // descriptor by row
	keeper         *keeper
	previousRows   [bpf.MaxListeners]bpf.Listener // the rows of the agent before
	lostEvents     uint64
	// A scan was less than a period ago, and another one is due after it.
	scannedRecently, scanPending bool
	checks                       checks
	everOpened                   map[int]bool            // slots that have been open in this agent's life
	adopters                     map[*member.Handle]bool // of members without a slot that have adopted devices

	lastReevaluation time.Time // when those that wait were looked at for who asked

	lastSave  time.Time   // when the members were
	saveTimer *time.Timer // they are to be

	registrations      uint64
	keeperProblem      error // what keeps the service from being held
	keeperRetryPending bool  // hold is to be tried again
}

// seat is a member in its slot.
type seat struct {
	slot          int
	process       *member.Process
	handle        *member.Handle
	source        string             // which rule or command made it a member
	claimed       bool               // a command did
	allowedOwners []uint32           // to whom its sockets may belong
	sockets       map[int]socketInfo // by row
	duplicate     error              // a socket beside those, which gets nothing
	ancestors     []int              // its ancestors when it was seated; later it has no others
}

type socketInfo struct {
	cookie uint64
	local  string
}

// waiting is a process that would be a member, and what it lacks.
type waitingProcess struct {
	process *member.Process
	handle  *member.Handle
	source  string
	slot    int // or member.AnySlot
	problem error
}

// openService makes or adopts a service and finds its members.
func openService(h *steerHost, log *slog.Logger, c config.Service, devices *placement.DeviceMap) (_ *service, err error) {
	s := &service{
		host: h, log: log.With("service", c.Name), config: c,
		firstSeen: make(map[member.ID]*member.Process),
		seats:     make(map[int]*seat), waiting: make(map[int]*waitingProcess),
		socketOwners: make(map[uint64]member.ID), boundBy: make(map[uint64]int), inspected: make(map[int]*inspections),
		everOpened: make(map[int]bool), checks: checks{fresh: make(map[int]bool)}, adopters: make(map[*member.Handle]bool),
		keeperSockets: make(map[int]int), refusals: make(refusals),
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	defer func() {
		if err != nil {
			s.closeLocked()
		}
	}()
	if s.rules, s.users, err = resolveMembers(c); err != nil {
		return nil, err
	}
	if s.memberHost, err = member.ReadHost(); err != nil {
		return nil, err
	}
	nonce, err := h.ensureNonce(cmp.Or(c.SlotsAs, c.Name))
	if err != nil {
		return nil, err
	}
	if s.state, _, err = loadState(s.statePath()); err != nil {
		return nil, err
	}
	s.state.Nonce = nonce
	dir := h.Root.Service(c.Name)
	for _, m := range s.state.Members {
		s.firstSeen[m.ID] = member.FromRecord(m.PID, m.StartTime, m.Args, m.SlotVariable, m.Exe, m.File)
	}
	for _, o := range s.state.Sockets {
		s.recordSocketOwner(o.ID, o.Cookies...)
	}
	if err := s.saveGroupOwner(); err != nil {
		return nil, err
	}
	if err := s.openNetns(); err != nil {
		return nil, err
	}
	if s.mapping, err = newMapping(c, s.state.Nonce, devices); err != nil {
		return nil, err
	}
	s.pruneAdopted()
	old, err := bpf.ReadListeners(dir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	s.previousRows = old
	s.assignRows(old)
	if err := s.openPath(); err != nil {
		return nil, err
	}
	if err := s.restore(); err != nil {
		return nil, err
	}
	s.suspectAll()
	return s, nil
}

func (s *service) statePath() string { return s.host.statePath(s.config.Name) }

func (h *steerHost) statePath(service string) string {
	return filepath.Join(h.StateDir, service+".json")
}

// findNonce is that of a service of this host, running or not: what is pinned counts.
func (h *steerHost) lookupNonce(name string) (nonce uint64, known bool, err error) {
	switch nonce, err := bpf.ReadNonce(h.Root.Service(name)); {
	case err == nil:
		return nonce, true, nil
	case !errors.Is(err, os.ErrNotExist):
		return 0, false, err
	}
	s, known, err := loadState(h.statePath(name))
	return s.Nonce, known, err
}

// nonce is that of a service, which is made and kept where there is none.
func (h *steerHost) ensureNonce(name string) (uint64, error) {
	nonce, known, err := h.lookupNonce(name)
	if err != nil || known {
		return nonce, err
	}
	s, _, err := loadState(h.statePath(name))
	if err != nil {
		return 0, err
	}
	s.Nonce = newNonce()
	return s.Nonce, s.save(h.statePath(name))
}

// nonceFor is the nonce that the service has by a policy: that of the service whose slots it has, or its own.
func (s *service) nonceFor(c config.Service) (uint64, error) {
	if c.SlotsAs == "" {
		return s.state.Nonce, nil
	}
	nonce, known, err := s.host.lookupNonce(c.SlotsAs)
	if !known {
		nonce = s.state.Nonce // the other is to be added
	}
	return nonce, err
}

// enter is the network namespace in which sockets are made; nil is the
// agent's own, which needs no right to enter.
func (s *service) socketNetns() *os.File {
	if s.config.Netns == "" {
		return nil
	}
	return s.netns
}

func (s *service) openNetns() error {
	name := cmp.Or(s.config.Netns, "/proc/thread-self/ns/net")
	// A FIFO that is named by mistake must not be waited for.
	netns, err := os.OpenFile(name, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return fault.Unreadable(fmt.Errorf("open network namespace: %w", err), "create it, or correct netns")
	}
	var stat unix.Stat_t
	if err := unix.Fstat(int(netns.Fd()), &stat); err != nil {
		netns.Close()
		return fmt.Errorf("open network namespace %s: %w", name, err)
	}
	if kind, err := unix.IoctlRetInt(int(netns.Fd()), unix.NS_GET_NSTYPE); err != nil || kind != unix.CLONE_NEWNET {
		netns.Close()
		return fault.Usage(fmt.Errorf("open network namespace: %s is none", name), "correct netns, as in /run/netns/NAME")
	}
	s.netns, s.netnsInode = netns, stat.Ino
	return nil
}

// readDevices reads the device map of a service, if it has one. That takes a second for a million lines.
func readDevices(c config.Service) (*placement.DeviceMap, error) {
	if c.DeviceMap == "" {
		return nil, nil
	}
	devices, err := placement.LoadDeviceMap(c.DeviceMap)
	if err != nil {
		return nil, fault.Unreadable(err, "")
	}
	return devices, nil
}

func newMapping(c config.Service, nonce uint64, devices *placement.DeviceMap) (*placement.Mapping, error) {
	standby := bpf.NoSlot
	if c.Standby != nil {
		standby = *c.Standby
	}
	return placement.NewMapping(c.Slots, standby, nonce, devices)
}

func bpfListener(l config.Listener) bpf.Listener {
	protocol := uint8(unix.IPPROTO_TCP)
	if l.Protocol == config.UDP {
		protocol = unix.IPPROTO_UDP
	}
	return bpf.Listener{Protocol: protocol, Address: l.Address, V6Only: l.V6Only}
}

// assignRows gives every listener of the policy the row that it had, or a
// free one.
func (s *service) assignRows(old [bpf.MaxListeners]bpf.Listener) {
	s.rows = [bpf.MaxListeners]bpf.Listener{}
	s.listeners = make(map[int]config.Listener)
	var fresh []config.Listener
	for _, l := range s.config.Listeners {
		row := slices.Index(old[:], bpfListener(l))
		if row < 0 {
			fresh = append(fresh, l)
			continue
		}
		s.rows[row], s.listeners[row] = old[row], l
	}
	for _, l := range fresh {
		row := slices.Index(s.rows[:], bpf.Listener{})
		s.rows[row], s.listeners[row] = bpfListener(l), l
	}
}

// memberPorts is where members bind in a listener's place.
func memberPorts(l config.Listener) (first, last uint16) {
	if l.MemberPorts.First == 0 {
		return l.Address.Port(), l.Address.Port()
	}
	return l.MemberPorts.First, l.MemberPorts.Last
}

// memberPlace is what a member has to open for a listener.
func memberAddress(l config.Listener) string {
	if l.MemberPorts.First == 0 {
		return l.String()
	}
	return fmt.Sprintf("%s port %s", l.Protocol, l.MemberPorts)
}

func (s *service) usesLookup() bool { return s.config.Steering == config.Lookup }

// open makes the data path what the policy says, and the mapping with it.
func (s *service) openPath() error {
	c := bpf.SteerConfig{
		Dir:       s.host.Root.Service(s.config.Name),
		Lookup:    s.usesLookup(),
		Listeners: s.rows,
		Devices:   s.config.TrackDevices,
		Netns:     s.netns,
		Cgroup:    filepath.Join(s.host.Cgroups.Mount, s.config.Cgroup),
	}
	for _, row := range slices.Sorted(maps.Keys(s.listeners)) {
		first, last := memberPorts(s.listeners[row])
		c.Ports = append(c.Ports, bpf.Ports{First: first, Last: last, Protocol: s.rows[row].Protocol})
	}
	path, err := bpf.OpenSteer(c)
	if err != nil {
		return err
	}
	if s.events != nil {
		s.events.Close()
	}
	if s.path != nil {
		s.path.Close()
	}
	s.path = path
	if err := s.installMapping(); err != nil {
		return err
	}
	if s.lostEvents, err = path.LostEvents(); err != nil {
		return err
	}
	if s.events, err = path.Events(); err != nil {
		return err
	}
	go s.watch(s.events)
	return nil
}

// builtDevices is a device map for the kernel, and its contents.
type builtDeviceMap struct {
	entries *placement.Entries
	trie    *bpf.DeviceTrie // nil if it is empty
}

// buildDevices takes seconds for a million prefixes.
func buildDeviceMap(entries *placement.Entries) (b builtDeviceMap, err error) {
	b.entries = entries
	if size := entries.Size(); size > 0 {
		b.trie, err = bpf.NewDeviceTrie(size, entries.All())
	}
	return b, err
}

func (b *builtDeviceMap) close() {
	if b.trie != nil {
		b.trie.Close()
	}
	*b = builtDeviceMap{}
}

// installMapping gives the mapping to the data path, in one step. The device map that is
// in force stays if it is the same.
func (s *service) installMapping() error {
	s.mapping.Except(s.exceptions())
	entries := s.mapping.Entries()
	if s.installedEntries != nil && s.installedEntries.Equal(entries) {
		s.installedEntries = entries
		return s.path.SetTable(&s.mapping.Table)
	}
	if s.pendingDevices.entries == nil || !s.pendingDevices.entries.Equal(entries) {
		s.pendingDevices.close()
		built, err := buildDeviceMap(entries)
		if err != nil {
			return err
		}
		s.pendingDevices = built
	}
	defer s.pendingDevices.close()
	s.installedEntries = nil
	if err := s.path.SetMapping(&s.mapping.Table, s.pendingDevices.trie); err != nil {
		return err
	}
	s.installedEntries = entries
	return nil
}

// adopt takes over what an earlier agent left, then finds new members. At the
// end all programs decide.
func (s *service) restore() error {
	if err := s.restoreKeeper(); err != nil {
		return err
	}
	for slot := range bpf.MaxSlots {
		if err := s.restoreSlot(slot); err != nil {
			return err
		}
	}
	if err := s.scan(); err != nil {
		return err
	}
	return s.reconcileKeeper()
}

// adoptSlot keeps a member that is still what the pins say of it, and clears
// the slot otherwise.
func (s *service) restoreSlot(slot int) error {
	value, err := s.path.Slot(slot)
	if err != nil {
		return err
	}
	if value == (bpf.Slot{}) {
		return s.closeIncompleteSlot(slot)
	}
	p, err := s.read(int(value.Pid))
	if err == nil && p.StartTime == value.StartTime && value.Ready == 1 && slot < s.config.Slots {
		var handle *member.Handle
		if handle, err = member.Open(p.PID); err == nil {
			seat := &seat{slot: slot, process: p, handle: handle, sockets: make(map[int]socketInfo)}
			if _, err = s.membership(p, seat); err == nil && s.loadSeatSockets(seat) {
				err = s.checkSeatSockets(seat)
			} else if err == nil {
				err = fs.ErrNotExist
			}
			if err == nil {
				s.occupySlot(seat)
				s.learnGroupOwner(seat)
				s.log.Info("member adopted", "slot", slot, "pid", p.PID)
				return nil
			}
			handle.Close()
		}
	}
	// A process that it forked may hold its sockets on.
	for row := range s.listeners {
		if cookie, err := s.path.Cookie(row, slot); err == nil && cookie != 0 {
			s.recordSocketOwner(member.ID{PID: int(value.Pid), StartTime: value.StartTime}, cookie)
		}
	}
	switch {
	case slot >= s.config.Slots:
		s.log.Info("slot cleared", "slot", slot, "pid", value.Pid, "reason", "slot removed")
	case err == nil, errors.Is(err, fs.ErrNotExist):
		s.log.Info("slot cleared", "slot", slot, "pid", value.Pid, "reason", "process ended, or lacks a socket")
	default:
		s.log.Warn("member not adopted", "slot", slot, "pid", value.Pid, "error", err)
	}
	return s.closeSlot(slot)
}

// clearHalfOpen takes out what an agent registered that ended before it opened
// the slot.
func (s *service) closeIncompleteSlot(slot int) error {
	for row := range s.listeners {
		cookie, err := s.path.Cookie(row, slot)
		if err != nil {
			return err
		}
		if cookie != 0 {
			return s.closeSlot(slot)
		}
	}
	return nil
}

// complete fills in the sockets of a seat from the pins, and tells whether
// there is one for each listener.
func (s *service) loadSeatSockets(seat *seat) bool {
	for row, l := range s.listeners {
		cookie, err := s.path.Cookie(row, seat.slot)
		if err != nil || cookie == 0 {
			return false
		}
		seat.sockets[row] = socketInfo{cookie, l.String()}
	}
	return true
}

// seat puts a member into its slot, in this process' view, and waits for its
// end.
func (s *service) occupySlot(seat *seat) {
	s.seats[seat.slot] = seat
	seat.ancestors = ancestors(seat.process)
	for _, socket := range seat.sockets {
		s.recordSocketOwner(member.ID{PID: seat.process.PID, StartTime: seat.process.StartTime}, socket.cookie)
	}
	handle := seat.handle
	go func() {
		if handle.Wait() != nil {
			return // closed: the seat was cleared for another reason
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.seats[seat.slot] == seat {
			s.vacateSlot(seat.slot, "process ended")
		}
		s.forgetAdopter(handle)
	}()
}

// release gives up what this process holds. The data path goes on.
func (s *service) closeLocked() {
	s.flushMembers()
	if s.checks.timer != nil {
		s.checks.timer.Stop()
	}
	if s.events != nil {
		s.events.Close()
		s.events = nil
	}
	if s.path != nil {
		s.path.Close()
	}
	for _, seat := range s.seats {
		seat.handle.Close()
	}
	for handle := range s.adopters {
		handle.Close()
	}
	for pid := range s.waiting {
		s.forgetWaiting(pid)
	}
	for _, fd := range s.keeperSockets {
		unix.Close(fd)
	}
	clear(s.keeperSockets)
	if s.keeper != nil {
		s.keeper.close()
	}
	if s.netns != nil {
		s.netns.Close()
	}
}

func (s *service) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closeLocked()
}
