// SPDX-License-Identifier: Apache-2.0

package compat

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"sockeye/internal/bigtcp/netif"
	"sockeye/internal/linux"
)

// checkCaptures reports packet sockets, by the names of their processes.
func checkCaptures(processes []string, kernel linux.Version) []Incompatibility {
	if len(processes) == 0 {
		return nil
	}
	detail := "packet sockets are open in " + joinFirst(processes, ", ") + ": in captures, packets above 65535 bytes have " +
		"a length of 0 in their headers, which tcpdump 4.99.3 prints as \"IP bad-len 0\""
	if kernel.Before(linux.Version{7, 0, 0}) {
		detail += "; capture filters such as \"tcp\" and \"port 443\" do not match those of IPv6, which have hop-by-hop options before TCP"
	}
	return []Incompatibility{{
		Name:   capture,
		Detail: detail,
		Hint: "the length of the captured packet is correct up to the snapshot length (262144 bytes for tcpdump); " +
			"set the sizes to 65536 while captures need correct headers",
	}}
}

// captures returns the processes with packet sockets in the namespace that receive IP
// packets, by the index of the interface; 0 means all interfaces.
func captures(n *netif.Namespace) (map[int][]string, error) {
	var table []byte
	err := n.Do(func() error {
		var err error
		table, err = os.ReadFile("/proc/thread-self/net/packet")
		return err
	})
	// The kernel may have no packet sockets.
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrPermission) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list packet sockets: %w", err)
	}
	sockets := packetSockets(string(table))
	if len(sockets) == 0 {
		return nil, nil
	}
	owners := socketOwners(sockets)
	byIndex := map[int][]string{}
	for inode, index := range sockets {
		owner, known := owners[inode]
		if !known {
			owner = "an unknown process"
		}
		if !slices.Contains(byIndex[index], owner) {
			byIndex[index] = append(byIndex[index], owner)
		}
	}
	for _, c := range byIndex {
		slices.Sort(c)
	}
	return byIndex, nil
}

// packetSockets parses /proc/net/packet: the interface index of each running socket
// that receives IP packets, by the inode of the socket.
func packetSockets(table string) map[string]int {
	const (
		protocol, index, running, inode = 3, 4, 5, 8
		fields                          = 9
	)
	sockets := map[string]int{}
	for line := range strings.Lines(table) {
		f := strings.Fields(line)
		if len(f) != fields || f[running] != "1" {
			continue
		}
		// The first line has the titles of the columns, which are not numbers.
		p, err := strconv.ParseUint(f[protocol], 16, 16)
		if err != nil || p != unix.ETH_P_ALL && p != unix.ETH_P_IP && p != unix.ETH_P_IPV6 {
			continue
		}
		if i, err := strconv.Atoi(f[index]); err == nil {
			sockets[f[inode]] = i
		}
	}
	return sockets
}

// socketOwners finds the processes that hold the sockets with these inodes, as in
// "tcpdump (812)". Processes that the caller may not inspect are skipped.
func socketOwners(sockets map[string]int) map[string]string {
	owners := map[string]string{}
	// Skip a process that exits concurrently.
	processes, _ := filepath.Glob("/proc/[0-9]*")
	for _, process := range processes {
		descriptors, err := os.ReadDir(filepath.Join(process, "fd"))
		if err != nil {
			continue
		}
		for _, d := range descriptors {
			target, err := os.Readlink(filepath.Join(process, "fd", d.Name()))
			if err != nil {
				continue
			}
			inode, isSocket := strings.CutPrefix(strings.TrimSuffix(target, "]"), "socket:[")
			if _, wanted := sockets[inode]; !isSocket || !wanted {
				continue
			}
			name, err := os.ReadFile(filepath.Join(process, "comm"))
			if err == nil {
				owners[inode] = fmt.Sprintf("%s (%s)", strings.TrimSpace(string(name)), filepath.Base(process))
			}
		}
		if len(owners) == len(sockets) {
			break
		}
	}
	return owners
}
