// SPDX-License-Identifier: Apache-2.0

// Package nlattr reads and writes the attributes of netlink messages. It is the only
// codec of attributes here: of rtnetlink and nftables answers, and of sock_diag(7).
//
// Package nl of github.com/vishvananda/netlink sends rtnetlink requests and splits
// their answers into messages. Its ParseRouteAttr allocates a slice for each level of
// each message, and keeps the flag bits in the types; a dump of 100,000 sockets has
// five attributes in each message.
package nlattr

import (
	"encoding/binary"
	"fmt"

	"golang.org/x/sys/unix"
)

func align(length int) int {
	return (length + unix.NLA_ALIGNTO - 1) &^ (unix.NLA_ALIGNTO - 1)
}

// Visit calls visit for each attribute in b. It returns an error at the first one
// whose length is impossible, and allocates nothing otherwise. The values are parts
// of b.
func Visit(b []byte, visit func(kind uint16, value []byte)) error {
	for len(b) >= unix.SizeofNlAttr {
		kind, value, rest, err := next(b)
		if err != nil {
			return err
		}
		visit(kind, value)
		b = rest
	}
	return nil
}

// Attributes are consecutive netlink attributes.
type Attributes []byte

// All yields the type and the value of each attribute, and ends before the first one
// whose length is impossible. Flags of the type are cleared.
func (a Attributes) All(yield func(kind uint16, value []byte) bool) {
	for len(a) >= unix.SizeofNlAttr {
		kind, value, rest, err := next(a)
		if err != nil || !yield(kind, value) {
			return
		}
		a = rest
	}
}

// next cuts the first attribute off b, which has unix.SizeofNlAttr bytes at least.
// Flags of the type (NLA_F_NESTED, NLA_F_NET_BYTEORDER) are cleared. The padding of
// the last attribute may be missing.
func next(b []byte) (kind uint16, value, rest []byte, err error) {
	length := int(binary.NativeEndian.Uint16(b))
	if length < unix.SizeofNlAttr || length > len(b) {
		return 0, nil, nil, fmt.Errorf("netlink attribute of %d bytes in %d", length, len(b))
	}
	kind = binary.NativeEndian.Uint16(b[2:]) &^ (unix.NLA_F_NESTED | unix.NLA_F_NET_BYTEORDER)
	return kind, b[unix.SizeofNlAttr:length], b[min(align(length), len(b)):], nil
}

// Append appends an attribute with its padding to b. The value of a nested attribute
// is what Append returned for the inner ones.
func Append(b []byte, kind uint16, value []byte) []byte {
	length := unix.SizeofNlAttr + len(value)
	b = binary.NativeEndian.AppendUint16(b, uint16(length))
	b = binary.NativeEndian.AppendUint16(b, kind)
	b = append(b, value...)
	return append(b, make([]byte, align(length)-length)...)
}

// String returns the first attribute of a type as a string, without the terminating
// zero.
func String(b []byte, kind uint16) string {
	return unix.ByteSliceToString(Find(b, kind))
}

// Uint32 returns the first attribute of a type as a number in network byte order, as
// nftables has them. ok is false if there is none of four bytes.
func Uint32(b []byte, kind uint16) (number uint32, ok bool) {
	value := Find(b, kind)
	if len(value) != 4 {
		return 0, false
	}
	return binary.BigEndian.Uint32(value), true
}

// Find returns the value of the first attribute of a type, or nil.
func Find(b []byte, kind uint16) []byte {
	for k, value := range Attributes(b).All {
		if k == kind {
			return value
		}
	}
	return nil
}
