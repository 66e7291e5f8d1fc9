// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Sets TCP parameters of the connections of a cgroup by the rules of a policy.
 *
 * Hook: sockops of the cgroup. The first callback of a connection finds the rule
 * and stores it with the socket, so that all later callbacks use the same rule,
 * even if the policy changes meanwhile.
 * Decision: options, replies to the kernel's questions (initial RTO, receive
 * window, ECN, base RTT), and TCP header options with tags.
 * Cost: one search for each connection, see match.bpf.h; for a connection with
 * a rule, one lookup in the socket's storage for each callback that the rule
 * enabled.
 */
#include "tune.bpf.h"

/* Jiffies per second. */
const volatile __u32 hz = 250;

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, TUNE_REQUESTS);
	__type(key, struct match_tuple);
	__type(value, struct tune_request);
} requests SEC(".maps");

/*
 * When rules were removed from the policy: CLOCK_BOOTTIME, nanoseconds. Rules
 * in force have no entry. Only user space reads and writes this map.
 */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, __u64);
} retired SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, TUNE_LEARNED);
	__type(key, struct tune_learned_key);
	__type(value, struct tune_learned);
} learned SEC(".maps");

/* Initial value for a prefix, which is too large for the stack. */
const struct tune_learned tune_learned_empty = {};

MATCH_EXPORT(enum, tune_limit);
MATCH_EXPORT(enum, tune_use);
MATCH_EXPORT(enum, tune_phase);
MATCH_EXPORT(enum, tune_flag);
MATCH_EXPORT(enum, tune_level);
MATCH_EXPORT(enum, tune_arm);
MATCH_EXPORT(enum, tune_connection_flag);

struct tune_option_header {
	__u8 kind;
	__u8 length;
	__u8 exid[2];
	__u8 byte[MATCH_TAG];
};

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

static __always_inline __u32 tune_jiffies(__u32 us)
{
	return ((__u64)us * hz + 999999) / 1000000;
}

/*
 * Sets an option of a rule if the option belongs to the phase. Returns the number
 * of options that were set, 0 or 1. This is a global function, as others below,
 * so that the verifier checks it once and not for each call.
 */
__noinline int tune_set(struct bpf_sock_ops *ctx, __u32 id, __u32 phase,
			__u32 index)
{
	struct tune_rule *rule = tune_rule(id);
	struct tune_option *o;
	__u32 value;
	long err;

	if (!rule || index >= TUNE_OPTIONS)
		return 0;
	o = &rule->option[index];
	if (!(o->phases & phase) || (o->phases & tune_other_family(ctx->family)))
		return 0;
	if (o->level == TUNE_LEVEL_TXHASH) {
		value = o->value;
		ctx->sk_txhash = value ? value : bpf_get_prandom_u32() | 1;
		err = 0;
	} else if (o->level == TUNE_LEVEL_CONGESTION) {
		err = bpf_setsockopt(ctx, SOL_TCP, TCP_CONGESTION,
				     rule->congestion[o->value & 1],
				     sizeof(rule->congestion[0]));
	} else {
		err = bpf_setsockopt(ctx, o->level, o->name, &o->value,
				     sizeof(o->value));
	}
	if (err) {
		tune_count_failure(id, o->id, err);
		return 0;
	}
	/* Otherwise the clamp takes effect at the first acknowledgement. */
	if (o->level == SOL_TCP && o->name == TCP_BPF_SNDCWND_CLAMP &&
	    ctx->snd_cwnd > o->value)
		bpf_setsockopt(ctx, SOL_TCP, TCP_BPF_IW, &o->value,
			       sizeof(o->value));
	return 1;
}

/* Sets the options of a rule that belong to the phase. Returns their number. */
__noinline int tune_apply(struct bpf_sock_ops *ctx, __u32 id, __u32 phase)
{
	struct tune_rule *rule = tune_rule(id);
	__u32 done = 0;
	int i;

	if (!rule)
		return 0;
	for (i = 0; i < TUNE_OPTIONS; i++) {
		if (i >= rule->options)
			break;
		done += tune_set(ctx, id, phase, i);
	}
	return done;
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

/* Adds the changes of a connection since its last count to the rule's sums. */
__noinline int tune_account(struct bpf_sock_ops *ctx, bool last)
{
	struct tune_connection *c = tune_connection(ctx);
	__u64 bytes, n, x, n0, x0;
	__u32 segments, retransmits, rtt, interval;
	struct tune_stats *s;

	if (!c)
		return 0;
	s = tune_counts(c->rule, c->arm);
	if (!s)
		return 0;
	segments = ctx->data_segs_out;
	retransmits = tune_retransmits(ctx, c);
	bytes = ctx->bytes_acked;
	n0 = c->segments < TUNE_SEGMENTS_MAX ? c->segments : TUNE_SEGMENTS_MAX;
	n = segments < TUNE_SEGMENTS_MAX ? segments : TUNE_SEGMENTS_MAX;
	x0 = c->retransmits < TUNE_SEGMENTS_MAX ? c->retransmits : TUNE_SEGMENTS_MAX;
	x = retransmits < TUNE_SEGMENTS_MAX ? retransmits : TUNE_SEGMENTS_MAX;
	__sync_fetch_and_add(&s->bytes, bytes - c->bytes);
	__sync_fetch_and_add(&s->segments, (__u32)(segments - c->segments));
	__sync_fetch_and_add(&s->retransmits, (__u32)(retransmits - c->retransmits));
	__sync_fetch_and_add(&s->segments2, n * n - n0 * n0);
	__sync_fetch_and_add(&s->retransmits2, x * x - x0 * x0);
	__sync_fetch_and_add(&s->segments_retransmits, n * x - n0 * x0);
	c->segments = segments;
	c->retransmits = retransmits;
	c->bytes = bytes;
	c->counted = bpf_jiffies64();
	if (last)
		__sync_fetch_and_add(&s->closed, 1);
	if (!(c->flags & TUNE_CONNECTION_ESTABLISHED))
		return 0;
	rtt = ctx->srtt_us >> 3;
	if (rtt)
		tune_histogram(s->rtt, rtt);
	interval = ctx->rate_interval_us;
	if (interval)
		tune_histogram(s->rate, (__u64)ctx->rate_delivered *
						ctx->mss_cache * 1000 / interval);
	return 0;
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

/* Reads the peer's tag from its SYN or from the packet of the callback. */
static __always_inline bool tune_read_tag(struct bpf_sock_ops *ctx,
					  struct match_tag *tag, __u64 from)
{
	struct tune_option_header h = {
		.kind = TCPOPT_EXP,
		.length = 4,
		.exid = { TUNE_TAG_EXID >> 8, TUNE_TAG_EXID & 0xff },
	};

	if (bpf_load_hdr_opt(ctx, &h, sizeof(h), from) < 0)
		return false;
	if (h.length <= 4 || h.length > sizeof(h))
		return false;
	tag->length = h.length - 4;
	/* The kernel copies only the bytes of the option: the rest is 0. */
	__builtin_memcpy(tag->byte, h.byte, MATCH_TAG);
	return true;
}

enum tune_tag_from {
	TUNE_NO_TAG,
	TUNE_TAG_HERE, /* in the packet at hand */
	TUNE_TAG_SYN, /* in the SYN that was kept */
};

/* Finds the rule of a connection or a handshake; see match_find. */
__noinline __u32 tune_lookup(struct bpf_sock_ops *ctx, __u32 role, __u32 from)
{
	struct match_question q = { .role = role };
	struct tune_stats *s;
	__u32 found, read = 0;

	if (from != TUNE_NO_TAG) {
		if (!tune_read_tag(ctx, &q.tag, from == TUNE_TAG_SYN ?
				   BPF_LOAD_HDR_OPT_TCP_SYN : 0))
			return 0;
		read = MATCH_TAG_READ;
	}
	if (!match_sock_ops_tuple(ctx, &q.tuple))
		return read;
	found = match_find(&q);
	s = (found & MATCH_BY_TAG) && ctx->is_fullsock ?
		    tune_counts(MATCH_RULE(found), TUNE_ARM_TREATED) : NULL;
	if (s)
		__sync_fetch_and_add(&s->tags, 1);
	return found | read;
}

static __always_inline void tune_connect(struct bpf_sock_ops *ctx)
{
	__u32 id = MATCH_RULE(tune_lookup(ctx, MATCH_CONNECT, TUNE_NO_TAG));
	struct match_tuple t = {};
	struct tune_connection *c;
	struct tune_rule *rule;

	rule = id ? tune_rule(id) : NULL;
	if (!rule || !match_sock_ops_tuple(ctx, &t))
		return;
	c = tune_init_connection(ctx, &t, id, rule, MATCH_CONNECT);
	if (!c)
		return;
	c->started = bpf_ktime_get_ns();
	tune_set_callbacks(ctx, tune_callbacks_of(rule, c), 0);
	if (c->arm == TUNE_ARM_TREATED)
		tune_count_options(id, c->arm, tune_apply(ctx, id, TUNE_PHASE_CONNECT));
}

/* Applies the rule of a connection that is established now. */
__noinline int tune_established(struct bpf_sock_ops *ctx, __u32 phase)
{
	struct tune_connection *c = tune_connection(ctx);
	struct tune_rule *rule;
	struct tune_stats *s;

	rule = c ? tune_rule(c->rule) : NULL;
	if (!rule)
		return 0;
	s = tune_counts(c->rule, c->arm);
	c->flags |= TUNE_CONNECTION_ESTABLISHED;
	c->handshake = ctx->total_retrans;
	if (s) {
		__sync_fetch_and_add(&s->established, 1);
		if (c->started)
			tune_histogram(s->connect,
				       (bpf_ktime_get_ns() - c->started) / 1000);
	}
	if (c->arm == TUNE_ARM_TREATED) {
		tune_count_options(c->rule, c->arm, tune_apply(ctx, c->rule, phase));
		if (rule->flags & TUNE_FLAG_LEARN)
			tune_choose_window(ctx);
	}
	tune_set_callbacks(ctx, tune_callbacks_of(rule, c), 0);
	return 0;
}

/*
 * A rule that matches the peer's tag replaces the rule that was found without
 * the tag. Options that the latter set stay set.
 */
static __always_inline void tune_active_established(struct bpf_sock_ops *ctx)
{
	const struct match_active *state = match_state();
	struct tune_connection *c = tune_connection(ctx);
	struct match_tuple t = {};
	struct tune_rule *rule;
	__u64 started = 0;
	__u32 found = 0;

	if (state && (state->used & MATCH_USE_TAG))
		found = tune_lookup(ctx, MATCH_CONNECT, TUNE_TAG_HERE);
	if (found & MATCH_BY_TAG) {
		rule = tune_rule(MATCH_RULE(found));
		if (!rule || !match_sock_ops_tuple(ctx, &t))
			return;
		if (c)
			started = c->started;
		c = tune_init_connection(ctx, &t, MATCH_RULE(found), rule, MATCH_CONNECT);
		if (!c)
			return;
		c->started = started;
		tune_established(ctx, TUNE_PHASE_ACTIVE | TUNE_PHASE_LIVE);
	} else if (c) {
		if (state && (state->used & MATCH_USE_TAG) && !(found & MATCH_TAG_READ))
			tune_set_callbacks(ctx, BPF_SOCK_OPS_PARSE_UNKNOWN_HDR_OPT_CB_FLAG, 0);
		tune_established(ctx, TUNE_PHASE_ACTIVE);
	}
}

static __always_inline void tune_passive_established(struct bpf_sock_ops *ctx)
{
	const struct match_active *state = match_state();
	struct tune_request *request;
	struct match_tuple t = {};
	struct tune_connection *c;
	struct tune_rule *rule;
	__u64 started = 0;
	__u32 found = 0;

	if (!state || !match_sock_ops_tuple(ctx, &t))
		return;
	if (state->used & MATCH_USE_TAG) {
		found = tune_lookup(ctx, MATCH_ACCEPT, TUNE_TAG_SYN);
		if (!(found & MATCH_TAG_READ))
			found = tune_lookup(ctx, MATCH_ACCEPT, TUNE_TAG_HERE);
		if (!(found & MATCH_TAG_READ))
			tune_set_callbacks(ctx, BPF_SOCK_OPS_PARSE_UNKNOWN_HDR_OPT_CB_FLAG, 0);
	}
	if (state->used & (TUNE_USE_SYNACK_RTO | TUNE_USE_RWND | TUNE_USE_ECN)) {
		request = bpf_map_lookup_elem(&requests, &t);
		if (request) {
			started = request->started;
			if (!(found & MATCH_BY_TAG))
				found = request->rule | MATCH_TAG_READ;
			bpf_map_delete_elem(&requests, &t);
		}
	}
	if (!found)
		found = tune_lookup(ctx, MATCH_ACCEPT, TUNE_NO_TAG);
	rule = MATCH_RULE(found) ? tune_rule(MATCH_RULE(found)) : NULL;
	c = rule ? tune_init_connection(ctx, &t, MATCH_RULE(found), rule, MATCH_ACCEPT) : NULL;
	if (!c || !(c->flags & TUNE_CONNECTION_TAGGING))
		/* The flag was inherited from the listener. */
		tune_set_callbacks(ctx, 0, BPF_SOCK_OPS_WRITE_HDR_OPT_CB_FLAG);
	if (!c)
		return;
	c->started = started;
	tune_established(ctx, TUNE_PHASE_PASSIVE);
}

/* Returns the rule of a handshake that has no full socket yet. */
static __always_inline struct tune_rule *
tune_request_rule(struct bpf_sock_ops *ctx, struct match_tuple *t)
{
	struct tune_request fresh = {}, *known;
	__u64 now = bpf_ktime_get_ns();

	if (!match_sock_ops_tuple(ctx, t))
		return NULL;
	known = bpf_map_lookup_elem(&requests, t);
	/* No handshake takes that long: an older entry is another connection's. */
	if (known && now - known->started < 130000000000ULL)
		return tune_rule(known->rule);
	fresh.rule = MATCH_RULE(tune_lookup(ctx, MATCH_ACCEPT, TUNE_NO_TAG));
	if (!fresh.rule)
		return NULL;
	fresh.started = now;
	bpf_map_update_elem(&requests, t, &fresh, BPF_ANY);
	return tune_rule(fresh.rule);
}

static __always_inline __u32 tune_reply_value(const struct tune_rule *rule, __u32 op,
					 bool request)
{
	switch (op) {
	case BPF_SOCK_OPS_TIMEOUT_INIT:
		return tune_jiffies(request ? rule->synack_rto : rule->syn_rto);
	case BPF_SOCK_OPS_RWND_INIT:
		return rule->rwnd;
	case BPF_SOCK_OPS_NEEDS_ECN:
		return rule->ecn;
	case BPF_SOCK_OPS_BASE_RTT:
		return rule->base_rtt;
	}
	return 0;
}

static __always_inline __u32 tune_use_of(__u32 op, bool request)
{
	switch (op) {
	case BPF_SOCK_OPS_TIMEOUT_INIT:
		return request ? TUNE_USE_SYNACK_RTO : TUNE_USE_SYN_RTO;
	case BPF_SOCK_OPS_RWND_INIT:
		return TUNE_USE_RWND;
	case BPF_SOCK_OPS_NEEDS_ECN:
		return TUNE_USE_ECN;
	case BPF_SOCK_OPS_BASE_RTT:
		return TUNE_USE_BASE_RTT;
	}
	return 0;
}

/*
 * Answers a question of the kernel. Without an answer the program keeps the
 * reply of another program.
 */
static __always_inline void tune_reply(struct bpf_sock_ops *ctx)
{
	const struct match_active *state = match_state();
	struct match_tuple t = {};
	bool request = !ctx->is_fullsock;
	__u32 op = ctx->op, answer;
	struct tune_connection *c;
	struct tune_rule *rule;

	if (!state || !(state->used & tune_use_of(op, request)))
		return;
	if (request) {
		rule = tune_request_rule(ctx, &t);
		if (!rule || tune_is_control(rule, &t))
			return;
	} else {
		c = tune_connection(ctx);
		if (!c || c->arm != TUNE_ARM_TREATED)
			return;
		rule = tune_rule(c->rule);
		if (!rule)
			return;
	}
	answer = tune_reply_value(rule, op, request);
	if (answer)
		ctx->reply = answer;
}

static __always_inline void tune_state_changed(struct bpf_sock_ops *ctx)
{
	struct tune_connection *c = tune_connection(ctx);
	__u32 state = ctx->args[1];

	if (!c)
		return;
	/*
	 * The flight ends with the connection, or when the application closes
	 * the connection after all data was acknowledged.
	 */
	if ((c->flags & TUNE_CONNECTION_LEARNING) &&
	    (state == BPF_TCP_CLOSE || state == BPF_TCP_FIN_WAIT2 || !ctx->packets_out))
		tune_time_flight(ctx, c, true);
	if (state == BPF_TCP_CLOSE)
		tune_account(ctx, true);
}

static __always_inline void tune_rtt(struct bpf_sock_ops *ctx)
{
	struct tune_connection *c = tune_connection(ctx);
	struct tune_rule *rule;

	if (!c)
		return;
	if (c->flags & TUNE_CONNECTION_LEARNING) {
		tune_time_flight(ctx, c, false);
		rule = tune_rule(c->rule);
		if (rule && !(c->flags & TUNE_CONNECTION_LEARNING) &&
		    !(rule->flags & TUNE_FLAG_LIVE))
			tune_set_callbacks(ctx, 0, BPF_SOCK_OPS_RTT_CB_FLAG);
	}
	if ((__u32)bpf_jiffies64() - c->counted >= hz)
		tune_account(ctx, false);
}

static __always_inline void tune_react(struct bpf_sock_ops *ctx,
				       struct tune_connection *c)
{
	struct tune_rule *rule;
	struct tune_stats *s;
	__u32 segments;
	bool bad;

	if ((c->flags & (TUNE_CONNECTION_SAMPLED | TUNE_CONNECTION_REACTED)) !=
	    TUNE_CONNECTION_SAMPLED)
		return;
	rule = tune_rule(c->rule);
	if (!rule)
		return;
	segments = ctx->data_segs_out;
	bad = rule->react_rtos && c->rtos >= rule->react_rtos;
	if (rule->react_retransmits && segments >= TUNE_REACT_SEGMENTS)
		bad |= (__u64)tune_retransmits(ctx, c) * 10000 >
		       (__u64)rule->react_retransmits * segments;
	if (!bad)
		return;
	c->flags |= TUNE_CONNECTION_REACTED;
	tune_count_options(c->rule, c->arm, tune_apply(ctx, c->rule, TUNE_PHASE_REACT));
	s = tune_counts(c->rule, c->arm);
	if (s)
		__sync_fetch_and_add(&s->reactions, 1);
}

/* Stops writing tags: the peer has the tag, or the path drops it. */
static __always_inline void tune_end_tag(struct bpf_sock_ops *ctx,
				       struct tune_connection *c,
				       const struct tune_rule *rule)
{
	c->flags &= ~TUNE_CONNECTION_TAGGING;
	tune_set_callbacks(ctx, 0, (BPF_SOCK_OPS_WRITE_HDR_OPT_CB_FLAG |
			    BPF_SOCK_OPS_RTO_CB_FLAG) & ~tune_callbacks_of(rule, c));
}

static __always_inline void tune_rto(struct bpf_sock_ops *ctx)
{
	struct tune_connection *c = tune_connection(ctx);
	struct tune_rule *rule;
	struct tune_stats *s;

	if (!c)
		return;
	/* A middlebox may have dropped the segment because of the tag. */
	if (ctx->state == BPF_TCP_SYN_SENT) {
		tune_set_callbacks(ctx, 0, BPF_SOCK_OPS_WRITE_HDR_OPT_CB_FLAG);
		return;
	}
	c->rtos++;
	s = tune_counts(c->rule, c->arm);
	if (s)
		__sync_fetch_and_add(&s->rtos, 1);
	if (c->flags & TUNE_CONNECTION_TAGGING) {
		rule = tune_rule(c->rule);
		if (rule)
			tune_end_tag(ctx, c, rule);
	}
	tune_react(ctx, c);
}

static __always_inline void tune_retransmit(struct bpf_sock_ops *ctx)
{
	struct tune_connection *c = tune_connection(ctx);

	if (c)
		tune_react(ctx, c);
}

/* Makes a new listener keep SYNs, and write tags into SYN-ACKs. */
static __always_inline void tune_listen(struct bpf_sock_ops *ctx)
{
	const struct match_active *state = match_state();
	int one = 1;

	if (!state)
		return;
	if (state->used & MATCH_USE_TAG)
		bpf_setsockopt(ctx, SOL_TCP, TCP_SAVE_SYN, &one, sizeof(one));
	if (state->used & TUNE_USE_WRITE)
		tune_set_callbacks(ctx, BPF_SOCK_OPS_WRITE_HDR_OPT_CB_FLAG, 0);
}

/*
 * Returns the tag for the SYN-ACK of a handshake, or NULL. Only the first SYN-ACK
 * gets a tag, as a middlebox may have dropped the first because of the tag. The
 * kernel has the SYN for the first SYN-ACK only: syn_skb shows that. Before Linux
 * 6.2 TCP_BPF_SYN_MAC fails with another errno than ENOENT while there is a SYN,
 * because TCP_SAVE_SYN of 1 does not keep the MAC header.
 */
static __always_inline const struct match_tag *
tune_synack_tag(struct bpf_sock_ops *ctx)
{
	const struct match_active *state = match_state();
	struct match_tuple t = {};
	struct tune_request *known;
	struct tune_rule *rule;
	__u32 found = 0;

	if (bpf_cast_to_kern_ctx) {
		struct bpf_sock_ops_kern *kern = bpf_cast_to_kern_ctx(ctx);

		if (!kern->syn_skb)
			return NULL;
	} else {
		__u32 start;

		if (bpf_getsockopt(ctx, SOL_TCP, TCP_BPF_SYN_MAC, &start,
				   sizeof(start)) == -ENOENT)
			return NULL;
	}
	if (!state || !match_sock_ops_tuple(ctx, &t))
		return NULL;
	if (state->used & MATCH_USE_TAG)
		found = tune_lookup(ctx, MATCH_ACCEPT, TUNE_TAG_SYN);
	if (!(found & MATCH_BY_TAG)) {
		known = bpf_map_lookup_elem(&requests, &t);
		found = known ? known->rule :
				tune_lookup(ctx, MATCH_ACCEPT, TUNE_NO_TAG);
	}
	rule = MATCH_RULE(found) ? tune_rule(MATCH_RULE(found)) : NULL;
	if (!rule || tune_is_control(rule, &t))
		return NULL;
	return rule->tag.length ? &rule->tag : NULL;
}

/*
 * Returns the tag for a segment, or NULL. After the handshake, segments with data
 * carry the tag until data is acknowledged. Of segments without data, only the
 * first acknowledgement of the connecting side does: if the path drops it, the
 * next one passes.
 */
static __always_inline const struct match_tag *
tune_packet_tag(struct bpf_sock_ops *ctx)
{
	__u32 flags = ctx->skb_tcp_flags;
	struct tune_connection *c;
	struct tune_rule *rule;

	if (!ctx->is_fullsock)
		return tune_synack_tag(ctx);
	c = tune_connection(ctx);
	if (!c || !(c->flags & TUNE_CONNECTION_TAGGING))
		return NULL;
	rule = tune_rule(c->rule);
	if (!rule)
		return NULL;
	if (flags & TCPHDR_SYN)
		return &rule->tag;
	/* bytes_acked includes the SYN of the connecting side. */
	if (ctx->bytes_acked > (c->role == MATCH_CONNECT)) {
		tune_end_tag(ctx, c, rule);
		return NULL;
	}
	/* The flags are 0 while space is reserved: there is no header yet. */
	if (flags && !ctx->skb_len) {
		if (c->role != MATCH_CONNECT ||
		    (c->flags & TUNE_CONNECTION_CONFIRMED))
			return NULL;
		c->flags |= TUNE_CONNECTION_CONFIRMED;
	}
	return &rule->tag;
}

static __always_inline void tune_reserve(struct bpf_sock_ops *ctx)
{
	const struct match_tag *tag = tune_packet_tag(ctx);
	__u32 length;

	if (!tag)
		return;
	length = tag->length;
	if (length <= MATCH_TAG)
		bpf_reserve_hdr_opt(ctx, 4 + length, 0);
}

static __always_inline void tune_write(struct bpf_sock_ops *ctx)
{
	const struct match_tag *tag = tune_packet_tag(ctx);
	struct tune_option_header h = {
		.kind = TCPOPT_EXP,
		.exid = { TUNE_TAG_EXID >> 8, TUNE_TAG_EXID & 0xff },
	};
	__u32 length;

	if (!tag)
		return;
	length = tag->length;
	if (!length || length > MATCH_TAG)
		return;
	h.length = 4 + length;
	__builtin_memcpy(h.byte, tag->byte, MATCH_TAG);
	bpf_store_hdr_opt(ctx, &h, sizeof(h), 0);
}

/* Reads a tag from the peer's first data, if the SYN had none. */
static __always_inline void tune_parse(struct bpf_sock_ops *ctx)
{
	struct tune_connection *c;
	struct match_tuple t = {};
	struct tune_rule *rule;
	__u32 found, id, role;

	if (!ctx->is_fullsock)
		return;
	c = tune_connection(ctx);
	/* The connecting side parses options only if it has a rule. */
	role = c ? c->role : MATCH_ACCEPT;
	found = tune_lookup(ctx, role, TUNE_TAG_HERE);
	if (!(found & MATCH_TAG_READ))
		return;
	tune_set_callbacks(ctx, 0, BPF_SOCK_OPS_PARSE_UNKNOWN_HDR_OPT_CB_FLAG);
	id = MATCH_RULE(found);
	if (!(found & MATCH_BY_TAG) || (c && c->rule == id))
		return;
	rule = tune_rule(id);
	if (!rule || !match_sock_ops_tuple(ctx, &t))
		return;
	c = tune_init_connection(ctx, &t, id, rule, role);
	if (c)
		tune_established(ctx, role == MATCH_CONNECT ?
				      TUNE_PHASE_ACTIVE | TUNE_PHASE_LIVE :
				      TUNE_PHASE_PASSIVE);
}

SEC("sockops")
int tune_sockops(struct bpf_sock_ops *ctx)
{
	switch (ctx->op) {
	case BPF_SOCK_OPS_TIMEOUT_INIT:
	case BPF_SOCK_OPS_RWND_INIT:
	case BPF_SOCK_OPS_NEEDS_ECN:
	case BPF_SOCK_OPS_BASE_RTT:
		tune_reply(ctx);
		break;
	case BPF_SOCK_OPS_TCP_CONNECT_CB:
		tune_connect(ctx);
		break;
	case BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB:
		tune_active_established(ctx);
		break;
	case BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB:
		tune_passive_established(ctx);
		break;
	case BPF_SOCK_OPS_STATE_CB:
		tune_state_changed(ctx);
		break;
	case BPF_SOCK_OPS_RTT_CB:
		tune_rtt(ctx);
		break;
	case BPF_SOCK_OPS_RTO_CB:
		tune_rto(ctx);
		break;
	case BPF_SOCK_OPS_RETRANS_CB:
		tune_retransmit(ctx);
		break;
	case BPF_SOCK_OPS_TCP_LISTEN_CB:
		tune_listen(ctx);
		break;
	case BPF_SOCK_OPS_HDR_OPT_LEN_CB:
		tune_reserve(ctx);
		break;
	case BPF_SOCK_OPS_WRITE_HDR_OPT_CB:
		tune_write(ctx);
		break;
	case BPF_SOCK_OPS_PARSE_HDR_OPT_CB:
		tune_parse(ctx);
		break;
	}
	return 1;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
