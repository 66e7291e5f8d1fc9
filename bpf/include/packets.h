/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Types and constants that trace_packets shares with user space. */
#ifndef SOCKEYE_PACKETS_H
#define SOCKEYE_PACKETS_H

#include <linux/types.h>

enum packets_limit {
	PACKETS_BYTES = 192, /* bytes captured of a packet, from the network header on */
	PACKETS_NAME = 16, /* bytes of an interface's name, with the terminating zero */
};

enum packets_kind {
	PACKETS_QUEUE = 1, /* a packet reaches a queueing discipline */
	PACKETS_DRIVER, /* a packet, or a part of one, is passed to a driver */
	PACKETS_RETRANSMIT, /* TCP has retransmitted a segment; comes after PACKETS_QUEUE */
	PACKETS_RECEIVE, /* TCP receives a segment */
	PACKETS_STATE, /* the state of the connection changes */
	PACKETS_DROP, /* UDP: the host drops a packet */
	PACKETS_READ, /* UDP: the application has received a datagram */
};

enum packets_flag {
	PACKETS_TCP = 1 << 0, /* a TCP header was found: the fields from it are valid */
	PACKETS_INNER = 1 << 1, /* the TCP header is inside the packet of a tunnel */
	PACKETS_EARLY = 1 << 2, /* received packet, captured before TCP receives it */
	PACKETS_UDP = 1 << 3, /* a UDP header was found, or a later fragment of a datagram */
	PACKETS_FRAGMENT = 1 << 4, /* a fragment of a datagram */
	PACKETS_INWARD = 1 << 5, /* READ, DROP: of the received datagram skb */
	PACKETS_LEFT = 1 << 6, /* READ: skb is the oldest datagram left, 0: none */
};

/* Times are CLOCK_MONOTONIC in nanoseconds; sequence numbers are those of packets. */
struct packets_event {
	__u64 time;
	__u64 skb; /* address: identifies a packet while the packet exists; 0: not known */
	__u32 seq; /* FRAGMENT: its offset in the datagram, bytes */
	__u32 ack; /* STATE: the first byte that is not acknowledged; FRAGMENT: its identification */
	__u32 length; /* of the payload, bytes; RETRANSMIT: of the sequence range */
	__u32 size; /* of the IP packet, bytes */
	__u32 window; /* bytes, scaled */
	__u32 ifindex; /* 0: not known */
	__u32 device; /* identifies an interface in all namespaces; 0: not known */
	__u32 peer; /* UDP: hash of the other end's address, and of its port unless FRAGMENT */
	__u32 reason; /* DROP: enum skb_drop_reason; 0: not known */
	__u16 gso_size; /* payload of each segment; 0: the packet is one segment */
	__u16 gso_segments;
	__u16 captured; /* number of bytes that follow */
	__u8 kind; /* enum packets_kind */
	__u8 flags; /* enum packets_flag */
	__u8 tcp; /* flags of the TCP header, FIN is bit 0 */
	__u8 state; /* TCP_ESTABLISHED and so on; STATE: the new state */
	__u8 congestion; /* RETRANSMIT: TCP_CA_Open and so on */
	__u8 padding;
	char name[PACKETS_NAME]; /* of the interface; "": not known */
};

/* Events of kind QUEUE and RECEIVE have the first bytes of the packet. */
struct packets_packet {
	struct packets_event event;
	__u8 bytes[PACKETS_BYTES];
};

#define PACKETS_EXPORT(kind, name) \
	const kind name *unused_##name __attribute__((unused))

_Static_assert(sizeof(struct packets_event) == 80, "event");
_Static_assert(sizeof(struct packets_packet) == 272, "packet");

#endif
