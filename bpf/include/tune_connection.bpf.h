/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The rule and the state of a connection, which the storage of its socket has.
 */
#ifndef SOCKEYE_TUNE_CONNECTION_BPF_H
#define SOCKEYE_TUNE_CONNECTION_BPF_H

#include "tune.bpf.h"

static __always_inline struct tune_connection *
tune_connection(struct bpf_sock_ops *ctx)
{
	struct bpf_sock *sk = ctx->sk;

	return sk ? bpf_sk_storage_get(&connections, sk, NULL, 0) : NULL;
}

static __always_inline struct tune_rule *tune_rule(__u32 id)
{
	return bpf_map_lookup_elem(&rules, &id);
}

static __always_inline bool tune_is_control(const struct tune_rule *rule,
					 const struct match_tuple *t)
{
	return rule->control && match_hash(t, rule->seed) < rule->control;
}

static __always_inline void tune_set_callbacks(struct bpf_sock_ops *ctx, __u32 set,
				       __u32 clear)
{
	__u32 now = ctx->bpf_sock_ops_cb_flags, then = (now | set) & ~clear;

	if (then != now)
		bpf_sock_ops_cb_flags_set(ctx, then);
}

static __always_inline void tune_count_options(__u32 rule, __u32 arm, __u32 options)
{
	struct tune_stats *s;

	if (!options)
		return;
	s = tune_counts(rule, arm);
	if (s)
		__sync_fetch_and_add(&s->options, options);
}

/*
 * Returns the retransmissions of data. The kernel's counter includes those of the
 * handshake.
 */
static __always_inline __u32 tune_retransmits(struct bpf_sock_ops *ctx,
					      const struct tune_connection *c)
{
	if (!(c->flags & TUNE_CONNECTION_ESTABLISHED))
		return 0;
	return ctx->total_retrans - c->handshake;
}

/* Returns the callbacks that a rule needs for an open connection. */
static __always_inline __u32 tune_callbacks_of(const struct tune_rule *rule,
					 const struct tune_connection *c)
{
	__u32 want = 0;

	if (rule->flags & (TUNE_FLAG_LIVE | TUNE_FLAG_CLOSE))
		want |= BPF_SOCK_OPS_STATE_CB_FLAG | BPF_SOCK_OPS_RTO_CB_FLAG;
	if ((rule->flags & TUNE_FLAG_LIVE) ||
	    (c->flags & TUNE_CONNECTION_LEARNING))
		want |= BPF_SOCK_OPS_RTT_CB_FLAG;
	if (c->flags & TUNE_CONNECTION_SAMPLED)
		want |= BPF_SOCK_OPS_RTO_CB_FLAG | BPF_SOCK_OPS_RETRANS_CB_FLAG;
	if (c->flags & TUNE_CONNECTION_TAGGING)
		want |= BPF_SOCK_OPS_WRITE_HDR_OPT_CB_FLAG | BPF_SOCK_OPS_RTO_CB_FLAG;
	return want;
}

/* Stores the rule of a connection with the socket. Returns NULL on failure. */
static __always_inline struct tune_connection *
tune_init_connection(struct bpf_sock_ops *ctx, const struct match_tuple *t,
	   __u32 id, struct tune_rule *rule, __u32 role)
{
	struct tune_connection fresh = {
		.rule = id,
		.role = role,
		.arm = tune_is_control(rule, t) ? TUNE_ARM_CONTROL : TUNE_ARM_TREATED,
		.candidate = TUNE_CANDIDATES,
		.counted = bpf_jiffies64(),
	}, *c;
	struct bpf_sock *sk = ctx->sk;
	struct tune_stats *s;

	if (!sk)
		return NULL;
	if (fresh.arm == TUNE_ARM_TREATED) {
		if ((rule->flags & TUNE_FLAG_REACT) &&
		    match_hash(t, ~rule->seed) <= rule->react_sample)
			fresh.flags |= TUNE_CONNECTION_SAMPLED;
		if (rule->tag.length)
			fresh.flags |= TUNE_CONNECTION_TAGGING;
	}
	c = bpf_sk_storage_get(&connections, sk, &fresh, BPF_SK_STORAGE_GET_F_CREATE);
	if (!c)
		return NULL;
	/* A rule that replaces another one starts with new state. */
	if (c->rule != id) {
		s = tune_counts(c->rule, c->arm);
		if (s)
			__sync_fetch_and_add(&s->closed, 1);
		if (c->flags & TUNE_CONNECTION_TAGGING)
			tune_set_callbacks(ctx, 0, BPF_SOCK_OPS_WRITE_HDR_OPT_CB_FLAG);
	}
	*c = fresh;
	s = tune_counts(id, fresh.arm);
	if (s)
		__sync_fetch_and_add(&s->connections, 1);
	return c;
}

#endif
