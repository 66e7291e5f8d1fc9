/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * What the programs that match connections share with user space.
 *
 * A rule of the policy becomes one or more terms: conjunctions of what a
 * connection must be. A set is a bitmap of terms, in the policy's order: each
 * dimension (remote prefix, port, role ...) gives the set of the terms that
 * it allows, and the first term in all of them names the rule.
 */
#ifndef SOCKEYE_MATCH_H
#define SOCKEYE_MATCH_H

#include <linux/types.h>

enum match_limit {
	MATCH_WORDS = 8,
	MATCH_TERMS = 512, /* of a ruleset */
	MATCH_TAG = 16, /* bytes of a tag */
};

/* The lowest bit is the side: of UDP, a socket with a peer connects. */
enum match_role {
	MATCH_CONNECT,
	MATCH_ACCEPT,
	MATCH_UDP_CONNECT,
	MATCH_UDP_ACCEPT,
	MATCH_ROLES, /* a power of two */
};

/* Which dimensions a ruleset has terms in. The bits above are the domain's. */
enum match_use {
	MATCH_USE_REMOTE = 1 << 0,
	MATCH_USE_LOCAL = 1 << 1,
	MATCH_USE_REMOTE_PORT = 1 << 2,
	MATCH_USE_LOCAL_PORT = 1 << 3,
	MATCH_USE_SAME = 1 << 4,
	MATCH_USE_TAG = 1 << 5, /* a rule matches on the peer's tag */
};

/* IPv6 address; an IPv4 address is mapped, ::ffff:a.b.c.d. Network order. */
struct match_address {
	__u32 word[4];
};

struct match_set {
	__u64 word[MATCH_WORDS];
};

/* LPM trie key; prefixlen counts from the top of the mapped address. */
struct match_prefix {
	__u32 prefixlen;
	struct match_address address;
};

/* LPM trie key; the port is in network order, so that ranges are prefixes. */
struct match_port {
	__u32 prefixlen;
	__u8 port[2];
	__u8 padding[2];
};

struct match_tag {
	__u8 length;
	__u8 byte[MATCH_TAG];
};

/* Replaced whole, never written in place. */
struct match_ruleset {
	__u32 uses; /* enum match_use, and the domain's */
	__u32 terms;
	struct match_set role[MATCH_ROLES];
	struct match_set same4[33]; /* by the bits that both addresses share */
	struct match_set same6[129];
	struct match_set untagged; /* terms that ask for no tag */
	__u32 rule[MATCH_TERMS]; /* the rule of a term */
};

/* Which of the two banks of maps is in force. */
struct match_active {
	__u32 bank;
	__u32 used; /* as uses, of all rulesets since the pins were made */
};

/* A connection's ends. */
struct match_tuple {
	struct match_address local;
	struct match_address remote;
	__u16 local_port; /* host order, both */
	__u16 remote_port;
};

/* A connection that might be, for the program that only decides. */
struct match_question {
	struct match_tuple tuple;
	__u32 role;
	struct match_tag tag; /* length 0: none, or not known */
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
