// SPDX-License-Identifier: Apache-2.0

package packets

import "encoding/binary"

// TCP options, and header types.
const (
	optionEnd       = 0
	optionNop       = 1
	optionSACK      = 5
	optionTimestamp = 8

	protocolHopByHop    = 0
	protocolTCP         = 6
	protocolRouting     = 43
	protocolFragment    = 44
	protocolDestination = 60
)

// options are the TCP options that the assembler uses.
type options struct {
	timestamps   bool
	value, reply uint32 // TSval and TSecr
	sack         [4][2]uint32
	blocks       int
}

// parseOptions parses the TCP options of an IP packet, as far as the captured bytes reach.
func parseOptions(b []byte) (o options) {
	b = tcpHeader(b)
	if len(b) < 20 {
		return o
	}
	b = b[20:min(len(b), max(20, int(b[12]>>4)*4))]
	for len(b) > 0 && b[0] != optionEnd {
		if b[0] == optionNop {
			b = b[1:]
			continue
		}
		if len(b) < 2 || b[1] < 2 || int(b[1]) > len(b) {
			return o
		}
		body := b[2:b[1]]
		switch b[0] {
		case optionTimestamp:
			if len(body) == 8 {
				o.timestamps = true
				o.value, o.reply = binary.BigEndian.Uint32(body), binary.BigEndian.Uint32(body[4:])
			}
		case optionSACK:
			for o.blocks = 0; o.blocks < len(o.sack) && len(body) >= 8; o.blocks++ {
				o.sack[o.blocks] = [2]uint32{binary.BigEndian.Uint32(body), binary.BigEndian.Uint32(body[4:])}
				body = body[8:]
			}
		}
		b = b[b[1]:]
	}
	return o
}

// tcpHeader returns the part of an IP packet from its TCP header on, or nil.
func tcpHeader(b []byte) []byte {
	if len(b) < 20 {
		return nil
	}
	switch b[0] >> 4 {
	case 4:
		if n := int(b[0]&15) * 4; b[9] == protocolTCP && n >= 20 && n <= len(b) {
			return b[n:]
		}
	case 6:
		if len(b) < 40 {
			return nil
		}
		next, n := b[6], 40
		for next == protocolHopByHop || next == protocolRouting || next == protocolDestination {
			if n+2 > len(b) {
				return nil
			}
			next, n = b[n], n+(int(b[n+1])+1)*8
		}
		if next == protocolTCP && n <= len(b) {
			return b[n:]
		}
	}
	return nil
}
