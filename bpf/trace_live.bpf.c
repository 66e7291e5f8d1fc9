// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Chooses among connections that are open already, and stops tracing others.
 *
 * Hook: cgroup/setsockopt of the sockets' cgroup, attached only while the agent
 * visits the open connections. The agent duplicates the socket's descriptor and
 * calls setsockopt(2) with the level TRACE_LIVE_LEVEL.
 * Decision: the program executes such a request on the socket, and the kernel
 * ignores the call. All other calls reach the kernel.
 * Cost: one comparison for each other setsockopt(2) in the cgroup.
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
	/* The callback stays enabled: other programs may use it. */
	if (!on || bpf_getsockopt(sk, SOL_TCP, TCP_BPF_SOCK_OPS_CB_FLAGS,
				  &flags, sizeof(flags)))
		return;
	flags |= BPF_SOCK_OPS_STATE_CB_FLAG;
	bpf_setsockopt(sk, SOL_TCP, TCP_BPF_SOCK_OPS_CB_FLAGS, &flags,
		       sizeof(flags));
}

/*
 * Stops tracing a connection. Timestamps stay enabled on connections that are not
 * in the map, as another program enabled them.
 */
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
		/* Another program may have disabled the timestamps. */
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
		/* Any unacknowledged packet may carry the application's request. */
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
	/* Makes the kernel ignore the call. */
	ctx->optlen = -1;
	return 1;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
