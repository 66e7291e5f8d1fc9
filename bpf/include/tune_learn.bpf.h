/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Learned initial windows: a share of the connections to a prefix tries the
 * candidates of a rule, the time of their first flights is the evidence, and the
 * prefix settles on the best candidate.
 */
#ifndef SOCKEYE_TUNE_LEARN_BPF_H
#define SOCKEYE_TUNE_LEARN_BPF_H

#include "tune_connection.bpf.h"

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, TUNE_LEARNED);
	__type(key, struct tune_learned_key);
	__type(value, struct tune_learned);
} learned SEC(".maps");

/* Initial value for a prefix, which is too large for the stack. */
const struct tune_learned tune_learned_empty = {};

static __always_inline void tune_learned_key(const struct tune_rule *rule,
					     const struct match_address *remote,
					     struct tune_learned_key *key)
{
	__u32 bits = match_ipv4(remote) ? rule->learn_bits4 : rule->learn_bits6;
	int i;

	key->learn = rule->learn;
	key->bits = bits;
#pragma unroll
	for (i = 0; i < 4; i++) {
		__u32 have = bits > 32 * i ? bits - 32 * i : 0;
		__u32 mask = have >= 32 ? ~0U : have ? ~0U << (32 - have) : 0;

		key->prefix.word[i] = remote->word[i] & bpf_htonl(mask);
	}
}

/*
 * Sets the initial window of a connection: the window on which the prefix has
 * settled or, for a share of the connections, the candidate with the fewest
 * tries. The other connections keep the kernel's window, and count as evidence
 * if that window is a candidate. Tries count, not timed connections: otherwise a
 * candidate whose connections are too short to be timed would be tried forever.
 */
__noinline int tune_choose_window(struct bpf_sock_ops *ctx)
{
	struct tune_connection *c = tune_connection(ctx);
	struct match_tuple t = {};
	struct tune_learned_key key;
	struct tune_learned *l;
	struct tune_rule *rule;
	__u32 index, least = ~0U, own, i;
	bool explore;
	__s32 window;
	long err;

	rule = c ? tune_rule(c->rule) : NULL;
	if (!rule || !match_sock_ops_tuple(ctx, &t))
		return 0;
	tune_learned_key(rule, &t.remote, &key);
	l = bpf_map_lookup_elem(&learned, &key);
	if (!l) {
		bpf_map_update_elem(&learned, &key, (void *)&tune_learned_empty, BPF_NOEXIST);
		l = bpf_map_lookup_elem(&learned, &key);
		if (!l)
			return 0;
		l->last = l->halved = bpf_ktime_get_boot_ns();
	}
	explore = bpf_get_prandom_u32() < (l->settled ? rule->probe : rule->explore);
	index = l->settled ? l->chosen : TUNE_CANDIDATES;
	own = ctx->snd_cwnd;
	for (i = 0; i < TUNE_CANDIDATES; i++) {
		if (i >= rule->candidates)
			break;
		if (explore) {
			if (l->candidate[i].tries < least) {
				least = l->candidate[i].tries;
				index = i;
			}
		} else if (!l->settled && rule->candidate[i] == own) {
			index = i;
		}
	}
	/* Keeps clang from checking another copy of the index. */
	barrier_var(index);
	if (index >= TUNE_CANDIDATES)
		return 0;
	window = rule->candidate[index];
	if (!window)
		return 0;
	if (explore || l->settled) {
		err = bpf_setsockopt(ctx, SOL_TCP, TCP_BPF_IW, &window, sizeof(window));
		if (err) {
			tune_count_failure(c->rule, rule->learn_option, err);
			return 0;
		}
		tune_count_options(c->rule, c->arm, 1);
	}
	__sync_fetch_and_add(&l->candidate[index].tries, 1);
	c->candidate = index;
	c->flags |= TUNE_CONNECTION_LEARNING;
	return 0;
}

/*
 * Returns the mean time of a candidate's first flight, in microseconds, with a
 * penalty for losses: if a quarter of the connections lost segments, the time
 * doubles.
 */
static __always_inline __u64 tune_score(const struct tune_evidence *e)
{
	if (!e->connections)
		return 0;
	return (e->time + e->time * 4 * e->lossy / e->connections) /
	       e->connections;
}

/*
 * Adds a timed first flight to the evidence of its candidate, and chooses the
 * best candidate once each has enough evidence.
 */
__noinline int tune_learn(struct bpf_sock_ops *ctx, bool lossy, __u32 us)
{
	struct tune_connection *c = tune_connection(ctx);
	struct match_tuple t = {};
	struct tune_rule *rule;
	struct tune_learned_key key;
	struct tune_evidence *e;
	__u32 best = 0, i, index;
	__u64 score, lowest = ~0ULL, now;
	bool settled = true;
	struct tune_learned *l;

	rule = c ? tune_rule(c->rule) : NULL;
	if (!rule || !match_sock_ops_tuple(ctx, &t))
		return 0;
	c->flags &= ~TUNE_CONNECTION_LEARNING;
	tune_learned_key(rule, &t.remote, &key);
	l = bpf_map_lookup_elem(&learned, &key);
	index = c->candidate;
	barrier_var(index);
	if (!l || index >= TUNE_CANDIDATES)
		return 0;
	now = bpf_ktime_get_boot_ns();
	l->last = now;
	if (now - l->halved > rule->forget) {
		l->halved = now;
		for (i = 0; i < TUNE_CANDIDATES; i++) {
			e = &l->candidate[i];
			e->tries >>= 1;
			e->connections >>= 1;
			e->lossy >>= 1;
			e->time >>= 1;
		}
	}
	e = &l->candidate[index];
	__sync_fetch_and_add(&e->connections, 1);
	if (lossy)
		__sync_fetch_and_add(&e->lossy, 1);
	__sync_fetch_and_add(&e->time, us);
	for (i = 0; i < TUNE_CANDIDATES; i++) {
		if (i >= rule->candidates)
			break;
		e = &l->candidate[i];
		settled &= e->connections >= rule->evidence;
		score = tune_score(e);
		/* A larger window must be better by more than a sixteenth. */
		if (score < lowest - lowest / 16) {
			lowest = score;
			best = i;
		}
	}
	if (settled) {
		l->chosen = best;
		l->settled = 1;
	}
	return 0;
}

/*
 * Returns the time at which data was acknowledged last, or sent with nothing in
 * flight; CLOCK_MONOTONIC, nanoseconds.
 */
static __always_inline __u64 tune_last_delivery(struct bpf_sock_ops *ctx)
{
	struct bpf_sock *sk = ctx->sk;
	struct tcp_sock *tp = sk ? bpf_skc_to_tcp_sock(sk) : NULL;

	return tp ? tp->delivered_mstamp * 1000 : 0;
}

/* A pause of more than TUNE_GAP round trips plus TUNE_GAP_US ends the flight. */
#define TUNE_GAP 4
#define TUNE_GAP_US 50000
/* Upper bound of a flight's time, microseconds. */
#define TUNE_FLIGHT_US 60000000

/*
 * Returns the time of a connection's first flight in microseconds, 0 while the
 * time is not known. The program calls the function once per round trip, and
 * with last at the end of the connection. The kernel's callback comes with the
 * first acknowledgement of a round trip; the bytes that end the flight were
 * often acknowledged before, by the last acknowledgement of the previous round
 * trip, so that their time is interpolated. A connection that pauses has no
 * first flight that could be timed.
 */
__noinline int tune_flight_time(struct bpf_sock_ops *ctx, bool last)
{
	struct tune_connection *c = tune_connection(ctx);
	__u64 acked = ctx->bytes_acked, now, delivered, end, span;
	__u32 bytes, at, sample, mss = ctx->mss_cache, srtt = ctx->srtt_us >> 3;
	struct tune_rule *rule;
	bool lossy;

	rule = c ? tune_rule(c->rule) : NULL;
	if (!rule || acked <= 1)
		return 0;
	bytes = acked > 0x7fffffff ? 0x7fffffff : acked;
	lossy = tune_retransmits(ctx, c) > 0;
	now = bpf_ktime_get_ns();
	if (!c->sent) {
		if (last)
			return 0;
		/* The RTT sample is of the first data. */
		sample = ctx->args[0];
		if (!sample)
			sample = srtt;
		c->sent = c->reached_at = now - (__u64)sample * 1000;
	}
	if (!last && !lossy &&
	    (now - c->reached_at) / 1000 > (__u64)srtt * TUNE_GAP + TUNE_GAP_US) {
		c->flags &= ~TUNE_CONNECTION_LEARNING;
		return 0;
	}
	if (bytes < rule->first_bytes) {
		c->reached = bytes;
		c->reached_at = now;
		return 0;
	}
	delivered = tune_last_delivery(ctx);
	end = now;
	at = bytes;
	if (delivered > c->reached_at && delivered < now) {
		if (last) {
			end = delivered;
		} else if (bytes - rule->first_bytes >= 2 * mss) {
			end = delivered;
			at = bytes - 2 * mss;
		}
	}
	span = (end - c->reached_at) / 1000 * (rule->first_bytes - c->reached) /
	       (at - c->reached);
	span += (c->reached_at - c->sent) / 1000;
	return span > TUNE_FLIGHT_US ? TUNE_FLIGHT_US : span ? span : 1;
}

static __always_inline void tune_time_flight(struct bpf_sock_ops *ctx,
					struct tune_connection *c, bool last)
{
	__u32 us = tune_flight_time(ctx, last);

	if (us)
		tune_learn(ctx, tune_retransmits(ctx, c) > 0, us);
}

#endif
