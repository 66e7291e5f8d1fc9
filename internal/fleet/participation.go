// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	"sockeye/internal/bpf"
	"sockeye/internal/config"
	"sockeye/internal/events"
	"sockeye/internal/fleet/follow"
	"sockeye/internal/fleet/forward"
	"sockeye/internal/fleet/lead"
	"sockeye/internal/fleet/store"
	"sockeye/internal/fleet/table"
	"sockeye/internal/owned"
	"sockeye/internal/placement"
	"sockeye/internal/sockdiag"
	"sockeye/internal/statedir"
	"sockeye/internal/sysctl"
)

// Files of the state directory.
const (
	tableFile    = "fleet.table"    // the table in force
	instanceFile = "fleet.instance" // names the registration of this host
)

const (
	// refreshInterval is the time between two looks at interfaces, routes, neighbors and services.
	refreshInterval = time.Second
	// batch is the number of buckets that move at the same time, 1.6 % of all.
	batch = 256
	// mostPassword is the size of the largest password of etcd in bytes.
	mostPassword = 1 << 10
)

// participation is this host in a fleet.
type participation struct {
	settings *settings
	services Services
	log      *slog.Logger
	stateDir string
	path     *forward.Path
	store    store.Store
	follower *follow.Follower
	cancel   context.CancelFunc
	done     sync.WaitGroup

	mu           sync.Mutex
	nics         []nic
	missing      error // an interface that does not exist
	absent       error // an address of the services that this host does not have
	attached     []int // interfaces, and the tunnel as the last one
	serves       bool  // until the first table, this host serves what reaches it
	continues    bool  // until the first table, the programs of an earlier version stay, or none if this host serves
	table        *table.Table
	flipped      time.Time             // of table
	unsaved      *table.Table          // table in force that is not in the state directory; nil: none
	mapping      *placement.Mapping    // hashes of the devices, with the nonce of the table
	paths        map[string]path       // by host
	dead         map[string]bool       // hosts that have died, as of the last look
	holders      map[netip.Addr]string // hosts of the table by address, as holders returns them
	unresolved   unresolved
	state        follow.State
	registration store.Registration
	healthy      error // nil: the services can serve
	problems     []string
	known        map[string]string    // states of the hosts, for events
	seen         map[string]bool      // all hosts that the fleet has had since the start of the agent, at most mostSeen
	before       map[string]lead.Host // the hosts at the last look
	served       map[string]bool      // those of them that the table had
	told         bool                 // the store has told about the hosts
	gone         map[string]lead.Host // those that have died, and whose devices have moved, as they were; they are in no table
	local        []string             // problems of interfaces and paths
	drops        drops
	ended        bool // path is closed
	late         late
	copies       copies
	asking       asking
}

// dataPath is what the follower needs of the data path.
type dataPath participation

// participate opens the data path and the store, and follows the store.
func (d *Domain) participate(s *settings, serves bool) (_ *participation, err error) {
	p := &participation{settings: s, serves: serves, services: d.services, log: d.log.With("fleet", s.Name), stateDir: d.host.StateDir, paths: make(map[string]path), seen: make(map[string]bool), gone: make(map[string]lead.Host), late: newLate(), copies: newCopies(), asking: newAsking()}
	if e := d.ended; e != nil { // an event tells if the change has solved its problems
		if p.problems = e.problems; e.settings.sharesTable(s) {
			p.known, p.before, p.served, p.unresolved = e.known, e.before, e.served, e.unresolved
			p.seen, p.gone = maps.Clone(e.seen), maps.Clone(e.gone) // requests may still read the former ones
		}
	}
	if p.path, err = forward.Open(d.pins()); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			p.path.Close()
		}
	}()
	if err := p.path.SetListeners(distinct(s.listeners)); err != nil {
		return nil, err
	}
	last, err := p.readTable()
	if err != nil {
		p.log.Warn("the last table of the fleet cannot be used", "error", err)
	}
	p.continues = last != nil || serves
	if nonce, epoch := p.path.Adopted(); last != nil && nonce == last.Nonce && epoch > last.Epoch {
		p.log.Warn("the saved table of the fleet is older than the one in force, which stays", "saved", last.Epoch, "in_force", epoch)
		last = nil
	}
	p.registration = store.Registration{Host: table.Host{Name: s.host, Weight: uint32(s.Weight)}, Digests: s.digests}
	p.refresh() // the first registration is complete: otherwise the next table would have a host without addresses
	if s.Etcd != nil {
		instance, err := p.instance()
		if err != nil {
			return nil, err
		}
		p.store = store.OpenLater(p.registration, func(r store.Registration) (store.Store, error) {
			c, err := etcdConfig(&s.Fleet)
			if err != nil {
				return nil, err
			}
			c.Host, c.Log, c.Instance, c.Answer = r, p.log, instance, p.answer
			return store.OpenEtcd(*c)
		})
	} else {
		p.store = store.OpenFile(s.File)
	}
	p.follower = follow.New(follow.Config{
		Store: p.store, Path: (*dataPath)(p), Host: p.registration, Last: last, Log: p.log,
		Lead: lead.Config{MinHosts: s.MinHosts, Settle: time.Duration(s.Settle) * time.Microsecond, OnDeath: lead.OnDeath(s.OnHostDeath), Batch: batch, Nonce: bpf.NewNonce()},
	})
	p.follower.Changed = p.changed
	ctx, cancel := context.WithCancel(context.Background())
	p.cancel = cancel
	p.done.Go(func() { p.follower.Run(ctx) })
	p.done.Go(func() {
		for {
			select {
			case <-ctx.Done():
				return
			case <-time.After(refreshInterval):
				p.refresh()
			}
		}
	})
	p.done.Go(func() { p.exchange(ctx) })
	return p, nil
}

// etcdConfig returns the settings of a store in etcd.
func etcdConfig(f *config.Fleet) (*store.EtcdConfig, error) {
	e := f.Etcd
	c := &store.EtcdConfig{Endpoints: e.Endpoints, Username: e.User, Fleet: f.Name}
	if slices.ContainsFunc(e.Endpoints, func(s string) bool { return strings.HasPrefix(s, "https:") }) {
		var err error
		if c.TLS, err = store.TLSConfig(e.CA, e.Cert, e.Key); err != nil {
			return nil, err
		}
	}
	if e.PasswordFile != "" {
		text, err := owned.ReadFile(e.PasswordFile, true, mostPassword)
		if err != nil {
			return nil, fmt.Errorf("read password of etcd: %w", err)
		}
		c.Password = strings.TrimSpace(string(text))
	}
	return c, nil
}

// end ends the participation. The programs stay attached. With leave, the registration of this host ends at once.
func (p *participation) end(leave bool) error {
	p.cancel()
	p.done.Wait()
	err := p.store.Close(leave)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ended = true
	return errors.Join(err, p.path.Close())
}

// instance returns the name of this host's registration: the same one after a restart of the agent, so that the next agent
// renews it, and another one after a reboot, and on a host that was cloned.
func (p *participation) instance() (string, error) {
	boot, err := sysctl.Read("kernel.random.boot_id")
	if err != nil {
		return "", err
	}
	var saved struct {
		Instance string `json:"instance"`
		Boot     string `json:"boot"`
	}
	file := filepath.Join(p.stateDir, instanceFile)
	if data, err := os.ReadFile(file); err == nil && json.Unmarshal(data, &saved) == nil && saved.Boot == boot && saved.Instance != "" {
		return saved.Instance, nil
	}
	saved.Instance, saved.Boot = rand.Text(), boot
	data, err := json.Marshal(saved)
	if err != nil {
		return "", err
	}
	if err := statedir.Write(file, append(data, '\n')); err != nil {
		p.log.Error("name of the registration not saved", "error", err) // steering must continue on a full disk
	}
	return saved.Instance, nil
}

// readTable returns the table that was in force when the agent ended, or nil.
func (p *participation) readTable() (*table.Table, error) {
	data, err := os.ReadFile(filepath.Join(p.stateDir, tableFile))
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return table.Decode(data)
}

// Apply puts a table in force: first in the kernel, then in the checks of connections, which close those of the devices that
// have left.
func (d *dataPath) Apply(t *table.Table) error {
	p := (*participation)(d)
	p.mu.Lock()
	defer p.mu.Unlock()
	before := p.table
	if err := p.install(t); err != nil {
		return err
	}
	p.unsaved = t
	p.save()
	gained, lost := changes(before, t, p.self())
	if lost > 0 || before == nil {
		p.late.left(before, t, p.self(), time.Now())
	}
	if gained > 0 {
		p.copies.gained(before, t, p.self(), p.dead, time.Now())
	}
	if gained+lost > 0 || before == nil {
		p.log.Info("table of the fleet in force", events.FleetTable, "epoch", t.Epoch, "gained", gained, "lost", lost)
	}
	return nil
}

// HandOver hands the templates of the devices that leave to their next hosts.
func (d *dataPath) HandOver(ctx context.Context, t *table.Table) error {
	p := (*participation)(d)
	p.mu.Lock()
	mapping, self, name := p.mapping, t.Index(p.self()), p.self()
	p.mu.Unlock()
	if name == "" {
		return nil
	}
	begun := time.Now()
	all, err := p.services.HandOver(func(device netip.Addr) bool {
		b := mapping.Locate(device).Bucket
		return t.Owner[b] == self && t.Next[b] != table.None
	}, time.Time{})
	if err != nil {
		return err
	}
	if err := p.handOver(ctx, false, all, func(device netip.Addr) string { return t.Hosts[t.Next[mapping.Locate(device).Bucket]].Name }); err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.late.prepared, p.late.preparedAt = t.Epoch, begun
	return nil
}

// handOver hands templates to the hosts that to returns.
func (p *participation) handOver(ctx context.Context, late bool, all map[netip.Addr][]byte, to func(device netip.Addr) string) error {
	byHost := make(map[string]map[netip.Addr][]byte)
	for device, templates := range all {
		name := to(device)
		if byHost[name] == nil {
			byHost[name] = make(map[netip.Addr][]byte)
		}
		byHost[name][device] = templates
	}
	for name, templates := range byHost {
		if err := p.store.HandOver(ctx, name, late, templates); err != nil {
			return err
		}
	}
	return nil
}

// takeOverTime is the longest time that the members get to receive templates; the devices move afterwards in any case.
const takeOverTime = 2 * time.Second

// mostTakes is the number of calls that take over the templates of a move. Whoever can write to etcd chooses how many there are.
const mostTakes = 100

// TakeOver sends the templates of the devices that come to the members of this host.
func (d *dataPath) TakeOver(ctx context.Context, t *table.Table) error {
	p := (*participation)(d)
	p.mu.Lock()
	mapping, self, name := p.mapping, t.Index(p.self()), p.self()
	p.mu.Unlock()
	if name == "" { // the templates are for the other host
		return nil
	}
	for range mostTakes {
		handed, more, err := p.store.TakeOver(ctx, false)
		for _, templates := range handed {
			maps.DeleteFunc(templates, func(device netip.Addr, _ []byte) bool { return t.Next[mapping.Locate(device).Bucket] != self })
			if len(templates) > 0 {
				p.services.TakeOver(templates, false)
			}
		}
		if err != nil {
			return err
		}
		if !more {
			break
		}
	}
	for begun := time.Now(); p.services.IsTakingOver() && time.Since(begun) < takeOverTime && ctx.Err() == nil; {
		time.Sleep(time.Millisecond)
	}
	return nil
}

// refresh looks at what changes without the store: interfaces, routes, neighbors, and the services.
func (p *participation) refresh() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.local = nil
	p.save()
	nics, missing, unread := findInterfaces(p.settings.Interfaces, p.nics)
	for _, err := range []error{missing, unread} {
		if err != nil {
			p.local = append(p.local, err.Error())
		}
	}
	p.missing, p.absent = missing, absentAddress(p.settings.Addresses)
	if p.absent != nil {
		p.local = append(p.local, p.absent.Error())
	}
	if !reflect.DeepEqual(nics, p.nics) {
		p.nics, p.attached = nics, nil
	}
	p.attach()
	if counts, err := p.path.Counts(); err != nil {
		p.local = append(p.local, err.Error())
	} else {
		p.local = append(p.local, p.drops.problems(counts, time.Now(), p.flipped)...)
	}
	if p.table != nil {
		if paths := p.findPaths(p.table, p.nameIn(p.table)); !reflect.DeepEqual(paths, p.paths) {
			if err := p.install(p.table); err != nil {
				p.local = append(p.local, err.Error())
			}
		}
	}
	p.healthy = p.services.CanServe(p.settings.selects)
	next := p.registration
	next.Healthy, next.MACs, next.Addresses = p.healthy == nil && missing == nil && p.absent == nil, ownMACs(p.nics), ownAddresses(p.nics, p.settings.Addresses)
	if !reflect.DeepEqual(next, p.registration) {
		p.registration = next
		if p.follower != nil {
			p.follower.Describe(next.Host, next.Healthy)
		}
	}
	p.report()
}

// save saves the table in force, until that succeeds: the next agent begins with it. The caller holds mu.
func (p *participation) save() {
	if p.unsaved == nil {
		return
	}
	data, err := p.unsaved.Encode()
	if err == nil {
		err = statedir.Write(filepath.Join(p.stateDir, tableFile), data)
	}
	if err != nil {
		p.local = append(p.local, fmt.Sprintf("the table is not saved: %v", err)) // steering must continue on a full disk
		return
	}
	p.unsaved = nil
}

// changed notes the state of the store.
func (p *participation) changed(s follow.State) {
	p.mu.Lock()
	defer p.mu.Unlock()
	before := p.nameIn(p.table)
	p.state = s
	if s.Snapshot != nil {
		p.late.noteHosts(s.Hosts, p.settings.host)
	}
	if p.table != nil && p.nameIn(p.table) != before {
		if err := p.install(p.table); err != nil {
			p.local = append(p.local, err.Error())
		}
	}
	p.reportHosts()
	p.report()
}

// install installs a table in the kernel. The caller holds mu.
func (p *participation) install(t *table.Table) error {
	mapping, err := placement.NewMapping(1, bpf.NoSlot, t.Nonce, p.settings.devices)
	if err != nil {
		return err
	}
	name := p.nameIn(t)
	paths := p.findPaths(t, name)
	next := func(h *table.Host) forward.Next { return paths[h.Name].Next }
	host := hostOf(t, mapping, name)
	// The connections of devices that leave are found before the flip, and closed right after it. Until then, this host serves the
	// datagrams of the devices.
	closing := func() func() { return func() {} }
	flip := forward.Flip{}
	if _, lost := changes(p.table, t, name); lost > 0 || p.table == nil {
		flip.Leaving = func() []forward.Connection {
			var found []sockdiag.Socket
			found, closing = p.services.FindLeaving(p.settings.Addresses, host)
			return established(found, mapping)
		}
	}
	flip.After = func() {
		if p.table == nil || p.table.Epoch != t.Epoch {
			p.flipped = time.Now()
		}
		p.table, p.mapping, p.paths = t, mapping, paths
		if p.attached == nil {
			p.attach() // the devices whose connections are closed must not come back to this host
		}
		log := closing()
		p.services.SetFleet(p.settings.Addresses, host)
		log()
	}
	if err := p.path.Set(t, name, next, p.settings.devices, flip); err != nil {
		return err
	}
	p.attach()
	return nil
}

// established returns the connections that stand for their devices until they are closed. Anybody can begin a handshake in the name of a
// device.
func established(found []sockdiag.Socket, mapping *placement.Mapping) (list []forward.Connection) {
	for i := range found {
		if s := &found[i]; s.State == sockdiag.Established {
			list = append(list, forward.Connection{Hash: mapping.Hash(s.Remote.Addr()), Device: s.Remote, Local: s.Local})
		}
	}
	return list
}

// changes returns the numbers of buckets that a host gains and loses when a table follows the one before, which is nil before the first one:
// until then, a host may have served what reached it.
func changes(before, t *table.Table, host string) (gained, lost int) {
	was, is := uint16(table.None), t.Index(host)
	if before != nil {
		was = before.Index(host)
	}
	for b := range t.Owner {
		had, has := was != table.None && before.Owner[b] == was, is != table.None && t.Owner[b] == is
		switch {
		case has && !had:
			gained++
		case had && !has:
			lost++
		}
	}
	return gained, lost
}

// hostOf returns the function that the services ask for the host of a device.
func hostOf(t *table.Table, mapping *placement.Mapping, self string) func(netip.Addr) (string, int, bool) {
	return func(device netip.Addr) (string, int, bool) {
		b := mapping.Locate(device).Bucket
		name := func(i uint16) string {
			if i == table.None {
				return ""
			}
			return t.Hosts[i].Name
		}
		owner := name(t.Owner[b])
		// Hosts that have applied the next table already send devices to the next owner.
		return owner, b, self != "" && (owner == self || name(t.Next[b]) == self)
	}
}

// findPaths finds the paths from the host with a name to the other hosts of a table. The caller holds mu.
func (p *participation) findPaths(t *table.Table, name string) map[string]path {
	paths := make(map[string]path, len(t.Hosts))
	open := sync.OnceValues(func() (int, error) { return p.path.OpenTunnel(p.settings.Addresses) })
	tunnel := func() (int, uint32, error) {
		index, err := open()
		return index, forward.VNI(t.Nonce), err
	}
	now, asked := time.Now(), make(unresolved)
	here := origin{links: newLinks(p.nics), services: p.settings.Addresses, tunnel: tunnel}
	here.silent = func(a netip.Addr) bool { // addresses that the kernel knows are forgotten
		if since, ok := p.unresolved[a]; ok {
			asked[a] = since
		}
		return asked.silent(a, now)
	}
	defer func() { p.unresolved = asked }()
	here.routers = here.defaultRouters()
	if self := t.Index(name); self != table.None {
		here.addresses = t.Hosts[self].Addresses
	}
	dead, taken := p.deadHosts(), make(map[netip.Addr]string)
	p.holders = here.holders(t, dead, p.holders)
	for _, a := range p.settings.Addresses {
		taken[a] = "the services"
	}
	for _, n := range p.nics {
		for _, a := range n.addresses {
			taken[a] = "this host"
		}
	}
	serving := make(map[uint16]bool)
	for _, column := range []*table.Column{&t.Owner, &t.Previous, &t.Next} {
		for _, i := range column {
			serving[i] = true
		}
	}
	for i := range t.Hosts {
		h := &t.Hosts[i]
		problem := conflict(h, taken, p.holders)
		switch {
		case h.Name == name:
			paths[h.Name] = path{kind: "self"}
			continue
		case problem != "" && h.Name == p.settings.host: // the store says that another process has the name
			paths[h.Name] = path{kind: "none"}
		case problem != "":
			paths[h.Name] = path{kind: "none", problem: problem}
		default:
			one := here.findPath(h)
			if one.Dead = dead[h.Name]; one.Dead || !serving[uint16(i)] {
				one.problem = "" // the store tells that the host is dead, or it has no devices
			}
			paths[h.Name] = one
		}
	}
	return paths
}

// nameIn returns the name of this host in a table, which may be nil. A host that got another name is in the table with its former one
// until the leader has written the next table: the former name has an address of this host, and nobody has registered it. The caller holds mu.
func (p *participation) nameIn(t *table.Table) string {
	name := p.self()
	if t == nil || name == "" || t.Index(name) != table.None || p.state.Snapshot == nil {
		return name
	}
	own := ownAddresses(p.nics, p.settings.Addresses)
	for i := range t.Hosts {
		h := &t.Hosts[i]
		isOwn := slices.ContainsFunc(h.Addresses, func(a netip.Addr) bool { return slices.Contains(own, a) })
		isAlive := slices.ContainsFunc(p.state.Hosts, func(other lead.Host) bool { return other.Name == h.Name && other.Alive })
		if isOwn && !isAlive {
			return h.Name
		}
	}
	return name
}

// self returns the name of this host in tables. It is "" while another process has registered a host with the name: this host
// has no devices then, and sends all packets to others. The caller holds mu.
func (p *participation) self() string {
	if p.state.Snapshot != nil && p.state.Taken {
		return ""
	}
	return p.settings.host
}

// deadHosts returns the hosts that have died as far as this host knows; none without the store, because two hosts that take each
// other for dead could send packets to and fro. The caller holds mu.
func (p *participation) deadHosts() map[string]bool {
	if p.state.Snapshot == nil || !p.state.Connected {
		return nil
	}
	dead := make(map[string]bool)
	for i := range p.state.Hosts {
		h := &p.state.Hosts[i]
		dead[h.Name] = !h.Alive && (!h.Unknown || p.dead[h.Name])
	}
	p.dead = dead
	return dead
}

// attach attaches the programs to the interfaces that exist. The caller holds mu.
func (p *participation) attach() {
	if p.table == nil && p.continues {
		return
	}
	var indexes []int
	for _, n := range p.nics {
		indexes = append(indexes, n.index)
	}
	tunnel := 0
	for _, path := range p.paths {
		if path.kind == "tunnel" {
			tunnel = path.Interface
		}
	}
	wanted := append(slices.Clone(indexes), tunnel)
	attached, err := p.path.IsAttached()
	if err == nil && attached && slices.Equal(wanted, p.attached) {
		return
	}
	if err := p.path.Attach(indexes, tunnel); err != nil {
		p.local = append(p.local, err.Error())
		return
	}
	p.attached = wanted
}
