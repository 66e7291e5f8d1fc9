// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Measures where messages of chosen connections of a cgroup spend their time
 * on their way out. The kernel calls it for a chosen connection at the end of
 * each sendmsg(2); only for messages that it then chooses, it is called again
 * as they reach the queueing discipline and the driver, and as they are
 * acknowledged. Cost: a lookup of the socket's storage for each call; at the
 * acknowledgement, the additions of trace.bpf.h. Other connections of the
 * cgroup pay for one search when they are established.
 *
 * Needs BPF timestamping (Linux 6.15, merged by net-next commit 8cd8ed0bd8e7).
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

/* The lock is held only to write a message that belongs among the slowest. */
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

/* Empty unless somebody reads samples. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, 1);
	__type(key, __u32);
	__array(values, struct {
		__uint(type, BPF_MAP_TYPE_RINGBUF);
		__uint(max_entries, 1 << 16);
	});
} rings SEC(".maps");

int bpf_sock_ops_enable_tx_tstamp(struct bpf_sock_ops_kern *skops,
				  __u64 flags) __ksym;

static __always_inline struct trace_connection *
trace_connection(struct bpf_sock_ops *ctx)
{
	struct bpf_sock *sk = ctx->sk;

	return sk ? bpf_sk_storage_get(&connections, sk, NULL, 0) : NULL;
}

/* The group of a connection, found when it is first asked for: tune has
 * decided by then. */
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

/* How long the connection was limited in this way until now, in jiffies
 * (tcp_get_info_chrono_stats in net/ipv4/tcp.c, Linux 6.18). */
static __always_inline __u32 trace_chrono(const struct tcp_sock *tp,
					   __u32 chrono)
{
	__u32 sum = tp->chrono_stat[chrono - 1];

	if (BPF_CORE_READ_BITFIELD(tp, chrono_type) == chrono)
		sum += (__u32)bpf_jiffies64() - tp->chrono_start;
	return sum;
}

/* The minute of a time, among those of a group's slowest messages. */
static __always_inline struct trace_minute *trace_minute(struct trace_slowest *slow,
							 __u64 now)
{
	__u32 slot = (now >> TRACE_MINUTE_SHIFT) & (TRACE_MINUTES - 1);

	barrier_var(slot);
	return slow && slot < TRACE_MINUTES ? &slow->minute[slot] : NULL;
}

/* Whether a message is one of the slowest of its group and minute, now. */
static __always_inline bool trace_is_slow(__u32 group, __u64 now, __u64 total)
{
	struct trace_minute *m = trace_minute(bpf_map_lookup_elem(&slowest, &group), now);

	return m && (m->minute != now >> TRACE_MINUTE_SHIFT ||
		     m->count < TRACE_SLOWEST || m->least < total);
}

/* Keeps a message if it is one of the slowest of its group and minute. */
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

/* Tells user space of a message. */
__noinline int trace_emit_sample(struct bpf_sock_ops *ctx, struct trace_message *m,
			  __u64 now, __u32 outcome, bool slow)
{
	struct trace_connection *c = trace_connection(ctx);
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
	s.outcome = outcome;
	s.role = c->role;
	s.message = *m;
	if (slow)
		trace_keep_slowest(&s);
	if (!st->samples)
		return 0;
	ring = bpf_map_lookup_elem(&rings, &zero);
	if (!ring)
		return 0;
	/* To wake the reader takes longer than all else: it looks by itself. */
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

/* Counts what became of a message. Returns 0. */
__noinline int trace_end_message(struct bpf_sock_ops *ctx, struct trace_message *m,
			 __u64 now, __u32 outcome)
{
	struct trace_connection *c = trace_connection(ctx);
	struct trace_state *st = trace_state();
	struct trace_stats *s;
	bool slow;

	if (!c || !m || outcome >= TRACE_OUTCOMES)
		return 0;
	s = trace_stats(c->group);
	if (s)
		__sync_fetch_and_add(&s->outcome[outcome], 1);
	slow = outcome != TRACE_OVERWRITTEN && outcome != TRACE_MISSED &&
	       outcome != TRACE_PARTED &&
	       trace_is_slow(c->group, now, now - (m->started ? m->started : m->sent));
	if (slow || (st && st->samples))
		trace_emit_sample(ctx, m, now, outcome, slow);
	return 0;
}

/* The key of the skb that a call is about. */
static __always_inline struct skb_shared_info *trace_shared(struct bpf_sock_ops *ctx)
{
	struct bpf_sock_ops_kern *kern = bpf_cast_to_kern_ctx(ctx);
	struct sk_buff *skb = kern->skb;

	return trace_cast(skb->head + skb->end, struct skb_shared_info);
}

/*
 * Whether the application's own stamps (SO_TIMESTAMPING) keep the packet at
 * hand from being marked. A packet has one key: with that of a message that it
 * has not marked itself, it would get a stamp for what it did not ask for, now
 * or once packets are joined.
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

/*
 * At the end of each sendmsg of a chosen connection: the socket is locked, and
 * the last byte of the message is in the last skb that waits to be sent or, if
 * none does, in the last that waits to be acknowledged.
 */
__noinline int trace_sendmsg(struct bpf_sock_ops *ctx)
{
	struct bpf_sock_ops_kern *kern = bpf_cast_to_kern_ctx(ctx);
	struct trace_connection *c = trace_connection(ctx);
	bool chosen, within = false, marked;
	struct skb_shared_info *shared;
	struct trace_message *m, *last;
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
	/* The flag may be another's. */
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
	if (!chosen && c->head == c->tail && !sk->sk_tsflags)
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
	/* Is the last byte of the message before in this skb, too? */
	if (c->head != c->tail && (__s32)(last->key - cb->seq) >= 0 && !last->queued)
		within = true;
	if (within && shared->tskey != last->key) {
		c->head--;
		trace_end_message(ctx, last, now, TRACE_OVERWRITTEN);
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
		trace_end_message(ctx, last, now, TRACE_OVERWRITTEN);
	}
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
	m->cwnd = tp->snd_cwnd;
	left = tp->sacked_out + tp->lost_out;
	m->in_flight = tp->packets_out - left + tp->retrans_out;
	m->outstanding = tp->snd_nxt - tp->snd_una;
	m->unsent = seq - tp->snd_nxt;
	m->window = tp->snd_wnd;
	m->mss = tp->mss_cache;
	m->srtt = tp->srtt_us >> 3;
	m->min_rtt = tp->rtt_min.s[0].v;
	m->retransmits = tp->total_retrans;
	m->window_limited = trace_chrono(tp, TCP_CHRONO_RWND_LIMITED);
	m->buffer_limited = trace_chrono(tp, TCP_CHRONO_SNDBUF_LIMITED);
	m->pacing = sk->sk_pacing_rate;
	m->repeats = 0;
	m->flags = 0;
	m->seen = tp->total_retrans;
	if (sk->sk_pacing_status)
		m->flags |= TRACE_MESSAGE_PACED;
	nonagle = BPF_CORE_READ_BITFIELD(tp, nonagle);
	if (!(nonagle & TCP_NAGLE_OFF))
		m->flags |= TRACE_MESSAGE_NAGLE;
	if (nonagle & TCP_NAGLE_CORK)
		m->flags |= TRACE_MESSAGE_CORK;
	if (!m->unsent) {
		/* TCP's own time of sending it, unless the pacer's is to come. */
		m->queued = skb->skb_mstamp_ns < now ? skb->skb_mstamp_ns : now;
		m->flags |= TRACE_MESSAGE_UNMARKED;
		m->window_limited = 0;
		m->buffer_limited = 0;
	}
	c->head++;
	return 0;
}

/*
 * How far from the tail the last message is whose key is not after one,
 * TRACE_IN_FLIGHT if there is none. Keys of messages under way ascend.
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
 * The message under way that has a key or, if the key is another's, the last
 * before it. First it is looked for where it is expected.
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

/* A message leaves again, if it is in the packet of a later one. Returns whether
 * it is. */
__noinline int trace_repeat_coalesced(struct trace_message *m, bool retransmitted, __u64 now)
{
	if (!m || !(m->flags & TRACE_MESSAGE_JOINED))
		return 0;
	trace_count_repeat(m, retransmitted, now);
	return 1;
}

/* A message leaves for the first time, in the packet of a later one, which begins
 * with a sequence number. Returns 0 if it has left before. */
__noinline int trace_leave_coalesced(struct bpf_sock_ops *ctx, struct trace_message *m,
			    __u32 begins, __u64 now)
{
	if (!m || m->queued)
		return 0;
	if ((__s32)(m->key - begins) < 0) {
		m->flags |= TRACE_MESSAGE_PARTED;
	} else {
		m->flags |= TRACE_MESSAGE_JOINED;
		trace_leave(ctx, m, now);
	}
	return 1;
}

/*
 * The sequence number that the packet at hand begins with, which has the key.
 * What is not a plain TCP segment of the connection, as in a tunnel, counts as
 * one that begins with what is not acknowledged.
 */
static __always_inline __u32 trace_packet_seq(struct sk_buff *skb,
					  const struct tcp_sock *tp, __u32 key)
{
	__u32 seq = bpf_ntohl(trace_cast(skb->head + skb->transport_header,
					 struct tcphdr)->seq);

	if ((__s32)(seq - tp->snd_una) < 0 || (__s32)(key - seq) < 0 ||
	    key - seq >= skb->len)
		return tp->snd_una;
	return seq;
}

/*
 * Packets go out in the order of keys: a message before, which was not stamped,
 * has lost its key to this one, as their packets were joined (tcp_grow_skb and
 * tcp_skb_collapse_tstamp, Linux 6.18). It may be the key of the application's
 * or of another program's. But a packet may be split again, and the part without
 * a key leaves first, unseen: of a message that ends there no time is known.
 */
__noinline int trace_queued(struct bpf_sock_ops *ctx)
{
	struct bpf_sock_ops_kern *kern = bpf_cast_to_kern_ctx(ctx);
	struct trace_connection *c = trace_connection(ctx);
	struct trace_message *m;
	__u32 i, n, found = 0;
	bool first, retransmitted = false, refused = false;
	struct tcp_sock *tp;
	__u32 key, begins;
	__u64 now;

	if (!c)
		return 0;
	key = trace_shared(ctx)->tskey;
	m = trace_find(c, key, c->queue, &found);
	if (!m)
		return 0;
	now = bpf_ktime_get_ns();
	tp = trace_cast(kern->sk, struct tcp_sock);
	begins = trace_packet_seq(kern->skb, tp, key);
	first = !m->queued;
	if (first && (__s32)(m->key - begins) < 0) {
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
		/* TCP tries again to send what the host has refused. */
		refused = (__s32)(tp->snd_nxt - m->key) <= 0 &&
			  c->segments != tp->data_segs_out;
		/* Else it is a device on top of another, with its own queue. */
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
		if (first ? !trace_leave_coalesced(ctx, m, begins, now) :
			    !trace_repeat_coalesced(m, retransmitted, now))
			break;
	}
	return 0;
}

__noinline int trace_driver(struct bpf_sock_ops *ctx)
{
	struct trace_connection *c = trace_connection(ctx);
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
	/* The driver may have had it before it was marked. */
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
 * The NIC's clock may be the host's, if something keeps it so (phc2sys(8)).
 * Else the time of the NIC's report bounds the stage from above.
 */
__noinline int trace_hardware(struct bpf_sock_ops *ctx)
{
	struct trace_connection *c = trace_connection(ctx);
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

/* Adds up the stages of a message that is acknowledged. */
__noinline int trace_add_stages(struct trace_stats *s,
			     const struct trace_message *m, __u64 now)
{
	__u64 queued;

	if (!s || !m)
		return 0;
	/* What the host dropped waited in the queue that it left. */
	queued = m->requeued ? m->requeued : m->queued;
	trace_add_interval(&s->stage[TRACE_SEND], m->started, m->sent);
	trace_add_interval(&s->stage[TRACE_STACK], m->sent, m->queued);
	trace_add_interval(&s->stage[TRACE_QDISC], queued, m->driver);
	if (m->hardware)
		trace_histogram_add(&s->stage[TRACE_NIC], m->hardware - 1);
	trace_add_interval(&s->stage[TRACE_NETWORK], m->driver, now);
	trace_add_interval(&s->stage[TRACE_TOTAL], m->started ? m->started : m->sent, now);
	__sync_fetch_and_add(&s->bytes, m->length);
	if (!m->queued)
		__sync_fetch_and_add(&s->unqueued, 1);
	if (!m->driver)
		__sync_fetch_and_add(&s->undriven, 1);
	return 0;
}

/*
 * At the end of one that was sent before it could be marked: if the driver had
 * had it later, it would have told. So it had it soon after TCP sent it.
 */
static __always_inline void trace_end_unmarked(const struct trace_connection *c,
				       struct trace_message *m)
{
	if (!m->driver && c->driver)
		m->driver = m->queued;
	m->queued = 0;
}

/*
 * A message is acknowledged, with the packet that has a key. Each message is its
 * own function to the verifier, which would follow all ways through all of them
 * otherwise.
 */
__noinline int trace_acknowledge(struct bpf_sock_ops *ctx,
			      const struct trace_connection *c,
			      struct trace_message *m, __u32 key, __u64 now)
{
	struct bpf_sock_ops_kern *kern = bpf_cast_to_kern_ctx(ctx);
	struct trace_stats *s = c ? trace_stats(c->group) : NULL;
	__u32 outcome;

	if (!m || !s)
		return 0;
	m->retransmits = trace_cast(kern->sk, struct tcp_sock)->total_retrans - m->retransmits;
	outcome = m->repeats ? TRACE_RETRANSMITTED : TRACE_ACKED;
	if (m->key != key)
		outcome = m->queued ? TRACE_COALESCED :
			  m->flags & TRACE_MESSAGE_PARTED ? TRACE_PARTED :
							    TRACE_MISSED;
	if (m->flags & TRACE_MESSAGE_UNMARKED)
		trace_end_unmarked(c, m);
	if (outcome != TRACE_MISSED && outcome != TRACE_PARTED)
		trace_add_stages(s, m, now);
	return trace_end_message(ctx, m, now, outcome);
}

/* Acknowledgements come in the order of keys. */
__noinline int trace_acked(struct bpf_sock_ops *ctx)
{
	struct trace_connection *c = trace_connection(ctx);
	struct trace_message *m;
	__u32 key, i;
	__u64 now;

	if (!c || c->head == c->tail)
		return 0;
	key = trace_shared(ctx)->tskey;
	now = bpf_ktime_get_ns();
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

/* The connection of a message ends before its acknowledgement. */
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
	return trace_end_message(ctx, m, now, (__s32)(m->key - tp->snd_una) < 0 ?
					      TRACE_MISSED :
					      TRACE_UNACKNOWLEDGED);
}

__noinline int trace_closed(struct bpf_sock_ops *ctx)
{
	struct trace_connection *c = trace_connection(ctx);
	__u64 now = bpf_ktime_get_ns();
	__u32 i;

	for (i = 0; c && i < TRACE_IN_FLIGHT && c->head != c->tail; i++) {
		trace_abandon(ctx, c, trace_message(c, c->tail), now);
		c->tail++;
	}
	return 0;
}

SEC("sockops")
int trace_sockops(struct bpf_sock_ops *ctx)
{
	switch (ctx->op) {
	case BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB:
		trace_established(ctx, MATCH_CONNECT);
		break;
	case BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB:
		trace_established(ctx, MATCH_ACCEPT);
		break;
	case BPF_SOCK_OPS_TSTAMP_SENDMSG_CB:
		trace_sendmsg(ctx);
		break;
	case BPF_SOCK_OPS_TSTAMP_SCHED_CB:
		trace_queued(ctx);
		break;
	case BPF_SOCK_OPS_TSTAMP_SND_SW_CB:
		trace_driver(ctx);
		break;
	case BPF_SOCK_OPS_TSTAMP_SND_HW_CB:
		trace_hardware(ctx);
		break;
	case BPF_SOCK_OPS_TSTAMP_ACK_CB:
		trace_acked(ctx);
		break;
	case BPF_SOCK_OPS_STATE_CB:
		if (ctx->args[1] == BPF_TCP_CLOSE)
			trace_closed(ctx);
		break;
	}
	return 1;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
