// SPDX-License-Identifier: Apache-2.0

package bpf_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"sockeye/internal/bpf"
	"sockeye/internal/stats"
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

// BenchmarkLookupCold measures single runs of the sk_lookup program after the caches of the CPU were filled with other data:
// what is shared between CPUs is read from the last cache, or from memory. The time includes reading the clock.
func BenchmarkLookupCold(b *testing.B) {
	for _, test := range []struct {
		name  string
		named bool
	}{{"plain", false}, {"devicemap", true}} {
		b.Run(test.name, func(b *testing.B) {
			c := config(b, true, "tcp [::]:1790", "udp [::]:4739")
			c.Devices = 65536
			text := ""
			if test.named {
				for i := range 10000 {
					text += fmt.Sprintf("10.0.%d.%d,router-%d\n", i>>8, i&0xff, i/2)
				}
			}
			s := serve(b, c, 4, bpf.NoSlot, deviceMap(b, text))
			s.seat(allSlots(4)...)
			const runs, addresses = 4000, 64
			other := make([]byte, 8<<20)
			var ns []float64
			b.ResetTimer()
			for range b.N {
				for i := range runs {
					in := lookupContext{Family: unix.AF_INET, Protocol: unix.IPPROTO_UDP, LocalPort: 4739, RemoteIP4: [4]byte{10, 0, byte(i % 7), byte(i * 3 % addresses)}}
					for at := 0; at < len(other); at += 64 {
						other[at]++
					}
					ns = append(ns, float64(runOnce(b, s.Program(0), &in)))
				}
			}
			b.ReportMetric(stats.Median(ns), "median-ns")
			b.ReportMetric(stats.Quantile(ns, 0.1), "p10-ns")
		})
	}
}

// runOnce runs a sk_lookup program once and returns the nanoseconds that the kernel measured.
func runOnce(b *testing.B, p *ebpf.Program, in *lookupContext) uint32 {
	const bpfProgTestRun = 10
	attr := struct { // union bpf_attr, member test
		program, result, sizeIn, sizeOut uint32
		dataIn, dataOut                  uint64
		repeat, duration                 uint32
		contextIn, contextOut            uint32
		context, contextTo               unsafe.Pointer
		flags, cpu, batch, _             uint32
	}{program: uint32(p.FD()), repeat: 1, contextIn: uint32(unsafe.Sizeof(*in)), context: unsafe.Pointer(in)}
	if _, _, errno := unix.Syscall(unix.SYS_BPF, bpfProgTestRun, uintptr(unsafe.Pointer(&attr)), unsafe.Sizeof(attr)); errno != 0 {
		b.Fatal(errno)
	}
	return attr.duration
}

// BenchmarkReader measures recvfrom(2) of a UDP socket that is in a map of sockets, as a member's socket is with sk_lookup,
// and of one that is not, in turns: least and median of the rounds.
func BenchmarkReader(b *testing.B) {
	members, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.SockMap, KeySize: 4, ValueSize: 8, MaxEntries: 1})
	check(b, err)
	defer members.Close()
	open := func() (fd int, address unix.Sockaddr) {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		check(b, err)
		b.Cleanup(func() { unix.Close(fd) })
		check(b, unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}))
		check(b, unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 8<<20))
		address, err = unix.Getsockname(fd)
		check(b, err)
		return fd, address
	}
	const rounds, datagrams, bytes = 200, 1000, 1200
	arms := []string{"plain", "sockmap"}
	var fds [2]int
	var to [2]unix.Sockaddr
	for i := range arms {
		fds[i], to[i] = open()
	}
	check(b, members.Put(uint32(0), uint64(fds[1])))
	sender, _ := open()
	buffer, payload := make([]byte, 2*bytes), make([]byte, bytes)
	var ns [2][]float64
	for range b.N {
		for round := range rounds * len(arms) {
			arm := (round + round/2) % len(arms)
			for range datagrams {
				check(b, unix.Sendto(sender, payload, 0, to[arm]))
			}
			start := time.Now()
			for range datagrams {
				_, _, err := unix.Recvfrom(fds[arm], buffer, 0)
				check(b, err)
			}
			ns[arm] = append(ns[arm], float64(time.Since(start).Nanoseconds())/datagrams)
		}
	}
	for i, arm := range arms {
		b.ReportMetric(slices.Min(ns[i]), arm+"-least-ns")
		b.ReportMetric(stats.Median(ns[i]), arm+"-median-ns")
	}
}
