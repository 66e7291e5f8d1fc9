/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * From a connection to its rule, and from a rule to options: the part that
 * the tune programs share. Cost of finding a rule: one lookup in an LPM trie
 * or a small table for each dimension that the ruleset uses, whatever the
 * number of rules and prefixes.
 */
#ifndef SOCKEYE_TUNE_BPF_H
#define SOCKEYE_TUNE_BPF_H

#include <stdbool.h>
#include <linux/bpf.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "tune.h"

#define AF_INET 2
#define AF_INET6 10
#define SOL_TCP 6
#define TCP_CONGESTION 13

TUNE_EXPORT(struct, tune_address);
TUNE_EXPORT(struct, tune_prefix);
TUNE_EXPORT(struct, tune_port);
TUNE_EXPORT(struct, tune_tag);
TUNE_EXPORT(struct, tune_set);
TUNE_EXPORT(struct, tune_ruleset);

/* Two banks: the one that is not in force is built, then the other's role
 * changes in one write. */
#define TUNE_BANK(map, kind, key_type, value_type)                         \
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
		__type(value, struct tune_ruleset);
	});
} rulesets SEC(".maps");

TUNE_BANK(remotes, BPF_MAP_TYPE_LPM_TRIE, struct tune_prefix, struct tune_set);
TUNE_BANK(locals, BPF_MAP_TYPE_LPM_TRIE, struct tune_prefix, struct tune_set);
TUNE_BANK(remote_ports, BPF_MAP_TYPE_LPM_TRIE, struct tune_port, struct tune_set);
TUNE_BANK(local_ports, BPF_MAP_TYPE_LPM_TRIE, struct tune_port, struct tune_set);
TUNE_BANK(peer_tags, BPF_MAP_TYPE_HASH, struct tune_tag, struct tune_set);

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct tune_active);
} active SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, struct tune_rule);
} rules SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 8192);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct tune_stats_key);
	__type(value, struct tune_stats);
} stats SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, TUNE_FAILURES);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct tune_failure);
	__type(value, __u64);
} failures SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct tune_connection);
} connections SEC(".maps");

static __always_inline bool tune_ipv4(const struct tune_address *a)
{
	return !a->word[0] && !a->word[1] && a->word[2] == bpf_htonl(0xffff);
}

static __always_inline void tune_mapped(struct tune_address *a, __u32 ipv4)
{
	a->word[0] = 0;
	a->word[1] = 0;
	a->word[2] = bpf_htonl(0xffff);
	a->word[3] = ipv4;
}

/*
 * A field of a context. clang would merge the loads of two branches into one
 * at a computed offset, which the verifier refuses.
 */
static __always_inline __u32 tune_field(__u32 value)
{
	barrier_var(value);
	return value;
}

static __always_inline __u32 tune_popcount(__u32 x)
{
	x = x - ((x >> 1) & 0x55555555);
	x = (x & 0x33333333) + ((x >> 2) & 0x33333333);
	x = (x + (x >> 4)) & 0x0f0f0f0f;
	return x * 0x01010101 >> 24;
}

/* Leading zeros, without branches: the verifier would follow each. */
static __always_inline __u32 tune_clz(__u32 x)
{
	x |= x >> 1;
	x |= x >> 2;
	x |= x >> 4;
	x |= x >> 8;
	x |= x >> 16;
	return 32 - tune_popcount(x);
}

/* Number of leading bits that both addresses share, 0 to 128. */
static __always_inline __u32 tune_shared_bits(const struct tune_address *a,
					      const struct tune_address *b)
{
	__u32 x, bits = 0;
	int i;

#pragma unroll
	for (i = 0; i < 4; i++) {
		x = bpf_ntohl(a->word[i] ^ b->word[i]);
		if (x)
			return bits + tune_clz(x);
		bits += 32;
	}
	return bits;
}

/* murmur3's finalizer over a tuple: which of a rule's shares it falls into. */
static __always_inline __u32 tune_draw(const struct tune_request_key *t,
				       __u32 seed)
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

static __always_inline const struct tune_set *
tune_address_set(void *bank, const struct tune_address *address)
{
	struct tune_prefix prefix = { .prefixlen = 128, .address = *address };

	return bpf_map_lookup_elem(bank, &prefix);
}

static __always_inline const struct tune_set *tune_port_set(void *bank,
							     __u16 port)
{
	struct tune_port key = { .prefixlen = 16,
				 .port = { port >> 8, port & 0xff } };

	return bpf_map_lookup_elem(bank, &key);
}

static __always_inline const struct tune_active *tune_state(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&active, &zero);
}

static __always_inline const struct tune_ruleset *tune_rules(__u32 bank)
{
	__u32 zero = 0;
	void *inner = bpf_map_lookup_elem(&rulesets, &bank);

	return inner ? bpf_map_lookup_elem(inner, &zero) : NULL;
}

/* The rules in force, or NULL. */
static __always_inline const struct tune_ruleset *tune_current(__u32 *bank)
{
	const struct tune_active *state = tune_state();

	if (!state)
		return NULL;
	*bank = state->bank & 1;
	return tune_rules(*bank);
}

/* Keeps of a set what is in another; false if nothing is left. */
static __always_inline bool tune_narrow(struct tune_set *set,
					const struct tune_set *to)
{
	__u64 any = 0;
	int i;

	if (!to)
		return false;
#pragma unroll
	for (i = 0; i < TUNE_WORDS; i++) {
		set->word[i] &= to->word[i];
		any |= set->word[i];
	}
	return any;
}

/* What goes with the number of a rule that was found. */
#define TUNE_BY_TAG (1U << 31) /* the rule asks for the peer's tag */
#define TUNE_TAG_READ (1U << 30) /* the peer has sent one */
#define TUNE_RULE(found) ((found) & (TUNE_TAG_READ - 1))

/*
 * Finds the first rule that matches, 0 if there is none. A rule that asks for
 * a tag is passed over while q has none.
 */
static __noinline __u32 tune_find(const struct tune_question *q)
{
	const struct tune_set *tag = NULL;
	const struct tune_ruleset *r;
	__u32 bank = 0, bits, term;
	struct tune_set set;
	__u64 w, untagged;
	void *inner;
	int i;

	if (!q)
		return 0;
	r = tune_current(&bank);
	if (!r || !r->terms)
		return 0;
	set = r->role[q->role & 1];
	if (r->uses & TUNE_USE_REMOTE_PORT) {
		inner = bpf_map_lookup_elem(&remote_ports, &bank);
		if (!inner || !tune_narrow(&set, tune_port_set(inner, q->tuple.remote_port)))
			return 0;
	}
	if (r->uses & TUNE_USE_LOCAL_PORT) {
		inner = bpf_map_lookup_elem(&local_ports, &bank);
		if (!inner || !tune_narrow(&set, tune_port_set(inner, q->tuple.local_port)))
			return 0;
	}
	if (r->uses & TUNE_USE_SAME) {
		bits = tune_shared_bits(&q->tuple.remote, &q->tuple.local);
		/* clang knows its bounds, the verifier must see them checked. */
		barrier_var(bits);
		if (tune_ipv4(&q->tuple.remote)) {
			bits -= 96;
			barrier_var(bits);
			if (bits > 32 || !tune_narrow(&set, &r->same4[bits]))
				return 0;
		} else {
			if (bits > 128 || !tune_narrow(&set, &r->same6[bits]))
				return 0;
		}
	}
	if (r->uses & TUNE_USE_REMOTE) {
		inner = bpf_map_lookup_elem(&remotes, &bank);
		if (!inner || !tune_narrow(&set, tune_address_set(inner, &q->tuple.remote)))
			return 0;
	}
	if (r->uses & TUNE_USE_LOCAL) {
		inner = bpf_map_lookup_elem(&locals, &bank);
		if (!inner || !tune_narrow(&set, tune_address_set(inner, &q->tuple.local)))
			return 0;
	}
	if ((r->uses & TUNE_USE_TAG) && q->tag.length) {
		inner = bpf_map_lookup_elem(&peer_tags, &bank);
		if (inner)
			tag = bpf_map_lookup_elem(inner, &q->tag);
	}
	for (i = 0; i < TUNE_WORDS; i++) {
		w = set.word[i] & (r->untagged.word[i] | (tag ? tag->word[i] : 0));
		if (!w)
			continue;
		untagged = w & -w & r->untagged.word[i];
		term = i * 64;
		if (!(__u32)w) {
			term += 32;
			w >>= 32;
		}
		/* The lowest bit of the word. */
		term += 31 - tune_clz((__u32)w & -(__u32)w);
		barrier_var(term);
		if (term >= TUNE_TERMS)
			return 0;
		return r->rule[term] | (untagged ? 0 : TUNE_BY_TAG);
	}
	return 0;
}

static __always_inline struct tune_stats *tune_counts(__u32 rule, __u32 arm)
{
	struct tune_stats_key key = { .rule = rule, .arm = arm };

	return bpf_map_lookup_elem(&stats, &key);
}

static __always_inline void tune_failed(__u32 rule, __u16 option, long error)
{
	struct tune_failure key = { .rule = rule, .option = option,
				    .error = (__u16)-error };
	__u64 one = 1, *count = bpf_map_lookup_elem(&failures, &key);

	if (count)
		__sync_fetch_and_add(count, 1);
	else
		bpf_map_update_elem(&failures, &key, &one, BPF_NOEXIST);
}

/* 4 buckets for each power of two. */
static __always_inline void tune_histogram(__u64 *buckets, __u64 value)
{
	__u32 v = value > 0xffffffff ? 0xffffffff : (__u32)value;
	__u32 e, i = v;

	if (v >= 4) {
		e = 31 - tune_clz(v);
		i = (e - 1) * 4 + ((v >> (e - 2)) & 3);
	}
	if (i < TUNE_BUCKETS)
		__sync_fetch_and_add(&buckets[i], 1);
}

/* The phase bits of options that are for another family. */
static __always_inline __u16 tune_not_for(__u32 family)
{
	return family == AF_INET ? TUNE_PHASE_IPV6 : TUNE_PHASE_IPV4;
}

#endif
