// SPDX-License-Identifier: Apache-2.0

package command

import (
	"fmt"
	"net/netip"

	"github.com/spf13/cobra"

	"sockeye/internal/config"
	"sockeye/internal/fault"
)

// Endpoints parses both addresses of a connection. A missing port is 0.
func Endpoints(localText, remoteText string) (local, remote netip.AddrPort, err error) {
	if local, err = end(localText); err != nil {
		return local, remote, err
	}
	if remote, err = end(remoteText); err != nil {
		return local, remote, err
	}
	if local.Addr().Is4() != remote.Addr().Is4() {
		return local, remote, fault.Usage(fmt.Errorf("%s and %s are of different families", local.Addr(), remote.Addr()),
			"a connection has two IPv4 or two IPv6 addresses")
	}
	return local, remote, nil
}

// Arguments checks the number of a command's arguments. name is the name of an argument in
// errors. If most is -1, the number has no upper bound.
func Arguments(least, most int, name string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		switch {
		case len(args) < least:
			return fault.Usage(fmt.Errorf("%s is missing", name), "usage: "+cmd.UseLine())
		case most >= 0 && len(args) > most:
			return fault.Usage(fmt.Errorf("unexpected argument %q", args[most]), "usage: "+cmd.UseLine())
		}
		return nil
	}
}

// NoCommand rejects an argument that is not a command, and suggests the most similar one.
func NoCommand(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	hint := cmd.CommandPath() + " --help lists the commands"
	var known []string
	for _, sub := range cmd.Commands() {
		if sub.IsAvailableCommand() {
			known = append(known, sub.Name())
		}
	}
	if near := config.Nearest(args[0], known); near != "" {
		hint = fmt.Sprintf("did you mean %s %s?", cmd.CommandPath(), near)
	}
	return fault.Usage(fmt.Errorf("unknown command %q", args[0]), hint)
}

// end parses one address of a connection.
func end(text string) (netip.AddrPort, error) {
	at, err := netip.ParseAddrPort(text)
	if err != nil {
		addr, err := netip.ParseAddr(text)
		if err != nil {
			return netip.AddrPort{}, fault.Usage(fmt.Errorf("%q is not an IP address or IP:port", text),
				"as in 192.0.2.1, 192.0.2.1:1790 or [2001:db8::1]:1790")
		}
		at = netip.AddrPortFrom(addr, 0)
	}
	return netip.AddrPortFrom(at.Addr().Unmap().WithZone(""), at.Port()), nil
}
