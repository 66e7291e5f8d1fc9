// SPDX-License-Identifier: Apache-2.0

// Package bigtcp is the BIG TCP domain: packets above 64 KB inside the host, whose
// GSO and GRO maximum sizes (gso_max_size and gro_max_size of ip-link(8)) are set per
// interface. IPv6 needs Linux 5.19, IPv4 Linux 6.3. Its parts:
//
//   - netif: the interfaces of a network namespace, their sizes and relations
//   - sizing: changes of sizes, planned, applied as a whole, recorded and reverted
//   - compat: known incompatibilities of a host with large packets
//   - verify: packet sizes of an interface, measured by BPF counters
//   - bench: a benchmark between two network namespaces
//   - linux: kernel versions
package bigtcp
