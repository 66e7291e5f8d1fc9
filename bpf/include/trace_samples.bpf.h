/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Samples: the messages in flight of a connection, the slowest messages of each
 * group and minute, and the ring buffer of a reader of samples.
 */
#ifndef SOCKEYE_TRACE_SAMPLES_BPF_H
#define SOCKEYE_TRACE_SAMPLES_BPF_H

#include "trace.bpf.h"

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

static __always_inline struct trace_message *
trace_message(struct trace_connection *c, __u32 i)
{
	i &= TRACE_IN_FLIGHT - 1;
	barrier_var(i);
	if (i >= TRACE_IN_FLIGHT)
		return NULL;
	return &c->message[i];
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

#endif
