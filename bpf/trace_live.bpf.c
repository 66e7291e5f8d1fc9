// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Chooses connections that were open before, and lets go of those that are not
 * traced any more. The agent takes such a socket's descriptor and calls
 * setsockopt(2) with a level of Sockeye's own; this program, attached to the
 * socket's cgroup for that time only, does what is asked on the socket itself
 * and keeps the call from the kernel. All other calls pass, at the cost of one
 * comparison.
 */
#include "trace.bpf.h"

const volatile __u64 nonce = 0;

TRACE_EXPORT(enum, trace_live_name);
TRACE_EXPORT(struct, trace_live_request);

static __always_inline void trace_set_timestamping(struct bpf_sock *sk, int on)
{
	__u32 flags = 0;

	if (!timestamps)
		return;
	bpf_setsockopt(sk, SOL_SOCKET, SK_BPF_CB_FLAGS, &on, sizeof(on));
	/* The callback itself is left on: others may ask for it, too. */
	if (!on || bpf_getsockopt(sk, SOL_TCP, TCP_BPF_SOCK_OPS_CB_FLAGS,
				  &flags, sizeof(flags)))
		return;
	flags |= BPF_SOCK_OPS_STATE_CB_FLAG;
	bpf_setsockopt(sk, SOL_TCP, TCP_BPF_SOCK_OPS_CB_FLAGS, &flags,
		       sizeof(flags));
}

/* Whoever else has switched timestamps on for a connection keeps them. */
static __always_inline void trace_forget(struct bpf_sock *sk)
{
	struct trace_connection *c;
	struct trace_rule *rule;
	struct trace_stats *s;

	c = bpf_sk_storage_get(&connections, sk, NULL, 0);
	if (!c)
		return;
	s = trace_stats(c->group);
	if (s)
		__sync_fetch_and_add(&s->outcome[TRACE_UNACKNOWLEDGED],
				     c->head - c->tail);
	rule = trace_rule(c->rule);
	if (rule && (rule->flags & TRACE_RULE_TX))
		trace_set_timestamping(sk, 0);
	bpf_sk_storage_delete(&connections, sk);
}

static __always_inline void trace_adopt(struct bpf_sock *sk, __u32 role)
{
	struct match_question q = { .role = role };
	struct trace_connection *c;
	struct trace_rule *rule;
	struct bpf_tcp_sock *tp;
	__u32 id;

	c = bpf_sk_storage_get(&connections, sk, NULL, 0);
	if (c) {
		/* Another may have switched it off. */
		rule = trace_rule(c->rule);
		if (rule && (rule->flags & TRACE_RULE_TX))
			trace_set_timestamping(sk, SK_BPF_CB_TX_TIMESTAMPING);
		return;
	}
	if (!match_sock_tuple(sk, &q.tuple))
		return;
	id = trace_choose_rule(&q);
	rule = id ? trace_rule(id) : NULL;
	tp = rule ? bpf_tcp_sock(sk) : NULL;
	c = tp ? bpf_sk_storage_get(&connections, sk, NULL, BPF_SK_STORAGE_GET_F_CREATE) : NULL;
	if (!c)
		return;
	trace_init_connection(c, id, rule, role);
	c->write_seq = tp->snd_nxt;
	if (timestamps && bpf_rdonly_cast) {
		c->write_seq = trace_cast(sk, struct tcp_sock)->write_seq;
		/* Any packet may have a stamp of the application's. */
		c->stamping = trace_cast(sk, struct sock)->sk_tsflags != 0;
		c->application = c->write_seq;
	}
	if (rule->flags & TRACE_RULE_TX)
		trace_set_timestamping(sk, SK_BPF_CB_TX_TIMESTAMPING);
}

SEC("cgroup/setsockopt")
int trace_live(struct bpf_sockopt *ctx)
{
	struct trace_live_request *request = ctx->optval, r;
	struct bpf_sock *sk = ctx->sk;

	if (ctx->level != TRACE_LIVE_LEVEL)
		return 1;
	if (!sk || (void *)(request + 1) > ctx->optval_end)
		return 1;
	r = *request;
	if (r.nonce != nonce)
		return 1;
	switch (ctx->optname) {
	case TRACE_LIVE_ADOPT:
		trace_adopt(sk, r.role & 1);
		break;
	case TRACE_LIVE_FORGET:
		trace_forget(sk);
		break;
	default:
		return 1;
	}
	/* The kernel is not to see the call. */
	ctx->optlen = -1;
	return 1;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
