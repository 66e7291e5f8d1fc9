/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The stages of a sent message: the queueing discipline, the driver, the NIC and
 * the acknowledgement. Each has a callback, which finds the message by the key in
 * its packet.
 */
#ifndef SOCKEYE_TRACE_STAGES_BPF_H
#define SOCKEYE_TRACE_STAGES_BPF_H

#include "trace_samples.bpf.h"

void bpf_local_irq_save(unsigned long *flags) __ksym;
void bpf_local_irq_restore(unsigned long *flags) __ksym;

/*
 * Returns how long the connection has been in a state of enum tcp_chrono until
 * now, in jiffies (tcp_get_info_chrono_stats in net/ipv4/tcp.c, Linux 6.18).
 */
static __always_inline __u32 trace_chrono(const struct tcp_sock *tp,
					   __u32 chrono)
{
	__u32 sum = tp->chrono_stat[chrono - 1];

	if (BPF_CORE_READ_BITFIELD(tp, chrono_type) == chrono)
		sum += (__u32)bpf_jiffies64() - tp->chrono_start;
	return sum;
}

/* Returns the shared info of the callback's skb, which has the key. */
static __always_inline struct skb_shared_info *trace_shared(struct bpf_sock_ops *ctx)
{
	struct bpf_sock_ops_kern *kern = bpf_cast_to_kern_ctx(ctx);
	struct sk_buff *skb = kern->skb;

	return trace_cast(skb->head + skb->end, struct skb_shared_info);
}

/*
 * Returns the distance from the tail to the last message whose key is not after
 * the given one; TRACE_IN_FLIGHT: none. Keys of messages in flight ascend.
 */
__noinline int trace_search(struct trace_connection *c, __u32 key)
{
	__u32 i, n, found = TRACE_IN_FLIGHT;
	struct trace_message *m;

	if (!c)
		return found;
	n = c->tail;
	for (i = 0; i < TRACE_IN_FLIGHT; i++, n++) {
		if (n == c->head)
			break;
		m = trace_message(c, n);
		if (!m || (__s32)(m->key - key) > 0)
			break;
		found = i;
	}
	return found;
}

/*
 * Returns the message in flight that has a key or, if the key belongs to no
 * message, the last message before the key; NULL: none. The expected message is
 * checked before the others.
 */
static __always_inline struct trace_message *
trace_find(struct trace_connection *c, __u32 key, __u32 expected,
		__u32 *found)
{
	struct trace_message *m = trace_message(c, expected);
	__u32 i;

	*found = expected;
	if (m && (__s32)(expected - c->tail) >= 0 &&
	    (__s32)(c->head - expected) > 0 && m->key == key)
		return m;
	i = trace_search(c, key);
	if (i >= TRACE_IN_FLIGHT)
		return NULL;
	*found = c->tail + i;
	return trace_message(c, *found);
}

/* A message leaves for the first time. */
__noinline int trace_leave(struct bpf_sock_ops *ctx, struct trace_message *m,
			  __u64 now)
{
	struct bpf_sock_ops_kern *kern = bpf_cast_to_kern_ctx(ctx);
	struct tcp_sock *tp = trace_cast(kern->sk, struct tcp_sock);

	if (!m)
		return 0;
	m->window_limited = trace_chrono(tp, TCP_CHRONO_RWND_LIMITED) - m->window_limited;
	m->buffer_limited = trace_chrono(tp, TCP_CHRONO_SNDBUF_LIMITED) - m->buffer_limited;
	m->seen = tp->total_retrans;
	m->queued = now;
	return 0;
}

static __always_inline void trace_count_repeat(struct trace_message *m,
					   bool retransmitted, __u64 now)
{
	if (retransmitted)
		m->repeats++;
	if (!m->driver && !(m->flags & TRACE_MESSAGE_UNMARKED))
		m->requeued = now;
}

/*
 * Counts the repetition of a message that is in the packet of a later one.
 * Returns 0 if the message is not.
 */
__noinline int trace_repeat_coalesced(struct trace_message *m, bool retransmitted, __u64 now)
{
	if (!m || !(m->flags & TRACE_MESSAGE_JOINED))
		return 0;
	trace_count_repeat(m, retransmitted, now);
	return 1;
}

/*
 * Records that a message reaches the queueing discipline in the packet of a later
 * one, which starts at the sequence number start. Returns 0 if the message has
 * reached the queueing discipline before.
 */
__noinline int trace_leave_coalesced(struct bpf_sock_ops *ctx, struct trace_message *m,
			    __u32 start, __u64 now)
{
	if (!m || m->queued)
		return 0;
	if ((__s32)(m->key - start) < 0) {
		m->flags |= TRACE_MESSAGE_PARTED;
	} else {
		m->flags |= TRACE_MESSAGE_JOINED;
		trace_leave(ctx, m, now);
	}
	return 1;
}

/*
 * Returns the first sequence number of the packet that is sent. If the packet is
 * no plain TCP segment of the connection, as in a tunnel, the result is the first
 * unacknowledged sequence number.
 */
static __always_inline __u32 trace_packet_seq(struct bpf_sock_ops *ctx,
					  struct sk_buff *skb,
					  const struct tcp_sock *tp)
{
	const struct tcphdr *th = trace_cast(skb->head + skb->transport_header,
					     struct tcphdr);
	__u32 seq = bpf_ntohl(th->seq);

	if (bpf_ntohs(th->source) != ctx->local_port ||
	    bpf_ntohs(th->dest) != bpf_ntohl(ctx->remote_port) ||
	    (__s32)(seq - tp->snd_una) < 0 || (__s32)(seq - tp->snd_nxt) > 0)
		return tp->snd_una;
	return seq;
}

/*
 * A marked packet reaches the queueing discipline. Packets are sent in the order
 * of their keys. So an earlier message without a time stamp has lost its key to
 * this packet, because both packets were merged (tcp_grow_skb and
 * tcp_skb_collapse_tstamp, Linux 6.18). The key may also be one of the
 * application, or of another program. TCP may split a packet again; the part
 * without a key is sent first, without a callback: no time is known of a message
 * that ends in that part. If only a part of a packet is moved to the one before
 * it, its key stays behind (tcp_grow_skb), and may then be that of a byte before
 * the packet.
 */
__noinline int trace_queued(struct bpf_sock_ops *ctx, struct trace_connection *c)
{
	struct bpf_sock_ops_kern *kern = bpf_cast_to_kern_ctx(ctx);
	struct trace_message *m;
	__u32 i, n, found = 0;
	bool first, retransmitted = false, refused = false;
	struct tcp_sock *tp;
	__u32 key, start;
	__u64 now;

	if (!c)
		return 0;
	key = trace_shared(ctx)->tskey;
	m = trace_find(c, key, c->queue, &found);
	if (!m)
		return 0;
	now = bpf_ktime_get_ns();
	tp = trace_cast(kern->sk, struct tcp_sock);
	start = trace_packet_seq(ctx, kern->skb, tp);
	first = !m->queued;
	if (first && (__s32)(m->key - start) < 0) {
		m->flags |= TRACE_MESSAGE_PARTED;
	} else if (first) {
		trace_leave(ctx, m, now);
		if (m->key != key)
			m->flags |= TRACE_MESSAGE_JOINED;
		c->queue = found + 1;
	} else if (m->key != key) {
		return 0;
	} else {
		retransmitted = m->seen != (__u8)tp->total_retrans;
		/* TCP sends a packet again that the host has dropped. */
		refused = (__s32)(tp->snd_nxt - m->key) <= 0 &&
			  c->segments != tp->data_segs_out;
		/* Otherwise a stacked device has a queue of its own. */
		if (!retransmitted && !refused)
			return 0;
		m->seen = tp->total_retrans;
		trace_count_repeat(m, retransmitted, now);
	}
	c->segments = tp->data_segs_out;
	for (i = 1; i < TRACE_IN_FLIGHT; i++) {
		n = found - i;
		m = trace_message(c, n);
		if (!m || (__s32)(n - c->tail) < 0)
			break;
		if (first ? !trace_leave_coalesced(ctx, m, start, now) :
			    !trace_repeat_coalesced(m, retransmitted, now))
			break;
	}
	return 0;
}

__noinline int trace_driver(struct bpf_sock_ops *ctx, struct trace_connection *c)
{
	__u32 i, n, key, found = 0;
	struct trace_message *m;
	__u64 now;

	if (!c)
		return 0;
	key = trace_shared(ctx)->tskey;
	m = trace_find(c, key, c->driver, &found);
	if (!m || !m->queued || m->driver)
		return 0;
	if (m->key != key && !(m->flags & TRACE_MESSAGE_JOINED))
		return 0;
	/* The driver may have received the packet before it was marked. */
	if ((m->flags & TRACE_MESSAGE_UNMARKED) && m->repeats)
		return 0;
	now = bpf_ktime_get_ns();
	m->driver = now;
	c->driver = found + 1;
	for (i = 1; i < TRACE_IN_FLIGHT; i++) {
		n = found - i;
		m = trace_message(c, n);
		if (!m || (__s32)(n - c->tail) < 0 ||
		    !(m->flags & TRACE_MESSAGE_JOINED) || m->driver)
			break;
		m->driver = now;
	}
	return 0;
}

/*
 * The NIC reports a time stamp. The time stamp is used if the NIC's clock is
 * synchronized to the host's, as by phc2sys(8). Otherwise the time of the report
 * is an upper bound.
 */
__noinline int trace_hardware(struct bpf_sock_ops *ctx, struct trace_connection *c)
{
	struct trace_state *st = trace_state();
	struct skb_shared_info *shared;
	struct trace_message *m;
	__u64 now, stamp;
	__u32 found = 0;

	if (!c || !st)
		return 0;
	shared = trace_shared(ctx);
	m = trace_find(c, shared->tskey, c->tail, &found);
	if (!m || m->key != shared->tskey || !m->driver || m->hardware)
		return 0;
	now = bpf_ktime_get_ns();
	stamp = shared->hwtstamps.hwtstamp - st->clock;
	if (stamp >= m->driver && stamp <= now)
		now = stamp;
	m->hardware = now - m->driver + 1;
	return 0;
}

/* The buckets of a message's stages; TRACE_BUCKETS: the stage is not known. */
struct trace_times {
	__u64 ns[TRACE_STAGES];
	__u32 bucket[TRACE_STAGES];
};

static __always_inline void trace_set_time(struct trace_times *t, __u32 stage,
					   __u64 from, __u64 to)
{
	__u64 ns = to > from ? to - from : 0;

	t->ns[stage] = ns;
	t->bucket[stage] = from && to ? trace_bucket(ns) : TRACE_BUCKETS;
}

/* A global function: the verifier follows its branches once. */
__noinline int trace_find_times(struct trace_times *t,
				const struct trace_message *m, __u64 now)
{
	if (!t || !m)
		return 0;
	trace_set_time(t, TRACE_SEND, m->started, m->sent);
	trace_set_time(t, TRACE_STACK, m->sent, m->queued);
	/* A dropped packet waited only in the queue that it left. */
	trace_set_time(t, TRACE_QDISC, m->requeued ? m->requeued : m->queued, m->driver);
	trace_set_time(t, TRACE_NIC, m->hardware ? 1 : 0, m->hardware);
	trace_set_time(t, TRACE_NETWORK, m->driver, now);
	trace_set_time(t, TRACE_TOTAL, m->started ? m->started : m->sent, now);
	return 0;
}

/*
 * Counts an acknowledged message, and adds its stages to the histograms. A process
 * and an interrupt of a CPU may use the same group: interrupts are disabled, which
 * takes less time than an atomic operation for each number.
 */
static __always_inline void trace_count_acked(struct trace_stats *s,
			const struct trace_message *m,
			const struct trace_times *t, __u32 outcome)
{
	struct trace_histogram *h;
	unsigned long irq;
	__u32 i, b;

	bpf_local_irq_save(&irq);
	if (outcome < TRACE_OUTCOMES)
		s->outcome[outcome]++;
	s->bytes += m->length;
	if (!m->queued)
		s->unqueued++;
	if (!m->driver)
		s->undriven++;
#pragma unroll
	for (i = 0; i < TRACE_STAGES; i++) {
		h = &s->stage[i];
		b = t->bucket[i];
		barrier_var(b);
		if (b >= TRACE_BUCKETS)
			continue;
		h->bucket[b]++;
		h->sum += t->ns[i];
		if (t->ns[i] > h->max)
			h->max = t->ns[i];
	}
	bpf_local_irq_restore(&irq);
}

/*
 * Completes the times of a message that TCP sent before the message was marked. If
 * the driver had received the packet after the mark, there would have been a
 * callback. So the driver received the packet soon after TCP sent it.
 */
static __always_inline void trace_end_unmarked(const struct trace_connection *c,
				       struct trace_message *m)
{
	if (!m->driver && c->driver)
		m->driver = m->queued;
	m->queued = 0;
}

/*
 * Handles one message that is acknowledged with the packet that has a key. This is
 * a global function: otherwise the verifier would follow all paths through all
 * messages.
 */
__noinline int trace_acknowledge(struct bpf_sock_ops *ctx,
			      const struct trace_connection *c,
			      struct trace_message *m, __u32 key, __u64 now)
{
	struct bpf_sock_ops_kern *kern = bpf_cast_to_kern_ctx(ctx);
	struct trace_stats *s = c ? trace_stats(c->group) : NULL;
	struct trace_times times = {};
	__u32 outcome;

	if (!m || !s)
		return 0;
	m->retransmits = trace_cast(kern->sk, struct tcp_sock)->total_retrans - m->retransmits;
	outcome = m->repeats ? TRACE_RETRANSMITTED : TRACE_ACKED;
	if (m->flags & TRACE_MESSAGE_PARTED)
		outcome = TRACE_PARTED;
	else if (m->key != key)
		outcome = m->queued ? TRACE_COALESCED : TRACE_MISSED;
	if (m->flags & TRACE_MESSAGE_UNMARKED)
		trace_end_unmarked(c, m);
	if (outcome == TRACE_MISSED || outcome == TRACE_PARTED)
		return trace_end_message(ctx, c, m, now, outcome);
	trace_find_times(&times, m, now);
	trace_count_acked(s, m, &times, outcome);
	trace_report_message(ctx, c, m, now, outcome);
	return 0;
}

/* Handles an acknowledgement. They come in the order of keys. */
__noinline int trace_acked(struct bpf_sock_ops *ctx, struct trace_connection *c)
{
	struct bpf_sock_ops_kern *kern = bpf_cast_to_kern_ctx(ctx);
	struct trace_message *m;
	__u32 key, i;
	__u64 now;

	if (!c || c->head == c->tail)
		return 0;
	key = trace_shared(ctx)->tskey;
	/* TCP has read the clock when it received the acknowledgement. */
	now = trace_cast(kern->sk, struct tcp_sock)->tcp_clock_cache;
	for (i = 0; i < TRACE_IN_FLIGHT; i++) {
		if (c->head == c->tail)
			return 0;
		m = trace_message(c, c->tail);
		if (!m || (__s32)(m->key - key) > 0)
			return 0;
		trace_acknowledge(ctx, c, m, key, now);
		c->tail++;
	}
	return 0;
}

/* Handles a message that is unacknowledged at the end of its connection. */
__noinline int trace_abandon(struct bpf_sock_ops *ctx,
			  const struct trace_connection *c,
			  struct trace_message *m, __u64 now)
{
	struct bpf_sock_ops_kern *kern = bpf_cast_to_kern_ctx(ctx);
	struct tcp_sock *tp = trace_cast(kern->sk, struct tcp_sock);

	if (!c || !m)
		return 0;
	m->retransmits = tp->total_retrans - m->retransmits;
	if (m->flags & TRACE_MESSAGE_UNMARKED)
		trace_end_unmarked(c, m);
	return trace_end_message(ctx, c, m, now, (__s32)(m->key - tp->snd_una) < 0 ?
					      TRACE_MISSED :
					      TRACE_UNACKNOWLEDGED);
}

#endif
