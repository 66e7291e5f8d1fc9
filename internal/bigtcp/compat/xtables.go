// SPDX-License-Identifier: Apache-2.0

package compat

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// xtables is one of the two packet filters of iptables-legacy(8).
type xtables struct {
	command       string // which shows the rules
	names         string // the file that lists the tables in use
	domain, level int
	header        int // the bytes of an entry before target_offset
	matches       int // the bytes of an entry before its matches
}

var (
	ipTables  = xtables{"iptables", "ip_tables_names", unix.AF_INET, unix.SOL_IP, 88, 112}
	ip6Tables = xtables{"ip6tables", "ip6_tables_names", unix.AF_INET6, unix.SOL_IPV6, 140, 168}
)

// Of <linux/netfilter_ipv4/ip_tables.h>; ip6_tables.h has the same.
const (
	iptGetInfo    = 64
	iptGetEntries = 65
	iptHooks      = 5
	// maxTable bounds the memory that a table may take, in bytes: a million rules.
	maxTable = 256 << 20
	// sizeofMatch is the size of the headers of a match and of a target.
	sizeofMatch = 32
	sizeofName  = 29
)

var iptChains = [iptHooks]string{"PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"}

// iptInfo is struct ipt_getinfo.
type iptInfo struct {
	name                 [32]byte
	validHooks           uint32
	hookEntry, underflow [iptHooks]uint32
	entries, size        uint32
}

// rules lists the rules in the thread's network namespace that look at what differs
// in large packets. It needs CAP_NET_ADMIN.
func (x xtables) rules() ([]filterRule, error) {
	// A table that is asked for is made: only those are that the file names.
	names, err := os.ReadFile("/proc/thread-self/net/" + x.names)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read tables of %s: %w", x.command, err)
	}
	if len(names) == 0 {
		return nil, nil
	}
	socket, err := unix.Socket(x.domain, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("read tables of %s: %w", x.command, err)
	}
	defer unix.Close(socket)
	var rules []filterRule
	for name := range strings.FieldsSeq(string(names)) {
		info, entries, err := x.table(socket, name)
		if err != nil {
			return nil, fmt.Errorf("read table %s of %s: %w", name, x.command, err)
		}
		rules = append(rules, x.parse(name, info, entries)...)
	}
	return rules, nil
}

// table reads the entries of a table.
func (x xtables) table(socket int, name string) (info iptInfo, entries []byte, err error) {
	// EAGAIN is of a table that has changed between the two calls.
	for range 10 {
		info = iptInfo{}
		copy(info.name[:len(info.name)-1], name)
		request := unsafe.Slice((*byte)(unsafe.Pointer(&info)), unsafe.Sizeof(info))
		if err := getsockopt(socket, x.level, iptGetInfo, request); err != nil {
			return info, nil, err
		}
		if info.size > maxTable {
			return info, nil, fmt.Errorf("it has %d bytes, more than %d", info.size, maxTable)
		}
		// struct ipt_get_entries: name, size, and entries that are aligned.
		const header = 40
		answer := make([]byte, header+info.size)
		copy(answer, info.name[:])
		binary.NativeEndian.PutUint32(answer[len(info.name):], info.size)
		err = getsockopt(socket, x.level, iptGetEntries, answer)
		if !errors.Is(err, unix.EAGAIN) {
			return info, answer[header:], err
		}
	}
	return info, nil, err
}

func getsockopt(socket, level, option int, value []byte) error {
	size := uint32(len(value))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(socket), uintptr(level), uintptr(option),
		uintptr(unsafe.Pointer(&value[0])), uintptr(unsafe.Pointer(&size)), 0)
	if errno != 0 {
		return errno
	}
	return nil
}

// parse goes through the entries of a table, up to one that does not fit.
func (x xtables) parse(table string, info iptInfo, entries []byte) []filterRule {
	var found []filterRule
	chain, number := "", 0
	for offset := 0; len(entries)-offset >= x.matches; {
		e := entries[offset:]
		target := int(binary.NativeEndian.Uint16(e[x.header:]))
		next := int(binary.NativeEndian.Uint16(e[x.header+2:]))
		if target < x.matches || next < target+sizeofMatch || next > len(e) {
			break
		}
		for hook, at := range info.hookEntry {
			if info.validHooks&(1<<hook) != 0 && int(at) == offset {
				chain, number = iptChains[hook], 0
			}
		}
		targetName := xtName(e[target:])
		if targetName == "ERROR" {
			// It begins a chain of the user's, and has its name.
			chain, number = unix.ByteSliceToString(e[target+sizeofMatch:next]), 0
			offset += next
			continue
		}
		number++
		if s := x.matchesSee(e[x.matches:target], targetName); s != 0 {
			found = append(found, filterRule{s, fmt.Sprintf("%s %s %s, rule %d", x.command, table, chain, number)})
		}
		offset += next
	}
	return found
}

func (x xtables) matchesSee(matches []byte, target string) sees {
	var s sees
	for len(matches) >= sizeofMatch {
		size := int(binary.NativeEndian.Uint16(matches))
		if size < sizeofMatch || size > len(matches) {
			break
		}
		s |= matchSees(xtName(matches))
		matches = matches[size:]
	}
	return s | targetSees(target)
}

// matchSees is what a match of xtables looks at, and targetSees the like of a
// target. Those of nftables for xtables' sake have the same names.
func matchSees(name string) sees {
	switch name {
	case "length":
		return xtLength
	case "hbh", "ipv6header":
		return nextHeader
	}
	return 0
}

func targetSees(name string) sees {
	if name == "NFQUEUE" {
		return queued
	}
	return 0
}

// xtName is the name of a match or a target, of which m holds at least the header.
func xtName(m []byte) string {
	return unix.ByteSliceToString(m[2 : 2+sizeofName])
}
