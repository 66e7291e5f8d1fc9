/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Types and constants that the programs that match connections share with user
 * space.
 *
 * User space compiles each rule of the policy to one or more terms, which are
 * conjunctions of conditions. A set is a bitmap of terms in the order of the
 * policy. For each dimension (remote prefix, port, role and so on) a program
 * looks up the set of terms that allow the connection's value; the first term
 * that is in the sets of all dimensions determines the rule.
 */
#ifndef SOCKEYE_MATCH_H
#define SOCKEYE_MATCH_H

#include <linux/types.h>

enum match_limit {
	MATCH_WORDS = 8,
	MATCH_TERMS = 512, /* terms of a ruleset */
	MATCH_TAG = 16, /* bytes of the longest tag */
};

/* Bit 0 is the side: 0 connects, 1 accepts. A connected UDP socket connects. */
enum match_role {
	MATCH_CONNECT,
	MATCH_ACCEPT,
	MATCH_UDP_CONNECT,
	MATCH_UDP_ACCEPT,
	MATCH_ROLES, /* a power of two */
};

/* Dimensions that a ruleset uses. The higher bits belong to the domain. */
enum match_use {
	MATCH_USE_REMOTE = 1 << 0,
	MATCH_USE_LOCAL = 1 << 1,
	MATCH_USE_REMOTE_PORT = 1 << 2,
	MATCH_USE_LOCAL_PORT = 1 << 3,
	MATCH_USE_SAME = 1 << 4, /* common prefix of both addresses */
	MATCH_USE_TAG = 1 << 5, /* the peer's tag */
};

/* IPv6 address in network byte order; an IPv4 address is ::ffff:a.b.c.d. */
struct match_address {
	__u32 word[4];
};

struct match_set {
	__u64 word[MATCH_WORDS];
};

/* LPM trie key; prefixlen counts the bits of the mapped address. */
struct match_prefix {
	__u32 prefixlen;
	struct match_address address;
};

/* LPM trie key; the port is in network byte order, so that ranges are prefixes. */
struct match_port {
	__u32 prefixlen;
	__u8 port[2];
	__u8 padding[2];
};

struct match_tag {
	__u8 length;
	__u8 byte[MATCH_TAG];
};

/* A new ruleset replaces the map as a whole. */
struct match_ruleset {
	__u32 uses; /* enum match_use, and the domain's */
	__u32 terms;
	struct match_set role[MATCH_ROLES];
	struct match_set same4[33]; /* by the common prefix of both addresses, bits */
	struct match_set same6[129];
	struct match_set untagged; /* terms that do not match on a tag */
	__u32 rule[MATCH_TERMS]; /* number of the rule of a term */
};

/* The bank of maps in force. */
struct match_active {
	__u32 bank;
	__u32 used; /* uses of all rulesets since the pins were created */
};

/* The addresses and ports of a connection. */
struct match_tuple {
	struct match_address local;
	struct match_address remote;
	__u16 local_port; /* host byte order, as remote_port */
	__u16 remote_port;
};

/* What a search needs to know of a connection. */
struct match_question {
	struct match_tuple tuple;
	__u32 role;
	struct match_tag tag; /* of the peer; length 0: none, or not known */
	__u8 padding[3];
};

#define MATCH_EXPORT(kind, name) \
	const kind name *unused_##name __attribute__((unused))

_Static_assert(MATCH_TERMS == MATCH_WORDS * 64, "set");
_Static_assert(sizeof(struct match_prefix) == 20, "prefix");
_Static_assert(sizeof(struct match_tag) == 17, "tag");
_Static_assert(sizeof(struct match_tuple) == 36, "tuple");
_Static_assert(sizeof(struct match_question) == 60, "question");

#endif
