// SPDX-License-Identifier: Apache-2.0

package verify

import (
	"bytes"
	"cmp"
	"fmt"
	"math"
	"net/netip"
	"os"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"sockeye/internal/bigtcp/programs"
	"sockeye/internal/sysctl"
)

// flow is one direction of a connection.
type flow struct {
	programs.Flow
	source, destination netip.AddrPort
	sent                bool // otherwise received
	family              Family
	socket              *socketHistory // nil if none was found
}

// socketHistory contains the maxima of all samples of a socket, in bytes; 0 if unknown.
type socketHistory struct {
	window     uint64 // receive window that the peer advertised
	ownWindow  uint64 // receive window that this end advertised
	congestion uint64 // congestion window
	pacing     uint64 // packet size that pacing permits; math.MaxUint64 if unbounded
	unsent     uint64
	resent     bool
	first      *unix.TCPInfo
	// Since the first sample: the time with data in flight, and the part of it that
	// was limited by the receive window.
	busy, byWindow time.Duration
}

// sampleFlows reads the flows, and the sockets of those with most bytes in small
// packets.
func (v *verifier) sampleFlows() error {
	err := v.counting.Flows(func(k *programs.FlowKey, f *programs.Flow) {
		known := v.flows[*k]
		if known == nil {
			if len(v.flows) >= maxFlows {
				return
			}
			known = &flow{sent: int(k.Point) == programs.Egress, family: familyNames[k.Family]}
			known.source, known.destination = k.Ends()
			v.flows[*k] = known
		}
		known.Flow = *f
	})
	if err != nil {
		return err
	}
	all := make([]*flow, 0, len(v.flows))
	for _, f := range v.flows {
		all = append(all, f)
	}
	slices.SortFunc(all, func(a, b *flow) int { return cmp.Compare(b.small(), a.small()) })
	for _, f := range all[:min(len(all), maxSampled)] {
		local, remote := f.source, f.destination
		if !f.sent {
			local, remote = remote, local
		}
		i, err := v.diag.find(local, remote, v.before.Index)
		if err != nil {
			return err
		}
		if i == nil {
			continue
		}
		if f.socket == nil {
			f.socket = &socketHistory{}
		}
		f.socket.add(i, gsoSize(v.before.Sizes, f.family), v.rttLog)
	}
	return nil
}

// add adds a sample. gso is the GSO size of the interface in bytes, rttLog the sysctl
// tcp_tso_rtt_log.
func (s *socketHistory) add(i *unix.TCPInfo, gso uint32, rttLog uint) {
	if s.first == nil {
		s.first = i
	}
	s.window = max(s.window, uint64(i.Snd_wnd))
	s.ownWindow = max(s.ownWindow, uint64(i.Rcv_wnd))
	s.congestion = max(s.congestion, uint64(i.Snd_cwnd)*uint64(i.Snd_mss))
	s.unsent = max(s.unsent, uint64(i.Notsent_bytes))
	s.resent = s.resent || i.Total_retrans > s.first.Total_retrans
	s.pacing = max(s.pacing, pacedSize(i.Pacing_rate, i.Min_rtt, gso, rttLog))
	since := func(now, then uint64) time.Duration {
		return time.Duration(now-min(then, now)) * time.Microsecond
	}
	s.busy = since(i.Busy_time, s.first.Busy_time)
	s.byWindow = since(i.Rwnd_limited, s.first.Rwnd_limited)
}

// pacedSize returns the packet size of tcp_tso_autosize in bytes, for a rate in bytes
// per second and a round trip in microseconds.
func pacedSize(rate uint64, minRTT, gso uint32, rttLog uint) uint64 {
	if rate == math.MaxUint64 {
		return rate
	}
	size := rate >> pacingShift
	if shift := minRTT >> min(rttLog, 31); shift < 32 {
		size += uint64(gso) >> shift
	}
	return size
}

// small returns the bytes in packets that are not large.
func (f *flow) small() uint64 { return f.Bytes - min(f.LargeBytes, f.Bytes) }

func (f *flow) String() string { return f.source.String() + " to " + f.destination.String() }

// localAddresses returns the addresses of the namespace's interfaces.
func (v *verifier) localAddresses() (map[netip.Addr]bool, error) {
	locals := make(map[netip.Addr]bool)
	err := v.network.Do(func() error {
		all, err := netlink.AddrList(nil, netlink.FAMILY_ALL)
		if err != nil {
			return fmt.Errorf("list addresses: %w", err)
		}
		for _, a := range all {
			if ip, ok := netip.AddrFromSlice(a.IP); ok {
				locals[ip.Unmap()] = true
			}
		}
		return nil
	})
	return locals, err
}

// hasQueues reports whether a program receives packets from NFQUEUE. It must run in the
// namespace.
func hasQueues() bool {
	queues, err := os.ReadFile("/proc/thread-self/net/netfilter/nfnetlink_queue")
	return err == nil && len(bytes.TrimSpace(queues)) > 0
}

// tsoRTTLog returns the sysctl tcp_tso_rtt_log (Linux 5.18). It must run in the
// namespace.
func tsoRTTLog() uint {
	n, _ := sysctl.Number("net.ipv4.tcp_tso_rtt_log")
	return uint(max(n, 0))
}
