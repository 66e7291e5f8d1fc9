/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Finds the rule of a connection. Cost: one lookup in an LPM trie or a hash table
 * for each dimension that the ruleset uses, and up to MATCH_WORDS words of
 * bitmaps for each; independent of the number of rules and prefixes.
 */
#ifndef SOCKEYE_MATCH_BPF_H
#define SOCKEYE_MATCH_BPF_H

#include "kernel.h"

#include <bpf/bpf_core_read.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "match.h"

MATCH_EXPORT(struct, match_address);
MATCH_EXPORT(struct, match_prefix);
MATCH_EXPORT(struct, match_port);
MATCH_EXPORT(struct, match_tag);
MATCH_EXPORT(struct, match_set);
MATCH_EXPORT(struct, match_ruleset);
MATCH_EXPORT(struct, match_question);
MATCH_EXPORT(enum, match_limit);
MATCH_EXPORT(enum, match_role);
MATCH_EXPORT(enum, match_use);

/*
 * There are two banks of maps. User space builds the bank that is not in force,
 * and puts it in force by one write of the map active.
 */
#define MATCH_BANK(map, kind, key_type, value_type)                        \
	struct {                                                           \
		__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);                  \
		__uint(max_entries, 2);                                    \
		__type(key, __u32);                                        \
		__array(values, struct {                                   \
			__uint(type, kind);                                \
			__uint(max_entries, 1);                            \
			__uint(map_flags, BPF_F_NO_PREALLOC);              \
			__type(key, key_type);                             \
			__type(value, value_type);                         \
		});                                                        \
	} map SEC(".maps")

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, 2);
	__type(key, __u32);
	__array(values, struct {
		__uint(type, BPF_MAP_TYPE_ARRAY);
		__uint(max_entries, 1);
		__type(key, __u32);
		__type(value, struct match_ruleset);
	});
} rulesets SEC(".maps");

MATCH_BANK(remotes, BPF_MAP_TYPE_LPM_TRIE, struct match_prefix, struct match_set);
MATCH_BANK(locals, BPF_MAP_TYPE_LPM_TRIE, struct match_prefix, struct match_set);
MATCH_BANK(remote_ports, BPF_MAP_TYPE_LPM_TRIE, struct match_port, struct match_set);
MATCH_BANK(local_ports, BPF_MAP_TYPE_LPM_TRIE, struct match_port, struct match_set);
MATCH_BANK(peer_tags, BPF_MAP_TYPE_HASH, struct match_tag, struct match_set);

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct match_active);
} active SEC(".maps");

static __always_inline bool match_ipv4(const struct match_address *a)
{
	return !a->word[0] && !a->word[1] && a->word[2] == bpf_htonl(0xffff);
}

static __always_inline void match_map_ipv4(struct match_address *a, __u32 ipv4)
{
	a->word[0] = 0;
	a->word[1] = 0;
	a->word[2] = bpf_htonl(0xffff);
	a->word[3] = ipv4;
}

/*
 * Returns a field of a context. Without the barrier clang merges the loads of
 * two branches into one load at a computed offset, which the verifier rejects.
 */
static __always_inline __u32 match_load(__u32 value)
{
	barrier_var(value);
	return value;
}

static __always_inline __u32 match_popcount(__u32 x)
{
	x = x - ((x >> 1) & 0x55555555);
	x = (x & 0x33333333) + ((x >> 2) & 0x33333333);
	x = (x + (x >> 4)) & 0x0f0f0f0f;
	return x * 0x01010101 >> 24;
}

/* Counts leading zeros without branches, which the verifier would all follow. */
static __always_inline __u32 match_clz(__u32 x)
{
	x |= x >> 1;
	x |= x >> 2;
	x |= x >> 4;
	x |= x >> 8;
	x |= x >> 16;
	return 32 - match_popcount(x);
}

/* Returns the length of the common prefix of two addresses, 0 to 128 bits. */
static __always_inline __u32 match_common_bits(const struct match_address *a,
					       const struct match_address *b)
{
	__u32 x, bits = 0;
	int i;

#pragma unroll
	for (i = 0; i < 4; i++) {
		x = bpf_ntohl(a->word[i] ^ b->word[i]);
		if (x)
			return bits + match_clz(x);
		bits += 32;
	}
	return bits;
}

/*
 * Hashes a tuple by the finalizer of murmur3. The hash selects a share of the
 * connections: those of a trial's control arm, or those to trace.
 */
static __always_inline __u32 match_hash(const struct match_tuple *t, __u32 seed)
{
	__u32 h = seed;
	int i;

#pragma unroll
	for (i = 0; i < 4; i++) {
		h = (h ^ t->remote.word[i]) * 0x85ebca6b;
		h ^= h >> 15;
		h = (h ^ t->local.word[i]) * 0xc2b2ae35;
		h ^= h >> 13;
	}
	h ^= ((__u32)t->remote_port << 16) | t->local_port;
	h ^= h >> 16;
	h *= 0x85ebca6b;
	h ^= h >> 13;
	h *= 0xc2b2ae35;
	h ^= h >> 16;
	return h;
}

static __always_inline const struct match_set *
match_address_set(void *bank, const struct match_address *address)
{
	struct match_prefix prefix = { .prefixlen = 128, .address = *address };

	return bpf_map_lookup_elem(bank, &prefix);
}

static __always_inline const struct match_set *match_port_set(void *bank,
							      __u16 port)
{
	struct match_port key = { .prefixlen = 16,
				  .port = { port >> 8, port & 0xff } };

	return bpf_map_lookup_elem(bank, &key);
}

static __always_inline const struct match_active *match_state(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&active, &zero);
}

static __always_inline const struct match_ruleset *match_rules(__u32 bank)
{
	__u32 zero = 0;
	void *inner = bpf_map_lookup_elem(&rulesets, &bank);

	return inner ? bpf_map_lookup_elem(inner, &zero) : NULL;
}

/* Returns the ruleset in force, or NULL, and sets *bank. */
static __always_inline const struct match_ruleset *match_current(__u32 *bank)
{
	const struct match_active *state = match_state();

	if (!state)
		return NULL;
	*bank = state->bank & 1;
	return match_rules(*bank);
}

/* Intersects a set with another one. Returns false if the result is empty. */
static __always_inline bool match_intersect(struct match_set *set,
					 const struct match_set *to)
{
	__u64 any = 0;
	int i;

	if (!to)
		return false;
#pragma unroll
	for (i = 0; i < MATCH_WORDS; i++) {
		set->word[i] &= to->word[i];
		any |= set->word[i];
	}
	return any;
}

/* Flags in the result of a search, with the number of the rule. */
#define MATCH_BY_TAG (1U << 31) /* the rule matches on the peer's tag */
#define MATCH_TAG_READ (1U << 30) /* the peer sent a tag */
#define MATCH_RULE(found) ((found) & (MATCH_TAG_READ - 1))

/*
 * Returns the number of the first rule that matches, with MATCH_BY_TAG; 0: none.
 * Rules that match on a tag are skipped if q has no tag.
 */
static __noinline __u32 match_find(const struct match_question *q)
{
	const struct match_set *tag = NULL;
	const struct match_ruleset *r;
	__u32 bank = 0, bits, term;
	struct match_set set;
	__u64 w, untagged;
	void *inner;
	int i;

	if (!q)
		return 0;
	r = match_current(&bank);
	if (!r || !r->terms)
		return 0;
	set = r->role[q->role & (MATCH_ROLES - 1)];
	if (r->uses & MATCH_USE_REMOTE_PORT) {
		inner = bpf_map_lookup_elem(&remote_ports, &bank);
		if (!inner || !match_intersect(&set, match_port_set(inner, q->tuple.remote_port)))
			return 0;
	}
	if (r->uses & MATCH_USE_LOCAL_PORT) {
		inner = bpf_map_lookup_elem(&local_ports, &bank);
		if (!inner || !match_intersect(&set, match_port_set(inner, q->tuple.local_port)))
			return 0;
	}
	if (r->uses & MATCH_USE_SAME) {
		bits = match_common_bits(&q->tuple.remote, &q->tuple.local);
		/* The verifier needs the checks that clang would optimize away. */
		barrier_var(bits);
		if (match_ipv4(&q->tuple.remote)) {
			bits -= 96;
			barrier_var(bits);
			if (bits > 32 || !match_intersect(&set, &r->same4[bits]))
				return 0;
		} else {
			if (bits > 128 || !match_intersect(&set, &r->same6[bits]))
				return 0;
		}
	}
	if (r->uses & MATCH_USE_REMOTE) {
		inner = bpf_map_lookup_elem(&remotes, &bank);
		if (!inner || !match_intersect(&set, match_address_set(inner, &q->tuple.remote)))
			return 0;
	}
	if (r->uses & MATCH_USE_LOCAL) {
		inner = bpf_map_lookup_elem(&locals, &bank);
		if (!inner || !match_intersect(&set, match_address_set(inner, &q->tuple.local)))
			return 0;
	}
	if ((r->uses & MATCH_USE_TAG) && q->tag.length) {
		inner = bpf_map_lookup_elem(&peer_tags, &bank);
		if (inner)
			tag = bpf_map_lookup_elem(inner, &q->tag);
	}
	for (i = 0; i < MATCH_WORDS; i++) {
		w = set.word[i] & (r->untagged.word[i] | (tag ? tag->word[i] : 0));
		if (!w)
			continue;
		untagged = w & -w & r->untagged.word[i];
		term = i * 64;
		if (!(__u32)w) {
			term += 32;
			w >>= 32;
		}
		/* Isolates the lowest bit that is set in the word. */
		term += 31 - match_clz((__u32)w & -(__u32)w);
		barrier_var(term);
		if (term >= MATCH_TERMS)
			return 0;
		return r->rule[term] | (untagged ? 0 : MATCH_BY_TAG);
	}
	return 0;
}

void *bpf_cast_to_kern_ctx(void *obj) __ksym __weak;
void *bpf_rdonly_cast(const void *obj, __u32 btf_id) __ksym __weak;

/*
 * Reports whether a request is of an IPv4 client. At an IPv6 listener such a
 * request has the listener's family, and uninitialized memory in the place of
 * the IPv6 address (inet_reqsk_alloc and tcp_v4_init_req, Linux 6.18). Only the
 * operations of the request differ, which the context does not show.
 */
static __always_inline bool match_request_ipv4(struct bpf_sock_ops *ctx)
{
	struct bpf_sock_ops_kern *kern;
	struct request_sock *req;

	if (!bpf_cast_to_kern_ctx || !bpf_rdonly_cast) {
		/* Before Linux 6.2: by the addresses. No client has 0.0.0.0. */
		__u32 high = match_load(ctx->remote_ip6[0]);

		return match_load(ctx->remote_ip4) && !high &&
		       !match_load(ctx->remote_ip6[1]);
	}
	kern = bpf_cast_to_kern_ctx(ctx);
	req = bpf_rdonly_cast(kern->sk, bpf_core_type_id_kernel(struct request_sock));
	return req->rsk_ops->family == AF_INET;
}

/* Sets addresses and ports. Returns false for other address families. */
static __always_inline bool match_sock_ops_tuple(struct bpf_sock_ops *ctx,
						 struct match_tuple *t)
{
	if (ctx->family == AF_INET ||
	    (ctx->family == AF_INET6 && !ctx->is_fullsock &&
	     match_request_ipv4(ctx))) {
		match_map_ipv4(&t->remote, match_load(ctx->remote_ip4));
		match_map_ipv4(&t->local, match_load(ctx->local_ip4));
	} else if (ctx->family == AF_INET6) {
		t->remote.word[0] = match_load(ctx->remote_ip6[0]);
		t->remote.word[1] = match_load(ctx->remote_ip6[1]);
		t->remote.word[2] = match_load(ctx->remote_ip6[2]);
		t->remote.word[3] = match_load(ctx->remote_ip6[3]);
		t->local.word[0] = match_load(ctx->local_ip6[0]);
		t->local.word[1] = match_load(ctx->local_ip6[1]);
		t->local.word[2] = match_load(ctx->local_ip6[2]);
		t->local.word[3] = match_load(ctx->local_ip6[3]);
	} else {
		return false;
	}
	t->remote_port = bpf_ntohl(ctx->remote_port);
	t->local_port = ctx->local_port;
	return true;
}

/* As match_sock_ops_tuple, for a socket. */
static __always_inline bool match_sock_tuple(struct bpf_sock *sk,
					     struct match_tuple *t)
{
	if (sk->family == AF_INET) {
		match_map_ipv4(&t->remote, match_load(sk->dst_ip4));
		match_map_ipv4(&t->local, match_load(sk->src_ip4));
	} else if (sk->family == AF_INET6) {
		t->remote.word[0] = match_load(sk->dst_ip6[0]);
		t->remote.word[1] = match_load(sk->dst_ip6[1]);
		t->remote.word[2] = match_load(sk->dst_ip6[2]);
		t->remote.word[3] = match_load(sk->dst_ip6[3]);
		t->local.word[0] = match_load(sk->src_ip6[0]);
		t->local.word[1] = match_load(sk->src_ip6[1]);
		t->local.word[2] = match_load(sk->src_ip6[2]);
		t->local.word[3] = match_load(sk->src_ip6[3]);
	} else {
		return false;
	}
	t->remote_port = bpf_ntohs(sk->dst_port);
	t->local_port = sk->src_port;
	return true;
}

#endif
