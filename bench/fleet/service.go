// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strings"

	"golang.org/x/sys/unix"

	"sockeye/internal/fleet/forward"
	"sockeye/internal/fleet/table"
	"sockeye/internal/placement"
)

// The service of the fleet, and the hosts a and b.
const (
	port   = 4739
	first  = "a"
	second = "b"
)

var (
	service = netip.MustParseAddr("192.0.2.53")
	devices = netip.MustParsePrefix("172.16.0.0/16")
)

// listeners returns the listeners of the service: TCP, UDP, and fragments.
func listeners() (list []forward.Listener) {
	for _, protocol := range []uint8{0, unix.IPPROTO_TCP, unix.IPPROTO_UDP} {
		l := forward.Listener{Protocol: protocol}
		l.Address.Word = placement.Address(service).Word
		if protocol != 0 {
			l.Port = port>>8 | port&0xff<<8
		}
		list = append(list, l)
	}
	return list
}

// newTable returns a table in which owner returns the index of the host of a bucket.
func newTable(owner func(bucket int) uint16) *table.Table {
	t := &table.Table{Epoch: 1, Nonce: rand.Uint64(), Hosts: []table.Host{{Name: first, Weight: 1}, {Name: second, Weight: 1}}}
	for b := range table.Buckets {
		t.Owner[b], t.Previous[b], t.Next[b] = owner(b), table.None, table.None
	}
	return t
}

// newDeviceMap returns a device map of n addresses, of which each device has two; nil for none.
func newDeviceMap(n int) (*placement.DeviceMap, error) {
	if n == 0 {
		return nil, nil
	}
	var text strings.Builder
	for i := range n {
		fmt.Fprintf(&text, "%v,device-%d\n", device(i), i/2)
	}
	return placement.ParseDeviceMap(strings.NewReader(text.String()), "devices.csv")
}

// device returns the address of a device, of which there are 65,536.
func device(i int) netip.Addr {
	a := devices.Addr().As4()
	a[2], a[3] = byte(i>>8), byte(i)
	return netip.AddrFrom4(a)
}
