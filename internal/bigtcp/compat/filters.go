// SPDX-License-Identifier: Apache-2.0

package compat

import (
	"errors"
	"fmt"
	"io/fs"

	"sockeye/internal/bigtcp/linux"
	"sockeye/internal/bigtcp/netif"
)

// filterTroubles looks through the packet filters.
func checkFilters(n *netif.Namespace, kernel linux.Version) ([]Incompatibility, error) {
	var rules []filterRule
	var tables []string
	var unseen, failed []error
	note := func(err error) {
		if errors.Is(err, fs.ErrPermission) {
			unseen = append(unseen, err)
		} else if err != nil {
			failed = append(failed, err)
		}
	}
	err := n.Do(func() (err error) {
		rules, err = nftRules()
		note(err)
		tables, err = legacyTables()
		note(err)
		return nil
	})
	note(err)
	troubles := append(checkRules(rules, kernel), checkLegacyTables(tables)...)
	if len(unseen) > 0 {
		troubles = append(troubles, Incompatibility{
			Name:   lengthFilter,
			Detail: fmt.Sprintf("packet filters that match on length are not known: %v", unseen[0]),
			Hint:   "to look through them takes CAP_NET_ADMIN",
		})
	}
	return troubles, errors.Join(failed...)
}

// filterKinds are what rules may see, and what comes of it. The kernel's sources for
// it are nft_meta.c, nft_payload.c, nft_exthdr.c, xt_length.c and nfnetlink_queue.c;
// TestFiltersSeeWhatIsSaid tries all but the last.
var filterKinds = []struct {
	inspects           inspected
	name, detail, hint string
	until              linux.Version // the first without it; none: all have it
}{
	{
		inspects: ipv4TotalLength, name: lengthFilter,
		detail: "looks at the length in the IPv4 header, which is 0 in packets above 65535 bytes: " +
			"such a packet is not \"longer than\" anything, and \"shorter than\" everything",
		hint: "compare meta length instead, which is the number of bytes that there are",
	},
	{
		inspects: ipv6PayloadLength, name: lengthFilter,
		detail: "looks at the length in the IPv6 header, which is 0 in packets above 65535 bytes: " +
			"such a packet is not \"longer than\" anything, and \"shorter than\" everything",
		hint: "compare meta length instead, which is the number of bytes that there are",
	},
	{
		inspects: packetLength, name: lengthFilter,
		detail: "looks at the number of bytes that there are, which is above 65535 in large packets: " +
			"a range that ends at 65535 leaves them out",
		hint: "let ranges end at 524288 or more",
	},
	{
		inspects: xtLength, name: lengthFilter,
		detail: "looks at the length by a range that cannot end above 65535: " +
			"larger packets are in no range, and match every inverted one",
		hint: "write the rule so that packets above 65535 bytes may be outside of the range",
	},
	{
		inspects: nextHeader, name: headerFilter, until: linux.Version{7, 0, 0},
		detail: "looks at the next header of IPv6 or for hop-by-hop options: packets above 65535 bytes have " +
			"these options before TCP, so that the next header is 0",
		hint: "compare meta l4proto, which skips them, and let hop-by-hop options pass; Linux 7.0 has them no more",
	},
	{
		inspects: queued, name: queueFilter,
		detail: "gives packets to a program (NFQUEUE): they are cut to the MTU before, and stay so; " +
			"a program that asks for whole ones (NFQA_CFG_F_GSO) gets 65531 bytes of each at most",
		hint: "let a rule before it accept the bulk of established connections",
	},
}

// ruleTroubles makes a trouble of all rules of a kind.
func checkRules(rules []filterRule, kernel linux.Version) []Incompatibility {
	var troubles []Incompatibility
	for _, k := range filterKinds {
		if k.until != (linux.Version{}) && !kernel.Before(k.until) {
			continue
		}
		var where []string
		for _, r := range rules {
			if r.inspects&k.inspects != 0 {
				where = append(where, r.where)
			}
		}
		if len(where) > 0 {
			troubles = append(troubles, Incompatibility{k.name, listed(where, "; ") + ": " + k.detail, k.hint})
		}
	}
	return troubles
}
