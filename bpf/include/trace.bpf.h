/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Chooses connections and messages, finds the groups of connections and the buckets
 * of times.
 */
#ifndef SOCKEYE_TRACE_BPF_H
#define SOCKEYE_TRACE_BPF_H

#include "match.bpf.h"
#include "trace.h"
#include "tune.h"

/* False on kernels without BPF timestamping: connections are only chosen. */
const volatile bool timestamps = true;

TRACE_EXPORT(enum, trace_limit);

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, TRACE_RULES);
	__type(key, __u32);
	__type(value, struct trace_rule);
} rules SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1);
	__type(key, struct trace_group);
	__type(value, __u32);
} groups SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, TRACE_SERVICES);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct trace_listener);
	__type(value, __u32);
} services SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct trace_connection);
} connections SEC(".maps");

/*
 * The map "connections" of the cgroup's tuning, or an empty map: see pins.go in
 * internal/bpf.
 */
struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct tune_connection);
} tuned SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct trace_state);
} state SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct trace_counts);
} counts SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct trace_stats);
} stats SEC(".maps");

struct trace_lock {
	struct bpf_spin_lock lock;
};

/* Locks in place of atomic operations that Linux before 5.12 lacks. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, TRACE_LOCKS);
	__type(key, __u32);
	__type(value, struct trace_lock);
} locks SEC(".maps");

#define trace_cast(pointer, type) \
	((type *)bpf_rdonly_cast(pointer, bpf_core_type_id_kernel(type)))

static __always_inline struct trace_state *trace_state(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&state, &zero);
}

static __always_inline struct trace_counts *trace_counts(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&counts, &zero);
}

static __always_inline struct trace_stats *trace_stats(__u32 group)
{
	return bpf_map_lookup_elem(&stats, &group);
}

/* Returns a rule by its number, which counts from 1. */
static __always_inline struct trace_rule *trace_rule(__u32 id)
{
	__u32 index = id - 1;

	return bpf_map_lookup_elem(&rules, &index);
}

static __always_inline __u32 trace_bucket(__u64 v)
{
	__u32 high = v >> 32, e, i;

	if (v < 256)
		return v >> 4;
	e = high ? 63 - match_clz(high) : 31 - match_clz((__u32)v);
	i = 16 + (e - 8) * 16 + ((v >> (e - 4)) & 15);
	return i < TRACE_BUCKETS ? i : TRACE_BUCKETS - 1;
}

/* Reports whether a message is chosen. *skip counts those to skip before. */
static __always_inline bool trace_sampled(const struct trace_rule *rule,
				       __u32 *skip, __u64 *next, __u64 now)
{
	if (rule->interval) {
		if (now < *next)
			return false;
		*next = now + rule->interval;
		return true;
	}
	if (*skip) {
		(*skip)--;
		return false;
	}
	/* Random gaps of 1 to 2n - 1, so that a period of the application does not bias. */
	if (rule->messages > 1)
		*skip = bpf_get_prandom_u32() % (2 * rule->messages - 1);
	return true;
}

/*
 * Returns how many messages to skip before the first: the lower of two random
 * values, as if sampling had started long before. A fixed start would choose
 * messages of short connections too often.
 */
static __always_inline __u32 trace_first_gap(const struct trace_rule *rule)
{
	__u32 n = 2 * rule->messages - 1, a, b;

	if (rule->messages <= 1)
		return 0;
	a = bpf_get_prandom_u32() % (n + 1);
	b = bpf_get_prandom_u32() % n;
	if (b >= a)
		b++;
	return a < b ? a : b;
}

static __always_inline __u32 trace_service(const struct match_tuple *t,
					   __u8 protocol)
{
	struct trace_listener key = { .address = t->local,
				      .port = t->local_port,
				      .protocol = protocol };
	__u32 *id = bpf_map_lookup_elem(&services, &key);

	if (!id) {
		__builtin_memset(&key.address, 0, sizeof(key.address));
		id = bpf_map_lookup_elem(&services, &key);
	}
	return id ? *id : 0;
}

/*
 * Returns the index of a group, which is created if necessary, or that of the
 * group "other" if the rule has no group left. cgroup is the ID of the cgroup; t
 * is of a connection or of a datagram.
 */
static __always_inline __u32 trace_group(__u32 id, struct trace_rule *rule,
					 const struct match_tuple *t,
					 __u32 role, __u8 protocol,
					 __u64 cgroup,
					 const struct tune_connection *tune)
{
	struct trace_group key = { .rule = id, .protocol = protocol };
	__u32 *found, n, index, bits, zero = 0;
	struct trace_lock *lock;
	int i;

	if (rule->group_by & TRACE_BY_REMOTE) {
		key.ipv4 = match_ipv4(&t->remote);
		bits = key.ipv4 ? rule->bits4 : rule->bits6;
#pragma unroll
		for (i = 0; i < 4; i++) {
			__u32 have = bits > 32 * i ? bits - 32 * i : 0;
			__u32 mask = have >= 32 ? ~0U : have ? ~0U << (32 - have) : 0;

			key.remote.word[i] = t->remote.word[i] & bpf_htonl(mask);
		}
	}
	if (rule->group_by & TRACE_BY_PORT)
		key.port = role & 1 ? t->local_port : t->remote_port;
	if (rule->group_by & TRACE_BY_SERVICE)
		key.service = trace_service(t, protocol);
	if (rule->group_by & TRACE_BY_CGROUP)
		key.cgroup = cgroup;
	if (tune && (rule->group_by & TRACE_BY_RULE))
		key.tune_rule = tune->rule;
	if (tune && (rule->group_by & TRACE_BY_ARM))
		key.arm = tune->arm + 1;
	found = bpf_map_lookup_elem(&groups, &key);
	if (found)
		return *found;
	if (rule->used >= rule->groups)
		return rule->first;
	lock = bpf_map_lookup_elem(&locks, &zero);
	if (!lock)
		return rule->first;
	bpf_spin_lock(&lock->lock);
	n = rule->used;
	if (n < rule->groups)
		rule->used = n + 1;
	bpf_spin_unlock(&lock->lock);
	if (n >= rule->groups)
		return rule->first;
	index = rule->first + 1 + n;
	if (bpf_map_update_elem(&groups, &key, &index, BPF_NOEXIST)) {
		found = bpf_map_lookup_elem(&groups, &key);
		return found ? *found : rule->first;
	}
	return index;
}

static __always_inline __u32 trace_write_seq(struct bpf_sock_ops *ctx)
{
	struct bpf_sock_ops_kern *kern = bpf_cast_to_kern_ctx(ctx);

	return trace_cast(kern->sk, struct tcp_sock)->write_seq;
}

/*
 * Returns the rule of a connection that is chosen, otherwise 0. The choice is a
 * hash of the tuple, so that the result is always the same.
 */
static __always_inline __u32 trace_choose_rule(const struct match_question *q)
{
	__u32 id = MATCH_RULE(match_find(q));
	struct trace_state *st = trace_state();
	struct trace_rule *rule;

	rule = id ? trace_rule(id) : NULL;
	if (!rule || !st || !(rule->flags & TRACE_RULE_TCP))
		return 0;
	if (rule->connections > 1 &&
	    match_hash(&q->tuple, st->seed) % rule->connections)
		return 0;
	return id;
}

/* Initializes the state of a connection: a socket can be connected again. */
static __always_inline void trace_init_connection(struct trace_connection *c, __u32 id,
					const struct trace_rule *rule,
					__u32 role)
{
	c->rule = id;
	c->role = role;
	c->grouped = 0;
	c->stamping = 0;
	c->watched = 0;
	c->skipped = 0;
	c->skip = trace_first_gap(rule);
	c->rx_skip = trace_first_gap(rule);
}

/* Chooses or skips a connection that is established now. */
static __always_inline void trace_established(struct bpf_sock_ops *ctx,
					      __u32 role)
{
	struct match_question q = { .role = role };
	int on = SK_BPF_CB_TX_TIMESTAMPING;
	struct trace_connection *c;
	struct trace_rule *rule;
	struct bpf_sock *sk;
	__u32 id;

	if (!match_sock_ops_tuple(ctx, &q.tuple))
		return;
	id = trace_choose_rule(&q);
	rule = id ? trace_rule(id) : NULL;
	sk = ctx->sk;
	if (!rule || !sk)
		return;
	c = bpf_sk_storage_get(&connections, sk, NULL, BPF_SK_STORAGE_GET_F_CREATE);
	if (!c)
		return;
	trace_init_connection(c, id, rule, role);
	if (!timestamps || !(rule->flags & TRACE_RULE_TX))
		return;
	/* Data that was written before, as with TCP Fast Open, is not a message. */
	if (bpf_cast_to_kern_ctx && bpf_rdonly_cast)
		c->write_seq = trace_write_seq(ctx);
	bpf_setsockopt(ctx, SOL_SOCKET, SK_BPF_CB_FLAGS, &on, sizeof(on));
	bpf_sock_ops_cb_flags_set(ctx, ctx->bpf_sock_ops_cb_flags |
					       BPF_SOCK_OPS_STATE_CB_FLAG);
}

#endif
