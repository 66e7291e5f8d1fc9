// SPDX-License-Identifier: Apache-2.0

// Package placement is the reference model of the steering programs in user space: the package computes the slot of a
// source address with the same bits as the programs, and creates the tables that the programs read.
package placement

import (
	"crypto/sha256"
	"encoding/binary"
	"math/bits"
	"net/netip"

	"sockeye/internal/bpf"
)

// Address returns addr in the format of the programs: IPv6 in network byte order, and IPv4 as ::ffff:a.b.c.d. A zone is
// ignored.
func Address(addr netip.Addr) bpf.Address {
	return fromBytes(addr.As16())
}

// Addr is the inverse of Address. The result for an IPv4-mapped address is an IPv4 address.
func Addr(address bpf.Address) netip.Addr {
	var b [16]byte
	for i, word := range address.Word {
		binary.LittleEndian.PutUint32(b[4*i:], word)
	}
	return netip.AddrFrom16(b).Unmap()
}

// DeviceHash returns the hash of a named device. The hash depends on the name and the nonce only, so that a device keeps
// its slot when its addresses change.
func DeviceHash(name string, nonce uint64) uint32 {
	sum := sha256.Sum256([]byte(name))
	return Hash(fromBytes([16]byte(sum[:16])), nonce)
}

func fromBytes(b [16]byte) bpf.Address {
	var a bpf.Address
	for i := range a.Word {
		a.Word[i] = binary.LittleEndian.Uint32(b[4*i:])
	}
	return a
}

// Hash is steer_hash of bpf/include/device.bpf.h: Bob Jenkins' lookup3 over
// the address and the nonce, as jhash2 of the kernel computes it.
func Hash(address bpf.Address, nonce uint64) uint32 {
	const initial = 0xdeadbeef + 6<<2
	rol := bits.RotateLeft32
	w := address.Word
	a, b, c := initial+w[0], initial+w[1], initial+w[2]
	a -= c
	a ^= rol(c, 4)
	c += b
	b -= a
	b ^= rol(a, 6)
	a += c
	c -= b
	c ^= rol(b, 8)
	b += a
	a -= c
	a ^= rol(c, 16)
	c += b
	b -= a
	b ^= rol(a, 19)
	a += c
	c -= b
	c ^= rol(b, 4)
	b += a
	a += w[3]
	b += uint32(nonce)
	c += uint32(nonce >> 32)
	c ^= b
	c -= rol(b, 14)
	a ^= c
	a -= rol(c, 11)
	b ^= a
	b -= rol(a, 25)
	c ^= b
	c -= rol(b, 16)
	a ^= c
	a -= rol(c, 4)
	b ^= a
	b -= rol(a, 14)
	c ^= b
	c -= rol(b, 24)
	return c
}
