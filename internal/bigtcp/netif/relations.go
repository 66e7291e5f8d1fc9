// SPDX-License-Identifier: Apache-2.0

package netif

import (
	"errors"
	"fmt"
	"os"
	"slices"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"sockeye/internal/linux"
	"sockeye/internal/nlattr"
)

// unknownNamespace is Related.Netns if the namespace cannot be found or entered.
const unknownNamespace = "unknown"

// snapshot contains the interfaces of a namespace at one point in time.
type snapshot struct {
	path    string
	links   []link
	byIndex map[int]*link
	ports   map[int][]*link // by the index of their bridge or bond
}

// isPeer reports whether IFLA_LINK is the other end of a pair.
func (l *link) isPeer() bool { return l.Kind == "veth" || l.Kind == "netkit" || l.Kind == "vxcan" }

// foreignLinks returns the interfaces whose related interfaces in other namespaces
// must be known to describe l.
func (s *snapshot) foreignLinks(l *link) []link {
	list := s.withLower(l)
	below := slices.DeleteFunc(list[1:], func(b link) bool { return b.isPeer() })
	return list[:1+len(below)]
}

// describe returns an interface with its relations. others has the snapshots of other
// namespaces by their nsid.
func (s *snapshot) describe(l *link, others map[int32]*snapshot) Interface {
	i := l.Interface
	i.Related = []Related{}
	if l.isPeer() && l.lower != 0 {
		if l.foreign {
			i.Related = append(i.Related, foreign(Peer, l, others)...)
		} else if peer := s.byIndex[l.lower]; peer != nil {
			i.Related = append(i.Related, peer.related(Peer, ""))
		}
	}
	for n, b := range s.withLower(l) {
		if n > 0 {
			i.Related = append(i.Related, b.related(Lower, ""))
		}
		if b.foreign && b.lower != 0 && !b.isPeer() {
			i.Related = append(i.Related, foreign(Lower, &b, others)...)
		}
	}
	if master := s.byIndex[l.master]; master != nil {
		i.Related = append(i.Related, master.related(Upper, ""))
	}
	return i
}

// foreign returns the interface of another namespace to which l is related, and the
// lower interfaces of that one.
func foreign(r Relation, l *link, others map[int32]*snapshot) []Related {
	there := others[l.netnsid]
	if there == nil || there.byIndex[l.lower] == nil {
		return []Related{{Relation: r, Index: l.lower, Netns: unknownNamespace}}
	}
	other := there.byIndex[l.lower]
	if r == Peer {
		return []Related{other.related(r, there.path)}
	}
	var list []Related
	for _, b := range there.withLower(other) {
		list = append(list, b.related(r, there.path))
	}
	return list
}

// withLower returns an interface and all lower interfaces in the same namespace,
// nearest first.
func (s *snapshot) withLower(l *link) []link {
	seen := map[int]bool{l.Index: true}
	list := []link{*l}
	for i := 0; i < len(list); i++ {
		for _, b := range s.lower(&list[i]) {
			if !seen[b.Index] {
				seen[b.Index] = true
				list = append(list, *b)
			}
		}
	}
	return list
}

// lower returns the direct lower interfaces in the same namespace.
func (s *snapshot) lower(l *link) []*link {
	below := slices.Clone(s.ports[l.Index])
	if lower := s.byIndex[l.lower]; lower != nil && !l.foreign && !l.isPeer() {
		below = append(below, lower)
	}
	return below
}

func (l *link) related(r Relation, netns string) Related {
	return Related{
		Relation:     r,
		Index:        l.Index,
		Name:         l.Name,
		Netns:        netns,
		Kind:         l.Kind,
		Driver:       l.Driver,
		TSOMaxSize:   l.TSOMaxSize,
		LegacyTunnel: l.LegacyTunnel,
		Sizes:        l.Sizes,
	}
}

// foreignSnapshots reads the other namespaces in which links have lower interfaces or
// peers, by the nsid in this namespace. Namespaces that cannot be found or entered are
// omitted.
func (n *Namespace) foreignSnapshots(links []link) map[int32]*snapshot {
	wanted := map[int32]bool{}
	for _, l := range links {
		if l.foreign && l.lower != 0 && l.netnsid >= 0 {
			wanted[l.netnsid] = true
		}
	}
	found := map[int32]*snapshot{}
	if len(wanted) == 0 {
		return found
	}
	for path, netns := range namespaces {
		id, s := n.snapshotOf(path, netns, wanted)
		if s != nil {
			found[id] = s
		}
		delete(wanted, id)
		if len(wanted) == 0 {
			break
		}
	}
	return found
}

// snapshotOf reads a namespace if its nsid is wanted, and closes netns.
func (n *Namespace) snapshotOf(path string, netns *os.File, wanted map[int32]bool) (id int32, s *snapshot) {
	id, err := n.nsid(netns)
	if err != nil || !wanted[id] {
		netns.Close()
		return -1, nil
	}
	other, err := openNamespace(path, netns)
	if err != nil {
		return id, nil
	}
	defer other.Close()
	s, err = other.snapshot()
	if err != nil {
		return id, nil
	}
	return id, s
}

// snapshot reads all interfaces with their drivers, offloads and relations within the
// namespace.
func (n *Namespace) snapshot() (*snapshot, error) {
	links, err := n.links()
	if err != nil {
		return nil, err
	}
	kernel, err := linux.Running()
	if err != nil {
		return nil, err
	}
	read := links[:0]
	for _, l := range links {
		err := n.readEthtool(&l)
		if errors.Is(err, unix.ENODEV) {
			err = n.retryEthtool(&l)
			if errors.Is(err, unix.ENODEV) {
				continue
			}
		}
		if err != nil {
			return nil, fmt.Errorf("read interface %s: %w", l.Name, err)
		}
		l.LegacyTunnel = LegacyTunnel(&l.Interface, kernel)
		read = append(read, l)
	}
	links = read
	s := &snapshot{path: n.path, links: links, byIndex: map[int]*link{}, ports: map[int][]*link{}}
	for i := range links {
		l := &links[i]
		s.byIndex[l.Index] = l
		if l.master != 0 {
			s.ports[l.master] = append(s.ports[l.master], l)
		}
	}
	return s, nil
}

// maxRenames bounds the renames of an interface during which readEthtool is repeated.
const maxRenames = 1000

// retryEthtool repeats readEthtool after ENODEV: the interface has vanished (ENODEV), was renamed,
// or its driver resets it and does not reply. In the last case, which retryEthtool assumes if the
// name stays the same for maxRetries, the driver and the offloads remain unknown.
func (n *Namespace) retryEthtool(l *link) error {
	for same, renamed := 0, 0; same < maxRetries && renamed < maxRenames; {
		now, err := n.link(l.Index)
		if err != nil {
			return err
		}
		if now.Name == l.Name {
			same++
		} else {
			renamed++
		}
		*l = now
		if err := n.readEthtool(l); !errors.Is(err, unix.ENODEV) {
			return err
		}
	}
	return nil
}

// readEthtool adds the driver and the offloads, which netlink does not report.
func (n *Namespace) readEthtool(l *link) (err error) {
	socket := n.rtnl.Socket.GetFd()
	if l.Driver, err = driver(socket, l.Name); err != nil {
		return err
	}
	l.Offloads, err = offloads(socket, l.Name)
	return err
}

// nsid returns the nsid of another namespace in this one (RTM_GETNSID), or -1 if it
// has none.
func (n *Namespace) nsid(netns *os.File) (int32, error) {
	r := n.request(unix.RTM_GETNSID, 0)
	r.AddData(nl.NewRtGenMsg())
	r.AddData(nl.NewRtAttr(unix.NETNSA_FD, nl.Uint32Attr(uint32(netns.Fd()))))
	messages, err := r.Execute(unix.NETLINK_ROUTE, unix.RTM_NEWNSID)
	if err != nil {
		return -1, fmt.Errorf("read nsid of a network namespace: %w", err)
	}
	for _, m := range messages {
		// The attributes follow struct rtgenmsg, aligned to 4 bytes.
		for kind, value := range nlattr.Attributes(m[min(len(m), 4):]).All {
			if kind == unix.NETNSA_NSID {
				return int32(uint32Value(value)), nil
			}
		}
	}
	return -1, nil
}
