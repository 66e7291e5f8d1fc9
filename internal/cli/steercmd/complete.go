// SPDX-License-Identifier: Apache-2.0

package steercmd

import (
	"net/url"
	"strconv"

	"github.com/spf13/cobra"

	"sockeye/internal/api"
)

// argumentKind lists the completions of an argument.
type argumentKind func(cmd *cobra.Command, query url.Values) []cobra.Completion

// complete completes the arguments of a command by their kinds. Without an agent there are no completions.
func (c *commands) complete(kinds ...argumentKind) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
		if len(args) >= len(kinds) {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return kinds[len(args)](cmd, ofService(cmd.Flag("service").Value.String())), cobra.ShellCompDirectiveNoFileComp
	}
}

// words completes fixed words.
func words(list ...cobra.Completion) argumentKind {
	return func(*cobra.Command, url.Values) []cobra.Completion { return list }
}

// slotsAnd completes the numbers of slots, and further words.
func (c *commands) slotsAnd(more ...cobra.Completion) argumentKind {
	return func(cmd *cobra.Command, query url.Values) []cobra.Completion {
		var slots []api.SlotStatus
		if c.Client().Get(cmd.Context(), "/v1/slots", query, &slots) != nil {
			return more
		}
		var list []cobra.Completion
		for _, s := range slots {
			list = append(list, strconv.Itoa(s.Slot))
		}
		return append(list, more...)
	}
}

// deviceNames completes the devices that were seen: by name if the device map has one.
func (c *commands) deviceNames(cmd *cobra.Command, query url.Values) []cobra.Completion {
	var devices []api.DeviceStatus
	if c.Client().Get(cmd.Context(), "/v1/devices", query, &devices) != nil {
		return nil
	}
	var list []cobra.Completion
	seen := make(map[string]bool)
	for _, d := range devices {
		name := d.Device
		if name == "" {
			name = d.Address.String()
		}
		if !seen[name] {
			seen[name] = true
			list = append(list, name)
		}
	}
	return list
}
