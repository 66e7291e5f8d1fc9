/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Types and constants that the trace programs share with user space.
 *
 * A message is the data of one sendmsg(2) on a connection. Its key is the
 * sequence number of its last byte. Times are CLOCK_MONOTONIC in nanoseconds; 0
 * stands for a time that is not known.
 */
#ifndef SOCKEYE_TRACE_H
#define SOCKEYE_TRACE_H

#include "match.h"

enum trace_limit {
	TRACE_RULES = 32, /* rules of a cgroup */
	TRACE_IN_FLIGHT = 64, /* messages in flight of a connection, a power of two */
	TRACE_BUCKETS = 512, /* buckets of a histogram */
	TRACE_SLOWEST = 8, /* slowest messages that are kept of a group and a minute */
	TRACE_MINUTES = 8, /* minutes for which they are kept, a power of two */
	TRACE_MINUTE_SHIFT = 36, /* a minute is 2^36 ns, 69 s: needs no division */
	TRACE_GROUPS = 4096, /* groups of a cgroup, of all rules */
	TRACE_WAITING = 16384, /* received samples that wait to be read */
	TRACE_READERS = 4096, /* sockets with waiting samples */
	TRACE_READER_SAMPLES = 32, /* waiting samples of a socket */
	TRACE_SENDING = 16384, /* datagrams between socket and driver */
	TRACE_LOCKS = 64, /* a power of two */
	TRACE_SERVICES = 512, /* listeners of all services */
	TRACE_LIVE_LEVEL = 0x50cc, /* level of the live hook's own setsockopt */
};

/* Stages of a message that is sent. */
enum trace_stage {
	TRACE_SEND, /* start to end of sendmsg(2) */
	TRACE_STACK, /* end of sendmsg(2) to the queueing discipline */
	TRACE_QDISC, /* queueing discipline to the driver */
	TRACE_NIC, /* driver to the time stamp of the NIC */
	TRACE_NETWORK, /* driver to the acknowledgement */
	TRACE_TOTAL, /* first known time to the acknowledgement */
	TRACE_STAGES,
};

/* Stages of received data. */
enum trace_rx_stage {
	TRACE_RX_STACK, /* arrival at the host to the socket */
	TRACE_RX_READER, /* socket to the application's read */
	TRACE_RX_STAGES,
};

/* The outcome of a chosen message or datagram that is sent: exactly one of these. */
enum trace_outcome {
	TRACE_ACKED,
	TRACE_RETRANSMITTED, /* acknowledged, after its last segment was retransmitted */
	TRACE_OVERWRITTEN, /* a later message took its key before it was sent */
	TRACE_COALESCED, /* acknowledged; its packet was merged with that of a later
			  * message, whose time stamps apply to both */
	TRACE_MISSED, /* acknowledged, but the kernel reported no time stamps; or a
		       * datagram whose end was not reported */
	TRACE_UNACKNOWLEDGED, /* the connection ended, or tracing stopped, before */
	TRACE_FULL, /* TRACE_IN_FLIGHT messages of the connection, or TRACE_SENDING
		     * datagrams, were in flight */
	TRACE_APPLICATION, /* not marked, as the application uses SO_TIMESTAMPING */
	TRACE_REFUSED, /* the kernel refused to mark the message */
	TRACE_SENT, /* a datagram that reached a driver */
	TRACE_DISCARDED, /* a datagram that the host dropped before a driver */
	TRACE_SPLIT, /* a datagram that was split before a driver, into packets that
		      * were not recognized */
	TRACE_PARTED, /* acknowledged; TCP merged and split packets so that its last
		       * byte left in a packet without its key */
	TRACE_OUTCOMES,
};

/* The outcome of a chosen segment or datagram that was received: exactly one of these. */
enum trace_rx_outcome {
	TRACE_RX_READ, /* read, or the rule does not measure until the read */
	TRACE_RX_DROPPED, /* a datagram: the socket's buffer was full */
	TRACE_RX_UNREAD, /* the socket was closed before */
	TRACE_RX_FULL, /* TRACE_WAITING samples, or TRACE_READER_SAMPLES of the
			* socket, were waiting */
	TRACE_RX_OUTCOMES,
};

enum trace_rule_flag {
	TRACE_RULE_TX = 1 << 0, /* TCP messages that are sent */
	TRACE_RULE_RX = 1 << 1, /* received data */
	TRACE_RULE_READER = 1 << 2, /* received data, until it is read */
	TRACE_RULE_TCP = 1 << 3,
	TRACE_RULE_UDP = 1 << 4,
	TRACE_RULE_UDP_TX = 1 << 5, /* datagrams that are sent */
};

/* Criteria by which a rule groups connections and datagrams. */
enum trace_group_by {
	TRACE_BY_REMOTE = 1 << 0,
	TRACE_BY_PORT = 1 << 1,
	TRACE_BY_SERVICE = 1 << 2,
	TRACE_BY_CGROUP = 1 << 3,
	TRACE_BY_RULE = 1 << 4, /* rule of tune */
	TRACE_BY_ARM = 1 << 5, /* arm of that rule's trial */
};

struct trace_rule {
	__u64 interval; /* minimum time between two chosen messages of a
			 * connection, nanoseconds; 0: choose by share */
	__u32 connections; /* choose one of so many connections */
	__u32 messages; /* choose one of so many messages of a connection */
	__u32 flags; /* enum trace_rule_flag */
	__u32 group_by; /* enum trace_group_by */
	__u32 first; /* index of the group "other"; the rule's groups follow */
	__u32 groups; /* maximum number of groups */
	__u32 used; /* number of groups */
	__u8 bits4; /* prefix length of TRACE_BY_REMOTE, of the mapped address */
	__u8 bits6;
	__u8 padding[2];
};

struct trace_group {
	struct match_address remote; /* masked */
	__u64 cgroup; /* ID */
	__u32 rule; /* number of the trace rule, from 1 */
	__u32 tune_rule; /* number; 0: none */
	__u16 port; /* port of the accepting side */
	__u16 service; /* number, from 1; 0: none */
	__u8 arm; /* enum tune_arm plus 1; 0: none */
	__u8 ipv4; /* the remote address is IPv4 */
	__u8 protocol; /* IPPROTO_TCP, IPPROTO_UDP */
	__u8 padding;
};

/* A listener of a service; zeros stand for any address. */
struct trace_listener {
	struct match_address address;
	__u16 port;
	__u8 protocol;
	__u8 padding;
};

/* A message in flight, with the state of the connection at the end of sendmsg(2). */
struct trace_message {
	__u32 key;
	__u32 length; /* bytes */
	__u64 started; /* start of sendmsg(2) */
	__u64 sent; /* end of sendmsg(2) */
	__u64 queued; /* reached the queueing discipline */
	__u64 requeued; /* reached it again, as the host dropped the packet before a driver */
	__u64 driver; /* reached the driver */
	__u64 hardware; /* from driver to the NIC's time stamp, plus 1; 0: not known */
	__u64 pacing; /* bytes per second; all ones: not paced */
	__u32 cwnd; /* packets */
	__u32 in_flight; /* packets */
	__u32 outstanding; /* bytes sent and not acknowledged */
	__u32 unsent; /* bytes, including those of this message */
	__u32 window; /* of the peer, bytes after the acknowledged ones */
	__u32 mss;
	__u32 srtt; /* microseconds */
	__u32 min_rtt; /* microseconds */
	__u32 retransmits; /* of the connection; at the end, the increase */
	__u32 window_limited; /* until queued: limited by the peer's window, jiffies */
	__u32 buffer_limited; /* until queued: limited by the send buffer, jiffies */
	__u16 repeats; /* retransmissions of the last segment */
	__u8 flags; /* enum trace_message_flag */
	__u8 seen; /* low bits of the connection's retransmissions when queued last */
};

enum trace_message_flag {
	TRACE_MESSAGE_PACED = 1 << 0, /* the kernel paces the connection */
	TRACE_MESSAGE_NAGLE = 1 << 1, /* no TCP_NODELAY */
	TRACE_MESSAGE_CORK = 1 << 2, /* TCP_CORK */
	TRACE_MESSAGE_UNMARKED = 1 << 3, /* TCP sent the message before it was marked */
	TRACE_MESSAGE_JOINED = 1 << 4, /* was sent in the packet of a later message */
	TRACE_MESSAGE_PARTED = 1 << 5, /* was sent before that packet, unnoticed */
};

/* What each message needs comes first, in one cache line. */
struct trace_connection {
	__u32 skip; /* messages to skip before the next is chosen */
	__u32 head; /* of the ring of messages; not reduced modulo its size */
	__u32 tail;
	__u8 watched; /* the application uses SO_TIMESTAMPING: no message is skipped */
	__u8 skipped; /* messages were skipped since the last that was not */
	__u8 stamping; /* the packet of "application" may be in flight */
	__u8 grouped; /* group is valid */
	__u32 rule;
	__u32 write_seq; /* sequence number after the last message that was not skipped */
	__u64 started; /* start of sendmsg(2), set by trace_send */
	__u32 group;
	__u32 queue; /* message that is expected next at the queueing discipline */
	__u32 driver; /* message that is expected next at the driver */
	__u32 segments; /* data_segs_out when a packet was queued last */
	__u32 application; /* sequence number after the last packet that the
			    * application marked itself */
	__u32 rx_skip; /* received segments to skip */
	__u64 next; /* when the next message may be chosen, if the rule has an interval */
	__u64 rx_next; /* when the next segment may be chosen */
	__u8 role;
	__u8 padding[7];
	struct trace_message message[TRACE_IN_FLIGHT];
};

/*
 * A log-linear histogram of times: 16 buckets of 16 ns, then 16 buckets for each
 * power of two from 256 ns; the last bucket has all values above 549 s. A value
 * differs by at most 1/32 from the middle of its bucket.
 */
struct trace_histogram {
	__u64 sum; /* nanoseconds */
	__u64 max;
	__u64 bucket[TRACE_BUCKETS];
};

/* Counts and times of a group, per CPU. */
struct trace_stats {
	__u64 chosen;
	__u64 outcome[TRACE_OUTCOMES];
	__u64 bytes; /* of acknowledged messages, and of datagrams that were sent */
	__u64 undriven; /* acknowledged messages without a time stamp of a driver */
	__u64 unqueued; /* acknowledged messages that were sent before they were marked */
	struct trace_histogram stage[TRACE_STAGES];
};

struct trace_rx_stats {
	__u64 chosen;
	__u64 outcome[TRACE_RX_OUTCOMES];
	__u64 unstamped; /* samples without a time stamp of their arrival */
	struct trace_histogram stage[TRACE_RX_STAGES];
};

/* A message with its outcome. */
struct trace_sample {
	__u64 ended; /* time of the outcome */
	__u64 total; /* nanoseconds from the first known time to ended */
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
	__u64 least; /* minimum of total among the samples */
	__u32 count;
	__u32 padding;
	struct trace_sample sample[TRACE_SLOWEST];
};

/* Settings of the programs; only user space writes them. */
struct trace_state {
	__s64 clock; /* CLOCK_REALTIME - CLOCK_MONOTONIC, nanoseconds; 0: not known */
	__u32 samples; /* write samples to the ring buffer */
	__u32 seed; /* of the hash that chooses connections */
};

/* Counters of the programs; user space only reads them. */
struct trace_counts {
	__u64 lost; /* samples that were lost because the ring buffer was full */
	__u64 segments; /* received segments that wait to be read */
	__u64 datagrams; /* received datagrams that wait to be read */
	__u64 sending; /* chosen datagrams between socket and driver */
};

/* A received sample that waits to be read. */
struct trace_waiting_key {
	__u64 of; /* segment: cookie of the connection; datagram: skb */
	__u64 end; /* segment: sequence number after it plus TRACE_END_BIAS; datagram: 0 */
};

struct trace_waiting {
	__u64 socket; /* when the sample reached the socket */
	__u64 arrival; /* skb->tstamp, which shows whether an skb was reused */
	__u64 cookie; /* of the socket */
	__u64 sk; /* datagram: address of the socket */
	__u32 group;
	__u32 slot; /* index in trace_reader */
};

/* The waiting samples of a socket, in no particular order. */
struct trace_reader {
	__u64 since[TRACE_READER_SAMPLES]; /* when the sample reached the socket; 0: the
					    * slot is free; or TRACE_RESERVED */
	__u64 of[TRACE_READER_SAMPLES]; /* segment: end of its key; datagram: skb */
};

#define TRACE_RESERVED 1ULL
#define TRACE_END_BIAS (1ULL << 32) /* makes every end different from 0 */

/* A chosen datagram between socket and driver. */
struct trace_sending {
	__u64 sent; /* left the socket */
	__u64 queued; /* reached the queueing discipline */
	__u64 sk; /* address of the socket */
	__u32 length; /* payload, bytes */
	__u32 group;
	__u32 segments; /* gso_segs: number of segments with UDP_SEGMENT; otherwise 0 */
	__u16 local_port;
	__u16 remote_port;
};

/* State of the sampling of a socket's datagrams for one rule. */
struct trace_sampler {
	__u64 next; /* when the next datagram may be chosen, if the rule has an interval */
	__u32 skip; /* datagrams to skip before the next is chosen */
	__u32 initialized;
};

struct trace_samplers {
	struct trace_sampler received[TRACE_RULES];
	struct trace_sampler sent[TRACE_RULES];
};

enum trace_live_name {
	TRACE_LIVE_ADOPT = 1, /* choose or skip the connection */
	TRACE_LIVE_FORGET, /* stop tracing the connection */
};

struct trace_live_request {
	__u64 nonce; /* authenticates the agent; calls without it reach the kernel */
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
