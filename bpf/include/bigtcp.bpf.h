/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Classifies packets by their headers, and counts them. */
#ifndef SOCKEYE_BIGTCP_BPF_H
#define SOCKEYE_BIGTCP_BPF_H

#include "kernel.h"

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "bigtcp.h"

/* Upper bound of each class but the last one: bytes, and segments. */
const volatile __u32 size_edges[BIGTCP_SIZES] = {};
const volatile __u32 segment_edges[BIGTCP_SEGMENTS] = {};

/* By point * BIGTCP_FAMILIES + family. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, BIGTCP_POINTS * BIGTCP_FAMILIES);
	__type(key, __u32);
	__type(value, struct bigtcp_counts);
} counts SEC(".maps");

struct bigtcp_packet {
	__u8 header[40]; /* of IP */
	__u32 family;
	__u32 length; /* bytes, beginning with the IP header */
	__u32 segments;
	__u32 tcp; /* offset of the TCP header from the IP header, bytes */
};

/*
 * Sets the family, the IP header and the offset of the TCP header. load copies n
 * bytes at an offset from "from", and returns 0 on success; the IP header is at
 * offset.
 */
static __always_inline void
bigtcp_classify(struct bigtcp_packet *p, const void *from, __u32 offset,
		long (*load)(const void *from, __u32 offset, void *to, __u32 n))
{
	__u8 extension[2], next;
	int i;

	p->family = BIGTCP_OTHER;
	if (load(from, offset, p->header, 20))
		return;
	if (p->header[0] >> 4 == 4) {
		p->tcp = (p->header[0] & 15) * 4;
		if (p->header[9] == IPPROTO_TCP &&
		    !((p->header[6] << 8 | p->header[7]) & IP_OFFSET))
			p->family = BIGTCP_TCP4;
		return;
	}
	if (p->header[0] >> 4 != 6 ||
	    load(from, offset + 20, p->header + 20, 20))
		return;
	next = p->header[6];
	p->tcp = 40;
#pragma unroll
	for (i = 0; i < IPV6_EXTENSIONS; i++) {
		if (next != IPPROTO_HOPOPTS && next != IPPROTO_ROUTING &&
		    next != IPPROTO_DSTOPTS)
			break;
		if (load(from, offset + p->tcp, extension, sizeof(extension)))
			return;
		next = extension[0];
		p->tcp += (extension[1] + 1) * 8;
	}
	if (next == IPPROTO_TCP)
		p->family = BIGTCP_TCP6;
}

static __always_inline struct bigtcp_counts *
bigtcp_count(__u32 point, const struct bigtcp_packet *p)
{
	__u32 key = point * BIGTCP_FAMILIES + p->family, size = 0, segment = 0;
	struct bigtcp_counts *c = bpf_map_lookup_elem(&counts, &key);
	int i;

	if (!c)
		return NULL;
#pragma unroll
	for (i = 0; i < BIGTCP_SIZES - 1; i++)
		size += p->length > size_edges[i];
#pragma unroll
	for (i = 0; i < BIGTCP_SEGMENTS - 1; i++)
		segment += p->segments > segment_edges[i];
	size &= BIGTCP_SIZES - 1;
	segment &= BIGTCP_SEGMENTS - 1;
	c->sizes[size].packets++;
	c->sizes[size].bytes += p->length;
	c->sizes[size].segments += p->segments;
	c->segments[segment].packets++;
	c->segments[segment].bytes += p->length;
	if (p->length > c->largest)
		c->largest = p->length;
	return c;
}

#endif
