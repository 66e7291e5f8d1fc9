/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * What the trace programs and user space share.
 *
 * A message is what one sendmsg(2) gave to a connection. Its key is the
 * sequence number of its last byte. Times are CLOCK_MONOTONIC, nanoseconds; 0
 * is a time that is not known.
 */
#ifndef SOCKEYE_TRACE_H
#define SOCKEYE_TRACE_H

#include "match.h"

enum trace_limit {
	TRACE_RULES = 32, /* of a cgroup */
	TRACE_IN_FLIGHT = 64, /* messages of a connection, a power of two */
	TRACE_BUCKETS = 512, /* of a histogram */
	TRACE_SLOWEST = 8, /* messages kept of a group and a minute */
	TRACE_MINUTES = 8, /* for which they are kept, a power of two */
	TRACE_MINUTE_SHIFT = 36, /* one is 2^36 ns, 69 s: without a division */
	TRACE_GROUPS = 4096, /* of a cgroup, all rules together */
	TRACE_WAITING = 16384, /* received samples that no reader has taken */
	TRACE_READERS = 4096, /* sockets with such samples */
	TRACE_READER_SAMPLES = 32, /* such samples of a socket */
	TRACE_SENDING = 16384, /* datagrams between socket and driver */
	TRACE_LOCKS = 64, /* a power of two */
	TRACE_SERVICES = 512, /* listeners of all services */
	TRACE_LIVE_LEVEL = 0x50cc, /* level of the live hook's own setsockopt */
};

/* Legs of a message's way out. */
enum trace_stage {
	TRACE_SEND, /* start of sendmsg to its end */
	TRACE_STACK, /* end of sendmsg to the queueing discipline */
	TRACE_QDISC, /* to the driver */
	TRACE_NIC, /* to the hardware's stamp */
	TRACE_NETWORK, /* driver to the peer's acknowledgement */
	TRACE_TOTAL, /* from the first time that is known to the acknowledgement */
	TRACE_STAGES,
};

/* Legs of what is received. */
enum trace_rx_stage {
	TRACE_RX_STACK, /* reaching the host to reaching the socket */
	TRACE_RX_READER, /* to the application */
	TRACE_RX_STAGES,
};

/* What became of a message that was chosen: exactly one of these. */
enum trace_outcome {
	TRACE_ACKED,
	TRACE_RETRANSMITTED, /* acknowledged, its last segment was sent again */
	TRACE_OVERWRITTEN, /* a later message took its key, before it was sent */
	TRACE_COALESCED, /* acknowledged; its packet was joined to that of a
			  * later one, whose stamps are its own */
	TRACE_MISSED, /* acknowledged, and the kernel gave no stamp; a datagram
		       * whose end it did not tell */
	TRACE_UNACKNOWLEDGED, /* the connection ended first, or was let go */
	TRACE_FULL, /* TRACE_IN_FLIGHT others of the connection were under
		     * way, or TRACE_SENDING datagrams */
	TRACE_APPLICATION, /* left to the application's own timestamps */
	TRACE_REFUSED, /* the kernel did not take the request */
	TRACE_SENT, /* a datagram that a driver had */
	TRACE_DISCARDED, /* a datagram that the host dropped before */
	TRACE_SPLIT, /* a datagram that was cut into fragments before */
	TRACE_PARTED, /* acknowledged; its packet was joined to that of a later
		       * one, and split again before its end */
	TRACE_OUTCOMES,
};

/* What became of something received that was chosen: exactly one of these. */
enum trace_rx_outcome {
	TRACE_RX_READ, /* or only its way to the socket was asked for */
	TRACE_RX_DROPPED, /* a datagram: no room in the socket */
	TRACE_RX_UNREAD, /* the socket was closed first */
	TRACE_RX_FULL, /* TRACE_WAITING others were waiting, or TRACE_READER_SAMPLES
			* of the socket */
	TRACE_RX_OUTCOMES,
};

enum trace_rule_flag {
	TRACE_RULE_TX = 1 << 0, /* of TCP */
	TRACE_RULE_RX = 1 << 1,
	TRACE_RULE_READER = 1 << 2, /* with the time in the socket */
	TRACE_RULE_TCP = 1 << 3,
	TRACE_RULE_UDP = 1 << 4,
	TRACE_RULE_UDP_TX = 1 << 5,
};

/* By what a rule groups. */
enum trace_group_by {
	TRACE_BY_REMOTE = 1 << 0,
	TRACE_BY_PORT = 1 << 1,
	TRACE_BY_SERVICE = 1 << 2,
	TRACE_BY_CGROUP = 1 << 3,
	TRACE_BY_RULE = 1 << 4, /* of tune */
	TRACE_BY_ARM = 1 << 5, /* of its trial */
};

struct trace_rule {
	__u64 interval; /* least time between two messages of a connection that
			 * are chosen; 0: choose by share */
	__u32 connections; /* one of so many is chosen */
	__u32 messages; /* of a connection, likewise */
	__u32 flags; /* enum trace_rule_flag */
	__u32 group_by; /* enum trace_group_by */
	__u32 first; /* index of the group "other"; its own follow */
	__u32 groups; /* at most */
	__u32 used; /* groups that it has */
	__u8 bits4; /* of the remote address, mapped */
	__u8 bits6;
	__u8 padding[2];
};

struct trace_group {
	struct match_address remote; /* masked */
	__u64 cgroup; /* id */
	__u32 rule; /* of trace, from 1 */
	__u32 tune_rule; /* 0: none */
	__u16 port; /* that was connected to */
	__u16 service; /* from 1; 0: none */
	__u8 arm; /* of tune */
	__u8 ipv4; /* the remote address is */
	__u8 protocol; /* IPPROTO_TCP, IPPROTO_UDP */
	__u8 padding;
};

/* A listener of a service; an address of zeros is any. */
struct trace_listener {
	struct match_address address;
	__u16 port;
	__u8 protocol;
	__u8 padding;
};

/* One message under way, with the connection as it was when it was sent. */
struct trace_message {
	__u32 key;
	__u32 length; /* bytes since the last message */
	__u64 started; /* sendmsg began */
	__u64 sent; /* sendmsg ended */
	__u64 queued; /* reached the queueing discipline */
	__u64 requeued; /* did so last before a driver had it: the host dropped it */
	__u64 driver;
	__u64 hardware; /* from driver to the NIC's stamp, plus 1 */
	__u64 pacing; /* bytes a second; all ones: not paced */
	__u32 cwnd; /* packets */
	__u32 in_flight; /* packets */
	__u32 outstanding; /* bytes sent and not acknowledged */
	__u32 unsent; /* bytes, those of this message included */
	__u32 window; /* of the peer, bytes from what it has acknowledged */
	__u32 mss;
	__u32 srtt; /* microseconds */
	__u32 min_rtt; /* microseconds */
	__u32 retransmits; /* of the connection; at the end: since then */
	__u32 window_limited; /* jiffies until queued, bounded by the peer's window */
	__u32 buffer_limited; /* likewise by the send buffer */
	__u16 repeats; /* how often the last segment was sent again */
	__u8 flags; /* enum trace_message_flag */
	__u8 seen; /* low bits of the connection's retransmits when last queued */
};

enum trace_message_flag {
	TRACE_MESSAGE_PACED = 1 << 0, /* the kernel paces the connection */
	TRACE_MESSAGE_NAGLE = 1 << 1, /* no TCP_NODELAY */
	TRACE_MESSAGE_CORK = 1 << 2, /* TCP_CORK */
	TRACE_MESSAGE_UNMARKED = 1 << 3, /* was sent before it could be marked */
	TRACE_MESSAGE_JOINED = 1 << 4, /* left in the packet of the next one */
	TRACE_MESSAGE_PARTED = 1 << 5, /* left before that, unseen */
};

struct trace_connection {
	__u64 started; /* of sendmsg, set by the fentry program */
	__u64 next; /* when a message may be chosen again */
	__u32 rule;
	__u32 group;
	__u32 skip; /* messages before the next is chosen */
	__u32 rx_skip; /* likewise, segments */
	__u64 rx_next;
	__u32 write_seq; /* after the last message */
	__u32 head; /* of the ring of messages; counts on */
	__u32 tail;
	__u32 queue; /* the next that is expected to be queued */
	__u32 driver; /* the next that is expected at the driver */
	__u32 application; /* after the packet with its last stamp */
	__u8 grouped; /* group is valid */
	__u8 role;
	__u8 stamping; /* that packet may be under way */
	__u8 padding;
	__u32 segments; /* with data, that TCP had tried to send when last queued */
	struct trace_message message[TRACE_IN_FLIGHT];
};

/*
 * Log-linear: 16 buckets of 16 ns, then 16 for each power of two from 256 ns
 * on; the last holds all above 549 s. A value lies within 1/32 of the middle
 * of its bucket.
 */
struct trace_histogram {
	__u64 sum; /* nanoseconds */
	__u64 max;
	__u64 bucket[TRACE_BUCKETS];
};

/* Of a group, per CPU. */
struct trace_stats {
	__u64 chosen;
	__u64 outcome[TRACE_OUTCOMES];
	__u64 bytes; /* of those acknowledged, and of datagrams sent */
	__u64 undriven; /* acknowledged, and no driver gave a stamp */
	__u64 unqueued; /* acknowledged, and sent before it could be marked */
	struct trace_histogram stage[TRACE_STAGES];
};

struct trace_rx_stats {
	__u64 chosen;
	__u64 outcome[TRACE_RX_OUTCOMES];
	__u64 unstamped; /* the host did not stamp its arrival */
	struct trace_histogram stage[TRACE_RX_STAGES];
};

/* A message at its end. */
struct trace_sample {
	__u64 ended; /* acknowledged, or given up */
	__u64 total; /* nanoseconds from the first time that is known */
	__u64 cookie; /* of the socket */
	struct match_tuple tuple;
	__u32 group;
	__u32 rule;
	__u8 outcome; /* enum trace_outcome */
	__u8 role;
	__u8 padding[2];
	struct trace_message message;
};

/* The slowest messages of a group in one minute. */
struct trace_minute {
	__u64 minute; /* CLOCK_MONOTONIC, in minutes of 2^36 ns */
	__u64 least; /* total among them */
	__u32 count;
	__u32 padding;
	struct trace_sample sample[TRACE_SLOWEST];
};

/* What user space asks of the programs; they do not write it. */
struct trace_state {
	__s64 clock; /* CLOCK_REALTIME - CLOCK_MONOTONIC, nanoseconds; 0: not known */
	__u32 samples; /* give samples to the ring buffer */
	__u32 seed; /* of the choice of connections */
};

/* What the programs tell user space, which does not write it. */
struct trace_counts {
	__u64 lost; /* samples that found no room in the ring buffer */
	__u64 segments; /* samples of connections that wait for their reader */
	__u64 datagrams; /* likewise, of other sockets */
	__u64 sending; /* datagrams between socket and driver */
};

/* A sample that was received, and waits for its reader. */
struct trace_waiting_key {
	__u64 of; /* cookie of the connection; of a datagram, its skb */
	__u64 end; /* sequence number after it plus TRACE_END_BIAS; of a datagram, 0 */
};

struct trace_waiting {
	__u64 socket; /* when it reached the socket */
	__u64 arrival; /* skb->tstamp, which tells a datagram from others */
	__u64 cookie; /* of the socket */
	__u64 sk; /* of a datagram */
	__u32 group;
	__u32 slot; /* in trace_reader */
};

/* The samples of a socket that wait, in no order. */
struct trace_reader {
	__u64 since[TRACE_READER_SAMPLES]; /* when it reached the socket; 0: no sample,
				    * TRACE_RESERVED: about to be one */
	__u64 of[TRACE_READER_SAMPLES]; /* end of trace_waiting_key, or a datagram's skb */
};

#define TRACE_RESERVED 1ULL
#define TRACE_END_BIAS (1ULL << 32) /* added, so that no end is 0 */

/* A datagram on its way out, by its skb. */
struct trace_sending {
	__u64 sent; /* left the socket */
	__u64 queued; /* reached the queueing discipline */
	__u64 sk;
	__u32 length; /* bytes */
	__u32 group;
	__u32 segments; /* of a datagram that is many; else 0 */
	__u32 padding;
};

/* Whose turn it is among the datagrams of a socket, by rule. */
struct trace_sampler {
	__u64 next; /* when one may be chosen again */
	__u32 skip; /* how many are not, before */
	__u32 initialized;
};

struct trace_samplers {
	struct trace_sampler received[TRACE_RULES];
	struct trace_sampler sent[TRACE_RULES];
};

enum trace_live_name {
	TRACE_LIVE_ADOPT = 1, /* choose the connection, or let it go */
	TRACE_LIVE_FORGET, /* let it go */
};

struct trace_live_request {
	__u64 nonce; /* only the agent's calls are heard */
	__u32 role;
	__u32 padding;
};

#define TRACE_EXPORT(kind, name) \
	const kind name *unused_##name __attribute__((unused))

_Static_assert(sizeof(struct trace_rule) == 40, "rule");
_Static_assert(sizeof(struct trace_group) == 40, "group");
_Static_assert(sizeof(struct trace_listener) == 20, "listener");
_Static_assert(sizeof(struct trace_message) == 112, "message");
_Static_assert(sizeof(struct trace_stats) <= 32768, "per-CPU value");
_Static_assert(sizeof(struct trace_rx_stats) <= 32768, "per-CPU value");
_Static_assert(sizeof(struct trace_sample) % 8 == 0, "sample");
_Static_assert(sizeof(struct trace_waiting) == 40, "waiting");
_Static_assert(sizeof(struct trace_reader) == 512, "reader");
_Static_assert(sizeof(struct trace_sending) == 40, "sending");

#endif
