// SPDX-License-Identifier: Apache-2.0

package bigtcpcmd

import (
	"strings"
	"testing"
	"unicode/utf8"

	"sockeye/internal/bigtcp/netif"
	"sockeye/internal/bigtcp/verify"
	"sockeye/internal/cli/clitest"
	"sockeye/internal/cli/command"
)

// TestBigTCPVerifyText compares printed results of verify with golden files.
func TestBigTCPVerifyText(t *testing.T) {
	share := 0.4375
	class := func(above, upTo uint32, packets, bytes uint64) verify.Class {
		return verify.Class{Above: above, UpTo: upTo, Packets: packets, Bytes: bytes}
	}
	of := func(at verify.Point, family verify.Family, largest uint64, sizes, segments []verify.Class) verify.Count {
		c := verify.Count{Point: at, Family: family, Largest: largest, Segments: 22000, Sizes: sizes, BySegments: segments}
		for _, s := range sizes {
			c.Packets += s.Packets
			c.Bytes += s.Bytes
			if s.Above >= netif.Legacy {
				c.LargeBytes += s.Bytes
			}
		}
		return c
	}
	whole := &verify.Report{
		Netns: "/run/netns/blue", Interface: "eth0", Index: 2, Seconds: 10.02, Method: "tcx",
		Verdict: netif.Verdict{State: netif.On, Text: "on: IPv6 196608 bytes, IPv4 196608 bytes"},
		Counts: []verify.Count{
			of(verify.Received, verify.TCP6, 72, []verify.Class{class(0, 128, 1000, 72000)}, []verify.Class{class(0, 1, 1000, 72000)}),
			of(verify.Sent, verify.TCP6, 196000,
				[]verify.Class{class(0, 128, 20, 2000), class(49152, 65536, 130, 7998000), class(163840, 196608, 150, 24e6)},
				[]verify.Class{class(0, 1, 20, 2000), class(16, 45, 130, 7998000), class(90, 180, 150, 24e6)}),
			of(verify.Sent, verify.Other, 100, []verify.Class{class(0, 128, 3, 300)}, []verify.Class{class(0, 1, 3, 300)}),
			of(verify.Driver, verify.TCP6, 600000,
				[]verify.Class{class(128, 1500, 6900, 18e6), class(524288, 0, 100, 14e6)}, []verify.Class{class(360, 0, 7000, 32e6)}),
		},
		TCPBytes: 32e6, LargeBytes: 14e6, Share: &share, Cut: 0.25,
		Causes: []verify.Cause{{
			Name: "old_connection", Share: 0.25, Bytes: 8e6, Connections: 2, Example: "[fd09::1]:1790 to [fd09::2]:40000",
			Detail: "their packets have up to 65232 bytes, although 196608 are allowed: connections older than the change keep their size until their route is looked up again",
			Hint:   "close the connections (restart the program, or ss -K); new ones have the new size",
		}, {
			Name: "cut", Share: 0.251, Bytes: 8e6,
			Detail: "the kernel segments packets before the driver: the sizes of the interface are 65536 bytes of IPv6, 65536 of IPv4",
			Hint:   "give the interface the sizes of the one from which the packets come (sockeye bigtcp apply), if its tso_max_size permits",
		}},
		Notes: []string{"what the sockets wrote\x1b[31m was odd"},
	}
	nothing := &verify.Report{Interface: "eth1", Seconds: 10, Verdict: netif.Verdict{Text: "off, possible up to 524280 bytes"}, NoDriver: "refused", Notes: []string{"no packets were counted: nothing is proven"}}
	for name, p := range map[string]*verify.Report{"bigtcp-verify": whole, "bigtcp-verify-nothing": nothing} {
		var got command.Text
		verifyText(&got, p)
		clitest.Golden(t, name, got.String())
		for line := range strings.Lines(got.String()) {
			if utf8.RuneCountInString(line) > command.LineWidth+1 {
				t.Errorf("a line of more than %d columns: %s", command.LineWidth, line)
			}
		}
	}
}
