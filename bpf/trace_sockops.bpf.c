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
#include "trace.bpf.h"

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

/* The lock is taken only to write one of the slowest messages. */
struct trace_slowest {
	struct bpf_spin_lock lock;
	__u32 padding;
	struct trace_minute minute[TRACE_MINUTES];
};
TRACE_EXPORT(struct, trace_slowest);

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct trace_slowest);
} slowest SEC(".maps");

/* The ring buffer of the reader of samples; empty without a reader. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, 1);
	__type(key, __u32);
	__array(values, struct {
		__uint(type, BPF_MAP_TYPE_RINGBUF);
		__uint(max_entries, 1 << 16);
	});
} rings SEC(".maps");

void bpf_local_irq_save(unsigned long *flags) __ksym;
void bpf_local_irq_restore(unsigned long *flags) __ksym;
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

static __always_inline struct trace_message *
trace_message(struct trace_connection *c, __u32 i)
{
	i &= TRACE_IN_FLIGHT - 1;
	barrier_var(i);
	if (i >= TRACE_IN_FLIGHT)
		return NULL;
	return &c->message[i];
}

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

/* Returns the entry of a time's minute in a group's slowest messages. */
static __always_inline struct trace_minute *trace_minute(struct trace_slowest *slow,
							 __u64 now)
{
	__u32 slot = (now >> TRACE_MINUTE_SHIFT) & (TRACE_MINUTES - 1);

	barrier_var(slot);
	return slow && slot < TRACE_MINUTES ? &slow->minute[slot] : NULL;
}

/* Reports whether a message is now among the slowest of its group and minute. */
static __always_inline bool trace_is_slow(__u32 group, __u64 now, __u64 total)
{
	struct trace_minute *m = trace_minute(bpf_map_lookup_elem(&slowest, &group), now);

	return m && (m->minute != now >> TRACE_MINUTE_SHIFT ||
		     m->count < TRACE_SLOWEST || m->least < total);
}

/* Stores a message if it is among the slowest of its group and minute. */
__noinline int trace_keep_slowest(struct trace_sample *s)
{
	struct trace_slowest *slow;
	__u64 minute, least = ~0ULL;
	struct trace_minute *m;
	__u32 i, at, group;
	bool room = false;

	if (!s)
		return 0;
	group = s->group;
	slow = bpf_map_lookup_elem(&slowest, &group);
	m = trace_minute(slow, s->ended);
	if (!slow || !m)
		return 0;
	minute = s->ended >> TRACE_MINUTE_SHIFT;
	bpf_spin_lock(&slow->lock);
	if (m->minute != minute) {
		m->minute = minute;
		m->count = 0;
	}
	at = m->count;
	if (at < TRACE_SLOWEST) {
		room = true;
		m->count++;
	} else {
		at = 0;
		for (i = 1; i < TRACE_SLOWEST; i++)
			if (m->sample[i].total < m->sample[at & (TRACE_SLOWEST - 1)].total)
				at = i;
	}
	at &= TRACE_SLOWEST - 1;
	barrier_var(at);
	if (at < TRACE_SLOWEST && (room || m->sample[at].total < s->total))
		m->sample[at] = *s;
	for (i = 0; i < TRACE_SLOWEST; i++)
		if (m->sample[i].total < least)
			least = m->sample[i].total;
	m->least = least;
	bpf_spin_unlock(&slow->lock);
	return 0;
}

#define TRACE_IS_SLOW 0x100 /* flag of an outcome: the message is among the slowest */

/* Writes a sample to the slowest messages and to the ring buffer. */
__noinline int trace_emit_sample(struct bpf_sock_ops *ctx,
			  const struct trace_connection *c,
			  const struct trace_message *m, __u64 now, __u32 outcome)
{
	struct trace_state *st = trace_state();
	struct trace_counts *counts;
	struct trace_sample s = {};
	__u64 flags = BPF_RB_NO_WAKEUP;
	__u32 zero = 0;
	void *ring;

	if (!c || !m || !st || !match_sock_ops_tuple(ctx, &s.tuple))
		return 0;
	s.ended = now;
	s.total = now - (m->started ? m->started : m->sent);
	s.cookie = bpf_get_socket_cookie(ctx);
	s.group = c->group;
	s.rule = c->rule;
	s.outcome = outcome & 0xff;
	s.role = c->role;
	s.message = *m;
	if (outcome & TRACE_IS_SLOW)
		trace_keep_slowest(&s);
	if (!st->samples)
		return 0;
	ring = bpf_map_lookup_elem(&rings, &zero);
	if (!ring)
		return 0;
	/*
	 * To wake the reader takes longer than the rest of the program. The
	 * reader polls, and is woken only if a quarter of the ring is full.
	 */
	if (bpf_ringbuf_query(ring, BPF_RB_AVAIL_DATA) >=
	    bpf_ringbuf_query(ring, BPF_RB_RING_SIZE) / 4)
		flags = BPF_RB_FORCE_WAKEUP;
	if (bpf_ringbuf_output(ring, &s, sizeof(s), flags)) {
		counts = trace_counts();
		if (counts)
			__sync_fetch_and_add(&counts->lost, 1);
	}
	return 0;
}

/* Reports a message that has ended, if somebody reads it. */
static __always_inline void trace_report_message(struct bpf_sock_ops *ctx,
				 const struct trace_connection *c,
				 const struct trace_message *m, __u64 now,
				 __u32 outcome)
{
	struct trace_state *st = trace_state();
	bool slow;

	slow = outcome != TRACE_OVERWRITTEN && outcome != TRACE_MISSED &&
	       outcome != TRACE_PARTED &&
	       trace_is_slow(c->group, now, now - (m->started ? m->started : m->sent));
	if (slow || (st && st->samples))
		trace_emit_sample(ctx, c, m, now, outcome | (slow ? TRACE_IS_SLOW : 0));
}

/* Counts the outcome of a message that was not acknowledged. */
__noinline int trace_end_message(struct bpf_sock_ops *ctx,
			 const struct trace_connection *c,
			 const struct trace_message *m, __u64 now,
			 __u32 outcome)
{
	struct trace_stats *s;

	if (!c || !m || outcome >= TRACE_OUTCOMES)
		return 0;
	s = trace_stats(c->group);
	if (s)
		__sync_fetch_and_add(&s->outcome[outcome], 1);
	trace_report_message(ctx, c, m, now, outcome);
	return 0;
}

/* Returns the shared info of the callback's skb, which has the key. */
static __always_inline struct skb_shared_info *trace_shared(struct bpf_sock_ops *ctx)
{
	struct bpf_sock_ops_kern *kern = bpf_cast_to_kern_ctx(ctx);
	struct sk_buff *skb = kern->skb;

	return trace_cast(skb->head + skb->end, struct skb_shared_info);
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
 * Notices that the application uses timestamps of its own: no further message is
 * skipped. Any that was skipped before may have requested some. An application that
 * has enabled, used and disabled timestamps within the skipped messages is not
 * noticed.
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
