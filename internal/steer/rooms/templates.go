// SPDX-License-Identifier: Apache-2.0

package rooms

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
	"sockeye/internal/events"
	"sockeye/internal/member"
	"sockeye/internal/sockaddr"
	"sockeye/internal/statedir"
	"sockeye/internal/steer/core"
	"sockeye/internal/steer/listener"
	"sockeye/internal/steer/session"
	"sockeye/internal/steer/spoof"
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
	proven     map[netip.Addr]bool // addresses with an established TCP connection; the map is replaced and not changed
	vouched    map[netip.Addr]bool // those that had one with another host, as its copies of templates say, until proven is replaced
	// running are the replays to slots that are ready.
	running   map[int]*fill
	saved     uint64 // revision of the last save
	savedRows string // rowsLine of the last save
	saveTimer *time.Timer
	saving    time.Duration // time that the last save took
	replays   uint64        // exporters whose templates were sent to a member
	temporary map[int]int   // descriptors of rooms that are open during a replay, by row
	filtered  map[int]bool  // slots whose member has a socket filter of its own
}

func newKeptTemplates() keptTemplates {
	return keptTemplates{
		replayedTo: make(map[netip.Addr]member.ID), vouched: make(map[netip.Addr]bool), running: make(map[int]*fill),
		temporary: make(map[int]int), filtered: make(map[int]bool),
	}
}

// KeepsTemplates reports whether the service keeps templates.
func (r *Rooms) KeepsTemplates() bool { return r.kept.store != nil }

// wantsTemplates reports whether the policy keeps templates.
func wantsTemplates(c config.Service) bool {
	return c.Templates == config.KeepTemplates && slices.ContainsFunc(c.Listeners, func(l config.Listener) bool { return l.Protocol == config.UDP })
}

// OpenTemplates begins or ends to keep templates, according to the policy. The path must be open.
func (r *Rooms) OpenTemplates() error {
	r.closeReader()
	if !wantsTemplates(r.Config) {
		if r.KeepsTemplates() {
			for _, seat := range r.Seats {
				r.StopCopying(seat)
			}
			r.kept.store = nil
			clear(r.kept.replayedTo)
		}
		// They would be outdated when the policy keeps templates again.
		if err := os.Remove(r.templatesPath()); err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("discard templates: %w", err)
		}
		return nil
	}
	if !r.KeepsTemplates() {
		r.kept.store = templates.NewStore(templates.Limits{}, func(a netip.Addr) bool { return r.kept.proven[a] || r.kept.vouched[a] })
		r.loadTemplates()
	}
	r.scheduleTemplatesSave() // a policy may have changed the listeners
	reader, err := r.Path.Templates()
	if err != nil {
		return err
	}
	r.kept.reader = reader
	go r.watchTemplates(reader)
	return nil
}

// CloseTemplates saves the templates. The filters stay, and the ring keeps what they copy, for the next agent.
func (r *Rooms) CloseTemplates() {
	r.closeReader()
	if r.kept.saveTimer != nil {
		r.kept.saveTimer.Stop()
	}
	if r.KeepsTemplates() {
		r.saveTemplates()
	}
}

func (r *Rooms) closeReader() {
	if r.kept.reader != nil {
		r.kept.reader.Close()
		r.kept.reader = nil
	}
}

// watchTemplates learns templates until the ring is closed.
func (r *Rooms) watchTemplates(reader *bpf.TemplateReader) {
	began, read := time.Now(), 0
	for {
		t, err := reader.Next()
		if errors.Is(err, os.ErrClosed) {
			return
		}
		if err != nil {
			r.Log.Error("ring of template sets failed", "error", err)
			return
		}
		r.Mu.Lock()
		if r.kept.reader == reader {
			r.learnFrom(&t)
		}
		r.Mu.Unlock()
		if read++; read < templatesPerSecond/10 {
			continue
		}
		time.Sleep(time.Second/10 - time.Since(began))
		began, read = time.Now(), 0
	}
}

// learnFrom keeps the templates of a datagram that a member has received.
func (r *Rooms) learnFrom(t *bpf.TemplateSets) {
	for slot, seat := range r.Seats {
		for row, socket := range seat.Sockets {
			if socket.Cookie != t.Cookie {
				continue
			}
			if home, _ := r.Mapping.Slot(t.Source.Addr()); home == slot {
				r.learn(t.Source, row, t.Datagram, seat.ID())
			} else {
				r.learn(t.Source, row, t.Datagram, member.ID{})
			}
			return
		}
	}
}

// learn keeps the templates of a datagram. at is the member that has received the datagram as the member of the device, or
// zero.
func (r *Rooms) learn(source netip.AddrPort, row int, datagram []byte, at member.ID) {
	err := r.kept.store.Learn(source, row, datagram, time.Now())
	if err != nil {
		return // counted
	}
	if addr := source.Addr().Unmap().WithZone(""); at.PID != 0 {
		if _, known := r.kept.replayedTo[addr]; !known {
			r.kept.replayedTo[addr] = at
		}
	}
	r.scheduleTemplatesSave()
}

func (r *Rooms) scheduleTemplatesSave() {
	if r.kept.saveTimer != nil || r.areTemplatesSaved() {
		return
	}
	r.kept.saveTimer = time.AfterFunc(max(templatesSaveDelay, saveShare*r.kept.saving), func() {
		r.Mu.Lock()
		defer r.Mu.Unlock()
		r.kept.saveTimer = nil
		if r.Events != nil && r.KeepsTemplates() {
			r.saveTemplates()
		}
	})
}

func (r *Rooms) templatesPath() string {
	return filepath.Join(r.Host.StateDir, r.Name+".templates")
}

func (r *Rooms) areTemplatesSaved() bool {
	return r.kept.store.Revision() == r.kept.saved && r.rowsLine() == r.kept.savedRows
}

func (r *Rooms) saveTemplates() {
	if r.areTemplatesSaved() {
		return
	}
	began := time.Now()
	defer func() { r.kept.saving = time.Since(began) }()
	var b bytes.Buffer
	b.WriteString(r.rowsLine())
	err := r.kept.store.Save(&b)
	if err == nil {
		err = statedir.Write(r.templatesPath(), b.Bytes())
	}
	if err != nil {
		r.Log.Error("templates not saved", "error", err)
		return
	}
	r.kept.saved, r.kept.savedRows = r.kept.store.Revision(), r.rowsLine()
}

// loadTemplates reads the templates of an earlier agent. A damaged file is discarded.
func (r *Rooms) loadTemplates() {
	file, err := os.ReadFile(r.templatesPath())
	if errors.Is(err, os.ErrNotExist) {
		return
	}
	if err == nil {
		rows, rest, _ := bytes.Cut(file, []byte("\n"))
		if string(rows)+"\n" != r.rowsLine() {
			err = errors.New("it is damaged, or for other listeners")
		} else {
			err = r.kept.store.Load(bytes.NewReader(rest), time.Now())
		}
	}
	if err != nil {
		r.Log.Warn("templates discarded: exporters must send theirs again", events.TemplatesDiscarded, "file", r.templatesPath(), "error", errors.Join(err, os.Remove(r.templatesPath())))
		return
	}
	r.kept.saved, r.kept.savedRows = r.kept.store.Revision(), r.rowsLine()
}

// rowsLine identifies the listeners of the rows: the templates of a state file refer to them.
func (r *Rooms) rowsLine() string {
	var rows []string
	for _, row := range slices.Sorted(maps.Keys(r.Listeners)) {
		rows = append(rows, fmt.Sprintf("%d %s", row, r.Listeners[row]))
	}
	return strings.Join(rows, ", ") + "\n"
}

// ForgetRow discards what came for the listener that had a row.
func (r *Rooms) ForgetRow(row int) {
	for slot, q := range r.queued {
		for range q.len() {
			d, _ := r.dequeue(slot)
			if d.row != row {
				r.enqueue(slot, d)
				continue
			}
			r.lost[slot]++
			r.countLeft(&d)
		}
	}
	if r.Path != nil {
		r.flushLeft()
	}
	if r.KeepsTemplates() {
		r.kept.store.Forget(row, time.Now())
	}
}

// AttachTemplateFilter attaches the filter that copies templates to the UDP socket of a member.
func (r *Rooms) AttachTemplateFilter(seat *core.Seat, socket *member.Socket) error {
	if !r.KeepsTemplates() || socket.Protocol != unix.IPPROTO_UDP {
		return nil
	}
	owner, ok := r.Path.Owner(socket.FD())
	err := r.Path.AttachTemplateFilter(socket.FD(), ok && owner.Filtered)
	if errors.Is(err, bpf.ErrFiltered) {
		if !r.kept.filtered[seat.Slot] {
			r.Log.Warn("templates of the member are not kept: its socket has a socket filter", "slot", seat.Slot, "pid", seat.Process.PID)
		}
		r.kept.filtered[seat.Slot] = true
		if classic, _, err := bpf.ReadFilter(socket.FD()); err == nil && classic && ok && owner.Filtered { // the member has replaced the filter by its own
			return r.Path.SetOwner(socket.FD(), bpf.Owner{PID: owner.PID, StartTime: owner.StartTime})
		}
		return nil
	}
	if err != nil {
		return err
	}
	delete(r.kept.filtered, seat.Slot)
	return r.Path.SetOwner(socket.FD(), bpf.Owner{PID: seat.Process.PID, StartTime: seat.Process.StartTime, Filtered: true})
}

// StopCopying removes the filters of a member that still runs.
func (r *Rooms) StopCopying(seat *core.Seat) {
	for row := range seat.Sockets {
		if r.Listeners[row].Protocol != config.UDP {
			continue
		}
		socket, err := seat.OpenSocket(row)
		if err != nil {
			continue
		}
		owner, ok := r.Path.Owner(socket.FD())
		if ok && owner.Filtered {
			err = errors.Join(bpf.DetachFilter(socket.FD()), r.Path.SetOwner(socket.FD(), bpf.Owner{PID: owner.PID, StartTime: owner.StartTime}))
		}
		if err != nil {
			r.Log.Warn("socket filter not removed", "pid", seat.Process.PID, "error", err)
		}
		socket.Close()
	}
}

// withoutTemplates returns the exporters of a slot whose templates the member of the slot does not know.
func (r *Rooms) withoutTemplates(slot int, at member.ID) (addresses []netip.Addr) {
	if !r.KeepsTemplates() {
		return nil
	}
	v := r.Serving()
	for addr := range r.kept.store.Addresses() {
		home, _ := r.Mapping.Slot(addr)
		if home != slot {
			if served, ok := v.Slot(home); !ok || served != slot {
				continue
			}
		}
		if r.kept.replayedTo[addr] != at {
			addresses = append(addresses, addr)
		}
	}
	slices.SortFunc(addresses, netip.Addr.Compare)
	return addresses
}

// openTemporaryRooms opens the addresses for replays to slots that are not ready, with steering by sk_lookup and without
// waiting rooms.
func (r *Rooms) openTemporaryRooms() error {
	if !r.UsesLookup() || r.Exist() {
		return nil
	}
	for row, l := range r.Listeners {
		if _, open := r.kept.temporary[row]; open || l.Protocol != config.UDP {
			continue
		}
		fd, err := r.OpenSocket(row)
		if err != nil {
			return err
		}
		r.kept.temporary[row] = fd
		if err := r.Path.InsertRoom(row, fd, r.kept.temporaryPort(row)); err != nil {
			return err
		}
	}
	return nil
}

// closeTemporaryRooms closes the addresses of openTemporaryRooms when no slot is filling.
func (r *Rooms) closeTemporaryRooms() {
	if len(r.filling) > 0 {
		return
	}
	for row, fd := range r.kept.temporary {
		if r.Path != nil && r.prepared[row] == nil {
			if err := r.Path.RemoveRoom(row); err != nil {
				r.Log.Error("waiting room not removed", "error", err)
			}
		}
		unix.Close(fd)
		delete(r.kept.temporary, row)
	}
}

// noteReplayed notes that a member knows the templates of exporters.
func (r *Rooms) noteReplayed(addresses []netip.Addr, at member.ID) {
	now := time.Now()
	r.kept.replays += uint64(len(addresses))
	for _, addr := range addresses {
		r.kept.replayedTo[addr] = at
		for row, l := range r.Listeners {
			if l.Protocol == config.UDP {
				r.kept.store.Replayed(addr, row, now)
			}
		}
	}
}

// ReplayMoved sends the templates of devices that another member serves now to that member. The first templates are sent at
// once.
func (r *Rooms) ReplayMoved() {
	if !r.KeepsTemplates() {
		return
	}
	bySlot, v := make(map[int][]netip.Addr), r.Serving()
	for addr := range r.kept.store.Addresses() {
		home, _ := r.Mapping.Slot(addr)
		if slot, ok := v.Slot(home); ok && r.kept.replayedTo[addr] != v.Members[slot] && r.kept.running[slot] == nil {
			bySlot[slot] = append(bySlot[slot], addr)
		}
	}
	for slot, addresses := range bySlot {
		// The end of a replay begins the next one, which may have sent these.
		addresses = slices.DeleteFunc(addresses, func(addr netip.Addr) bool { return r.kept.replayedTo[addr] == v.Members[slot] })
		if len(addresses) == 0 || r.kept.running[slot] != nil {
			continue
		}
		r.beginLate(&fill{seat: r.Seats[slot], late: true, addresses: addresses, templates: r.templateDatagrams(addresses, true, nil)})
	}
}

// templateDatagrams returns the datagrams with the templates of exporters. next contains the sequence numbers of the
// messages that follow.
func (r *Rooms) templateDatagrams(addresses []netip.Addr, ready bool, next map[templates.Session]uint32) (list []waitingDatagram) {
	now := time.Now()
	for _, addr := range addresses {
		for _, m := range r.kept.store.Replay(addr, now, 0, next) {
			to, ok := r.replayDestination(m.Row, addr, ready)
			if !ok {
				continue
			}
			list = append(list, waitingDatagram{Datagram: spoof.Datagram{From: m.Source, To: to, Payload: m.Data}, row: m.Row})
		}
	}
	return list
}

// replayDestination returns the address at which the data path finds the member of an exporter, also before its slot is
// ready.
func (r *Rooms) replayDestination(row int, of netip.Addr, ready bool) (to netip.AddrPort, ok bool) {
	l, ok := r.Listeners[row]
	if !ok || l.Protocol != config.UDP {
		return to, false
	}
	if r.UsesLookup() && !ready {
		port := r.kept.temporaryPort(row)
		if p := r.prepared[row]; p != nil {
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
	return sockaddr.AddrPort(local).Port()
}

// Exporters returns the number of exporters whose templates are kept.
func (r *Rooms) Exporters() int {
	if !r.KeepsTemplates() {
		return 0
	}
	return r.kept.store.Stats().Sources
}

// NoteSessions notes the addresses with an established TCP connection, which cannot be forged.
func (r *Rooms) NoteSessions(list []session.Session) {
	r.kept.proven = make(map[netip.Addr]bool, len(list))
	clear(r.kept.vouched)
	for i := range list {
		if list[i].Owned {
			r.kept.proven[list[i].Address.Unmap()] = true
		}
	}
	if !r.KeepsTemplates() {
		return
	}
	r.kept.store.Expire(time.Now())
	for addr := range r.kept.replayedTo {
		if len(r.kept.replayedTo) > 4*r.kept.store.Stats().Sources+1024 && !r.kept.store.Has(addr) {
			delete(r.kept.replayedTo, addr)
		}
	}
}

// AssumeReplayed notes that the members that an earlier agent registered know the templates of their devices.
func (r *Rooms) AssumeReplayed() {
	if !r.KeepsTemplates() {
		return
	}
	v := r.Serving()
	for addr := range r.kept.store.Addresses() {
		if id, ok := v.Server(addr); ok {
			r.kept.replayedTo[addr] = id
		}
	}
}

// TemplatesOf returns the templates of a device, or of all devices for "".
func (r *Rooms) TemplatesOf(device string) ([]api.TemplateStatus, error) {
	r.Mu.Lock()
	defer r.Mu.Unlock()
	if err := r.CheckOpen(); err != nil {
		return nil, err
	}
	list := []api.TemplateStatus{}
	if !r.KeepsTemplates() {
		return list, nil
	}
	address, _ := netip.ParseAddr(device)
	for t := range r.kept.store.List() {
		addr := t.Source.Addr()
		at := r.Mapping.Locate(addr)
		if device != "" && addr != address.Unmap() && at.Device != device {
			continue
		}
		one := api.TemplateStatus{
			Service: r.Name, Source: t.Source.String(), Device: at.Device, Slot: at.Slot, Protocol: protocolName(t.Version),
			Domain: t.Domain, Template: t.ID, Options: t.Options, Fields: t.Fields, ScopeFields: t.ScopeFields,
			Learned: t.Learned, Refreshed: t.Refreshed, Replays: t.Replays,
		}
		if l, ok := r.Listeners[t.Row]; ok {
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

// TemplateStats returns the counters of the templates, which must be kept.
func (r *Rooms) TemplateStats() templates.Stats { return r.kept.store.Stats() }

// TemplateReplays returns the number of exporters whose templates were sent to a member.
func (r *Rooms) TemplateReplays() uint64 { return r.kept.replays }
