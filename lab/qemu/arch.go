// SPDX-License-Identifier: Apache-2.0

package qemu

import (
	"fmt"
	"runtime"
	"strings"
)

// Arch is an architecture of virtual machines.
type Arch struct {
	Name string // of Go and of Debian
	CPU  string // the CPU of qemu that tests of programs need

	command string   // of qemu
	machine []string // arguments for the machine type and the emulation
	kernel  string   // parameters of the kernel
	console string   // device of the first serial port, for the kernel's console
	port    []string // arguments for the second serial port, which is qemu's standard output
	device  string   // path of the second serial port in the guest
}

// The architectures of Sockeye's releases.
var (
	AMD64 = &Arch{
		Name: "amd64", CPU: "max", command: "qemu-system-x86_64",
		// Multi-threaded emulation is faster, but sometimes loses a breakpoint that the kernel sets to modify its own
		// code, and crashes.
		machine: []string{"-accel", "tcg,thread=single"},
		// On a busy host, the timer has not fired when the kernel checks it, and the kernel panics.
		kernel:  "no_timer_check",
		console: "ttyS0", port: []string{"-serial", "stdio"}, device: "/dev/ttyS1",
	}
	ARM64 = &Arch{
		// The CPU max has pointer authentication, whose emulation takes most of the time of a guest.
		Name: "arm64", CPU: "neoverse-n1", command: "qemu-system-aarch64",
		machine: []string{"-machine", "virt", "-accel", "tcg,thread=multi"},
		// The machine type has one serial port. The second one is a PCI device with another driver.
		console: "ttyAMA0", port: []string{"-chardev", "stdio,id=port", "-device", "pci-serial,chardev=port"}, device: "/dev/ttyS0",
	}
)

// GuestPort returns the path of the serial port to the host. It is called in the guest, and panics on an error.
func GuestPort() string {
	a, err := FindArch(runtime.GOARCH)
	Must(err, "find the port")
	return a.device
}

// FindArch returns the architecture with a name.
func FindArch(name string) (*Arch, error) {
	all := []*Arch{AMD64, ARM64}
	var names []string
	for _, a := range all {
		if a.Name == name {
			return a, nil
		}
		names = append(names, a.Name)
	}
	return nil, fmt.Errorf("architecture %q: want %s", name, strings.Join(names, " or "))
}
