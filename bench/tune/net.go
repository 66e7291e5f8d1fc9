// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"strconv"
	"strings"
	"time"
	"unsafe"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
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

// incastPrefix has the /64 of each host. The addresses of all hosts have a common prefix of 44 bits.
var incastPrefix = netip.MustParsePrefix("fd79::/44")

func incastRouter(host int) netip.Addr { return incastAddr(host, 0xfe) }

// incastTarget returns the address of the receiver for an arm.
func incastTarget(arm int) netip.Addr { return incastAddr(senders, byte(1+arm)) }

// newIncastNet creates the network with a rate in bits per second and a queue in packets. The receiver has an address for
// each arm. If mark is not 0, the bottleneck marks packets that are queued longer.
func newIncastNet(l *lab.Lab, rate int64, queue, arms int, mark time.Duration) (*incastNet, error) {
	var n incastNet
	var err error
	if n.rack, err = plainHost(l, "rack"); err != nil {
		return nil, err
	}
	if err := n.rack.Sysctl("ipv6.conf.all.forwarding", "1"); err != nil {
		return nil, err
	}
	for i := range senders {
		sender, _, err := n.attach(l, fmt.Sprintf("sender-%d", i), i, 1)
		if err != nil {
			return nil, err
		}
		n.senders = append(n.senders, sender)
	}
	if n.receiver, n.port, err = n.attach(l, "receiver", senders, arms); err != nil {
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
	if mark > 0 {
		if err := n.markAfter(mark, queue); err != nil {
			return nil, fmt.Errorf("make bottleneck: mark packets: %w", err)
		}
	}
	return &n, nil
}

// Attributes of the queueing discipline codel (linux/pkt_sched.h).
const (
	codelTarget      = 1
	codelLimit       = 2
	codelInterval    = 3
	codelECN         = 4
	codelCEThreshold = 5
)

// markAfter replaces the queue of the bottleneck with one of the same length that marks the packets that waited longer
// than a threshold, as a switch does for DCTCP. codel drops no packet until its target, which no packet reaches.
func (n *incastNet) markAfter(threshold time.Duration, queue int) error {
	return n.rack.Do(func() error {
		r := nl.NewNetlinkRequest(unix.RTM_NEWQDISC, unix.NLM_F_CREATE|unix.NLM_F_EXCL|unix.NLM_F_ACK)
		r.AddData(&nl.TcMsg{Family: nl.FAMILY_ALL, Ifindex: int32(n.port), Handle: netlink.MakeHandle(2, 0), Parent: netlink.MakeHandle(1, 1)})
		r.AddData(nl.NewRtAttr(nl.TCA_KIND, nl.ZeroTerminated("codel")))
		options := nl.NewRtAttr(nl.TCA_OPTIONS, nil)
		for attribute, value := range map[int]uint32{
			codelTarget: 10_000_000, codelInterval: 10_000_000, // 10 s
			codelLimit: uint32(queue), codelECN: 1, codelCEThreshold: uint32(threshold.Microseconds()),
		} {
			options.AddRtAttr(attribute, nl.Uint32Attr(value))
		}
		r.AddData(options)
		_, err := r.Execute(unix.NETLINK_ROUTE, 0)
		return err
	})
}

// limitRoutes limits the congestion window of the senders' connections to an arm, in segments, by the metrics of a
// route. "ip route replace ADDRESS via ROUTER cwnd lock N" does the same.
func (n *incastNet) limitRoutes(arm, cwnd int) error {
	to := incastTarget(arm)
	for i, s := range n.senders {
		err := s.Do(func() error {
			link, err := s.Netlink().LinkByName("eth0")
			if err != nil {
				return err
			}
			r := nl.NewNetlinkRequest(unix.RTM_NEWROUTE, unix.NLM_F_CREATE|unix.NLM_F_REPLACE|unix.NLM_F_ACK)
			r.AddData(&nl.RtMsg{RtMsg: unix.RtMsg{
				Family: unix.AF_INET6, Dst_len: uint8(to.BitLen()), Table: unix.RT_TABLE_MAIN, Protocol: unix.RTPROT_STATIC,
				Scope: unix.RT_SCOPE_UNIVERSE, Type: unix.RTN_UNICAST,
			}})
			r.AddData(nl.NewRtAttr(unix.RTA_DST, to.AsSlice()))
			r.AddData(nl.NewRtAttr(unix.RTA_GATEWAY, incastRouter(i).AsSlice()))
			r.AddData(nl.NewRtAttr(unix.RTA_OIF, nl.Uint32Attr(uint32(link.Attrs().Index))))
			metrics := nl.NewRtAttr(unix.RTA_METRICS, nil)
			metrics.AddRtAttr(unix.RTAX_LOCK, nl.Uint32Attr(1<<unix.RTAX_CWND))
			metrics.AddRtAttr(unix.RTAX_CWND, nl.Uint32Attr(uint32(cwnd)))
			r.AddData(metrics)
			_, err = r.Execute(unix.NETLINK_ROUTE, 0)
			return err
		})
		if err != nil {
			return fmt.Errorf("limit windows by a route of %s: %w", s.Name(), err)
		}
	}
	return nil
}

// attach creates the namespace of a host, and returns the index of the router's interface towards it. The host caches the
// metrics of its connections, as by default: a locked cwnd of a route is one of them.
func (n *incastNet) attach(l *lab.Lab, name string, i, addresses int) (*lab.Namespace, int, error) {
	host, err := plainHost(l, name)
	if err != nil {
		return nil, 0, err
	}
	if err := host.Sysctl("ipv4.tcp_no_metrics_save", "0"); err != nil {
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
	var own []netip.Addr
	for a := range addresses {
		own = append(own, incastAddr(i, byte(1+a)))
	}
	for _, end := range []struct {
		n         *lab.Namespace
		link      string
		addresses []netip.Addr
	}{{host, "eth0", own}, {n.rack, port, []netip.Addr{incastRouter(i)}}} {
		dev, err := end.n.Netlink().LinkByName(end.link)
		if err == nil {
			err = end.n.Netlink().LinkSetUp(dev)
		}
		if err != nil {
			return nil, 0, fmt.Errorf("attach %s: set link up: %w", name, err)
		}
		for _, a := range end.addresses {
			if err := end.n.AddAddress(end.link, netip.PrefixFrom(a, 64)); err != nil {
				return nil, 0, err
			}
		}
		if err := offloadOff(end.n, end.link); err != nil {
			return nil, 0, err
		}
		index = dev.Attrs().Index
	}
	return host, index, host.AddRoute(incastPrefix, incastRouter(i))
}

// incastAddr returns an address in the /64 of a host.
func incastAddr(host int, last byte) netip.Addr {
	a := incastPrefix.Addr().As16()
	a[7], a[15] = byte(host), last
	return netip.AddrFrom16(a)
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
	segments, drops, marks uint64
}

func (n *incastNet) counts() (c netCounts, err error) {
	for _, s := range n.senders {
		err := s.Do(func() error {
			b, err := os.ReadFile("/proc/thread-self/net/snmp")
			if err != nil {
				return err
			}
			c.segments += harness.SNMP(string(b), "Tcp", "OutSegs") + harness.SNMP(string(b), "Tcp", "RetransSegs")
			return nil
		})
		if err != nil {
			return c, fmt.Errorf("count segments of %s: %w", s.Name(), err)
		}
	}
	err = n.receiver.Do(func() error {
		b, err := os.ReadFile("/proc/thread-self/net/snmp6")
		for line := range strings.Lines(string(b)) {
			if f := strings.Fields(line); len(f) == 2 && f[0] == "Ip6InCEPkts" {
				c.marks, err = strconv.ParseUint(f[1], 10, 64)
			}
		}
		return err
	})
	if err != nil {
		return c, fmt.Errorf("count marked packets: %w", err)
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
