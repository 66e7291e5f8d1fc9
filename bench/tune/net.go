// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"unsafe"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"sockeye/bench/harness"
	"sockeye/lab"
)

// The incast network consists of senders and a receiver, each with its own link to a router, which replaces the switch
// of the rack. A router and not a bridge: a routed packet no longer belongs to the sender's socket, so TCP small queues
// do not count the queue of the bottleneck, as they would with the bridge of the lab.
const (
	senders    = 3
	packetSize = 1514 // size of a full packet in the queue in bytes
	burst      = 8    // burst of the bottleneck in packets
)

type incastNet struct {
	rack     *lab.Namespace
	senders  []*lab.Namespace
	receiver *lab.Namespace
	port     int // interface index of the bottleneck
}

func incastHost(i int) netip.Addr   { return netip.AddrFrom4([4]byte{10, 79, byte(i), 1}) }
func incastRouter(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, 79, byte(i), 254}) }

// newIncastNet creates the network with a rate in bits per second and a queue in packets.
func newIncastNet(l *lab.Lab, rate int64, queue int) (*incastNet, error) {
	var n incastNet
	var err error
	if n.rack, err = plainHost(l, "rack"); err != nil {
		return nil, err
	}
	if err := n.rack.Sysctl("ipv4.ip_forward", "1"); err != nil {
		return nil, err
	}
	for i := range senders {
		sender, _, err := n.attach(l, fmt.Sprintf("sender-%d", i), i)
		if err != nil {
			return nil, err
		}
		n.senders = append(n.senders, sender)
	}
	if n.receiver, n.port, err = n.attach(l, "receiver", senders); err != nil {
		return nil, err
	}
	err = n.rack.Netlink().QdiscAdd(&netlink.Tbf{
		QdiscAttrs: netlink.QdiscAttrs{LinkIndex: n.port, Handle: netlink.MakeHandle(1, 0), Parent: netlink.HANDLE_ROOT},
		Rate:       uint64(rate / 8), Limit: uint32(queue * packetSize),
		Buffer: netlink.Xmittime(uint64(rate/8), burst*packetSize),
	})
	if err != nil {
		return nil, fmt.Errorf("make bottleneck: %w", err)
	}
	return &n, nil
}

// attach creates the namespace of a host, and returns the index of the router's interface towards it.
func (n *incastNet) attach(l *lab.Lab, name string, i int) (*lab.Namespace, int, error) {
	host, err := plainHost(l, name)
	if err != nil {
		return nil, 0, err
	}
	port := fmt.Sprintf("port%d", i)
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "eth0"
	fd, err := unix.Open(n.rack.Path(), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, 0, fmt.Errorf("attach %s: %w", name, err)
	}
	defer unix.Close(fd)
	if err := host.Netlink().LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: port, PeerNamespace: netlink.NsFd(fd)}); err != nil {
		return nil, 0, fmt.Errorf("attach %s: make veth: %w", name, err)
	}
	index := 0
	for _, end := range []struct {
		n       *lab.Namespace
		link    string
		address netip.Addr
	}{{host, "eth0", incastHost(i)}, {n.rack, port, incastRouter(i)}} {
		dev, err := end.n.Netlink().LinkByName(end.link)
		if err == nil {
			err = end.n.Netlink().LinkSetUp(dev)
		}
		if err != nil {
			return nil, 0, fmt.Errorf("attach %s: set link up: %w", name, err)
		}
		if err := end.n.AddAddress(end.link, netip.PrefixFrom(end.address, 24)); err != nil {
			return nil, 0, err
		}
		if err := offloadOff(end.n, end.link); err != nil {
			return nil, 0, err
		}
		index = dev.Attrs().Index
	}
	return host, index, host.AddRoute(netip.MustParsePrefix("10.79.0.0/16"), incastRouter(i))
}

// plainHost creates a namespace without cached TCP metrics, whose links keep the packet order of a flow. Without
// receive packet steering, a veth queues packets on the CPU that sent them: two CPUs reorder a flow, and TCP treats
// reordering as loss.
func plainHost(l *lab.Lab, name string) (*lab.Namespace, error) {
	n, err := l.Namespace(name)
	if err != nil {
		return nil, err
	}
	cpus := fmt.Sprintf("%x", uint32(1)<<min(runtime.NumCPU(), 31)-1)
	if err := n.Sysctl("core.rps_default_mask", cpus); err != nil {
		return nil, err
	}
	return n, n.Sysctl("ipv4.tcp_no_metrics_save", "1")
}

// netCounts contains counters of the senders and of the bottleneck.
type netCounts struct {
	retransmits, segments, drops uint64
}

func (n *incastNet) counts() (c netCounts, err error) {
	for _, s := range n.senders {
		err := s.Do(func() error {
			b, err := os.ReadFile("/proc/thread-self/net/snmp")
			if err != nil {
				return err
			}
			c.retransmits += harness.SNMP(string(b), "Tcp", "RetransSegs")
			c.segments += harness.SNMP(string(b), "Tcp", "OutSegs") + harness.SNMP(string(b), "Tcp", "RetransSegs")
			return nil
		})
		if err != nil {
			return c, fmt.Errorf("count retransmissions of %s: %w", s.Name(), err)
		}
	}
	dev, err := n.rack.Netlink().LinkByIndex(n.port)
	if err != nil {
		return c, fmt.Errorf("find bottleneck: %w", err)
	}
	qdiscs, err := n.rack.Netlink().QdiscList(dev)
	if err != nil {
		return c, fmt.Errorf("count drops: %w", err)
	}
	for _, q := range qdiscs {
		if s := q.Attrs().Statistics; q.Type() == "tbf" && s != nil && s.Queue != nil {
			c.drops += uint64(s.Queue.Drops)
		}
	}
	return c, nil
}

// offloadOff limits the packets of a link to its MTU.
func offloadOff(n *lab.Namespace, link string) error {
	return n.Do(func() error {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("turn offload of %s off: %w", link, err)
		}
		defer unix.Close(fd)
		for _, command := range []uint32{unix.ETHTOOL_STSO, unix.ETHTOOL_SGSO, unix.ETHTOOL_SGRO} {
			value := struct{ command, data uint32 }{command, 0}
			request := struct {
				name [unix.IFNAMSIZ]byte
				data unsafe.Pointer
				_    [16]byte // of struct ifreq's union
			}{data: unsafe.Pointer(&value)}
			copy(request.name[:unix.IFNAMSIZ-1], link)
			if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&request))); errno != 0 {
				return fmt.Errorf("turn offload of %s off: %w", link, errno)
			}
		}
		return nil
	})
}
