/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Types and constants that the tune programs share with user space. */
#ifndef SOCKEYE_TUNE_H
#define SOCKEYE_TUNE_H

#include <linux/types.h>

#include "match.h"

enum tune_limit {
	TUNE_OPTIONS = 64, /* options of a rule, including those of its reaction */
	TUNE_CANDIDATES = 8, /* initial windows that a rule explores */
	TUNE_BUCKETS = 128, /* buckets of a histogram, see tune_histogram */
	TUNE_TAG_EXID = 0x534b, /* RFC 6994 experiment identifier of the tag */
	TUNE_REQUESTS = 8192, /* handshakes that are remembered */
	TUNE_LEARNED = 4096, /* prefixes that are remembered */
	TUNE_FAILURES = 4096, /* combinations of rule, option and errno that are counted */
	TUNE_SEGMENTS_MAX = 1 << 26, /* cap of a connection's segments in sums of squares */
	TUNE_NAME = 36, /* bytes of a rule's name, with the terminating zero */
	TUNE_REACT_SEGMENTS = 50, /* segments before the share of retransmissions counts */
	TUNE_LIVE_LEVEL = 0x50cb, /* level of the live hook's own setsockopt */
};

/* Continues enum match_use: callbacks that a ruleset answers. */
enum tune_use {
	TUNE_USE_WRITE = 1 << 6, /* a rule for accepted connections writes a tag */
	TUNE_USE_SYN_RTO = 1 << 7,
	TUNE_USE_SYNACK_RTO = 1 << 8,
	TUNE_USE_RWND = 1 << 9,
	TUNE_USE_ECN = 1 << 10,
	TUNE_USE_BASE_RTT = 1 << 11,
};

/* When an option is set, and on which sockets. */
enum tune_phase {
	TUNE_PHASE_CONNECT = 1 << 0, /* before the SYN is sent */
	TUNE_PHASE_ACTIVE = 1 << 1, /* established by connect(2) */
	TUNE_PHASE_PASSIVE = 1 << 2, /* established by accept(2) */
	TUNE_PHASE_REACT = 1 << 3, /* the rule's reaction */
	TUNE_PHASE_LIVE = 1 << 4, /* on a connection that was open before */
	TUNE_PHASE_IPV4 = 1 << 5, /* only on AF_INET sockets */
	TUNE_PHASE_IPV6 = 1 << 6, /* only on AF_INET6 sockets */
};

enum tune_flag {
	TUNE_FLAG_LIVE = 1 << 0, /* count while the connection is open */
	TUNE_FLAG_CLOSE = 1 << 1, /* count when the connection closes */
	TUNE_FLAG_REACT = 1 << 2,
	TUNE_FLAG_LEARN = 1 << 3,
};

/* Levels of options that setsockopt(2) does not have. */
enum tune_level {
	TUNE_LEVEL_CONGESTION = 0x10000, /* the name is rule.congestion[value] */
	TUNE_LEVEL_TXHASH = 0x10001, /* sk_txhash; 0: a random value */
};

enum tune_arm {
	TUNE_ARM_TREATED,
	TUNE_ARM_CONTROL, /* of a trial: counted, not changed */
	TUNE_ARMS,
};

struct tune_option {
	__u32 level;
	__u32 name;
	__s32 value;
	__u16 phases; /* enum tune_phase */
	__u16 id; /* user space's number of the option */
};

/*
 * A rule does not change: a rule with another content gets another number, so
 * that a connection keeps the rule that it started with. Its map element is
 * written once: since Linux 6.1 the kernel reuses the memory of a replaced
 * element at once (htab_elem_free, kernel/bpf/hashtab.c), so that a program
 * that still reads it would see parts of another rule. Times are microseconds
 * unless noted.
 */
struct tune_rule {
	__u64 forget; /* learning: half-life of evidence, nanoseconds */
	__u32 flags; /* enum tune_flag */
	__u32 options;
	__u32 syn_rto;
	__u32 synack_rto;
	__u32 rwnd; /* in MSS */
	__u32 ecn;
	__u32 base_rtt;
	__u32 seed; /* of the hashes that select the shares below */
	__u32 control; /* share of connections in the control arm, of 2^32 */
	__u32 react_sample; /* share of connections that may react, of 2^32 - 1 */
	__u32 react_retransmits; /* retransmissions in 10000 segments; 0: no condition */
	__u32 react_rtos; /* retransmission timeouts; 0: no condition */
	__u32 learn; /* key of learned data, which survives a change of the rule */
	__u32 candidates;
	__u32 candidate[TUNE_CANDIDATES]; /* initial windows, ascending */
	__u32 explore; /* share of explored connections before a prefix has settled, of 2^32 */
	__u32 probe; /* the same share afterwards */
	__u32 first_bytes; /* size of the first flight, which is timed */
	__u32 evidence; /* timed connections that each candidate needs */
	__u8 learn_bits4; /* prefix length, bits of the mapped address */
	__u8 learn_bits6; /* bits */
	__u8 learn_option; /* number of the option, for tune_failure */
	struct match_tag tag; /* that is written; length 0: none */
	char name[TUNE_NAME];
	char congestion[2][16]; /* [0] at the start, [1] of the reaction */
	struct tune_option option[TUNE_OPTIONS];
};

/* State of a connection that a rule has matched, in socket storage. */
struct tune_connection {
	__u32 rule;
	__u8 arm;
	__u8 role;
	__u8 candidate; /* index of the initial window; TUNE_CANDIDATES: none */
	__u8 flags; /* enum tune_connection_flag */
	__u64 started; /* CLOCK_MONOTONIC, nanoseconds; 0: not known */
	__u64 sent; /* learning: first data sent, estimated by the first RTT sample */
	__u64 reached_at; /* learning: time at which "reached" was acknowledged */
	__u64 bytes; /* acknowledged and already counted, as the three below */
	__u32 segments;
	__u32 retransmits;
	__u32 rtos;
	__u32 counted; /* jiffies of the last count */
	__u32 handshake; /* retransmissions of the SYN or the SYN-ACK */
	__u32 reached; /* learning: acknowledged bytes */
};

enum tune_connection_flag {
	TUNE_CONNECTION_ESTABLISHED = 1 << 0,
	TUNE_CONNECTION_LEARNING = 1 << 1,
	TUNE_CONNECTION_SAMPLED = 1 << 2, /* may react */
	TUNE_CONNECTION_REACTED = 1 << 3,
	TUNE_CONNECTION_TAGGING = 1 << 4, /* writes tags, until data is acknowledged */
	TUNE_CONNECTION_ADOPTED = 1 << 5, /* was open before the rule */
	TUNE_CONNECTION_CONFIRMED = 1 << 6, /* an acknowledgement carried the tag */
	TUNE_CONNECTION_UNSEEN = 1 << 7, /* adopted, and the kernel makes no callbacks */
};

/* A passive handshake in progress; the key is a match_tuple. */
struct tune_request {
	__u64 started; /* CLOCK_MONOTONIC, nanoseconds */
	__u32 rule;
	__u32 padding;
};

struct tune_stats_key {
	__u32 rule;
	__u32 arm;
};

/*
 * Sums over the connections of a rule and an arm. Open connections are included
 * up to their last count. The sums of squares and products are of the totals of
 * connections, for confidence intervals.
 */
struct tune_stats {
	__u64 connections; /* matched */
	__u64 established;
	__u64 closed;
	__u64 adopted; /* were open before the rule, which apply --live gave them */
	__u64 bytes; /* acknowledged */
	__u64 segments; /* sent with data, including retransmissions */
	__u64 retransmits;
	__u64 rtos;
	__u64 segments2; /* sum of segments^2 */
	__u64 retransmits2;
	__u64 segments_retransmits; /* sum of the products */
	__u64 options; /* options that were set */
	__u64 reactions;
	__u64 tags; /* tags that were read */
	__u64 rtt[TUNE_BUCKETS]; /* smoothed RTT, microseconds */
	__u64 connect[TUNE_BUCKETS]; /* from SYN to established, microseconds */
	__u64 rate[TUNE_BUCKETS]; /* delivery rate, kilobytes per second */
};

struct tune_failure {
	__u32 rule;
	__u16 option; /* id */
	__u16 error; /* errno */
};

struct tune_learned_key {
	__u32 learn;
	struct match_address prefix;
	__u32 bits; /* of the mapped address */
};

struct tune_evidence {
	__u32 tries; /* connections that started with the candidate */
	__u32 connections; /* of these, connections with a timed first flight */
	__u32 lossy; /* of these, connections that lost a segment of the flight */
	__u32 padding;
	__u64 time; /* sum of the flight times, microseconds */
};

struct tune_learned {
	__u64 last; /* time of the last evidence, CLOCK_BOOTTIME, nanoseconds */
	__u64 halved; /* time at which the evidence was halved last */
	__u32 chosen; /* index of the candidate in use, if settled */
	__u32 settled; /* every candidate has enough evidence */
	struct tune_evidence candidate[TUNE_CANDIDATES];
};

/* Requests to the live hook: the option name of its setsockopt(2). */
enum tune_live_name {
	TUNE_LIVE_ADOPT = 1, /* find the rule of the connection, and apply the rule */
	TUNE_LIVE_SET, /* set one option */
	TUNE_LIVE_FORGET, /* detach the rule; options that were set stay set */
	TUNE_LIVE_LISTEN, /* prepare a listener for tags */
};

struct tune_live_request {
	__u64 nonce; /* authenticates the agent; calls without it reach the kernel */
	__u32 role;
	__u32 level;
	__u32 name;
	__s32 value;
};

_Static_assert(sizeof(struct tune_option) == 16, "option");
_Static_assert(sizeof(struct tune_connection) == 64, "connection");
_Static_assert(sizeof(struct tune_learned_key) == 24, "learned key");
_Static_assert(sizeof(struct tune_evidence) == 24, "evidence");
_Static_assert(sizeof(struct tune_failure) == 8, "failure");
_Static_assert(sizeof(struct tune_live_request) == 24, "live request");
_Static_assert(sizeof(struct tune_rule) % 8 == 0, "rule");

#endif
