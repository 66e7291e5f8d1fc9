// SPDX-License-Identifier: Apache-2.0

// Package swarm loads a service with many devices, and finds out from outside whether all traffic of a device is at one
// member.
//
// Each device has an address of its own, IPv4 or IPv6. It holds one TCP connection with BMP messages, which it opens
// again at once when the connection is closed or refused, and sends IPFIX over UDP from several ports. Both carry
// sequence numbers. Members are minimal collectors: they bind the ports, accept and read.
//
// Devices and members write a Record for each datagram and each change of a connection, with the time of
// CLOCK_MONOTONIC, which all processes of a host share. Analysis judges the records of all processes together: which
// member had the connection of a device at the instant at which a member received one of its datagrams.
package swarm

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"

	"sockeye/lab"
)

// MaxDevices is the maximum number of devices.
const MaxDevices = 1 << 14

// prefix4 and prefix6 contain the addresses of devices.
var (
	prefix4 = netip.MustParsePrefix("10.80.0.0/16")
	prefix6 = netip.MustParsePrefix("fd80::/64")
)

// Address returns the address of a device: IPv4 if i is even, IPv6 if i is odd.
func Address(i int) netip.Addr {
	if i%2 == 0 {
		return netip.AddrFrom4([4]byte{10, 80, byte(i >> 9), byte(i >> 1)})
	}
	return netip.AddrFrom16([16]byte{0xfd, 0x80, 13: 1, 14: byte(i >> 8), 15: byte(i)})
}

// Device returns the device of an address, and whether the address is that of a device.
func Device(a netip.Addr) (int, bool) {
	a = a.Unmap()
	switch {
	case prefix4.Contains(a):
		b := a.As4()
		return int(b[2])<<9 | int(b[3])<<1, true
	case prefix6.Contains(a):
		b := a.As16()
		return int(b[14])<<8 | int(b[15]), true
	}
	return 0, false
}

// gateways are the addresses of the namespace of the devices on the lab's bridge.
var gateways = map[netip.Prefix]netip.Addr{
	prefix4: netip.MustParseAddr("10.77.0.201"),
	prefix6: netip.MustParseAddr("fd77::201"),
}

// Attach adds a namespace for the devices to a lab, from which the namespace "collector" is reachable.
func Attach(l *lab.Lab) (devices *lab.Namespace, err error) {
	collectors, err := l.Namespace("collector")
	if err != nil {
		return nil, err
	}
	if devices, err = l.Attach("devices", netip.PrefixFrom(gateways[prefix4], 24), netip.PrefixFrom(gateways[prefix6], 64)); err != nil {
		return nil, err
	}
	return devices, errors.Join(devices.Own(prefix4), devices.Own(prefix6), Reach(collectors))
}

// Reach lets a namespace on the lab's bridge answer the devices.
func Reach(collectors *lab.Namespace) error {
	for prefix, gateway := range gateways {
		if err := collectors.AddRoute(prefix, gateway); err != nil {
			return err
		}
	}
	return collectors.UnlimitErrors() // the devices must receive every ICMP error
}

// roleVariable contains the role of a process of a swarm as JSON. Its name does not start with SOCKEYE_, because
// "sockeye run" removes such variables.
const roleVariable = "SWARM_ROLE"

type role struct {
	Member *Member `json:"member,omitempty"`
	Load   *Load   `json:"load,omitempty"`
}

// HasRole reports whether this process was started by a Swarm. Such a process must call Run and exit.
func HasRole() bool { return os.Getenv(roleVariable) != "" }

// Run runs the process as a member or as the devices, until its standard input is closed.
func Run() error {
	var r role
	if err := json.Unmarshal([]byte(os.Getenv(roleVariable)), &r); err != nil {
		return fmt.Errorf("read role: %w", err)
	}
	records := recorder{os.NewFile(recordsFD, "records")}
	switch {
	case r.Member != nil:
		return r.Member.run(records)
	case r.Load != nil:
		return r.Load.run(records)
	}
	return errors.New("read role: neither member nor devices")
}
