// SPDX-License-Identifier: Apache-2.0

// Package forward is the data path of a host of a fleet: the BPF programs that send packets to the services of the fleet to
// the host that owns the bucket of their device, with their maps and pins.
package forward

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"maps"
	"math/bits"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"sockeye/internal/bpf"
	"sockeye/internal/bpf/load"
	"sockeye/internal/bpf/pin"
	"sockeye/internal/clsact"
	"sockeye/internal/fleet/table"
	"sockeye/internal/placement"
)

// Outcome is what a program does with a packet to a service.
type Outcome int

// The outcomes (bpf/include/fleet.h).
const (
	// Local packets were passed to the services of this host.
	Local = Outcome(fleetForwardFleetOutcomeFLEET_LOCAL)
	// Forwarded packets were sent to the owner of their bucket.
	Forwarded = Outcome(fleetForwardFleetOutcomeFLEET_FORWARDED)
	// Chance packets have no socket here, and were sent to the other owner of a bucket that moves.
	Chance = Outcome(fleetForwardFleetOutcomeFLEET_CHANCE)
	// Disagreed packets were sent here by a peer although this host does not own their bucket, and were passed.
	Disagreed = Outcome(fleetForwardFleetOutcomeFLEET_DISAGREED)
	// NoTable packets were dropped before the first table.
	NoTable = Outcome(fleetForwardFleetOutcomeFLEET_TABLE)
	// NoOwner packets were dropped because their bucket has no owner.
	NoOwner = Outcome(fleetForwardFleetOutcomeFLEET_OWNER)
	// Expired packets were dropped because their TTL or hop limit was used up.
	Expired = Outcome(fleetForwardFleetOutcomeFLEET_TTL)
	// Unreachable packets were dropped because this host has no path to the owner.
	Unreachable = Outcome(fleetForwardFleetOutcomeFLEET_UNREACHABLE)
	// Untrusted packets were dropped: in the tunnel, because no peer has sent them or because they are not to a service; at an interface,
	// because they are to a service in a broadcast or multicast frame, or have several tags of VLAN ID 0.
	Untrusted = Outcome(fleetForwardFleetOutcomeFLEET_UNTRUSTED)
	// Outcomes is the number of outcomes.
	Outcomes = int(fleetForwardFleetOutcomeFLEET_OUTCOMES)
)

var outcomeNames = [Outcomes]string{"local", "forwarded", "second_chance", "disagreed", "no_table", "no_owner", "ttl", "unreachable", "untrusted"}

// String returns the name of an outcome in metrics.
func (o Outcome) String() string { return outcomeNames[o] }

// MostListeners is the largest number of listeners of a fleet.
const MostListeners = int(fleetForwardFleetLimitFLEET_SERVED)

// Pins of tables.
const (
	pinTables = "fleet_tables" // the map of the programs
	pinTable  = "table"        // the table in force
	pinNext   = "table_next"   // the table that is being installed
)

// TunnelMAC is the link-layer address of the tunnel of every host. It is locally administered.
var TunnelMAC = [6]byte{0x02, 's', 'o', 'c', 'k', 'y'}

// Listener is a listener of a service at an address of the fleet. Port and protocol are 0 for packets without ports:
// fragments.
type Listener = fleetForwardFleetListener

// Next is how this host reaches another one. The zero value stands for a host that cannot be reached.
type Next struct {
	// Addresses are those of the host on the link of the interface, at most one per family, or the far end of the tunnel.
	Addresses []netip.Addr
	// Interface is the index of the interface.
	Interface int
	// VNI is the virtual network of the tunnel; 0: the host is on the link.
	VNI uint32
	// Sources are all addresses of the host: its packets in the tunnel may come from any of them, because its routes to this host may be
	// of another family.
	Sources []netip.Addr
	// Room is the size of the largest IP packet that fits into a packet of the tunnel, in bytes.
	Room int
	// MAC is the address from which the host forwards packets on the link; zeros: not known, so that its packets are treated as
	// those of a router.
	MAC [6]byte
	// Dead is set for a host that has died as far as this host knows. Its program may still forward packets by an earlier table, so
	// that they are treated as those of a router.
	Dead bool
}

// Connection is a TCP connection of a device with a service of this host.
type Connection struct {
	Hash          uint32 // of the device
	Device, Local netip.AddrPort
}

// Path is the data path: pinned maps and programs, which stay attached without this process.
type Path struct {
	base, dir               string
	others                  []string // directories of other layouts
	spec                    *ebpf.CollectionSpec
	tables                  *ebpf.Map
	served, peers           *ebpf.Map
	leaving, outcomes       *ebpf.Map
	devices                 [2]deviceMaps // by the value of named, less 1
	ingress, tunnel, egress *ebpf.Program
	hooks                   []hook
	former                  map[fleetForwardFleetPeer]time.Time // peers of the tunnel that have left the table, and the times
	links                   map[string]link.Link                // by the names of their pins
	filters                 *clsact.Filters                     // nil: the kernel has TCX links
	named                   uint32                              // device map in force
	nonce, epoch            uint64                              // of the table that Open has found; 0: none
	entries                 *placement.Entries                  // of the device map in force; nil: of an earlier process
}

type deviceMaps struct{ tries, hosts *ebpf.Map }

// Open creates the maps and loads the programs, or adopts the pins below base. The programs are attached by Attach, and drop all
// packets to services until Set has installed a table. The error is a *pin.IncompatibleError for a pin that this version cannot use.
func Open(base string) (_ *Path, err error) {
	layout, err := pin.ObjectsLayout([]string{"fleet_"}, loadFleetForward)
	if err != nil {
		return nil, err
	}
	p := &Path{base: base, dir: base + pin.LayoutMark + layout, links: make(map[string]link.Link), former: make(map[fleetForwardFleetPeer]time.Time)}
	defer func() {
		if err != nil {
			p.Close()
		}
	}()
	if p.others, err = pin.OtherLayouts(base, p.dir); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(p.dir, 0o700); err != nil {
		return nil, fmt.Errorf("create pin directory: %w", err)
	}
	if p.spec, err = loadFleetForward(); err != nil {
		return nil, err
	}
	if err := p.spec.Variables["tunnel_mac"].Set(TunnelMAC); err != nil {
		return nil, err
	}
	replaced := make(map[string]*ebpf.Map)
	for name, to := range map[string]**ebpf.Map{
		pinTables: &p.tables, "served": &p.served, "peers": &p.peers, "leaving": &p.leaving, "outcomes": &p.outcomes,
		"device_maps": &p.devices[0].tries, "host_maps": &p.devices[0].hosts,
		"next_devices": &p.devices[1].tries, "next_hosts": &p.devices[1].hosts,
	} {
		if *to, err = pin.OpenMap(p.dir, p.spec.Maps[name]); err != nil {
			return nil, err
		}
		replaced[name] = *to
	}
	if p.named, err = p.adoptTable(); err != nil {
		return nil, err
	}
	collection, err := load.Collection(p.spec, replaced)
	if err != nil {
		return nil, load.Explain("programs of the fleet", err)
	}
	defer collection.Close()
	p.ingress, p.tunnel, p.egress = collection.DetachProgram("fleet_ingress"), collection.DetachProgram("fleet_tunnel"), collection.DetachProgram("fleet_egress")
	return p, nil
}

// Adopted returns the nonce and the epoch of the table that Open has found in force, or 0.
func (p *Path) Adopted() (nonce, epoch uint64) { return p.nonce, p.epoch }

// adoptTable finds the table in force, and returns which device map it names. The kernel opens a map by its ID only with
// CAP_SYS_ADMIN, which the agent lacks, but it tells the ID: the table in force is pinned, and has the same ID. An agent that was
// killed while it installed a table leaves two pins, one of which is the table in force.
func (p *Path) adoptTable() (named uint32, err error) {
	var id uint32
	if err := p.tables.Lookup(uint32(0), &id); errors.Is(err, ebpf.ErrKeyNotExist) {
		return 0, nil
	} else if err != nil {
		return 0, fmt.Errorf("read table of the fleet: %w", err)
	}
	for _, name := range []string{pinTable, pinNext} {
		path := filepath.Join(p.dir, name)
		t, err := readTable(path, ebpf.MapID(id))
		if err != nil {
			return 0, err
		}
		if t == nil {
			continue
		}
		if name == pinNext {
			err = os.Rename(path, filepath.Join(p.dir, pinTable))
		}
		p.nonce, p.epoch = t.Nonce, t.Epoch
		return t.Named, err
	}
	return p.presumeNamed(ebpf.MapID(id)), nil
}

// readTable returns the table that is pinned at path, or nil if none is or if its map has another ID.
func readTable(path string, id ebpf.MapID) (*fleetForwardFleetTable, error) {
	m, err := ebpf.LoadPinnedMap(path, &ebpf.LoadPinOptions{ReadOnly: true})
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, &pin.IncompatibleError{Path: path, Err: err}
	}
	defer m.Close()
	info, err := m.Info()
	if err != nil {
		return nil, &pin.IncompatibleError{Path: path, Err: err}
	}
	if its, _ := info.ID(); its != id {
		return nil, nil
	}
	t := new(fleetForwardFleetTable)
	if err := m.Lookup(uint32(0), t); err != nil {
		return nil, &pin.IncompatibleError{Path: path, Err: err}
	}
	return t, nil
}

// presumeNamed returns which device map a table without a pin names: versions before the pin have left such a table. Without the
// right to open the table, the device map that exists is the one. There are two only if the agent was killed between the flip
// of the table and the removal of the former device map; then the next change of the device map could have effect a moment
// before its table.
func (p *Path) presumeNamed(id ebpf.MapID) uint32 {
	if m, err := ebpf.NewMapFromID(id); err == nil {
		defer m.Close()
		t := new(fleetForwardFleetTable)
		if m.Lookup(uint32(0), t) == nil {
			return t.Named
		}
	}
	for i, bank := range p.devices {
		var trie uint32
		if bank.tries.Lookup(uint32(0), &trie) == nil {
			return uint32(i + 1)
		}
	}
	return 0
}

// Flip is called when a table comes into force. A nil function is not called.
type Flip struct {
	// Leaving is called right before: nothing else can fail but the flip itself. It returns the connections of devices that leave this host,
	// in the order in which After closes them. This host serves the datagrams of a device until the last of its connections is closed.
	Leaving func() []Connection
	// After is called as soon as the table is in force: the kernel waits for a grace period of RCU afterwards, which takes a second on a
	// busy host.
	After func()
}

// Set installs a table of the fleet. self is the name of this host, and next returns how it reaches the others. devices is
// the device map of the services, or nil. Packets are decided by the old table or by the new one.
func (p *Path) Set(t *table.Table, self string, next func(h *table.Host) Next, devices *placement.DeviceMap, flip Flip) error {
	kernel := &fleetForwardFleetTable{Nonce: t.Nonce, Epoch: t.Epoch, Self: t.Index(self), Named: 0}
	for b := range t.Owner {
		to := &kernel.Bucket[b]
		to.Owner, to.Other = t.Owner[b], t.Previous[b]
		if t.Next[b] != table.None {
			to.Other = t.Next[b] | uint16(fleetForwardFleetLimitFLEET_PREPARED)
		}
	}
	peers, dead := make(senders), make(senders)
	for i := range t.Hosts {
		h := &t.Hosts[i]
		if h.Name == self {
			continue
		}
		n := next(h)
		if n.Interface == 0 {
			continue
		}
		to := &kernel.Host[i]
		to.Id = hostID(h.Name)
		peer := fleetForwardFleetSender{Host: to.Id, Kind: uint32(fleetForwardFleetSenderKindFLEET_PEER)}
		to.Ifindex, to.Vni, to.Mac = uint32(n.Interface), n.VNI, n.MAC
		for _, a := range n.Addresses {
			if a.Is4() && n.VNI == 0 {
				to.Ipv4 = binary.NativeEndian.Uint32(a.AsSlice())
			} else {
				to.Address.Word = placement.Address(a).Word
			}
		}
		if n.VNI != 0 {
			kernel.Vni = n.VNI
			if room := uint16(n.Room); kernel.Room == 0 || room < kernel.Room {
				kernel.Room = room
			}
			for _, a := range n.Sources {
				var key fleetForwardFleetPeer
				key.Address.Word = placement.Address(a).Word
				if n.Dead {
					dead[key] = peer
				} else {
					peers[key] = peer
				}
			}
		} else if n.MAC != [6]byte{} && !n.Dead {
			peers[fleetForwardFleetPeer{Mac: n.MAC}] = peer
			bit := n.MAC[4] ^ n.MAC[5]
			kernel.PeerBits[bit/64] |= 1 << (bit % 64)
		}
	}
	if kernel.Vni == 0 {
		kernel.Vni = VNI(t.Nonce) // of hosts that are not in this table
	}
	err := putAll(p.peers, peers)
	if errors.Is(err, unix.E2BIG) { // hosts have changed their addresses thousands of times
		if err = p.removeFormer(); err == nil {
			err = putAll(p.peers, peers)
		}
	}
	if err != nil {
		return fmt.Errorf("write peers: %w", err)
	}
	if err := p.install(kernel, entriesOf(t.Nonce, devices), flip); err != nil {
		return err
	}
	if err := p.retirePeers(peers, dead); err != nil {
		return fmt.Errorf("write peers: %w", err)
	}
	return nil
}

// removeFormer removes all former peers.
func (p *Path) removeFormer() error {
	var key fleetForwardFleetPeer
	var value fleetForwardFleetSender
	kept := make(senders)
	all := p.peers.Iterate()
	for all.Next(&key, &value) {
		if value.Kind == uint32(fleetForwardFleetSenderKindFLEET_PEER) {
			kept[key] = value
		}
	}
	return errors.Join(all.Err(), keepKeys(p.peers, kept))
}

// hostID returns the number by which the programs know a host, in all tables.
func hostID(name string) uint64 {
	h := fnv.New64a()
	h.Write([]byte(name))
	return h.Sum64()
}

// senders are the hosts by which packets are forwarded, by their addresses.
type senders map[fleetForwardFleetPeer]fleetForwardFleetSender

// formerTime is the minimum time for which the tunnel accepts packets of a host that has left the table. While the agent of that
// host is dead, its program forwards packets by its last table.
const formerTime = time.Hour

// retirePeers removes the peers that are not in the table. Peers of the tunnel are former peers for formerTime before that, and dead
// hosts of the table are.
func (p *Path) retirePeers(peers, dead senders) error {
	kept, former := maps.Clone(peers), maps.Clone(dead)
	maps.Copy(kept, dead)
	var key fleetForwardFleetPeer
	var value fleetForwardFleetSender
	all := p.peers.Iterate()
	for all.Next(&key, &value) {
		if _, known := kept[key]; known || key.Mac != [6]byte{} {
			continue
		}
		if _, known := p.former[key]; !known {
			p.former[key] = time.Now()
		}
		if time.Since(p.former[key]) < formerTime {
			kept[key], former[key] = value, value
		}
	}
	if err := all.Err(); err != nil {
		return err
	}
	for key, value := range former {
		value.Kind = uint32(fleetForwardFleetSenderKindFLEET_FORMER_PEER)
		former[key] = value
	}
	if err := putAll(p.peers, former); err != nil {
		return err
	}
	maps.DeleteFunc(p.former, func(key fleetForwardFleetPeer, _ time.Time) bool {
		_, again := peers[key]
		_, known := kept[key]
		return again || !known
	})
	return keepKeys(p.peers, kept)
}

// entriesOf returns the entries of a device map with the hashes of its devices.
func entriesOf(nonce uint64, devices *placement.DeviceMap) *placement.Entries {
	m, err := placement.NewMapping(1, bpf.NoSlot, nonce, devices)
	if err != nil {
		panic(err) // a mapping of one slot always exists
	}
	return m.Entries()
}

// install writes the device map to the bank that is not in force, and then the table that refers to it.
func (p *Path) install(t *fleetForwardFleetTable, entries *placement.Entries, flip Flip) (err error) {
	size := entries.Size()
	same := p.entries != nil && p.entries.Equal(entries) // a large device map takes seconds, and few tables change it
	if same {
		t.Named = p.named
	} else if size > 0 {
		t.Named = 1
		if p.named == 1 {
			t.Named = 2
		}
		devices, err := bpf.NewDeviceMap(size, entries.All())
		if err != nil {
			return err
		}
		defer devices.Close()
		to := p.devices[t.Named-1]
		if err := devices.Install(to.tries, to.hosts); err != nil {
			return err
		}
	}
	inner, err := ebpf.NewMap(p.spec.Maps[pinTables].InnerMap)
	if err != nil {
		return fmt.Errorf("create table of the fleet: %w", err)
	}
	defer inner.Close()
	if err := inner.Put(uint32(0), t); err != nil {
		return fmt.Errorf("write table of the fleet: %w", err)
	}
	next := filepath.Join(p.dir, pinNext)
	if err := pin.Remove(next); err != nil {
		return err
	}
	// Pinned before it is in force: whenever the agent is killed, the table in force has a pin.
	if err := inner.Pin(next); err != nil {
		return fmt.Errorf("pin table of the fleet: %w", err)
	}
	if flip.Leaving != nil {
		p.setLeaving(flip.Leaving())
		// Also those of an agent that was killed: a program that finds an entry looks for the connection.
		defer func() { err = errors.Join(err, keepKeys(p.leaving, map[uint32]bool{})) }()
	}
	flipped := flip.After
	if flipped == nil {
		flipped = func() {}
	}
	if err := bpf.PutTable(p.tables, inner, flipped); err != nil {
		return errors.Join(fmt.Errorf("install table of the fleet: %w", err), pin.Remove(next))
	}
	p.named, p.entries = t.Named, entries
	if err := os.Rename(next, filepath.Join(p.dir, pinTable)); err != nil {
		return fmt.Errorf("pin table of the fleet: %w", err)
	}
	if same {
		return nil
	}
	for i, bank := range p.devices {
		if uint32(i+1) != p.named {
			if err := bpf.RemoveDeviceMap(bank.tries, bank.hosts); err != nil {
				return err
			}
		}
	}
	return nil
}

// setLeaving writes the connections of devices that leave. If the map is full, datagrams of the other devices reach the next host before
// their connections are closed, for some milliseconds. The table comes into force all the same.
func (p *Path) setLeaving(list []Connection) {
	for i := range list {
		c := &list[i]
		value := fleetForwardFleetConnection{DevicePort: bits.ReverseBytes16(c.Device.Port()), Port: bits.ReverseBytes16(c.Local.Port())} // network byte order
		value.Device.Word, value.Local.Word = placement.Address(c.Device.Addr()).Word, placement.Address(c.Local.Addr()).Word
		if p.leaving.Put(c.Hash, &value) != nil {
			return
		}
	}
}

// SetListeners replaces the listeners whose packets are forwarded.
func (p *Path) SetListeners(listeners []Listener) error {
	if len(listeners) > MostListeners {
		return fmt.Errorf("%d listeners at the addresses of the fleet, at most %d are possible", len(listeners), MostListeners)
	}
	wanted := make(map[Listener]uint32)
	for _, l := range listeners {
		wanted[l] = 1
	}
	if err := errors.Join(putAll(p.served, wanted), keepKeys(p.served, wanted)); err != nil {
		return fmt.Errorf("write listeners of the fleet: %w", err)
	}
	return nil
}

// putAll writes entries to a map.
func putAll[K comparable, V any](m *ebpf.Map, entries map[K]V) error {
	for key, value := range entries {
		if err := m.Put(&key, &value); err != nil {
			return err
		}
	}
	return nil
}

// keepKeys removes all other keys from a map.
func keepKeys[K comparable, V any](m *ebpf.Map, keys map[K]V) error {
	var key K
	var value []byte
	var removed []K
	all := m.Iterate()
	for all.Next(&key, &value) {
		if _, kept := keys[key]; !kept {
			removed = append(removed, key)
		}
	}
	errs := []error{all.Err()}
	for _, key := range removed {
		if err := m.Delete(&key); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// Counts returns the packets by outcome since the maps were created; segments of GRO packets count one by one.
func (p *Path) Counts() (counts [Outcomes]uint64, err error) {
	for outcome := range counts {
		var each []uint64
		if err := p.outcomes.Lookup(uint32(outcome), &each); err != nil {
			return counts, fmt.Errorf("read outcomes: %w", err)
		}
		for _, n := range each {
			counts[outcome] += n
		}
	}
	return counts, nil
}

// Close closes the descriptors of this process. Pinned maps, programs and links stay.
func (p *Path) Close() error {
	if p.filters != nil {
		p.filters.Close()
	}
	var errs []error
	for _, l := range p.links {
		errs = append(errs, l.Close())
	}
	for _, program := range []*ebpf.Program{p.ingress, p.tunnel, p.egress} {
		errs = append(errs, program.Close())
	}
	for _, m := range []*ebpf.Map{p.tables, p.served, p.peers, p.leaving, p.outcomes,
		p.devices[0].tries, p.devices[0].hosts, p.devices[1].tries, p.devices[1].hosts} {
		errs = append(errs, m.Close())
	}
	return errors.Join(errs...)
}

// Remove detaches the programs and removes the pins below base, in any layout.
func Remove(base string) error { return pin.EachLayout(base, removeDir) }

// removeDir removes the links first: without its maps, a program would drop packets.
func removeDir(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("read pin directory: %w", err)
	}
	for _, links := range []bool{true, false} {
		for _, e := range entries {
			if isLink(e.Name()) != links {
				continue
			}
			if err := pin.Remove(filepath.Join(dir, e.Name())); err != nil {
				return err
			}
		}
	}
	return os.Remove(dir)
}
