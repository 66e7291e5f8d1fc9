/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What the programs that count packets by their size tell user space. */
#ifndef SOCKEYE_BIGTCP_H
#define SOCKEYE_BIGTCP_H

#include <linux/types.h>

enum bigtcp_limit {
	BIGTCP_LEGACY = 65536, /* larger packets are BIG TCP */
	BIGTCP_NEARLY = 49152, /* packets above it, to BIGTCP_LEGACY, are nearly full */
	BIGTCP_SIZES = 16, /* classes of sizes; a power of two */
	BIGTCP_SEGMENTS = 8, /* classes of segments; a power of two */
};

/* Where packets are counted. */
enum bigtcp_point {
	BIGTCP_INGRESS, /* received, before the IP stack */
	BIGTCP_EGRESS, /* sent, before the kernel cuts what is too large */
	BIGTCP_DRIVER, /* sent, as the driver gets it */
	BIGTCP_POINTS,
};

enum bigtcp_family {
	BIGTCP_TCP4,
	BIGTCP_TCP6,
	BIGTCP_OTHER,
	BIGTCP_FAMILIES,
};

/* Bytes are those of IP packets, without the header of the link. */
struct bigtcp_size {
	__u64 packets;
	__u64 bytes;
	__u64 segments;
};

struct bigtcp_segment {
	__u64 packets;
	__u64 bytes;
};

/* Of a point and a family, of one CPU. */
struct bigtcp_counts {
	struct bigtcp_size sizes[BIGTCP_SIZES];
	struct bigtcp_segment segments[BIGTCP_SEGMENTS];
	__u64 largest; /* bytes */
	__u64 over_bytes; /* BIGTCP_EGRESS: in packets above the device's limit */
};

/* A connection in one direction; IPv4 addresses as ::ffff:a.b.c.d. */
struct bigtcp_flow_key {
	__u8 source[16];
	__u8 destination[16];
	__be16 source_port;
	__be16 destination_port;
	__u8 point; /* BIGTCP_INGRESS or BIGTCP_EGRESS */
	__u8 family; /* BIGTCP_TCP4 or BIGTCP_TCP6 */
	__u8 padding[2];
};

/* Of the packets that carry data. */
struct bigtcp_flow {
	__u64 packets;
	__u64 bytes;
	__u64 large_bytes; /* in packets above BIGTCP_LEGACY */
	__u64 nearly_bytes; /* in packets above BIGTCP_NEARLY, not above BIGTCP_LEGACY */
	__u32 largest; /* bytes */
	__u32 mss; /* largest payload of a segment; 0: no packet had several */
};

#define BIGTCP_EXPORT(kind, name) \
	const kind name *unused_##name __attribute__((unused))

_Static_assert(sizeof(struct bigtcp_counts) == 528, "counts");
_Static_assert(sizeof(struct bigtcp_flow_key) == 40, "flow key");
_Static_assert(sizeof(struct bigtcp_flow) == 40, "flow");

#endif
