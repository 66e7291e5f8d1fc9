// SPDX-License-Identifier: Apache-2.0

package verify

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"sockeye/internal/bigtcp/netif"
)

// notes returns additional notes of a report.
func (p *Report) notes(before *netif.Interface, refused tooBigCounters) []string {
	notes := []string{}
	var other, all uint64
	for _, c := range p.Counts {
		if c.Point == Driver {
			continue
		}
		all += c.Bytes
		if c.Family == Other {
			other += c.Bytes
		}
	}
	switch {
	case all == 0:
		notes = append(notes, "no packets were counted: nothing is proven")
	case other == all:
		notes = append(notes, "no TCP packets were counted, and other protocols have no large packets: nothing is proven")
	case other*2 > all:
		notes = append(notes, fmt.Sprintf("%.0f %% of all bytes are not TCP (UDP, or encapsulated): BIG TCP does not apply to them", 100*share(other, all)))
	}
	if p.Sizes != before.Sizes {
		notes = append(notes, fmt.Sprintf("the sizes changed during the run; they were %s", sizesOf(before.Sizes)))
	}
	if refused.byUs > 0 {
		notes = append(notes, fmt.Sprintf("this host dropped %d forwarded IPv6 packets as too big (Ip6InTooBigErrors): %s", refused.byUs, jumbogramText))
	}
	if refused.byOthers > 0 {
		notes = append(notes, fmt.Sprintf("routers on the path rejected %d IPv6 packets as too big (Icmp6InPktTooBigs): if they run Linux, %s", refused.byOthers, jumbogramText))
	}
	if p.NoDriver != "" {
		notes = append(notes, "packets were not counted at the driver: which packets the kernel segments is derived from the sizes of the interface")
	}
	return notes
}

const jumbogramText = "kernels before 7.0 insert an option of 8 bytes into large IPv6 packets and count it for each segment when they forward the packet, so that packets with segments that fill the MTU are lost; turn BIG TCP for IPv6 off where these packets are sent or merged, or raise the MTU of the outgoing interface by 8"

// tooBigCounters count IPv6 packets of a namespace that were rejected for their size.
type tooBigCounters struct{ byUs, byOthers uint64 }

// readTooBig reads the counters. It must run in the namespace.
func readTooBig() (n tooBigCounters, err error) {
	text, err := os.ReadFile("/proc/thread-self/net/snmp6")
	if errors.Is(err, os.ErrNotExist) {
		return n, nil // the kernel has no IPv6
	}
	if err != nil {
		return n, fmt.Errorf("read counters of IPv6: %w", err)
	}
	for line := range strings.Lines(string(text)) {
		fields := strings.Fields(line)
		if len(fields) != 2 {
			continue
		}
		value, err := strconv.ParseUint(fields[1], 10, 64)
		if err != nil {
			continue
		}
		switch fields[0] {
		case "Ip6InTooBigErrors":
			n.byUs = value
		case "Icmp6InPktTooBigs":
			n.byOthers = value
		}
	}
	return n, nil
}
