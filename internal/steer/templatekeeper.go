// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/api"
	"sockeye/internal/bpf"
	"sockeye/internal/config"
	"sockeye/internal/member"
	"sockeye/internal/statedir"
	"sockeye/internal/steer/core"
	"sockeye/internal/steer/listener"
	"sockeye/internal/steer/replay"
	"sockeye/internal/steer/session"
	"sockeye/internal/steer/templates"
)

// The records of IPFIX and NetFlow v9 cannot be decoded without the exporter's templates, which the exporter sends every few
// minutes only. A socket filter of the members' UDP sockets copies the datagrams that contain templates to the agent. The
// agent keeps the templates, and sends them to each member that newly serves the exporter, from the exporter's address and
// port: to a registered member before its slot becomes ready, and to a member that gets a device right after the change of
// the mapping.

const (
	// templatesPerSecond is the number of datagrams with templates that the agent parses in a second, about half of the
	// time of one CPU if all of them are as expensive as possible. The others wait in the ring, or are lost and counted.
	templatesPerSecond = 5000
	// templatesSaveDelay is the time between a change of the templates and their save, and saveShare the maximum share of the
	// time that saves take: what an agent has not saved is lost if it is killed.
	templatesSaveDelay = 200 * time.Millisecond
	saveShare          = 20
)

// keptTemplates contains the templates of the exporters of a service.
type keptTemplates struct {
	store  *templates.Store // nil: templates are off
	reader *bpf.TemplateReader
	// replayedTo contains the member that knows the templates of an exporter.
	replayedTo map[netip.Addr]member.ID
	proven     map[netip.Addr]bool // addresses with an established TCP connection
	// running are the replays to slots that are ready.
	running   map[int]*fill
	saved     uint64 // revision of the last save
	saveTimer *time.Timer
	saving    time.Duration // time that the last save took
	replays   uint64        // exporters whose templates were sent to a member
	temporary map[int]int   // descriptors of rooms that are open during a replay, by row
	filtered  map[int]bool  // slots whose member has a socket filter of its own
}

func newKeptTemplates() keptTemplates {
	return keptTemplates{
		replayedTo: make(map[netip.Addr]member.ID), proven: make(map[netip.Addr]bool), running: make(map[int]*fill),
		temporary: make(map[int]int), filtered: make(map[int]bool),
	}
}

// keepsTemplates reports whether the service keeps templates.
func (s *service) keepsTemplates() bool { return s.kept.store != nil }

// wantsTemplates reports whether the policy keeps templates.
func wantsTemplates(c config.Service) bool {
	return c.Templates == config.KeepTemplates && slices.ContainsFunc(c.Listeners, func(l config.Listener) bool { return l.Protocol == config.UDP })
}

// openTemplateKeeper begins or ends to keep templates, according to the policy. The path must be open.
func (s *service) openTemplateKeeper() error {
	s.closeReader()
	if !wantsTemplates(s.Config) {
		if s.keepsTemplates() {
			for _, seat := range s.Seats {
				s.stopCopying(seat)
			}
			s.kept.store = nil
			clear(s.kept.replayedTo)
		}
		// They would be outdated when the policy keeps templates again.
		if err := os.Remove(s.templatesPath()); err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("discard templates: %w", err)
		}
		return nil
	}
	if !s.keepsTemplates() {
		s.kept.store = templates.NewStore(templates.Limits{}, func(a netip.Addr) bool { return s.kept.proven[a] })
		s.loadTemplates()
	}
	reader, err := s.Path.Templates()
	if err != nil {
		return err
	}
	s.kept.reader = reader
	go s.watchTemplates(reader)
	return nil
}

func (s *service) closeReader() {
	if s.kept.reader != nil {
		s.kept.reader.Close()
		s.kept.reader = nil
	}
}

// closeTemplateKeeper saves the templates. The filters stay, and the ring keeps what they copy, for the next agent.
func (s *service) closeTemplateKeeper() {
	s.closeReader()
	if s.kept.saveTimer != nil {
		s.kept.saveTimer.Stop()
	}
	s.closeTemporaryRooms()
	if s.keepsTemplates() {
		s.saveTemplates()
	}
}

// watchTemplates learns templates until the ring is closed.
func (s *service) watchTemplates(reader *bpf.TemplateReader) {
	began, read := time.Now(), 0
	for {
		t, err := reader.Next()
		if errors.Is(err, os.ErrClosed) {
			return
		}
		if err != nil {
			s.Log.Error("ring of template sets failed", "error", err)
			return
		}
		s.Mu.Lock()
		if s.kept.reader == reader {
			s.learnFrom(&t)
		}
		s.Mu.Unlock()
		if read++; read < templatesPerSecond/10 {
			continue
		}
		time.Sleep(time.Second/10 - time.Since(began))
		began, read = time.Now(), 0
	}
}

// learnFrom keeps the templates of a datagram that a member has received.
func (s *service) learnFrom(t *bpf.TemplateSets) {
	for slot, seat := range s.Seats {
		for row, socket := range seat.Sockets {
			if socket.Cookie != t.Cookie {
				continue
			}
			if home, _ := s.Mapping.Slot(t.Source.Addr()); home == slot {
				s.learn(t.Source, row, t.Datagram, seat.ID())
			} else {
				s.learn(t.Source, row, t.Datagram, member.ID{})
			}
			return
		}
	}
}

// learn keeps the templates of a datagram. at is the member that has received the datagram as the member of the device, or
// zero.
func (s *service) learn(source netip.AddrPort, row int, datagram []byte, at member.ID) {
	err := s.kept.store.Learn(source, row, datagram, time.Now())
	if err != nil {
		return // counted
	}
	if addr := source.Addr().Unmap().WithZone(""); at.PID != 0 {
		if _, known := s.kept.replayedTo[addr]; !known {
			s.kept.replayedTo[addr] = at
		}
	}
	s.scheduleTemplatesSave()
}

func (s *service) scheduleTemplatesSave() {
	if s.kept.saveTimer != nil || s.kept.store.Revision() == s.kept.saved {
		return
	}
	s.kept.saveTimer = time.AfterFunc(max(templatesSaveDelay, saveShare*s.kept.saving), func() {
		s.Mu.Lock()
		defer s.Mu.Unlock()
		s.kept.saveTimer = nil
		if s.Events != nil && s.keepsTemplates() {
			s.saveTemplates()
		}
	})
}

func (s *service) templatesPath() string {
	return filepath.Join(s.Host.StateDir, s.Config.Name+".templates")
}

// rowsLine identifies the listeners of the rows: the templates of a state file refer to them.
func (s *service) rowsLine() string {
	var rows []string
	for _, row := range slices.Sorted(maps.Keys(s.Listeners)) {
		rows = append(rows, fmt.Sprintf("%d %s", row, s.Listeners[row]))
	}
	return strings.Join(rows, ", ") + "\n"
}

func (s *service) saveTemplates() {
	if s.kept.store.Revision() == s.kept.saved {
		return
	}
	began := time.Now()
	defer func() { s.kept.saving = time.Since(began) }()
	var b bytes.Buffer
	b.WriteString(s.rowsLine())
	err := s.kept.store.Save(&b)
	if err == nil {
		err = statedir.Write(s.templatesPath(), b.Bytes())
	}
	if err != nil {
		s.Log.Error("templates not saved", "error", err)
		return
	}
	s.kept.saved = s.kept.store.Revision()
}

// loadTemplates reads the templates of an earlier agent. A damaged file is discarded.
func (s *service) loadTemplates() {
	file, err := os.ReadFile(s.templatesPath())
	if errors.Is(err, os.ErrNotExist) {
		return
	}
	if err == nil {
		rows, rest, _ := bytes.Cut(file, []byte("\n"))
		if string(rows)+"\n" != s.rowsLine() {
			err = errors.New("it is damaged, or for other listeners")
		} else {
			err = s.kept.store.Load(bytes.NewReader(rest), time.Now())
		}
	}
	if err != nil {
		s.Log.Warn("templates discarded: exporters must send theirs again", "file", s.templatesPath(), "error", errors.Join(err, os.Remove(s.templatesPath())))
		return
	}
	s.kept.saved = s.kept.store.Revision()
}

// copyTemplates attaches the filter that copies templates to the UDP socket of a member.
func (s *service) copyTemplates(seat *core.Seat, socket *member.Socket) error {
	if !s.keepsTemplates() || socket.Protocol != unix.IPPROTO_UDP {
		return nil
	}
	owner, ok := s.Path.Owner(socket.FD())
	err := s.Path.CopyTemplates(socket.FD(), ok && owner.Filtered)
	if errors.Is(err, bpf.ErrFiltered) {
		if !s.kept.filtered[seat.Slot] {
			s.Log.Warn("templates of the member are not kept: its socket has a socket filter", "slot", seat.Slot, "pid", seat.Process.PID)
		}
		s.kept.filtered[seat.Slot] = true
		return nil
	}
	if err != nil {
		return err
	}
	delete(s.kept.filtered, seat.Slot)
	return s.Path.SetOwner(socket.FD(), bpf.Owner{PID: seat.Process.PID, StartTime: seat.Process.StartTime, Filtered: true})
}

// stopCopying removes the filters of a member that still runs.
func (s *service) stopCopying(seat *core.Seat) {
	for row := range seat.Sockets {
		if s.Listeners[row].Protocol != config.UDP {
			continue
		}
		socket, err := seat.OpenSocket(row)
		if err != nil {
			continue
		}
		owner, ok := s.Path.Owner(socket.FD())
		if ok && owner.Filtered {
			err = errors.Join(bpf.DetachFilter(socket.FD()), s.Path.SetOwner(socket.FD(), bpf.Owner{PID: owner.PID, StartTime: owner.StartTime}))
		}
		if err != nil {
			s.Log.Warn("socket filter not removed", "pid", seat.Process.PID, "error", err)
		}
		socket.Close()
	}
}

// withoutTemplates returns the exporters of a slot whose templates the member of the slot does not know.
func (s *service) withoutTemplates(slot int, at member.ID) (addresses []netip.Addr) {
	if !s.keepsTemplates() {
		return nil
	}
	v := s.Serving()
	for addr := range s.kept.store.Addresses() {
		home, _ := s.Mapping.Slot(addr)
		if home != slot {
			if served, ok := v.Slot(home); !ok || served != slot {
				continue
			}
		}
		if s.kept.replayedTo[addr] != at {
			addresses = append(addresses, addr)
		}
	}
	slices.SortFunc(addresses, netip.Addr.Compare)
	return addresses
}

// templateDatagrams returns the datagrams with the templates of exporters. next contains the sequence numbers of the
// messages that follow.
func (s *service) templateDatagrams(addresses []netip.Addr, ready bool, next map[templates.Session]uint32) (list []waitingDatagram) {
	now := time.Now()
	for _, addr := range addresses {
		for _, m := range s.kept.store.Replay(addr, now, 0, next) {
			to, ok := s.replayDestination(m.Row, addr, ready)
			if !ok {
				continue
			}
			list = append(list, waitingDatagram{replay.Datagram{From: m.Source, To: to, Payload: m.Data}, m.Row})
		}
	}
	return list
}

// replayDestination returns the address at which the data path finds the member of an exporter, also before its slot is
// ready.
func (s *service) replayDestination(row int, of netip.Addr, ready bool) (to netip.AddrPort, ok bool) {
	l, ok := s.Listeners[row]
	if !ok || l.Protocol != config.UDP {
		return to, false
	}
	if s.UsesLookup() && !ready {
		port := s.kept.temporaryPort(row)
		if p := s.rooms.prepared[row]; p != nil {
			port = p.port
		}
		return netip.AddrPortFrom(listener.Loopback(of), port), port != 0
	}
	to = l.Address
	if to.Addr().IsUnspecified() {
		to = netip.AddrPortFrom(listener.Loopback(of), to.Port())
	}
	return to, to.Addr().Is4() == of.Is4()
}

func (t *keptTemplates) temporaryPort(row int) uint16 {
	fd, open := t.temporary[row]
	if !open {
		return 0
	}
	local, err := unix.Getsockname(fd)
	if err != nil {
		return 0
	}
	return addrPort(local).Port()
}

// openTemporaryRooms opens the addresses for replays to slots that are not ready, with steering by sk_lookup and without
// waiting rooms.
func (s *service) openTemporaryRooms() error {
	if !s.UsesLookup() || s.hasRooms() {
		return nil
	}
	for row, l := range s.Listeners {
		if _, open := s.kept.temporary[row]; open || l.Protocol != config.UDP {
			continue
		}
		fd, err := s.openRoomSocket(row)
		if err != nil {
			return err
		}
		s.kept.temporary[row] = fd
		if err := s.Path.InsertRoom(row, fd, s.kept.temporaryPort(row)); err != nil {
			return err
		}
	}
	return nil
}

// closeTemporaryRooms closes the addresses of openTemporaryRooms when no slot is filling.
func (s *service) closeTemporaryRooms() {
	if len(s.rooms.filling) > 0 {
		return
	}
	for row, fd := range s.kept.temporary {
		if err := s.Path.RemoveRoom(row); err != nil {
			s.Log.Error("waiting room not removed", "error", err)
		}
		unix.Close(fd)
		delete(s.kept.temporary, row)
	}
}

// noteReplayed notes that a member knows the templates of exporters.
func (s *service) noteReplayed(addresses []netip.Addr, at member.ID) {
	now := time.Now()
	s.kept.replays += uint64(len(addresses))
	for _, addr := range addresses {
		s.kept.replayedTo[addr] = at
		for row, l := range s.Listeners {
			if l.Protocol == config.UDP {
				s.kept.store.Replayed(addr, row, now)
			}
		}
	}
}

// replayMoved sends the templates of devices that another member serves now to that member. The first templates are sent at
// once.
func (s *service) replayMoved() {
	if !s.keepsTemplates() {
		return
	}
	bySlot, v := make(map[int][]netip.Addr), s.Serving()
	for addr := range s.kept.store.Addresses() {
		home, _ := s.Mapping.Slot(addr)
		if slot, ok := v.Slot(home); ok && s.kept.replayedTo[addr] != v.Members[slot] && s.kept.running[slot] == nil {
			bySlot[slot] = append(bySlot[slot], addr)
		}
	}
	for slot, addresses := range bySlot {
		s.beginLate(&fill{seat: s.Seats[slot], late: true, addresses: addresses, templates: s.templateDatagrams(addresses, true, nil)})
	}
}

// knownExporters returns the number of exporters whose templates are kept.
func (s *service) knownExporters() int {
	if !s.keepsTemplates() {
		return 0
	}
	return s.kept.store.Stats().Sources
}

// noteSessions notes the addresses with an established TCP connection, which cannot be forged.
func (s *service) noteSessions(list []session.Session) {
	if !s.keepsTemplates() {
		return
	}
	clear(s.kept.proven)
	for i := range list {
		if list[i].Owned {
			s.kept.proven[list[i].Address.Unmap()] = true
		}
	}
	s.kept.store.Expire(time.Now())
	for addr := range s.kept.replayedTo {
		if len(s.kept.replayedTo) > 4*s.kept.store.Stats().Sources+1024 && !s.kept.store.Has(addr) {
			delete(s.kept.replayedTo, addr)
		}
	}
}

// assumeReplayed notes that the members that an earlier agent registered know the templates of their devices.
func (s *service) assumeReplayed() {
	if !s.keepsTemplates() {
		return
	}
	v := s.Serving()
	for addr := range s.kept.store.Addresses() {
		if id, ok := v.Server(addr); ok {
			s.kept.replayedTo[addr] = id
		}
	}
}

// templatesOf returns the templates of a device, or of all devices for "".
func (s *service) templatesOf(device string) ([]api.TemplateStatus, error) {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	list := []api.TemplateStatus{}
	if !s.keepsTemplates() {
		return list, nil
	}
	address, _ := netip.ParseAddr(device)
	for t := range s.kept.store.List() {
		addr := t.Source.Addr()
		at := s.Mapping.Locate(addr)
		if device != "" && addr != address.Unmap() && at.Device != device {
			continue
		}
		one := api.TemplateStatus{
			Service: s.Config.Name, Source: t.Source.String(), Device: at.Device, Slot: at.Slot, Protocol: protocolName(t.Version),
			Domain: t.Domain, Template: t.ID, Options: t.Options, Fields: t.Fields, ScopeFields: t.ScopeFields,
			Learned: t.Learned, Refreshed: t.Refreshed, Replays: t.Replays,
		}
		if l, ok := s.Listeners[t.Row]; ok {
			one.Listener = l.String()
		}
		if !t.Replayed.IsZero() {
			one.Replayed = &t.Replayed
		}
		if device != "" {
			for _, f := range t.FieldList() {
				one.Elements = append(one.Elements, api.TemplateField{Element: f.Element, Enterprise: f.Enterprise, Length: f.Length, Scope: f.Scope})
			}
		}
		list = append(list, one)
	}
	return list, nil
}

func protocolName(version uint16) string {
	if version == templates.IPFIX {
		return "ipfix"
	}
	return "netflow-v9"
}
