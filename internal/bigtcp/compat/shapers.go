// SPDX-License-Identifier: Apache-2.0

package compat

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"sockeye/internal/bigtcp/netif"
	"sockeye/internal/nlattr"
)

// shaper is a qdisc that segments packets before it queues them.
type shaper struct {
	kind  string
	burst uint64 // bytes: larger packets are segmented; 0 if all packets are
}

// checkShapers reports shapers of an interface with large packets (tbf_enqueue and
// cake_enqueue of the kernel).
func checkShapers(i *netif.Interface, shapers []shaper) []Incompatibility {
	var found []Incompatibility
	size := uint64(max(i.Sizes.GSO, i.Sizes.GSOIPv4))
	for _, s := range shapers {
		switch {
		case size <= netif.Legacy:
		case s.burst == 0:
			found = append(found, Incompatibility{
				Name:   shaperQdisc,
				Detail: fmt.Sprintf("%s segments all packets to the MTU before it queues them (split-gso)", s.kind),
				Hint:   fmt.Sprintf("tc qdisc change dev %s root cake no-split-gso; other packets then wait longer behind large ones", i.Name),
			})
		case s.burst < size:
			found = append(found, Incompatibility{
				Name:   shaperQdisc,
				Detail: fmt.Sprintf("%s segments packets larger than its burst, about %d bytes, to the MTU before it queues them", s.kind, s.burst),
				Hint:   fmt.Sprintf("a burst of %d bytes or more passes all packets", size+maxHeaderSize),
			})
		}
	}
	return found
}

// maxHeaderSize is more than the bytes of all headers before the TCP payload.
const maxHeaderSize = 1000

// shapers returns the shapers of the namespace, by the index of the interface.
func shapers(n *netif.Namespace) (map[int][]shaper, error) {
	var messages [][]byte
	var err error
	for range 3 {
		err = n.Do(func() (err error) {
			r := nl.NewNetlinkRequest(unix.RTM_GETQDISC, unix.NLM_F_DUMP)
			r.AddData(&nl.TcMsg{Family: unix.AF_UNSPEC})
			messages, err = r.Execute(unix.NETLINK_ROUTE, unix.RTM_NEWQDISC)
			return err
		})
		if !errors.Is(err, nl.ErrDumpInterrupted) {
			break
		}
	}
	if err != nil && !errors.Is(err, nl.ErrDumpInterrupted) {
		return nil, fmt.Errorf("read queueing disciplines: %w", err)
	}
	byIndex := map[int][]shaper{}
	for _, m := range messages {
		if index, s, ok := parseShaper(m); ok {
			byIndex[index] = append(byIndex[index], s)
		}
	}
	return byIndex, nil
}

// tcaCakeSplitGSO is TCA_CAKE_SPLIT_GSO of <linux/pkt_sched.h>.
const tcaCakeSplitGSO = 17

// parseShaper parses a message RTM_NEWQDISC, from struct tcmsg on. ok is false for a
// qdisc that segments no packets.
func parseShaper(m []byte) (index int, s shaper, ok bool) {
	if len(m) < nl.SizeofTcMsg {
		return 0, shaper{}, false
	}
	index = int(int32(binary.NativeEndian.Uint32(m[4:])))
	var options []byte
	for kind, value := range nlattr.Attributes(m[nl.SizeofTcMsg:]).All {
		switch kind {
		case nl.TCA_KIND:
			s.kind = unix.ByteSliceToString(value)
		case nl.TCA_OPTIONS:
			options = value
		}
	}
	switch s.kind {
	case "tbf":
		s.burst, ok = tbfBurst(options)
	case "cake":
		split := nlattr.Find(options, tcaCakeSplitGSO)
		ok = len(split) == 4 && binary.NativeEndian.Uint32(split) != 0
	}
	return index, s, ok
}

// tbfBurst returns the size of the token bucket in bytes, which the kernel reports as
// the time to fill it at the rate.
func tbfBurst(options []byte) (uint64, bool) {
	const (
		rateAt, bufferAt = 8, 28 // in struct tc_tbf_qopt
		size             = 36
		nanosecondsATick = 64
	)
	parameters := nlattr.Find(options, nl.TCA_TBF_PARMS)
	if len(parameters) < size {
		return 0, false
	}
	rate := uint64(binary.NativeEndian.Uint32(parameters[rateAt:]))
	if large := nlattr.Find(options, nl.TCA_TBF_RATE64); len(large) == 8 {
		rate = binary.NativeEndian.Uint64(large)
	}
	ticks := binary.NativeEndian.Uint32(parameters[bufferAt:])
	return uint64(float64(rate) * float64(ticks) * nanosecondsATick / 1e9), true
}
