// SPDX-License-Identifier: Apache-2.0

package bpf_test

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"sockeye/internal/bpf"
)

// BenchmarkLookup measures one run of the sk_lookup program without the cost of BPF statistics: the kernel repeats
// the program for one address after the other (BPF_PROG_TEST_RUN).
func BenchmarkLookup(b *testing.B) {
	for _, test := range []struct {
		name    string
		devices int
		named   bool
	}{
		{"plain", 0, false},
		{"devices", 65536, false},
		{"devicemap", 0, true},
		{"devices+devicemap", 65536, true},
	} {
		b.Run(test.name, func(b *testing.B) {
			c := config(b, true, "tcp [::]:1790", "udp [::]:4739")
			c.Devices = test.devices
			text := ""
			if test.named {
				for i := range 2000 {
					text += fmt.Sprintf("10.0.%d.%d,router-%d\n", i>>8, i&0xff, i/2)
				}
			}
			s := serve(b, c, 4, bpf.NoSlot, deviceMap(b, text))
			s.seat(allSlots(4)...)
			rnd := rand.New(rand.NewPCG(1, 2))
			const addresses, repeat = 64, 20000
			var total time.Duration
			least := time.Hour
			b.ResetTimer()
			for range b.N {
				for range addresses {
					in := lookupContext{Family: unix.AF_INET, Protocol: unix.IPPROTO_UDP, LocalPort: 4739,
						RemoteIP4: [4]byte{10, 0, byte(rnd.IntN(8)), byte(rnd.IntN(256))}}
					start := time.Now()
					_, err := s.Program(0).Run(&ebpf.RunOptions{Context: &in, Repeat: repeat})
					check(b, err)
					took := time.Since(start)
					total += took
					least = min(least, took)
				}
			}
			b.ReportMetric(float64(total.Nanoseconds())/float64(b.N*addresses*repeat), "ns/run")
			b.ReportMetric(float64(least.Nanoseconds())/repeat, "least-ns/run")
		})
	}
}
