// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Measures how long messages of chosen connections take in each stage from
 * sendmsg(2) to the acknowledgement.
 *
 * Hook: sockops of the cgroup, with BPF timestamping (Linux 6.15, net-next commit
 * 8cd8ed0bd8e7). The kernel runs the program at the end of each sendmsg(2) on a
 * chosen connection; for messages that the program then marks, also when they
 * reach the queueing discipline, the driver and the NIC, and when they are
 * acknowledged.
 * Decision: which connections and messages are sampled; packets are not changed.
 * Cost: one lookup in the socket's storage for each callback. A message that is
 * not chosen costs nothing more. A chosen one has four callbacks, of which the last
 * adds up to six times to histograms of this CPU. Other connections of the cgroup
 * cost one search when they are established, see match.bpf.h.
 */
#include "trace_stages.bpf.h"

#define SKBTX_APPLICATION                                        \
	(SKBTX_HW_TSTAMP | SKBTX_SW_TSTAMP | SKBTX_COMPLETION_TSTAMP | \
	 SKBTX_SCHED_TSTAMP)

TRACE_EXPORT(struct, trace_rule);
TRACE_EXPORT(struct, trace_group);
TRACE_EXPORT(struct, trace_listener);
TRACE_EXPORT(struct, trace_connection);
TRACE_EXPORT(struct, trace_stats);
TRACE_EXPORT(struct, trace_sample);
TRACE_EXPORT(struct, trace_minute);
TRACE_EXPORT(struct, trace_state);
TRACE_EXPORT(struct, trace_counts);
TRACE_EXPORT(enum, trace_stage);
TRACE_EXPORT(enum, trace_outcome);
TRACE_EXPORT(enum, trace_rule_flag);
TRACE_EXPORT(enum, trace_group_by);
TRACE_EXPORT(enum, trace_message_flag);

int bpf_sock_ops_enable_tx_tstamp(struct bpf_sock_ops_kern *skops,
				  __u64 flags) __ksym;

/*
 * Assigns the group of a connection at its first chosen message: tune has
 * assigned the connection's rule by then.
 */
__noinline int trace_assign_group(struct bpf_sock_ops *ctx)
{
	struct bpf_sock_ops_kern *kern = bpf_cast_to_kern_ctx(ctx);
	struct bpf_sock *sk = ctx->sk;
	struct trace_connection *c;
	struct match_tuple t = {};
	struct trace_rule *rule;
	__u64 cgroup = 0;

	if (!sk)
		return 0;
	c = bpf_sk_storage_get(&connections, sk, NULL, 0);
	if (!c)
		return 0;
	rule = trace_rule(c->rule);
	if (!rule || !match_sock_ops_tuple(ctx, &t))
		return 0;
	if (rule->group_by & TRACE_BY_CGROUP)
		cgroup = trace_cast(kern->sk, struct sock)->sk_cgrp_data.cgroup->kn->id;
	c->group = trace_group(c->rule, rule, &t, c->role, IPPROTO_TCP, cgroup,
			       bpf_sk_storage_get(&tuned, sk, NULL, 0));
	c->grouped = 1;
	return 0;
}

/*
 * Reports whether a packet must not be marked, because the application uses
 * timestamps of its own (SO_TIMESTAMPING). A packet has one key. With the key of
 * a message that the application did not mark, the application would get a
 * timestamp that it did not request, at once or after packets are merged.
 */
static __always_inline bool trace_left_to_application(struct trace_connection *c,
					 const struct tcp_sock *tp, bool marked,
					 bool own)
{
	if (!c->stamping)
		return false;
	if ((__s32)(tp->snd_una - c->application) >= 0) {
		c->stamping = 0;
		return false;
	}
	return !(marked && own);
}

/* Starts an empty ring again, whose first entry is probably cached. */
static __always_inline void trace_rewind(struct trace_connection *c)
{
	if (c->head != c->tail)
		return;
	c->head = c->tail = c->queue = TRACE_IN_FLIGHT;
	/* 0: no driver has reported a packet of the connection yet. */
	if (c->driver)
		c->driver = TRACE_IN_FLIGHT;
}

/*
 * Reports whether nothing is to be done for a message, and counts the message. It
 * reads nothing but the first cache line of the socket's storage, as most messages
 * end here. The message before a chosen one is not skipped, because the chosen one
 * starts after it.
 */
static __always_inline bool trace_skipped(struct trace_connection *c)
{
	if (c->skip < 2 || c->head != c->tail || c->watched)
		return false;
	c->skip--;
	c->skipped = 1;
	return true;
}

/*
 * Detects that the application uses timestamps of its own. From then on, no message
 * is skipped; skipped messages may have requested timestamps. An application that
 * enables, uses and disables timestamps within the skipped messages is not
 * detected.
 */
static __always_inline void trace_watch_application(struct trace_connection *c,
					 const struct sock *sk)
{
	c->watched = sk->sk_tsflags != 0;
	if (c->watched && c->skipped) {
		c->stamping = 1;
		c->application = c->write_seq;
	}
	c->skipped = 0;
}

/*
 * Handles the end of a sendmsg(2) on a chosen connection. The socket is locked.
 * The last byte of the message is in the last unsent skb or, if there is none,
 * in the last unacknowledged skb: the kernel passes that skb.
 */
__noinline int trace_sendmsg(struct bpf_sock_ops *ctx, struct trace_connection *c)
{
	struct bpf_sock_ops_kern *kern = bpf_cast_to_kern_ctx(ctx);
	bool chosen, within = false, marked;
	struct skb_shared_info *shared;
	struct trace_message *m, *last;
	struct bpf_tcp_sock *tcp;
	struct bpf_sock *bsk;
	struct trace_rule *rule;
	struct trace_stats *s;
	struct tcp_skb_cb *cb;
	struct tcp_sock *tp;
	struct sk_buff *skb;
	__u32 seq, length, key, left;
	struct sock *sk;
	__u64 now, started;
	__u8 nonagle;

	rule = c ? trace_rule(c->rule) : NULL;
	/* Another program may have enabled the callback. */
	if (!rule || !(rule->flags & TRACE_RULE_TX))
		return 0;
	started = c->started;
	c->started = 0;
	sk = trace_cast(kern->sk, struct sock);
	tp = trace_cast(kern->sk, struct tcp_sock);
	seq = tp->write_seq;
	length = seq - c->write_seq;
	c->write_seq = seq;
	now = rule->interval ? bpf_ktime_get_ns() : 0;
	chosen = trace_sampled(rule, &c->skip, &c->next, now);
	trace_watch_application(c, sk);
	if (!chosen && c->head == c->tail && !c->watched)
		return 0;
	if (!now)
		now = bpf_ktime_get_ns();
	skb = kern->skb;
	cb = trace_cast(skb->cb, struct tcp_skb_cb);
	shared = trace_shared(ctx);
	key = cb->seq + skb->len - 1;
	marked = (shared->tx_flags & SKBTX_APPLICATION) ||
		 (BPF_CORE_READ_BITFIELD(cb, txstamp_ack) & TSTAMP_ACK_SK);
	if (marked) {
		c->stamping = 1;
		c->application = key + 1;
	}
	last = trace_message(c, c->head - 1);
	if (!last)
		return 0;
	/* Whether the last byte of the previous message is in this skb, too. */
	if (c->head != c->tail && (__s32)(last->key - cb->seq) >= 0 && !last->queued)
		within = true;
	if (within && shared->tskey != last->key) {
		c->head--;
		trace_end_message(ctx, c, last, now, TRACE_OVERWRITTEN);
		within = false;
	}
	if (!chosen)
		return 0;
	if (!c->grouped)
		trace_assign_group(ctx);
	s = trace_stats(c->group);
	if (!s)
		return 0;
	__sync_fetch_and_add(&s->chosen, 1);
	if (trace_left_to_application(c, tp, marked, shared->tskey == key)) {
		__sync_fetch_and_add(&s->outcome[TRACE_APPLICATION], 1);
		return 0;
	}
	if (!within && c->head - c->tail >= TRACE_IN_FLIGHT) {
		__sync_fetch_and_add(&s->outcome[TRACE_FULL], 1);
		return 0;
	}
	if (bpf_sock_ops_enable_tx_tstamp(bpf_cast_to_kern_ctx(ctx), 0)) {
		__sync_fetch_and_add(&s->outcome[TRACE_REFUSED], 1);
		return 0;
	}
	if (within) {
		c->head--;
		trace_end_message(ctx, c, last, now, TRACE_OVERWRITTEN);
	}
	/* Fields of this view are read directly, without the checks of other pointers. */
	bsk = ctx->sk;
	tcp = bsk ? bpf_tcp_sock(bsk) : NULL;
	if (!tcp)
		return 0;
	trace_rewind(c);
	m = trace_message(c, c->head);
	if (!m)
		return 0;
	m->key = key;
	m->length = length;
	m->started = started;
	m->sent = now;
	m->queued = 0;
	m->requeued = 0;
	m->driver = 0;
	m->hardware = 0;
	m->cwnd = tcp->snd_cwnd;
	left = tcp->sacked_out + tcp->lost_out;
	m->in_flight = tcp->packets_out - left + tcp->retrans_out;
	m->outstanding = tcp->snd_nxt - tcp->snd_una;
	m->unsent = seq - tcp->snd_nxt;
	m->window = tp->snd_wnd;
	m->mss = tcp->mss_cache;
	m->srtt = tcp->srtt_us >> 3;
	m->min_rtt = tcp->rtt_min;
	m->retransmits = tcp->total_retrans;
	m->window_limited = trace_chrono(tp, TCP_CHRONO_RWND_LIMITED);
	m->buffer_limited = trace_chrono(tp, TCP_CHRONO_SNDBUF_LIMITED);
	m->pacing = sk->sk_pacing_rate;
	m->repeats = 0;
	m->flags = 0;
	m->seen = m->retransmits;
	if (sk->sk_pacing_status)
		m->flags |= TRACE_MESSAGE_PACED;
	nonagle = BPF_CORE_READ_BITFIELD(tp, nonagle);
	if (!(nonagle & TCP_NAGLE_OFF))
		m->flags |= TRACE_MESSAGE_NAGLE;
	if (nonagle & TCP_NAGLE_CORK)
		m->flags |= TRACE_MESSAGE_CORK;
	if (!m->unsent) {
		/* TCP's own send time, unless the pacer has set a future one. */
		m->queued = skb->skb_mstamp_ns < now ? skb->skb_mstamp_ns : now;
		m->flags |= TRACE_MESSAGE_UNMARKED;
		m->window_limited = 0;
		m->buffer_limited = 0;
	}
	c->head++;
	return 0;
}

__noinline int trace_closed(struct bpf_sock_ops *ctx, struct trace_connection *c)
{
	__u64 now = bpf_ktime_get_ns();
	__u32 i;

	for (i = 0; c && i < TRACE_IN_FLIGHT && c->head != c->tail; i++) {
		trace_abandon(ctx, c, trace_message(c, c->tail), now);
		c->tail++;
	}
	return 0;
}

/* Handles a callback of a message, or the end of a connection. */
static __always_inline void trace_callback(struct bpf_sock_ops *ctx, __u32 op)
{
	struct trace_connection *c;
	struct bpf_sock *sk = ctx->sk;

	c = sk ? bpf_sk_storage_get(&connections, sk, NULL, 0) : NULL;
	if (!c)
		return;
	switch (op) {
	case BPF_SOCK_OPS_TSTAMP_SENDMSG_CB:
		if (!trace_skipped(c))
			trace_sendmsg(ctx, c);
		break;
	case BPF_SOCK_OPS_TSTAMP_SCHED_CB:
		trace_queued(ctx, c);
		break;
	case BPF_SOCK_OPS_TSTAMP_SND_SW_CB:
		trace_driver(ctx, c);
		break;
	case BPF_SOCK_OPS_TSTAMP_SND_HW_CB:
		trace_hardware(ctx, c);
		break;
	case BPF_SOCK_OPS_TSTAMP_ACK_CB:
		trace_acked(ctx, c);
		break;
	case BPF_SOCK_OPS_STATE_CB:
		trace_closed(ctx, c);
		break;
	}
}

/* A function of its own: the code of other callbacks stays together. */
__noinline int trace_established_as(struct bpf_sock_ops *ctx, __u32 role)
{
	trace_established(ctx, role);
	return 0;
}

SEC("sockops")
int trace_sockops(struct bpf_sock_ops *ctx)
{
	__u32 op = ctx->op;

	if (op >= BPF_SOCK_OPS_TSTAMP_SCHED_CB &&
	    op <= BPF_SOCK_OPS_TSTAMP_SENDMSG_CB)
		trace_callback(ctx, op);
	else if (op == BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB)
		trace_established_as(ctx, MATCH_CONNECT);
	else if (op == BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB)
		trace_established_as(ctx, MATCH_ACCEPT);
	else if (op == BPF_SOCK_OPS_STATE_CB && ctx->args[1] == BPF_TCP_CLOSE)
		trace_callback(ctx, op);
	return 1;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
