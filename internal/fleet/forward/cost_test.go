// SPDX-License-Identifier: Apache-2.0

package forward_test

import (
	"fmt"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"

	"sockeye/internal/fleet/forward"
	"sockeye/internal/fleet/table"
	"sockeye/internal/placement"
	"sockeye/internal/stats"
	"sockeye/internal/testenv"
)

// datagramOf returns a frame with a datagram of 100 bytes.
func datagramOf(from, to netip.Addr, to16 uint16) []byte {
	frame := make([]byte, 14, 200)
	frame[12] = 0x08
	ip := []byte{0x45, 0, 0, 128, 0, 0, 0, 0, 255, 17, 0, 0}
	ip = append(append(ip, from.AsSlice()...), to.AsSlice()...)
	udp := []byte{0x80, 0, byte(to16 >> 8), byte(to16), 0, 108, 0, 0}
	return append(append(append(frame, ip...), udp...), make([]byte, 100)...)
}

// BenchmarkIngress measures one run of fleet_ingress by BPF_PROG_TEST_RUN, next to an empty program, in turns: packets to no
// service, packets that this host serves, and packets that are sent to another host, without and with a device map. The kernel
// repeats one packet, so that the caches are hot.
func BenchmarkIngress(b *testing.B) {
	for _, devices := range []int{0, 10_000} {
		b.Run(fmt.Sprintf("devices=%d", devices), func(b *testing.B) {
			p, err := forward.Open(filepath.Join(testenv.BPFFS(b), "fleet"))
			check(b, err)
			defer p.Close()
			check(b, p.SetListeners(listeners(port)))
			to := &table.Table{Epoch: 1, Nonce: 7, Hosts: []table.Host{{Name: "a", Weight: 1}, {Name: "b", Weight: 1}}}
			for bucket := range table.Buckets {
				to.Owner[bucket], to.Previous[bucket], to.Next[bucket] = uint16(bucket%2), table.None, table.None
			}
			var text strings.Builder
			for i := range devices {
				fmt.Fprintf(&text, "172.16.%d.%d,device-%d\n", i>>8, i&255, i/2)
			}
			names, err := placement.ParseDeviceMap(strings.NewReader(text.String()), "devices.csv")
			check(b, err)
			next := func(*table.Host) forward.Next {
				return forward.Next{Addresses: []netip.Addr{netip.MustParseAddr("10.0.0.2")}, Interface: 1, MAC: [6]byte{2, 0, 0, 0, 0, 2}}
			}
			check(b, p.Set(to, "a", next, names, func() {}))
			empty, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SchedCLS, License: "GPL", Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, -1), asm.Return()}})
			check(b, err)
			defer empty.Close()
			mapping, err := placement.NewMapping(1, 0, to.Nonce, names)
			check(b, err)
			var owned [2]netip.Addr
			for i := 0; !owned[0].IsValid() || !owned[1].IsValid(); i++ {
				owned[mapping.Locate(device(4, i)).Bucket%2] = device(4, i)
			}
			arms := []struct {
				name    string
				program *ebpf.Program
				frame   []byte
				verdict uint32
			}{
				{"empty", empty, datagramOf(owned[0], service4, port), 1<<32 - 1},
				{"other", p.Ingress(), datagramOf(owned[0], service4, 53), 1<<32 - 1},
				{"local", p.Ingress(), datagramOf(owned[0], service4, port), 1<<32 - 1},
				{"forwarded", p.Ingress(), datagramOf(owned[1], service4, port), 7}, // TC_ACT_REDIRECT
			}
			const rounds, repeat = 2000, 250 // each run of forwarded uses up a hop of the TTL
			ns := make([][]float64, len(arms))
			for range b.N {
				for round := range rounds * len(arms) {
					i := (round + round/len(arms)) % len(arms)
					verdict, took, err := arms[i].program.Benchmark(arms[i].frame, repeat, nil)
					check(b, err)
					if verdict != arms[i].verdict {
						b.Fatalf("%s: verdict %d", arms[i].name, int32(verdict))
					}
					ns[i] = append(ns[i], float64(took.Nanoseconds()))
				}
			}
			for i, arm := range arms {
				b.ReportMetric(stats.Median(ns[i]), arm.name+"-ns")
			}
		})
	}
}
