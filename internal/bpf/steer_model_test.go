// SPDX-License-Identifier: Apache-2.0

package bpf_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"sockeye/internal/bpf"
	"sockeye/internal/placement"
)

// lookupContext is struct bpf_sk_lookup of linux/bpf.h; ports have the byte order of its fields.
type lookupContext struct {
	Cookie     uint64
	Family     uint32
	Protocol   uint32
	RemoteIP4  [4]byte
	RemoteIP6  [16]byte
	RemotePort [2]byte
	_          [2]byte
	LocalIP4   [4]byte
	LocalIP6   [16]byte
	LocalPort  uint32
	Ifindex    uint32
	_          [4]byte
}

// TestModelAgreesWithProgram compares the slots that the kernel's program and its reference model select for a
// million random addresses.
func TestModelAgreesWithProgram(t *testing.T) {
	const slots = 1024
	c := config(t, true, "udp [::]:4739")
	s := serve(t, c, slots, bpf.NoSlot, nil)
	s.seat(allSlots(slots)...)
	rnd := rand.New(rand.NewPCG(1, 2))
	bySlot := make(map[uint64]int, slots)
	for slot, sockets := range s.seats {
		bySlot[sockets[0].cookie()] = slot
	}
	address := func(v6 bool) netip.Addr {
		var b [16]byte
		binary.BigEndian.PutUint64(b[:8], rnd.Uint64())
		binary.BigEndian.PutUint64(b[8:], rnd.Uint64())
		if v6 {
			return netip.AddrFrom16(b)
		}
		return netip.AddrFrom4([4]byte(b[:4]))
	}
	var prefixes strings.Builder
	seen := make(map[netip.Prefix]bool)
	for i := range 5000 {
		v6 := i%2 == 0
		p, err := address(v6).Prefix(1 + rnd.IntN(24))
		check(t, err)
		if !seen[p] {
			fmt.Fprintf(&prefixes, "%s,router-%d\n", p, i/10)
		}
		seen[p] = true
	}
	for _, devices := range []*placement.DeviceMap{nil, deviceMap(t, prefixes.String())} {
		m, err := placement.NewMapping(slots, bpf.NoSlot, rnd.Uint64(), devices)
		check(t, err)
		s.install(m)
		named := 0
		for i := range twinAddresses / 2 {
			a := address(i%2 == 0)
			in := lookupContext{Family: unix.AF_INET, Protocol: unix.IPPROTO_UDP, LocalPort: 4739}
			if a.Is6() {
				in.Family, in.RemoteIP6 = unix.AF_INET6, a.As16()
			} else {
				in.RemoteIP4 = a.As4()
			}
			var out lookupContext
			verdict, err := s.Program(0).Run(&ebpf.RunOptions{Context: &in, ContextOut: &out})
			if errors.Is(err, ebpf.ErrNotSupported) {
				t.Skipf("kernel: %v", err)
			}
			check(t, err)
			slot, known := bySlot[out.Cookie]
			want, device := m.Slot(a)
			if verdict != 1 || !known || slot != want {
				t.Fatalf("%s: verdict %d, slot %d, want %d", a, verdict, slot, want)
			}
			if device != "" {
				named++
			}
		}
		if devices != nil && named < twinAddresses/20 {
			t.Errorf("only %d addresses belong to a device", named)
		}
	}
}
