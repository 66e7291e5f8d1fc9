// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"cmp"
	"errors"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/bpf"
	"sockeye/internal/config"
	"sockeye/internal/fault"
	"sockeye/internal/member"
	"sockeye/internal/placement"
	"sockeye/internal/steer/bypass"
	"sockeye/internal/steer/core"
	"sockeye/internal/steer/keeper"
	"sockeye/internal/steer/listener"
	"sockeye/internal/steer/moves"
	"sockeye/internal/steer/notadmitted"
	"sockeye/internal/steer/rooms"
	"sockeye/internal/steer/split"
	"sockeye/internal/steer/stored"
	"sockeye/internal/steer/traffic"
)

// service reconciles one service of the policy with the host: the data path, and the member of each slot.
type service struct {
	core.Service

	rules      []member.Rule
	memberHost *member.Host
	// installedEntries are the contents of the device map in the kernel, nil if unknown; pendingDevices is the next
	// device map, already built.
	installedEntries *placement.Entries
	pendingDevices   builtDeviceMap

	firstSeen    map[member.ID]*member.Process // attributes of the first inspection: nfacctd overwrites its arguments
	waiting      map[int]*waitingProcess       // by process id
	notAdmitted  notadmitted.Table             // processes that match a rule and are not admitted
	probesLeft   int                           // remaining number of processes whose descriptors may be read for a refusal
	waitingFull  bool                          // waiting is full, and this was logged
	socketOwners map[uint64]member.ID          // member that registered a socket, by cookie
	boundBy      map[uint64]int                // process id of sockets that do not listen yet, by cookie
	inspected    map[int]*inspections          // by process id, for processes that bound a socket in this period
	keeper       *keeper.Process
	previousRows [bpf.MaxListeners]bpf.Listener // rows that the previous agent pinned
	lostEvents   uint64
	// scannedRecently: the last rate-limited scan was less than a period ago. scanPending: another scan follows.
	scannedRecently, scanPending bool
	checks                       *split.Checks
	moves                        *moves.Moves
	rooms                        *rooms.Rooms
	traffic                      *traffic.Traffic
	emptying                     bool // all members are removed: no process gets a slot that becomes empty
	ignoresSettings              bool // the settings of the slots leave no slot for any device

	lastReevaluation time.Time // time of the last evaluation of waiting processes for a status request

	lastSave  time.Time   // time of the last save of the members
	saveTimer *time.Timer // timer of the next save; nil: none is due

	registrations      map[int]uint64 // by slot
	keeperProblem      error          // error of reconcileKeeper; nil: the ports are held
	keeperRetryPending bool           // the next attempt of reconcileKeeper is scheduled
	past               *bypass.Watch
}

// openService creates or restores a service and registers its members.
func openService(h *core.Host, log *slog.Logger, c config.Service, devices *placement.DeviceMap) (_ *service, err error) {
	s := &service{
		Service: core.Service{
			Host: h, Log: log.With("service", c.Name), Name: c.Name, Config: c,
			Seats: make(map[int]*core.Seat), Formers: make(map[member.ID]*core.Seat), KeeperSockets: make(map[int]int), Restoring: true,
		},
		firstSeen:    make(map[member.ID]*member.Process),
		waiting:      make(map[int]*waitingProcess),
		socketOwners: make(map[uint64]member.ID), boundBy: make(map[uint64]int), inspected: make(map[int]*inspections),
		registrations: make(map[int]uint64),
	}
	s.Actions = s
	s.rooms = rooms.New(&s.Service)
	s.traffic = traffic.New(&s.Service, s.rooms)
	s.moves = moves.New(&s.Service, s.rooms)
	s.past = bypass.New(&s.Service, s.rooms.IsPrepared)
	s.checks = split.New(&s.Service, s.rooms, s.moves)
	s.Mu.Lock()
	defer s.Mu.Unlock()
	defer func() {
		if err != nil {
			s.closeLocked()
		}
	}()
	if s.rules, s.Users, err = core.ResolveMembers(c); err != nil {
		return nil, err
	}
	if s.memberHost, err = member.ReadHost(); err != nil {
		return nil, err
	}
	nonce, err := h.EnsureNonce(cmp.Or(c.SlotsAs, c.Name))
	if err != nil {
		return nil, err
	}
	var known bool
	if s.State, known, err = stored.Load(s.StatePath()); err != nil {
		return nil, err
	}
	s.State.Nonce = nonce
	dir := h.Root.Service(c.Name)
	for _, m := range s.State.Members {
		s.firstSeen[m.ID] = member.FromRecord(m.PID, m.StartTime, m.Args, m.SlotVariable, m.Exe, m.File)
	}
	for _, o := range s.State.Sockets {
		s.recordSocketOwner(o.ID, o.Cookies...)
	}
	if err := s.saveState(); err != nil {
		if !known {
			return nil, err
		}
		s.Log.Error("state not saved", "error", err) // the file has the state of the previous agent
	}
	if err := s.OpenNetns(); err != nil {
		return nil, err
	}
	if err := s.shareSettings(c); err != nil {
		return nil, err
	}
	s.Target, err = stored.NewMapping(c, &s.State, s.State.Nonce, devices)
	if errors.Is(err, placement.ErrNoWeight) {
		// The policy has fewer slots than at the last start, and the remaining ones drain.
		s.Log.Warn("states and weights of the slots are ignored: no slot would be left for any device")
		s.ignoresSettings = true
		s.Target, err = stored.NewMapping(c, &stored.State{}, s.State.Nonce, devices)
	}
	if err != nil {
		return nil, err
	}
	if s.Mapping, err = s.pinnedMapping(dir); err != nil {
		return nil, err
	}
	s.checks.PruneAdopted()
	old, err := bpf.ReadListeners(dir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	if err := s.removeOtherMode(); err != nil {
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
	s.moves.ExpirePins()
	if since := s.Path.RefusedSince(); !since.IsZero() {
		s.Log.Warn("the map of sockets has another layout than the previous version's: members were registered again, and refused until then",
			"members", len(s.Seats), "refused", time.Since(since).Round(time.Millisecond))
	}
	s.past.Start()
	return s, nil
}

// pinnedMapping returns the mapping that an earlier agent left in force, with the device map and the pins of this agent,
// or the target if there is none.
func (s *service) pinnedMapping(dir string) (*placement.Mapping, error) {
	pinned, err := bpf.ReadTable(dir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	m := s.Target.WithPins(s.PinsInForce())
	if err != nil || pinned.Nonce != s.Target.Table.Nonce || s.Config.SharesSlots {
		return m, nil
	}
	for _, slot := range pinned.Bucket {
		if int(slot) >= bpf.MaxSlots {
			return m, nil
		}
	}
	return m.WithBuckets(&pinned.Bucket), nil
}

// shareSettings copies the settings of the slots and the pins of the service that this service shares slots with.
func (s *service) shareSettings(c config.Service) error {
	if c.SlotsAs == "" {
		return nil
	}
	of, _, err := stored.Load(s.Host.StateFile(c.SlotsAs))
	if err != nil {
		return err
	}
	s.State.Slots, s.State.Pins = of.Slots, of.Pins
	return nil
}

// removeOtherMode removes the pins and the keeper of an earlier agent that had the other steering mode: their maps have
// another type. scan finds the members again.
func (s *service) removeOtherMode() error {
	dir := s.Host.Root.Service(s.Name)
	lookup, err := bpf.UsesLookup(dir)
	if err != nil || lookup == s.UsesLookup() {
		return nil // bpf.OpenSteer reports pins that cannot be opened
	}
	s.Log.Warn("steering differs from that of the previous agent; the data path is created anew")
	return fault.Join(keeper.Retire(s.Host.Root.Dir, s.Name), bpf.Remove(dir))
}

// nonceFor returns the nonce of the service under a configuration: the nonce of the slots_as service, or its own.
func (s *service) nonceFor(c config.Service) (uint64, error) {
	if c.SlotsAs == "" {
		return s.State.Nonce, nil
	}
	nonce, known, err := s.Host.LookupNonce(c.SlotsAs)
	if !known {
		nonce = s.State.Nonce // the same policy adds the other service
	}
	return nonce, err
}

// assignRows assigns each listener of the policy to its previous row, or to a free one.
func (s *service) assignRows(old [bpf.MaxListeners]bpf.Listener) {
	before := s.Rows
	s.Rows = [bpf.MaxListeners]bpf.Listener{}
	s.Listeners = make(map[int]config.Listener)
	var fresh []config.Listener
	for _, l := range s.Config.Listeners {
		row := slices.Index(old[:], listener.ForBPF(l))
		if row < 0 {
			fresh = append(fresh, l)
			continue
		}
		s.Rows[row], s.Listeners[row] = old[row], l
	}
	for _, l := range fresh {
		row := slices.Index(s.Rows[:], bpf.Listener{})
		s.Rows[row], s.Listeners[row] = listener.ForBPF(l), l
	}
	for row, l := range before {
		if l != (bpf.Listener{}) && l != s.Rows[row] {
			s.rooms.ForgetRow(row)
		}
	}
}

// openPath opens or creates the data path of the configuration, installs the mapping in force, and watches the events.
func (s *service) openPath() error {
	c := bpf.SteerConfig{
		Dir:       s.Host.Root.Service(s.Name),
		Lookup:    s.UsesLookup(),
		Listeners: s.Rows,
		Devices:   s.Config.TrackDevices,
		Netns:     s.Netns,
		Cgroup:    filepath.Join(s.Host.Cgroups.Mount, s.Config.Cgroup),
	}
	if s.rooms.Exist() {
		c.RoomDatagrams, c.RoomBytes = uint64(s.rooms.Room().Datagrams), uint64(s.rooms.Room().Bytes)
	}
	for _, row := range slices.Sorted(maps.Keys(s.Listeners)) {
		first, last := listener.MemberPorts(s.Listeners[row])
		c.Ports = append(c.Ports, bpf.Ports{First: first, Last: last, Protocol: s.Rows[row].Protocol})
	}
	previous := s.Path
	c.Ready = func(path *bpf.Steer) error {
		s.Path, s.installedEntries = path, nil
		// Connections are closed after the flip.
		defer s.checks.Suspend()()
		return s.InstallMapping()
	}
	path, err := bpf.OpenSteer(c)
	if err != nil {
		s.Path, s.installedEntries = previous, nil
		return err
	}
	if s.Events != nil {
		s.Events.Close()
	}
	s.traffic.End()
	if previous != nil {
		previous.Close()
	}
	s.Path = path
	fail := func(err error) error {
		s.Events = nil // closed: see CheckOpen
		return err
	}
	if err := s.InstallMapping(); err != nil {
		return fail(err)
	}
	if s.lostEvents, err = path.LostEvents(); err != nil {
		return fail(err)
	}
	if s.Events, err = path.Events(); err != nil {
		return fail(err)
	}
	if err := s.traffic.Begin(); err != nil {
		return fail(err)
	}
	go s.watch(s.Events)
	return s.rooms.OpenTemplates()
}

// builtDeviceMap is a device map for the kernel, and its contents.
type builtDeviceMap struct {
	entries *placement.Entries
	devices *bpf.DeviceMap // nil if there are no entries
}

func (b *builtDeviceMap) close() {
	if b.devices != nil {
		b.devices.Close()
	}
	*b = builtDeviceMap{}
}

// InstallMapping replaces the mapping of the data path atomically, and closes the connections of the devices that have
// moved. An unchanged device map stays in place.
func (s *service) InstallMapping() error {
	entries := s.Mapping.Entries()
	if s.installedEntries != nil && s.installedEntries.Equal(entries) {
		s.installedEntries = entries
		return s.Path.SetTable(s.moves.GatedTable(), s.checks.Moved)
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
	if err := s.Path.SetMapping(s.moves.GatedTable(), s.pendingDevices.devices, s.checks.Moved); err != nil {
		return err
	}
	s.installedEntries = entries
	return nil
}

// buildDeviceMap creates the maps of entries in the kernel. A million prefixes take seconds.
func buildDeviceMap(entries *placement.Entries) (b builtDeviceMap, err error) {
	b.entries = entries
	if size := entries.Size(); size > 0 {
		b.devices, err = bpf.NewDeviceMap(size, entries.All())
	}
	return b, err
}

func (s *service) close() {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	s.closeLocked()
}

// closeLocked closes the descriptors of this process and saves pending state. Pinned programs stay attached. The caller
// holds the lock.
func (s *service) closeLocked() {
	s.Removed = true
	s.flushMembers()
	s.checks.Close()
	if s.Conn != nil {
		s.Conn.Close()
		s.Conn = nil
	}
	if s.Events != nil {
		s.Events.Close()
		s.Events = nil
	}
	s.traffic.Close()
	if s.Path != nil {
		s.rooms.ReturnQueued()
	}
	if s.Path != nil {
		s.Path.Close()
	}
	for _, seat := range s.Seats {
		seat.Handle.Close()
	}
	for _, former := range s.Formers {
		former.Handle.Close()
	}
	for pid := range s.waiting {
		s.forgetWaiting(pid)
	}
	for _, fd := range s.KeeperSockets {
		unix.Close(fd)
	}
	clear(s.KeeperSockets)
	s.rooms.CloseTemplates()
	s.rooms.Close()
	s.moves.Close()
	if s.keeper != nil {
		s.keeper.Close()
	}
	if s.Netns != nil {
		s.Netns.Close()
	}
}

// isRemoved reports whether a policy has removed the service since a request found it.
func (s *service) isRemoved() bool {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	return s.Removed
}

// IsFilling reports whether the member of a slot receives the waiting packets.
func (s *service) IsFilling(slot int) bool { return s.rooms.IsFilling(slot) }

// Advance moves buckets toward the target mapping, and closes the connections of the devices that have moved.
func (s *service) Advance() error { return s.moves.Advance() }

// CheckSoon schedules a check of the connections.
func (s *service) CheckSoon() { s.checks.Soon() }
