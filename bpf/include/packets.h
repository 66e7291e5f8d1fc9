/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What the program that follows the packets of a connection tells user space. */
#ifndef SOCKEYE_PACKETS_H
#define SOCKEYE_PACKETS_H

#include <linux/types.h>

enum packets_limit {
	PACKETS_BYTES = 192, /* kept of a packet, from the network header on */
	PACKETS_NAME = 16, /* of an interface, with a zero */
};

enum packets_kind {
	PACKETS_QUEUE = 1, /* a packet reaches a queueing discipline */
	PACKETS_DRIVER, /* a driver is given it, or a part of it */
	PACKETS_RETRANSMIT, /* TCP has sent a segment again, after PACKETS_QUEUE */
	PACKETS_RECEIVE, /* TCP gets a segment */
	PACKETS_STATE, /* the connection goes to another state */
};

enum packets_flag {
	PACKETS_TCP = 1 << 0, /* a TCP header was found: what comes from it is valid */
	PACKETS_INNER = 1 << 1, /* it is inside of a tunnel's packet */
	PACKETS_EARLY = 1 << 2, /* received: seen before TCP gets it */
};

/* Times are CLOCK_MONOTONIC, nanoseconds; sequence numbers as in packets. */
struct packets_event {
	__u64 time;
	__u64 skb; /* tells packets apart that exist at the same time */
	__u32 seq;
	__u32 ack; /* of STATE: the first byte that is not acknowledged */
	__u32 length; /* of the payload; of RETRANSMIT: sequence numbers */
	__u32 size; /* of the IP packet, bytes */
	__u32 window; /* bytes */
	__u32 ifindex; /* 0: not known */
	__u32 device; /* tells the interfaces of all namespaces apart; 0: not known */
	__u16 gso_size; /* payload of each segment; 0: the packet is one */
	__u16 gso_segments;
	__u16 captured; /* bytes that follow */
	__u8 kind; /* enum packets_kind */
	__u8 flags; /* enum packets_flag */
	__u8 tcp; /* flags of the TCP header, FIN lowest */
	__u8 state; /* TCP_ESTABLISHED and so on; of STATE: the new one */
	__u8 congestion; /* of RETRANSMIT: TCP_CA_OPEN and so on */
	__u8 padding;
	char name[PACKETS_NAME]; /* of the interface, "" if it is not known */
};

/* QUEUE and RECEIVE come with bytes. */
struct packets_packet {
	struct packets_event event;
	__u8 bytes[PACKETS_BYTES];
};

#define PACKETS_EXPORT(kind, name) \
	const kind name *unused_##name __attribute__((unused))

_Static_assert(sizeof(struct packets_event) == 72, "event");
_Static_assert(sizeof(struct packets_packet) == 264, "packet");

#endif
