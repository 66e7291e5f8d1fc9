// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Applies rules to connections that are open already.
 *
 * Hook of tune_live: cgroup/setsockopt of the sockets' cgroup, attached only
 * during "apply --live" and similar commands. The agent duplicates the socket's
 * descriptor and calls setsockopt(2) with the level TUNE_LIVE_LEVEL.
 * Decision: the program executes such a request on the socket, and the kernel
 * ignores the call. All other calls reach the kernel.
 * Cost: one comparison for each other setsockopt(2) in the cgroup.
 *
 * tune_decide is never attached. The agent runs it with BPF_PROG_TEST_RUN to find
 * the rule of a connection by the code and the maps of the other programs.
 */
#include "tune.bpf.h"

#include <linux/pkt_cls.h>

const volatile __u64 nonce = 0;

MATCH_EXPORT(enum, tune_live_name);
MATCH_EXPORT(struct, tune_live_request);

/* Changes the enabled callbacks. Fails before Linux 6.12, which has no such option. */
static __always_inline long tune_change_callbacks(struct bpf_sock *sk, __u32 set,
					   __u32 clear)
{
	__u32 flags = 0;
	long err;

	err = bpf_getsockopt(sk, SOL_TCP, TCP_BPF_SOCK_OPS_CB_FLAGS, &flags,
			     sizeof(flags));
	if (err)
		return err;
	flags = (flags | set) & ~clear;
	return bpf_setsockopt(sk, SOL_TCP, TCP_BPF_SOCK_OPS_CB_FLAGS, &flags,
			      sizeof(flags));
}

/* Reports whether a rule is in force and matches on the peer's tag. */
static __noinline bool tune_rule_needs_tag(__u32 id)
{
	const struct match_ruleset *r;
	__u32 bank = 0;
	int i;

	r = match_current(&bank);
	if (!r)
		return false;
	for (i = 0; i < MATCH_TERMS; i++) {
		if (i >= r->terms)
			break;
		if (r->rule[i] == id)
			return !(r->untagged.word[i / 64] >> (i % 64) & 1);
	}
	return false;
}

/* Disables the callbacks of a connection, and counts it as closed. */
static __always_inline void tune_detach_rule(struct bpf_sock *sk,
				       const struct tune_connection *c)
{
	__u32 id = c->rule, clear;
	struct tune_rule *rule = bpf_map_lookup_elem(&rules, &id);
	struct tune_stats *s;

	/* Trace also uses the state callback, which comes a few times only. */
	clear = BPF_SOCK_OPS_RTO_CB_FLAG | BPF_SOCK_OPS_RTT_CB_FLAG |
		BPF_SOCK_OPS_RETRANS_CB_FLAG;
	if (c->flags & TUNE_CONNECTION_TAGGING)
		clear |= BPF_SOCK_OPS_WRITE_HDR_OPT_CB_FLAG;
	tune_change_callbacks(sk, 0, clear);
	if (!rule || !(rule->flags & (TUNE_FLAG_LIVE | TUNE_FLAG_CLOSE)) ||
	    (c->flags & TUNE_CONNECTION_UNSEEN))
		return;
	s = tune_counts(id, c->arm);
	if (s)
		__sync_fetch_and_add(&s->closed, 1);
}

/*
 * Sets an option of a rule. Returns the number of options that were set, 0 or 1.
 * This is a global function, so that the verifier checks it once and not for
 * each option.
 */
__noinline int tune_set(struct bpf_sockopt *ctx, __u32 id, __u32 index)
{
	struct tune_rule *rule = bpf_map_lookup_elem(&rules, &id);
	struct bpf_sock *sk = ctx->sk;
	struct tune_option *o;
	long err;

	if (!rule || !sk || index >= TUNE_OPTIONS)
		return 0;
	o = &rule->option[index];
	if (!(o->phases & TUNE_PHASE_LIVE) ||
	    (o->phases & tune_other_family(sk->family)))
		return 0;
	if (o->level == TUNE_LEVEL_CONGESTION)
		err = bpf_setsockopt(sk, SOL_TCP, TCP_CONGESTION,
				     rule->congestion[o->value & 1],
				     sizeof(rule->congestion[0]));
	else
		err = bpf_setsockopt(sk, o->level, o->name, &o->value,
				     sizeof(o->value));
	if (err) {
		tune_count_failure(id, o->id, err);
		return 0;
	}
	return 1;
}

static __always_inline void tune_adopt(struct bpf_sockopt *ctx,
				       struct bpf_sock *sk, __u32 role)
{
	struct tune_connection fresh = {
		.role = role,
		.candidate = TUNE_CANDIDATES,
		.flags = TUNE_CONNECTION_ESTABLISHED | TUNE_CONNECTION_ADOPTED,
	}, *c;
	__u32 want = 0, id, done = 0;
	struct match_question q = { .role = role };
	struct bpf_tcp_sock *tp;
	struct tune_rule *rule;
	struct tune_stats *s;
	int i;

	if (!match_sock_tuple(sk, &q.tuple))
		return;
	id = MATCH_RULE(match_find(&q));
	rule = id ? bpf_map_lookup_elem(&rules, &id) : NULL;
	if (!rule)
		return;
	c = bpf_sk_storage_get(&connections, sk, NULL, 0);
	if (c) {
		/* The tag that led to the rule is not known any more. */
		if (c->rule == id || tune_rule_needs_tag(c->rule))
			return;
		tune_detach_rule(sk, c);
	}
	fresh.rule = id;
	fresh.counted = bpf_jiffies64();
	/* What the connection sent before does not count for the rule. */
	tp = bpf_tcp_sock(sk);
	if (tp) {
		fresh.segments = tp->data_segs_out;
		fresh.retransmits = tp->total_retrans;
		fresh.bytes = tp->bytes_acked;
	}
	if (rule->control && match_hash(&q.tuple, rule->seed) < rule->control)
		fresh.arm = TUNE_ARM_CONTROL;
	else if ((rule->flags & TUNE_FLAG_REACT) &&
		 match_hash(&q.tuple, ~rule->seed) <= rule->react_sample)
		fresh.flags |= TUNE_CONNECTION_SAMPLED;
	c = bpf_sk_storage_get(&connections, sk, &fresh, BPF_SK_STORAGE_GET_F_CREATE);
	if (!c)
		return;
	*c = fresh;
	if (rule->flags & (TUNE_FLAG_LIVE | TUNE_FLAG_CLOSE))
		want |= BPF_SOCK_OPS_STATE_CB_FLAG | BPF_SOCK_OPS_RTO_CB_FLAG;
	if (rule->flags & TUNE_FLAG_LIVE)
		want |= BPF_SOCK_OPS_RTT_CB_FLAG;
	if (c->flags & TUNE_CONNECTION_SAMPLED)
		want |= BPF_SOCK_OPS_RTO_CB_FLAG | BPF_SOCK_OPS_RETRANS_CB_FLAG;
	if (want && tune_change_callbacks(sk, want, 0))
		c->flags |= TUNE_CONNECTION_UNSEEN;
	s = tune_counts(id, fresh.arm);
	if (s) {
		__sync_fetch_and_add(&s->connections, 1);
		__sync_fetch_and_add(&s->established, 1);
		__sync_fetch_and_add(&s->adopted, 1);
		/* Otherwise the rule would never be forgotten. */
		if (c->flags & TUNE_CONNECTION_UNSEEN)
			__sync_fetch_and_add(&s->closed, 1);
	}
	if (fresh.arm == TUNE_ARM_CONTROL)
		return;
	for (i = 0; i < TUNE_OPTIONS; i++) {
		if (i >= rule->options)
			break;
		done += tune_set(ctx, id, i);
	}
	if (s)
		__sync_fetch_and_add(&s->options, done);
}

static __always_inline void tune_forget(struct bpf_sock *sk)
{
	struct tune_connection *c;

	c = bpf_sk_storage_get(&connections, sk, NULL, 0);
	if (!c)
		return;
	tune_detach_rule(sk, c);
	bpf_sk_storage_delete(&connections, sk);
}

static __always_inline long tune_listener(struct bpf_sock *sk)
{
	const struct match_active *state = match_state();
	int one = 1;

	if (!state)
		return 0;
	if (state->used & MATCH_USE_TAG)
		bpf_setsockopt(sk, SOL_TCP, TCP_SAVE_SYN, &one, sizeof(one));
	if (state->used & TUNE_USE_WRITE)
		return tune_change_callbacks(sk, BPF_SOCK_OPS_WRITE_HDR_OPT_CB_FLAG, 0);
	return 0;
}

SEC("cgroup/setsockopt")
int tune_live(struct bpf_sockopt *ctx)
{
	struct tune_live_request *request = ctx->optval, r;
	struct bpf_sock *sk = ctx->sk;
	__u32 level, name;

	if (ctx->level != TUNE_LIVE_LEVEL)
		return 1;
	if (!sk || (void *)(request + 1) > ctx->optval_end)
		return 1;
	r = *request;
	if (r.nonce != nonce)
		return 1;
	level = r.level;
	name = r.name;
	switch (ctx->optname) {
	case TUNE_LIVE_ADOPT:
		tune_adopt(ctx, sk, r.role & 1);
		break;
	case TUNE_LIVE_SET:
		if (bpf_setsockopt(sk, level, name, &r.value, sizeof(r.value)))
			return 0;
		break;
	case TUNE_LIVE_FORGET:
		tune_forget(sk);
		break;
	case TUNE_LIVE_LISTEN:
		if (tune_listener(sk))
			return 0;
		break;
	default:
		return 1;
	}
	/* Makes the kernel ignore the call. */
	ctx->optlen = -1;
	return 1;
}

SEC("tc")
int tune_decide(struct __sk_buff *skb)
{
	struct match_question q;

	/* BPF_PROG_TEST_RUN requires an Ethernet header of 14 bytes. */
	if (bpf_skb_load_bytes(skb, 14, &q, sizeof(q)))
		return 0;
	return MATCH_RULE(match_find(&q));
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
