/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Types and constants that the BIG TCP programs share with user space. */
#ifndef SOCKEYE_BIGTCP_H
#define SOCKEYE_BIGTCP_H

#include <linux/types.h>

enum bigtcp_limit {
	BIGTCP_LEGACY = 65536, /* bytes; larger packets are BIG TCP packets */
	BIGTCP_NEARLY = 49152, /* bytes; larger packets, up to BIGTCP_LEGACY, are nearly full */
	BIGTCP_SIZES = 16, /* classes of packet sizes; a power of two */
	BIGTCP_SEGMENTS = 8, /* classes of numbers of segments; a power of two */
};

/* Where packets are counted. */
enum bigtcp_point {
	BIGTCP_INGRESS, /* received, before the IP stack */
	BIGTCP_EGRESS, /* sent, before software segmentation */
	BIGTCP_DRIVER, /* sent, as passed to the driver */
	BIGTCP_POINTS,
};

enum bigtcp_family {
	BIGTCP_TCP4,
	BIGTCP_TCP6,
	BIGTCP_OTHER,
	BIGTCP_FAMILIES,
};

/* Sums over the packets of a class. Bytes exclude the link header. */
struct bigtcp_size {
	__u64 packets;
	__u64 bytes;
	__u64 segments;
};

struct bigtcp_segment {
	__u64 packets;
	__u64 bytes;
};

/* The counts of a point and a family on one CPU. */
struct bigtcp_counts {
	struct bigtcp_size sizes[BIGTCP_SIZES];
	struct bigtcp_segment segments[BIGTCP_SEGMENTS];
	__u64 largest; /* packet, bytes */
	__u64 over_bytes; /* BIGTCP_EGRESS: in packets above the device's limit */
};

/* One direction of a connection; IPv4 addresses as ::ffff:a.b.c.d. */
struct bigtcp_flow_key {
	__u8 source[16];
	__u8 destination[16];
	__be16 source_port;
	__be16 destination_port;
	__u8 point; /* BIGTCP_INGRESS or BIGTCP_EGRESS */
	__u8 family; /* BIGTCP_TCP4 or BIGTCP_TCP6 */
	__u8 padding[2];
};

/* Sums over the packets of a flow that carry data. */
struct bigtcp_flow {
	__u64 packets;
	__u64 bytes;
	__u64 large_bytes; /* in packets above BIGTCP_LEGACY */
	__u64 nearly_bytes; /* in packets above BIGTCP_NEARLY, up to BIGTCP_LEGACY */
	__u32 largest; /* packet, bytes */
	__u32 mss; /* largest gso_size, bytes; 0: no packet had several segments */
};

#define BIGTCP_EXPORT(kind, name) \
	const kind name *unused_##name __attribute__((unused))

_Static_assert(sizeof(struct bigtcp_counts) == 528, "counts");
_Static_assert(sizeof(struct bigtcp_flow_key) == 40, "flow key");
_Static_assert(sizeof(struct bigtcp_flow) == 40, "flow");

#endif
