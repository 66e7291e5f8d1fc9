/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What the tune programs and user space share. */
#ifndef SOCKEYE_TUNE_H
#define SOCKEYE_TUNE_H

#include <linux/types.h>

#include "match.h"

enum tune_limit {
	TUNE_OPTIONS = 64, /* of a rule, its reaction included */
	TUNE_CANDIDATES = 8, /* initial windows that a rule explores */
	TUNE_BUCKETS = 128, /* of a histogram */
	TUNE_TAG_EXID = 0x534b, /* RFC 6994 experiment identifier of the tag */
	TUNE_REQUESTS = 8192, /* handshakes remembered */
	TUNE_LEARNED = 4096, /* prefixes remembered */
	TUNE_FAILURES = 4096, /* rule, option and errno counted */
	TUNE_SEGMENTS_MAX = 1 << 26, /* of a connection, in sums of squares */
	TUNE_NAME = 36, /* bytes of a rule's name, with its end */
	TUNE_REACT_SEGMENTS = 50, /* sent before a share of them is judged */
	TUNE_LIVE_LEVEL = 0x50cb, /* level of the live hook's own setsockopt */
};

/* Goes on where enum match_use ends: which calls a ruleset answers. */
enum tune_use {
	TUNE_USE_WRITE = 1 << 6, /* an accepting rule writes a tag */
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
	TUNE_FLAG_CLOSE = 1 << 1, /* count when it closes */
	TUNE_FLAG_REACT = 1 << 2,
	TUNE_FLAG_LEARN = 1 << 3,
};

/* Levels of options that are not setsockopt(2)'s. */
enum tune_level {
	TUNE_LEVEL_CONGESTION = 0x10000, /* the name is rule.congestion[value] */
	TUNE_LEVEL_TXHASH = 0x10001, /* sk_txhash; 0: a new random one */
};

enum tune_arm {
	TUNE_ARM_TREATED,
	TUNE_ARM_CONTROL, /* of a trial: counted, left alone */
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
 * A rule is never changed: one with another content has another id, so that a
 * connection keeps what it began with. Times are microseconds.
 */
struct tune_rule {
	__u64 retired; /* CLOCK_BOOTTIME, nanoseconds, when a policy dropped it */
	__u64 forget; /* learning: half-life of evidence, nanoseconds */
	__u32 flags; /* enum tune_flag */
	__u32 options;
	__u32 syn_rto;
	__u32 synack_rto;
	__u32 rwnd; /* in MSS */
	__u32 ecn;
	__u32 base_rtt;
	__u32 seed; /* of the choices that follow */
	__u32 control; /* share of the connections, of 2^32 */
	__u32 react_sample; /* share, of 2^32 - 1 */
	__u32 react_retransmits; /* of 10000 segments; 0: no condition */
	__u32 react_rtos; /* 0: no condition */
	__u32 learn; /* key of what is learned; survives a change of the rule */
	__u32 candidates;
	__u32 candidate[TUNE_CANDIDATES]; /* initial windows, ascending */
	__u32 explore; /* share before a prefix has settled, of 2^32 */
	__u32 probe; /* share after */
	__u32 first_bytes; /* the first flight: what is timed */
	__u32 evidence; /* connections that a candidate needs to be judged */
	__u8 learn_bits4;
	__u8 learn_bits6; /* of the mapped address, both */
	__u8 learn_option; /* its number, for failures */
	struct match_tag tag; /* written; length 0: none */
	char name[TUNE_NAME];
	char congestion[2][16]; /* [0] at the start, [1] the reaction's */
	struct tune_option option[TUNE_OPTIONS];
};

/* What is known of a connection that a rule has matched; socket storage. */
struct tune_connection {
	__u32 rule;
	__u8 arm;
	__u8 role;
	__u8 candidate; /* of learning; TUNE_CANDIDATES: none of them */
	__u8 flags; /* enum tune_connection_flag */
	__u64 started; /* CLOCK_MONOTONIC, nanoseconds; 0: not known */
	__u64 sent; /* first data sent, as far as the first sample tells */
	__u64 reached_at; /* learning: when so many bytes were acknowledged */
	__u64 bytes; /* acknowledged; this and the rest: already counted */
	__u32 segments;
	__u32 retransmits;
	__u32 rtos;
	__u32 counted; /* jiffies of the last count */
	__u32 handshake; /* retransmissions of the SYN, or the SYN-ACK */
	__u32 reached;
};

enum tune_connection_flag {
	TUNE_CONNECTION_ESTABLISHED = 1 << 0,
	TUNE_CONNECTION_LEARNING = 1 << 1,
	TUNE_CONNECTION_SAMPLED = 1 << 2, /* may react */
	TUNE_CONNECTION_REACTED = 1 << 3,
	TUNE_CONNECTION_TAGGING = 1 << 4, /* the first data still has to go */
	TUNE_CONNECTION_ADOPTED = 1 << 5, /* was open before the rule */
	TUNE_CONNECTION_CONFIRMED = 1 << 6, /* an acknowledgement carried the tag */
	TUNE_CONNECTION_UNSEEN = 1 << 7, /* adopted, and the kernel will not call */
};

/* A handshake, until it is done; its key is a match_tuple. */
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
 * Sums over the connections of a rule, live ones included as far as they were
 * counted. The squares are of connections' totals, for intervals.
 */
struct tune_stats {
	__u64 connections; /* matched */
	__u64 established;
	__u64 closed;
	__u64 adopted; /* were open before the rule, and got it by apply --live */
	__u64 bytes; /* acknowledged */
	__u64 segments; /* sent with data, retransmissions included */
	__u64 retransmits;
	__u64 rtos;
	__u64 segments2; /* sum of segments^2 */
	__u64 retransmits2;
	__u64 segments_retransmits; /* sum of the products */
	__u64 options; /* set */
	__u64 reactions;
	__u64 tags; /* peers whose tag was read */
	__u64 rtt[TUNE_BUCKETS]; /* smoothed RTT, microseconds: see TUNE_BUCKETS */
	__u64 connect[TUNE_BUCKETS]; /* microseconds from SYN to established */
	__u64 rate[TUNE_BUCKETS]; /* delivery rate, kilobytes a second */
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
	__u32 tries; /* connections that began with it */
	__u32 connections; /* of them, that sent the first bytes */
	__u32 lossy; /* that lost a segment of them */
	__u32 padding;
	__u64 time; /* microseconds, sum over connections */
};

struct tune_learned {
	__u64 last; /* CLOCK_BOOTTIME, nanoseconds, of the last evidence */
	__u64 halved; /* of the last halving */
	__u32 chosen; /* candidate in use, once settled */
	__u32 settled;
	struct tune_evidence candidate[TUNE_CANDIDATES];
};

/* What the live hook is asked for, as the name of its setsockopt. */
enum tune_live_name {
	TUNE_LIVE_ADOPT = 1, /* find a rule for the connection, and set it */
	TUNE_LIVE_SET, /* set one option */
	TUNE_LIVE_FORGET, /* end what the rule does from now on */
	TUNE_LIVE_LISTEN, /* prepare a listener for tags */
};

struct tune_live_request {
	__u64 nonce; /* only the agent's calls are heard */
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
