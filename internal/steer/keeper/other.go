// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"fmt"
	"os"
	"slices"

	"golang.org/x/sys/unix"

	"sockeye/internal/config"
	"sockeye/internal/fault"
	"sockeye/internal/member"
	"sockeye/internal/steer/listener"
)

// CheckOthers returns an error if the keeper of another pin directory has a listener of one of the services. The
// kernel has one program for a SO_REUSEPORT group, so two agents would replace the program of each other.
func CheckOthers(pins string, services []config.Service) error {
	if len(services) == 0 {
		return nil
	}
	processes, err := member.All()
	if err != nil {
		return err
	}
	for _, p := range processes {
		other, _, ok := parseArguments(p.Args)
		if !ok || !isTrusted(member.ID{PID: p.PID, StartTime: p.StartTime}) || hasPins(p.PID, other, pins) {
			continue
		}
		if err := checkOther(p.PID, other, services); err != nil {
			return err
		}
	}
	return nil
}

func checkOther(pid int, pins string, services []config.Service) error {
	handle, err := member.Open(pid)
	if err != nil {
		return nil // the keeper has exited
	}
	defer handle.Close()
	sockets, err := handle.Sockets(func(*member.Socket) bool { return true })
	if err != nil {
		return nil
	}
	defer member.CloseAll(sockets)
	for _, c := range services {
		for _, l := range c.Listeners {
			row := listener.ForBPF(l)
			if !slices.ContainsFunc(sockets, func(s *member.Socket) bool { return IsSocket(s, row) && isInNetns(s, c.Netns) }) {
				continue
			}
			reset := "sockeye reset --pins " + pins
			if !sameFile(procFile(pid, "ns/mnt"), "/proc/self/ns/mnt") {
				reset = fmt.Sprintf("nsenter --mount --target %d %s", pid, reset)
			}
			return fault.In("service "+c.Name, fault.Conflict(fmt.Errorf("%s belongs to another agent: its keeper, process %d, has the port", l, pid),
				"use that agent (sockeye agent --pins "+pins+"), or stop it and run "+reset))
		}
	}
	return nil
}

// isInNetns reports whether a socket is in a network namespace, "" for the agent's own. If the socket's namespace is not
// known, the result is true.
func isInNetns(s *member.Socket, name string) bool {
	if name == "" {
		name = "/proc/thread-self/ns/net"
	}
	fd, err := unix.IoctlRetInt(s.FD(), unix.SIOCGSKNS)
	if err != nil {
		return true
	}
	f := os.NewFile(uintptr(fd), "network namespace")
	defer f.Close()
	socket, err := f.Stat()
	if err != nil {
		return true
	}
	service, err := os.Stat(name)
	return err == nil && os.SameFile(socket, service)
}
