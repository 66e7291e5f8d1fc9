// SPDX-License-Identifier: Apache-2.0

package compat

import (
	"encoding/binary"
	"errors"
	"runtime"
	"slices"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// xtPart is a match or a target.
func xtPart(name string, data ...byte) []byte {
	b := make([]byte, sizeofMatch, sizeofMatch+len(data))
	copy(b[2:2+sizeofName-1], name)
	b = append(b, data...)
	b = append(b, make([]byte, -len(b)&7)...)
	binary.NativeEndian.PutUint16(b, uint16(len(b)))
	return b
}

var (
	xtLengthMatch = xtPart("length", 0, 0, 0xff, 0xff, 0)
	xtAccept      = xtPart("", 0xfe, 0xff, 0xff, 0xff) // -NF_ACCEPT - 1
	xtReturn      = xtPart("", 0xfb, 0xff, 0xff, 0xff)
)

func xtChain(name string) []byte {
	return xtPart("ERROR", append([]byte(name), make([]byte, 30-len(name))...)...)
}

// entry is a rule without conditions but its matches.
func (x xtables) entry(target []byte, matches ...[]byte) []byte {
	b := append(make([]byte, x.matches), slices.Concat(matches...)...)
	binary.NativeEndian.PutUint16(b[x.header:], uint16(len(b)))
	b = append(b, target...)
	binary.NativeEndian.PutUint16(b[x.header+2:], uint16(len(b)))
	return b
}

// filter is a table with rules in INPUT and in a chain of the user's.
func (x xtables) filter() (iptInfo, []byte) {
	info := iptInfo{validHooks: 1<<1 | 1<<2 | 1<<3}
	copy(info.name[:], "filter")
	var entries []byte
	add := func(e []byte) int {
		at := len(entries)
		entries = append(entries, e...)
		info.entries++
		return at
	}
	info.hookEntry[1] = uint32(add(x.entry(xtAccept)))
	add(x.entry(xtAccept, xtLengthMatch))
	info.underflow[1] = uint32(add(x.entry(xtAccept)))
	info.hookEntry[2] = uint32(add(x.entry(xtAccept)))
	info.hookEntry[3] = uint32(add(x.entry(xtAccept)))
	info.underflow[2], info.underflow[3] = info.hookEntry[2], info.hookEntry[3]
	add(x.entry(xtChain("mine")))
	add(x.entry(xtAccept, xtLengthMatch, xtLengthMatch))
	add(x.entry(xtReturn))
	add(x.entry(xtChain("ERROR")))
	info.size = uint32(len(entries))
	return info, entries
}

// replace puts a table into the thread's network namespace: struct ipt_replace.
func (x xtables) replace(info iptInfo, entries []byte) error {
	socket, err := unix.Socket(x.domain, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(socket)
	before := info
	request := unsafe.Slice((*byte)(unsafe.Pointer(&before)), unsafe.Sizeof(before))
	if err := getsockopt(socket, x.level, iptGetInfo, request); err != nil {
		return err
	}
	const sizeofCounter = 16
	counters := make([]byte, sizeofCounter*before.entries)
	b := slices.Clone(info.name[:])
	for _, v := range slices.Concat([]uint32{info.validHooks, info.entries, info.size}, info.hookEntry[:], info.underflow[:], []uint32{before.entries}) {
		b = binary.NativeEndian.AppendUint32(b, v)
	}
	b = binary.NativeEndian.AppendUint64(b, uint64(uintptr(unsafe.Pointer(&counters[0]))))
	b = append(b, entries...)
	_, _, errno := unix.Syscall6(unix.SYS_SETSOCKOPT, uintptr(socket), uintptr(x.level), iptGetInfo,
		uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)), 0)
	runtime.KeepAlive(counters)
	if errno != 0 {
		return errno
	}
	return nil
}

func TestXTablesRulesAreFound(t *testing.T) {
	n := troubleNetwork(t)
	for _, x := range []xtables{ipTables, ip6Tables} {
		host, _ := troublesOf(t, n)
		wantNoTrouble(t, host, troubleLength, x.command+" filter")
		err := n.Do(func() error { return x.replace(x.filter()) })
		if errors.Is(err, unix.ENOPROTOOPT) || errors.Is(err, unix.ENOENT) {
			t.Skipf("kernel: it has not all that %s and its match length take: %v", x.command, err)
		}
		must(t, err)
		host, _ = troublesOf(t, n)
		wantTrouble(t, host, troubleLength, x.command+" filter INPUT, rule 2; "+x.command+" filter mine, rule 1", "cannot end above 65535")
	}
}

func FuzzXTables(f *testing.F) {
	for _, x := range []xtables{ipTables, ip6Tables} {
		_, entries := x.filter()
		f.Add(entries, uint32(0), uint32(0))
		f.Add(entries, uint32(0x1f), uint32(len(x.entry(xtAccept))))
		f.Add(entries[:len(entries)-50], uint32(2), uint32(0))
	}
	f.Fuzz(func(t *testing.T, entries []byte, hooks, at uint32) {
		for _, x := range []xtables{ipTables, ip6Tables} {
			if found := x.parse("filter", iptInfo{validHooks: hooks, hookEntry: [iptHooks]uint32{0, at}}, entries); len(found) > len(entries)/x.matches {
				t.Errorf("%d rules in %d bytes", len(found), len(entries))
			}
		}
	})
}
