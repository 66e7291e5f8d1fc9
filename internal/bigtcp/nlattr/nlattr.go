// SPDX-License-Identifier: Apache-2.0

// Package nlattr reads the attributes of netlink messages.
package nlattr

import (
	"encoding/binary"

	"golang.org/x/sys/unix"
)

// attributes are those of a netlink message, one after another.
type Attributes []byte

// all goes through the attributes, up to one that is cut off.
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

// attribute is the value of the first attribute of a kind, nil if there is none.
func Find(b []byte, kind uint16) []byte {
	for k, value := range Attributes(b).All {
		if k == kind {
			return value
		}
	}
	return nil
}

func String(b []byte, kind uint16) string {
	return unix.ByteSliceToString(Find(b, kind))
}

// attributeUint32 reads a number, which nftables has in network byte order.
func Uint32(b []byte, kind uint16) (uint32, bool) {
	value := Find(b, kind)
	if len(value) != 4 {
		return 0, false
	}
	return binary.BigEndian.Uint32(value), true
}
