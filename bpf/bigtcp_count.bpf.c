// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Counts the packets that an interface receives and sends, by size and by
 * number of segments, and the bytes of each TCP connection.
 *
 * Hooks: ingress and egress of an interface (TCX, or clsact before Linux 6.6),
 * attached only during a measurement.
 * Decision: none. TC_ACT_UNSPEC lets the next program run.
 * Cost: about 70 ns for a packet, to read its headers and add to counters of
 * this CPU; 20 ns more for a TCP packet, and 30 ns more for one with data, to
 * find its connection, whose counters all CPUs increment atomically. There is
 * no lock, except in the table when a connection is inserted.
 *
 * Egress runs before the kernel segments packets that are too large for the
 * device. bigtcp_driver.bpf.c counts the packets after segmentation.
 */
#include "bigtcp.bpf.h"

#include <linux/pkt_cls.h>


/* VLAN tags that the programs skip. */
#define VLAN_TAGS 2

char _license[] SEC("license") = "Dual BSD/GPL";

BIGTCP_EXPORT(enum, bigtcp_limit);
BIGTCP_EXPORT(enum, bigtcp_point);
BIGTCP_EXPORT(enum, bigtcp_family);
BIGTCP_EXPORT(struct, bigtcp_counts);
BIGTCP_EXPORT(struct, bigtcp_flow_key);
BIGTCP_EXPORT(struct, bigtcp_flow);

/* Packets begin with an Ethernet header; false: with the IP header. */
const volatile bool ethernet = true;

/*
 * The kernel segments GSO packets of at least so many bytes, with the link
 * header, before the driver; by family. 0: it segments none.
 */
const volatile __u32 limits[BIGTCP_FAMILIES] = {};

/* Recently used connections. Evicted ones are still part of counts. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 8192);
	__type(key, struct bigtcp_flow_key);
	__type(value, struct bigtcp_flow);
} flows SEC(".maps");

static __always_inline long bigtcp_load(const void *skb, __u32 offset, void *to,
					__u32 n)
{
	return bpf_skb_load_bytes(skb, offset, to, n);
}

static __always_inline void bigtcp_addresses(struct bigtcp_flow_key *key,
					     const struct bigtcp_packet *p)
{
	if (p->family == BIGTCP_TCP6) {
		__builtin_memcpy(key->source, p->header + 8, 16);
		__builtin_memcpy(key->destination, p->header + 24, 16);
		return;
	}
	key->source[10] = key->source[11] = 0xff;
	key->destination[10] = key->destination[11] = 0xff;
	__builtin_memcpy(key->source + 12, p->header + 12, 4);
	__builtin_memcpy(key->destination + 12, p->header + 16, 4);
}

/*
 * Returns the bytes of an IP packet by its header, as Ethernet pads short
 * packets; 0 in the header stands for a BIG TCP packet.
 */
static __always_inline __u32 bigtcp_ip_length(const struct bigtcp_packet *p)
{
	__u32 total;

	if (p->family == BIGTCP_TCP6) {
		total = p->header[4] << 8 | p->header[5];
		total += total ? 40 : 0;
	} else {
		total = p->header[2] << 8 | p->header[3];
	}
	return total && total < p->length ? total : p->length;
}

static __always_inline void bigtcp_flow(const struct __sk_buff *skb,
					__u32 point, __u32 network,
					const struct bigtcp_packet *p)
{
	struct bigtcp_flow_key key = { .point = point, .family = p->family };
	struct bigtcp_flow *f, none = {};
	__u8 tcp[13];

	if (bpf_skb_load_bytes(skb, network + p->tcp, tcp, sizeof(tcp)) ||
	    bigtcp_ip_length(p) <= p->tcp + (tcp[12] >> 4) * 4)
		return;
	bigtcp_addresses(&key, p);
	__builtin_memcpy(&key.source_port, tcp, 2);
	__builtin_memcpy(&key.destination_port, tcp + 2, 2);
	f = bpf_map_lookup_elem(&flows, &key);
	if (!f) {
		bpf_map_update_elem(&flows, &key, &none, BPF_NOEXIST);
		f = bpf_map_lookup_elem(&flows, &key);
		if (!f)
			return;
	}
	__sync_fetch_and_add(&f->packets, 1);
	__sync_fetch_and_add(&f->bytes, p->length);
	if (p->length > BIGTCP_LEGACY)
		__sync_fetch_and_add(&f->large_bytes, p->length);
	else if (p->length > BIGTCP_NEARLY)
		__sync_fetch_and_add(&f->nearly_bytes, p->length);
	if (p->length > f->largest)
		f->largest = p->length;
	if (skb->gso_size > f->mss)
		f->mss = skb->gso_size;
}

static __always_inline int bigtcp_count_packet(struct __sk_buff *skb, __u32 point)
{
	struct bigtcp_packet p = {};
	struct bigtcp_counts *c;
	__u32 network = 0;
	__be16 protocol;
	int i;

	if (ethernet) {
		network = ETH_HLEN;
#pragma unroll
		for (i = 0; i < VLAN_TAGS; i++) {
			if (bpf_skb_load_bytes(skb, network - 2, &protocol,
					       sizeof(protocol)) ||
			    (protocol != bpf_htons(ETH_P_8021Q) &&
			     protocol != bpf_htons(ETH_P_8021AD)))
				break;
			network += 4;
		}
	}
	if (skb->len < network)
		return TC_ACT_UNSPEC;
	p.length = skb->len - network;
	p.segments = skb->gso_segs ?: 1;
	bigtcp_classify(&p, skb, network, bigtcp_load);
	c = bigtcp_count(point, &p);
	if (c && point == BIGTCP_EGRESS && p.segments > 1 && limits[p.family] &&
	    skb->len >= limits[p.family])
		c->over_bytes += p.length;
	if (p.family != BIGTCP_OTHER)
		bigtcp_flow(skb, point, network, &p);
	return TC_ACT_UNSPEC;
}

SEC("tc")
int bigtcp_ingress(struct __sk_buff *skb)
{
	return bigtcp_count_packet(skb, BIGTCP_INGRESS);
}

SEC("tc")
int bigtcp_egress(struct __sk_buff *skb)
{
	return bigtcp_count_packet(skb, BIGTCP_EGRESS);
}
