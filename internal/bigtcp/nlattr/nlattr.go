// SPDX-License-Identifier: Apache-2.0

// Package nlattr reads the attributes of netlink messages.
package nlattr

import (
	"encoding/binary"

	"golang.org/x/sys/unix"
)

// Attributes are consecutive netlink attributes.
type Attributes []byte

// All yields the type and the value of each attribute, up to a truncated one. Flags of
// the type are cleared.
func (a Attributes) All(yield func(kind uint16, value []byte) bool) {
	for len(a) >= unix.SizeofNlAttr {
		length := int(binary.NativeEndian.Uint16(a))
		if length < unix.SizeofNlAttr || length > len(a) {
			return
		}
		kind := binary.NativeEndian.Uint16(a[2:]) &^ (unix.NLA_F_NESTED | unix.NLA_F_NET_BYTEORDER)
		if !yield(kind, a[unix.SizeofNlAttr:length]) {
			return
		}
		next := (length + unix.NLA_ALIGNTO - 1) &^ (unix.NLA_ALIGNTO - 1)
		a = a[min(next, len(a)):]
	}
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
