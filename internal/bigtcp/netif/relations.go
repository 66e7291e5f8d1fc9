// SPDX-License-Identifier: Apache-2.0

package netif

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"sockeye/internal/bigtcp/linux"
	"sockeye/internal/bigtcp/nlattr"
)

// unknown is the namespace of a device where it cannot be found or entered.
const unknown = "unknown"

// snapshot is what a namespace had in one moment.
type snapshot struct {
	path    string
	links   []link
	byIndex map[int]*link
	ports   map[int][]*link // of a bridge or bond, by its index
}

// snapshot reads all interfaces with their drivers and offloads, and what they are
// bound to inside the namespace.
func (n *Network) snapshot() (*snapshot, error) {
	links, err := n.links()
	if err != nil {
		return nil, err
	}
	kernel, err := linux.Running()
	if err != nil {
		return nil, err
	}
	kept := links[:0]
	for _, l := range links {
		err := n.ask(&l)
		if errors.Is(err, unix.ENODEV) {
			err = n.askAgain(&l)
			if errors.Is(err, unix.ENODEV) {
				continue
			}
		}
		if err != nil {
			return nil, fmt.Errorf("read interface %s: %w", l.Name, err)
		}
		l.LegacyTunnel = LegacyTunnel(&l.Interface, kernel)
		kept = append(kept, l)
	}
	links = kept
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

// ask reads what only ethtool's commands tell.
func (n *Network) ask(l *link) (err error) {
	socket := n.rtnl.Socket.GetFd()
	if l.Driver, err = driver(socket, l.Name); err != nil {
		return err
	}
	l.Offloads, err = offloads(socket, l.Name)
	return err
}

// askAgain is for an interface of which ask said that there is none: it has vanished
// (ENODEV) or was renamed, or its driver resets it and gives no answer.
func (n *Network) askAgain(l *link) error {
	for range tries {
		now, err := n.link(l.Index)
		if err != nil {
			return err
		}
		*l = now
		if err := n.ask(l); !errors.Is(err, unix.ENODEV) {
			return err
		}
	}
	return nil
}

// isPeer tells kinds of which the lower device is the other end.
func (l *link) isPeer() bool { return l.Kind == "veth" || l.Kind == "netkit" || l.Kind == "vxcan" }

// below are the devices right below one, in the same namespace.
func (s *snapshot) below(l *link) []*link {
	below := slices.Clone(s.ports[l.Index])
	if lower := s.byIndex[l.lower]; lower != nil && !l.foreign && !l.isPeer() {
		below = append(below, lower)
	}
	return below
}

// withBelow are a device and all below it, in the same namespace, nearest first.
func (s *snapshot) withBelow(l *link) []link {
	seen := map[int]bool{l.Index: true}
	list := []link{*l}
	for i := 0; i < len(list); i++ {
		for _, b := range s.below(&list[i]) {
			if !seen[b.Index] {
				seen[b.Index] = true
				list = append(list, *b)
			}
		}
	}
	return list
}

// abroad are the devices whose place in other namespaces is to be known to describe l.
func (s *snapshot) abroad(l *link) []link {
	list := s.withBelow(l)
	below := slices.DeleteFunc(list[1:], func(b link) bool { return b.isPeer() })
	return list[:1+len(below)]
}

// describe gives an interface its relations. Elsewhere are the other namespaces, by
// their numbers in this one.
func (s *snapshot) describe(l *link, elsewhere map[int32]*snapshot) Interface {
	i := l.Interface
	i.Related = []Related{}
	if l.isPeer() && l.lower != 0 {
		if l.foreign {
			i.Related = append(i.Related, foreign(Peer, l, elsewhere)...)
		} else if peer := s.byIndex[l.lower]; peer != nil {
			i.Related = append(i.Related, peer.related(Peer, ""))
		}
	}
	for n, b := range s.withBelow(l) {
		if n > 0 {
			i.Related = append(i.Related, b.related(Lower, ""))
		}
		if b.foreign && b.lower != 0 && !b.isPeer() {
			i.Related = append(i.Related, foreign(Lower, &b, elsewhere)...)
		}
	}
	if master := s.byIndex[l.master]; master != nil {
		i.Related = append(i.Related, master.related(Upper, ""))
	}
	return i
}

// foreign are the device in another namespace to which l is bound, and those below it.
func foreign(r Relation, l *link, elsewhere map[int32]*snapshot) []Related {
	there := elsewhere[l.netnsid]
	if there == nil || there.byIndex[l.lower] == nil {
		return []Related{{Relation: r, Index: l.lower, Netns: unknown}}
	}
	other := there.byIndex[l.lower]
	if r == Peer {
		return []Related{other.related(r, there.path)}
	}
	var list []Related
	for _, b := range there.withBelow(other) {
		list = append(list, b.related(r, there.path))
	}
	return list
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

// elsewhere reads the other namespaces that links lead to, by their numbers in this
// one. Those that cannot be found or entered are left out.
func (n *Network) elsewhere(links []link) map[int32]*snapshot {
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
		id, s := n.visit(path, netns, wanted)
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

// visit reads a namespace if its number is wanted. It closes netns.
func (n *Network) visit(path string, netns *os.File, wanted map[int32]bool) (id int32, s *snapshot) {
	id, err := n.numberOf(netns)
	if err != nil || !wanted[id] {
		netns.Close()
		return -1, nil
	}
	other, err := openNetwork(path, netns)
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

// numberOf is the number that another namespace has in this one; -1 if none.
func (n *Network) numberOf(netns *os.File) (int32, error) {
	r := n.request(unix.RTM_GETNSID, 0)
	r.AddData(nl.NewRtGenMsg())
	r.AddData(nl.NewRtAttr(unix.NETNSA_FD, nl.Uint32Attr(uint32(netns.Fd()))))
	messages, err := r.Execute(unix.NETLINK_ROUTE, unix.RTM_NEWNSID)
	if err != nil {
		return -1, fmt.Errorf("ask for the number of a network namespace: %w", err)
	}
	for _, m := range messages {
		// Behind struct rtgenmsg, aligned.
		for kind, value := range nlattr.Attributes(m[min(len(m), 4):]).All {
			if kind == unix.NETNSA_NSID {
				return int32(number(value)), nil
			}
		}
	}
	return -1, nil
}

// maxNamespaces bounds how many namespaces are looked at.
const maxNamespaces = 1 << 14

// namespaces goes through the network namespaces that can be found, each once: by
// name where they have one, else by the process of the lowest number. It opens them,
// since a process may go elsewhere meanwhile.
func namespaces(yield func(path string, netns *os.File) bool) {
	seen := map[uint64]bool{}
	// Without the names there are the processes.
	paths, _ := NetworkPaths()
	for _, path := range append(paths, processPaths()...) {
		var stat unix.Stat_t
		if unix.Stat(path, &stat) != nil || seen[stat.Ino] {
			continue
		}
		netns, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
		if err != nil {
			continue
		}
		seen[stat.Ino] = true
		if !yield(path, netns) || len(seen) == maxNamespaces {
			return
		}
	}
}

// candidates are the paths that namespaces goes through.
func AllNetworkPaths() []string {
	var paths []string
	for path, netns := range namespaces {
		netns.Close()
		paths = append(paths, path)
	}
	return paths
}

// processPaths are the network namespaces of all processes, by their numbers.
func processPaths() []string {
	proc, err := os.Open("/proc")
	if err != nil {
		return nil
	}
	defer proc.Close()
	// What vanishes meanwhile is not looked for.
	names, _ := proc.Readdirnames(-1)
	var pids []int
	for _, name := range names {
		if pid, err := strconv.Atoi(name); err == nil {
			pids = append(pids, pid)
		}
	}
	slices.Sort(pids)
	paths := make([]string, len(pids))
	for i, pid := range pids {
		paths[i] = fmt.Sprintf("/proc/%d/ns/net", pid)
	}
	return paths
}
