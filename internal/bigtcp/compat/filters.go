// SPDX-License-Identifier: Apache-2.0

package compat

import (
	"errors"
	"fmt"
	"io/fs"

	"sockeye/internal/bigtcp/netif"
	"sockeye/internal/linux"
)

// checkFilters reports rules of packet filters.
func checkFilters(n *netif.Namespace, kernel linux.Version) ([]Incompatibility, error) {
	var rules []filterRule
	var tables []string
	var denied, failed []error
	note := func(err error) {
		if errors.Is(err, fs.ErrPermission) {
			denied = append(denied, err)
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
	found := append(checkRules(rules, kernel), checkLegacyTables(tables)...)
	if len(denied) > 0 {
		found = append(found, Incompatibility{
			Name:   lengthFilter,
			Detail: fmt.Sprintf("packet filters cannot be inspected: %v", denied[0]),
			Hint:   "the inspection needs CAP_NET_ADMIN",
		})
	}
	return found, errors.Join(failed...)
}

// filterKinds describes the consequences of inspected properties, from the kernel's
// nft_meta.c, nft_payload.c, nft_exthdr.c, xt_length.c and nfnetlink_queue.c.
// TestFiltersMatchAsDescribed verifies all but the last.
var filterKinds = []struct {
	inspects           inspected
	name, detail, hint string
	until              linux.Version // the first kernel without the incompatibility; zero: none
}{
	{
		inspects: ipv4TotalLength, name: lengthFilter,
		detail: "matches on the length in the IPv4 header, which is 0 in packets above 65535 bytes: " +
			"\"longer than\" never matches such a packet, and \"shorter than\" always does",
		hint: "match on meta length instead, which is the length of the packet in memory",
	},
	{
		inspects: ipv6PayloadLength, name: lengthFilter,
		detail: "matches on the length in the IPv6 header, which is 0 in packets above 65535 bytes: " +
			"\"longer than\" never matches such a packet, and \"shorter than\" always does",
		hint: "match on meta length instead, which is the length of the packet in memory",
	},
	{
		inspects: packetLength, name: lengthFilter,
		detail: "matches on the length of the packet in memory (meta length), which is above 65535 in large packets: " +
			"a range that ends at 65535 does not match them",
		hint: "end ranges at 524288 or more",
	},
	{
		inspects: xtLength, name: lengthFilter,
		detail: "matches on the length with a range that cannot end above 65535: " +
			"larger packets are in no range, and match every inverted range",
		hint: "write the rule so that packets above 65535 bytes may be outside the range",
	},
	{
		inspects: nextHeader, name: headerFilter, until: linux.Version{7, 0, 0},
		detail: "matches on the next header of IPv6 or on hop-by-hop options: packets above 65535 bytes have " +
			"these options before TCP, so that the next header is 0",
		hint: "match on meta l4proto, which skips the options, and accept hop-by-hop options; Linux 7.0 does not insert them",
	},
	{
		inspects: queued, name: queueFilter,
		detail: "queues packets to a program (NFQUEUE): the kernel segments them to the MTU first; " +
			"a program that requests whole packets (NFQA_CFG_F_GSO) gets at most 65531 bytes of each",
		hint: "accept established connections in an earlier rule",
	},
}

// checkRules returns one incompatibility for all rules of a kind.
func checkRules(rules []filterRule, kernel linux.Version) []Incompatibility {
	var found []Incompatibility
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
			found = append(found, Incompatibility{k.name, joinFirst(where, "; ") + ": " + k.detail, k.hint})
		}
	}
	return found
}
