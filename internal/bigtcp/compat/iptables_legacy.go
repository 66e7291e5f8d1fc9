// SPDX-License-Identifier: Apache-2.0

package compat

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
)

// legacyTables names the tables of iptables-legacy(8) in the thread's network
// namespace, as in "iptables filter". The list in /proc needs CAP_NET_ADMIN or root.
// The rules themselves are a binary format of the kernel and are not read: Debian 10,
// RHEL 8 and later have iptables-nft, whose rules nftables shows, and Linux 6.17 has
// the legacy tables only if it is built with CONFIG_NETFILTER_XTABLES_LEGACY.
func legacyTables() ([]string, error) {
	var tables []string
	for _, command := range []string{"iptables", "ip6tables"} {
		// ip_tables_names and ip6_tables_names.
		file := "/proc/thread-self/net/" + strings.Replace(command, "tables", "_tables_names", 1)
		names, err := os.ReadFile(file)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("read tables of %s: %w", command, err)
		}
		for name := range strings.FieldsSeq(string(names)) {
			tables = append(tables, command+" "+name)
		}
	}
	return tables, nil
}

// checkLegacyTables reports tables of iptables-legacy, whose matches are unknown.
func checkLegacyTables(tables []string) []Incompatibility {
	if len(tables) == 0 {
		return nil
	}
	return []Incompatibility{{
		Name: iptablesLegacy,
		Detail: fmt.Sprintf("tables of iptables-legacy exist (%s), whose rules are not inspected: those that match -m length, -m hbh "+
			"or -m ipv6header, and those that queue to NFQUEUE, are incompatible with packets above 65535 bytes", joinFirst(tables, ", ")),
		Hint: "look for such rules with iptables-legacy-save and ip6tables-legacy-save; rules of iptables-nft are inspected",
	}}
}
