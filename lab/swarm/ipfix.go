// SPDX-License-Identifier: Apache-2.0

package swarm

import (
	"encoding/binary"
	"errors"
	"net/netip"
)

// An IPFIX message has a header and sets (RFC 7011 section 3). A member decodes a data set if it has received the template
// from the same address and port, with the same observation domain.

const (
	ipfixHeaderLen  = 16
	setHeaderLen    = 4
	templateSet     = 2
	firstDataSet    = 256
	enterpriseBit   = 0x8000
	ipfixSequenceAt = 8
	ipfixDomainAt   = 12
)

var errIPFIX = errors.New("malformed IPFIX message")

type templateID struct {
	from   netip.AddrPort
	domain uint32
	id     uint16
}

// knowledge contains the templates that a member has received.
type knowledge map[templateID]bool

// message notes the templates of a message. data reports whether the message has data sets, and decodable whether the
// templates of all of them are known.
func (k knowledge) message(from netip.AddrPort, b []byte) (data, decodable bool, err error) {
	if len(b) < ipfixHeaderLen {
		return false, false, errIPFIX
	}
	t := templateID{from: from, domain: binary.BigEndian.Uint32(b[ipfixDomainAt:])}
	decodable = true
	for b = b[ipfixHeaderLen:]; len(b) > 0; {
		if len(b) < setHeaderLen {
			return false, false, errIPFIX
		}
		id, length := binary.BigEndian.Uint16(b), int(binary.BigEndian.Uint16(b[2:]))
		if length < setHeaderLen || length > len(b) {
			return false, false, errIPFIX
		}
		switch set := b[setHeaderLen:length]; {
		case id == templateSet:
			for len(set) >= setHeaderLen {
				t.id = binary.BigEndian.Uint16(set)
				fields := int(binary.BigEndian.Uint16(set[2:]))
				for set = set[4:]; fields > 0; fields-- {
					size := 4
					if len(set) >= 2 && binary.BigEndian.Uint16(set)&enterpriseBit != 0 {
						size = 8
					}
					if len(set) < size {
						return false, false, errIPFIX
					}
					set = set[size:]
				}
				k[t] = true
			}
		case id >= firstDataSet:
			t.id = id
			data, decodable = true, decodable && k[t]
		}
		b = b[length:]
	}
	return data, decodable, nil
}
