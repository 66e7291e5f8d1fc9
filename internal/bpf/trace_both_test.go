// SPDX-License-Identifier: Apache-2.0

package bpf_test

import (
	"testing"

	"golang.org/x/sys/unix"
)

// TestRXBothProtocols checks that segments are counted as read while datagrams wait: the program for datagrams also
// runs for connections.
func TestRXBothProtocols(t *testing.T) {
	const pieces, bytes = 20, 100
	tr := trace(t, rxRules(allRX, 1))
	tcp, udp := tr.ends(unix.IPPROTO_TCP, false), tr.ends(unix.IPPROTO_UDP, false)
	udp.send(t, pieces, bytes)
	for range pieces {
		tcp.send(t, 2, bytes)
		tcp.read(t, bytes)
		tcp.read(t, bytes)
	}
	tr.received(unix.IPPROTO_TCP).expect(t, 2*pieces, 2*pieces, 0, 0, 0, 0)
	tr.received(unix.IPPROTO_UDP).expect(t, pieces, 0, 0, 0, 0, pieces)
	udp.read(t, pieces*bytes)
	tr.received(unix.IPPROTO_UDP).expect(t, pieces, pieces, 0, 0, 0, 0)
}
