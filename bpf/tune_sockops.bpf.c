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
#include "tune_learn.bpf.h"
#include "tune_tag.bpf.h"

/* Jiffies per second. */
const volatile __u32 hz = 250;

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

MATCH_EXPORT(enum, tune_limit);
MATCH_EXPORT(enum, tune_use);
MATCH_EXPORT(enum, tune_phase);
MATCH_EXPORT(enum, tune_flag);
MATCH_EXPORT(enum, tune_level);
MATCH_EXPORT(enum, tune_arm);
MATCH_EXPORT(enum, tune_connection_flag);

static __always_inline __u32 tune_jiffies(__u32 us)
{
	return ((__u64)us * hz + 999999) / 1000000;
}

/*
 * Sets an option of a rule if the option belongs to the phase. Returns the number
 * of options that were set, 0 or 1. This is a global function, as others of tune,
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
