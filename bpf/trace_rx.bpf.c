// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Measures how long received data takes from the host's entry to its socket, and
 * from there until the application reads it.
 *
 * Hooks: cgroup_skb/ingress of the cgroup runs for each packet before the socket
 * receives the packet, and chooses samples: segments with data of chosen
 * connections, and datagrams. Raw tracepoints and sock_release follow samples
 * until they are read; they are attached only if a rule measures that.
 * Decision: none, all packets pass.
 * Cost: for each TCP packet of the cgroup one lookup in the socket's storage,
 * which only chosen connections have; for each datagram a search of the rule,
 * see match.bpf.h; for a sample, the additions of trace_skb.bpf.h. The
 * tracepoints run for all sockets of the host: one load, and one lookup by the
 * socket or the packet while samples wait.
 *
 * A segment counts as read once the application has read all bytes up to its
 * end. A datagram counts as read when it has left the socket's queue. Before
 * Linux 6.3, consume_skb runs at that moment. Newer kernels have
 * sock_recv_length, which does not say what was read; since 6.18 (commit
 * 6471658dc66c) datagrams that were read are not always freed by consume_skb.
 */
#include "trace_skb.bpf.h"

#define TCP_WINDOW (1U << 30) /* largest window, bytes */
#define READ_CHECKS 4 /* datagrams that are checked after a read */
#define STAMP_AGE 3600000000000ULL /* an older time stamp is wrong; nanoseconds */

/* Reads of datagrams are noticed by sock_recv_length; false: by consume_skb. */
const volatile bool by_socket = true;

TRACE_EXPORT(struct, trace_rx_stats);
TRACE_EXPORT(struct, trace_waiting_key);
TRACE_EXPORT(struct, trace_waiting);
TRACE_EXPORT(enum, trace_rx_stage);
TRACE_EXPORT(enum, trace_rx_outcome);

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct trace_rx_stats);
} rx_stats SEC(".maps");

/* Samples that wait to be read. Whoever deletes a sample counts its outcome. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, TRACE_WAITING);
	__type(key, struct trace_waiting_key);
	__type(value, struct trace_waiting);
} waiting SEC(".maps");

/* The waiting samples of a socket, by socket cookie. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, TRACE_READERS);
	__type(key, __u64);
	__type(value, struct trace_reader);
} readers SEC(".maps");

const struct trace_reader empty_reader = {};

static __always_inline struct trace_rx_stats *rx_group_stats(__u32 group)
{
	return bpf_map_lookup_elem(&rx_stats, &group);
}

/*
 * Ends the wait of a sample, and counts the outcome. since distinguishes samples
 * with the same key; now is 0 if the time of the end is not known. Returns 1, or
 * 0 if the sample was ended elsewhere.
 */
__noinline int rx_end_sample(__u64 of, __u64 end, __u64 since, __u64 now,
		      __u32 outcome)
{
	struct trace_waiting_key key = { .of = of, .end = end };
	struct trace_counts *c = trace_counts();
	struct trace_rx_stats *s;
	struct trace_waiting *w;
	__u32 group;

	w = bpf_map_lookup_elem(&waiting, &key);
	if (!w || !c || w->socket != since)
		return 0;
	group = w->group;
	if (bpf_map_delete_elem(&waiting, &key))
		return 0;
	if (end)
		__sync_fetch_and_add(&c->segments, -1);
	else
		__sync_fetch_and_add(&c->datagrams, -1);
	s = rx_group_stats(group);
	if (!s)
		return 1;
	if (outcome == TRACE_RX_READ && now)
		trace_histogram_count(&s->stage[TRACE_RX_READER], now > since ? now - since : 0);
	barrier_var(outcome);
	if (outcome < TRACE_RX_OUTCOMES)
		__sync_fetch_and_add(&s->outcome[outcome], 1);
	return 1;
}

/* Adds a sample to those of a socket. Returns the slot; -1: all are in use. */
__noinline int rx_store(__u64 cookie, __u64 of, __u64 since)
{
	__u32 index = cookie & (TRACE_LOCKS - 1), slot;
	struct trace_reader *r;
	struct trace_lock *lock;

	r = bpf_map_lookup_elem(&readers, &cookie);
	if (!r) {
		bpf_map_update_elem(&readers, &cookie, &empty_reader, BPF_NOEXIST);
		r = bpf_map_lookup_elem(&readers, &cookie);
	}
	lock = bpf_map_lookup_elem(&locks, &index);
	if (!r || !lock)
		return -1;
	bpf_spin_lock(&lock->lock);
	for (slot = 0; slot < TRACE_READER_SAMPLES; slot++) {
		if (r->since[slot])
			continue;
		r->since[slot] = TRACE_RESERVED;
		r->of[slot] = of;
		break;
	}
	bpf_spin_unlock(&lock->lock);
	if (slot >= TRACE_READER_SAMPLES)
		return -1;
	/* The lock orders the two writes of since for all readers. */
	bpf_spin_lock(&lock->lock);
	r->since[slot] = since;
	bpf_spin_unlock(&lock->lock);
	return slot;
}

static __always_inline struct trace_reader *rx_reader(__u64 cookie)
{
	/* Most sockets have no cookie, because nobody has asked for it. */
	return cookie ? bpf_map_lookup_elem(&readers, &cookie) : NULL;
}

/* Ends the wait of a datagram, and frees its slot. */
static __always_inline void rx_end_datagram(__u64 skb, const struct trace_waiting *w,
				    __u64 now, __u32 outcome)
{
	struct trace_reader *r = by_socket ? rx_reader(w->cookie) : NULL;
	__u64 since = w->socket;
	__u32 slot = w->slot;

	barrier_var(slot);
	if (r && slot < TRACE_READER_SAMPLES && r->since[slot] == since)
		r->since[slot] = 0;
	rx_end_sample(skb, 0, since, now, outcome);
}

/* Starts the wait of a sample. Returns 0 if there is no space. */
static __noinline int rx_track(const struct trace_waiting_key *key,
			      const struct trace_waiting *w)
{
	struct trace_counts *c = trace_counts();
	struct trace_waiting *placed;
	struct trace_rx_stats *s;
	int slot = 0, err;

	if (!key || !w || !c)
		return 0;
	err = bpf_map_update_elem(&waiting, key, w, BPF_NOEXIST);
	if (err == -EEXIST && !key->end) {
		/* The skb of an earlier datagram was reused: that one was read. */
		placed = bpf_map_lookup_elem(&waiting, key);
		if (placed)
			rx_end_datagram(key->of, placed, 0, TRACE_RX_READ);
		err = bpf_map_update_elem(&waiting, key, w, BPF_NOEXIST);
	}
	s = rx_group_stats(w->group);
	if (err) {
		if (s)
			__sync_fetch_and_add(&s->outcome[TRACE_RX_FULL], 1);
		return 0;
	}
	if (key->end)
		__sync_fetch_and_add(&c->segments, 1);
	else
		__sync_fetch_and_add(&c->datagrams, 1);
	if (key->end || by_socket) {
		slot = rx_store(w->cookie, key->end ? key->end : key->of, w->socket);
		if (slot < 0) {
			rx_end_sample(key->of, key->end, w->socket, 0, TRACE_RX_FULL);
			return 0;
		}
	}
	placed = bpf_map_lookup_elem(&waiting, key);
	if (placed)
		placed->slot = slot;
	return 1;
}

/*
 * Counts a sample, and measures its time to the socket. Returns the time now, or
 * 0 if nothing follows the sample.
 */
static __always_inline __u64 rx_account(struct __sk_buff *ctx, __u32 group,
				       bool followed)
{
	struct trace_rx_stats *s = rx_group_stats(group);
	struct trace_state *st = trace_state();
	__u64 now = bpf_ktime_get_ns(), age;

	if (!s || !st)
		return 0;
	__sync_fetch_and_add(&s->chosen, 1);
	age = now + st->clock - ctx->tstamp;
	if (ctx->tstamp && st->clock && age <= STAMP_AGE)
		trace_histogram_count(&s->stage[TRACE_RX_STACK], age);
	else
		__sync_fetch_and_add(&s->unstamped, 1);
	if (!followed)
		__sync_fetch_and_add(&s->outcome[TRACE_RX_READ], 1);
	return followed ? now : 0;
}

struct rx_tcp {
	__be16 source;
	__be16 destination;
	__be32 seq;
	__be32 ack_seq;
	__u8 offset; /* upper 4 bits: length of the header in 32-bit words */
};

/* Returns the sequence number after a segment's data plus TRACE_END_BIAS; 0: no data. */
static __always_inline __u64 rx_segment_end(struct __sk_buff *ctx)
{
	struct rx_tcp *tcp;
	__u32 at, length;

	tcp = trace_transport(ctx, IPPROTO_TCP, sizeof(*tcp), &at);
	if (!tcp)
		return 0;
	length = ctx->len - at - (tcp->offset >> 4) * 4;
	return length ? TRACE_END_BIAS + (__u32)(bpf_ntohl(tcp->seq) + length) : 0;
}

/* Returns the group of a connection, which is assigned at the first call. */
static __always_inline __u32 rx_group(struct bpf_sock *sk,
				      struct trace_connection *c,
				      struct trace_rule *rule)
{
	struct match_tuple t = {};
	__u64 cgroup = 0;

	if (c->grouped)
		return c->group;
	if (!match_sock_tuple(sk, &t))
		return rule->first;
	if (rule->group_by & TRACE_BY_CGROUP)
		cgroup = bpf_sk_cgroup_id(sk);
	c->group = trace_group(c->rule, rule, &t, c->role, IPPROTO_TCP, cgroup,
			       bpf_sk_storage_get(&tuned, sk, NULL, 0));
	c->grouped = 1;
	return c->group;
}

/*
 * Ends the wait of a sample that arrived while its connection was closed.
 * trace_closed ends the others.
 */
__noinline int rx_end_closed(__u64 cookie, __u64 end, __u64 since)
{
	struct trace_reader *r = rx_reader(cookie);
	bool others = false;
	__u32 i;

	rx_end_sample(cookie, end, since, 0, TRACE_RX_UNREAD);
	if (!r)
		return 0;
	for (i = 0; i < TRACE_READER_SAMPLES; i++) {
		if (r->since[i] == since)
			r->since[i] = 0;
		else if (r->since[i])
			others = true;
	}
	if (!others)
		bpf_map_delete_elem(&readers, &cookie);
	return 0;
}

static __always_inline void rx_segment(struct __sk_buff *ctx, struct bpf_sock *sk)
{
	struct trace_waiting_key key = {};
	struct trace_waiting w = {};
	struct trace_connection *c;
	struct trace_rule *rule;
	struct bpf_tcp_sock *tp;
	__u32 ahead;

	c = bpf_sk_storage_get(&connections, sk, NULL, 0);
	rule = c ? trace_rule(c->rule) : NULL;
	if (!rule || !(rule->flags & TRACE_RULE_RX))
		return;
	key.end = rx_segment_end(ctx);
	if (!key.end || !trace_sampled(rule, &c->rx_skip, &c->rx_next,
				    rule->interval ? bpf_ktime_get_ns() : 0))
		return;
	tp = bpf_tcp_sock(sk);
	if (!tp)
		return;
	/* Skips retransmissions of received data, and invalid segments. */
	ahead = (__u32)key.end - tp->rcv_nxt;
	if (!ahead || ahead > TCP_WINDOW)
		return;
	key.of = bpf_get_socket_cookie(ctx);
	if (bpf_map_lookup_elem(&waiting, &key))
		return; /* a retransmission */
	w.group = rx_group(sk, c, rule);
	w.cookie = key.of;
	w.socket = rx_account(ctx, w.group, rule->flags & TRACE_RULE_READER);
	if (!w.socket || !rx_track(&key, &w))
		return;
	/* The socket may have been closed meanwhile. */
	if (sk->state == BPF_TCP_CLOSE)
		rx_end_closed(key.of, key.end, w.socket);
}

static __always_inline void rx_datagram(struct __sk_buff *ctx, struct bpf_sock *sk)
{
	struct match_question q = { .role = sk->dst_port ? MATCH_UDP_CONNECT : MATCH_UDP_ACCEPT };
	struct trace_waiting_key key = {};
	struct trace_waiting w = {};
	struct trace_rule *rule;
	__u32 id;

	if (!trace_datagram(ctx, &q.tuple, true))
		return;
	id = trace_choose_datagram(ctx, sk, &q, TRACE_RULE_RX | TRACE_RULE_UDP, true, &w.group);
	rule = id ? trace_rule(id) : NULL;
	if (!rule)
		return;
	/* Without a time stamp a reused skb could not be recognized. */
	w.arrival = ctx->tstamp;
	w.socket = rx_account(ctx, w.group, w.arrival && (rule->flags & TRACE_RULE_READER));
	if (!w.socket)
		return;
	w.cookie = bpf_get_socket_cookie(ctx);
	w.sk = pointer_value(sk);
	key.of = pointer_value(ctx);
	rx_track(&key, &w);
}

SEC("cgroup_skb/ingress")
int trace_rx(struct __sk_buff *ctx)
{
	struct bpf_sock *sk = ctx->sk;

	sk = sk ? bpf_sk_fullsock(sk) : NULL;
	if (!sk)
		return 1;
	if (sk->protocol == IPPROTO_TCP)
		rx_segment(ctx, sk);
	else if (sk->protocol == IPPROTO_UDP)
		rx_datagram(ctx, sk);
	return 1;
}

static __always_inline __u64 rx_cookie(struct sock *sk)
{
	return BPF_CORE_READ(sk, __sk_common.skc_cookie.counter);
}

/*
 * Ends the wait of the samples of a connection that were read, i.e. end before
 * copied; if the connection ends, also of the others.
 */
__noinline int rx_end_read(__u64 cookie, __u32 copied, __u64 now, __u32 ends)
{
	struct trace_reader *r = rx_reader(cookie);
	__u64 since, end;
	__u32 i;

	if (!r)
		return 0;
	for (i = 0; i < TRACE_READER_SAMPLES; i++) {
		since = r->since[i];
		if (since <= TRACE_RESERVED)
			continue;
		end = r->of[i];
		if ((__s32)(copied - (__u32)end) >= 0) {
			if (rx_end_sample(cookie, end, since, now, TRACE_RX_READ))
				r->since[i] = 0;
		} else if (ends) {
			rx_end_sample(cookie, end, since, 0, TRACE_RX_UNREAD);
		}
	}
	return 0;
}

/* The application has read from a connection. The socket is locked. */
SEC("raw_tp/tcp_rcv_space_adjust")
int trace_segment(struct bpf_raw_tracepoint_args *ctx)
{
	struct sock *sk = (void *)ctx->args[0];
	struct trace_counts *c = trace_counts();
	__u64 cookie;

	if (!c || !c->segments)
		return 0;
	cookie = rx_cookie(sk);
	if (rx_reader(cookie))
		rx_end_read(cookie, BPF_CORE_READ((struct tcp_sock *)sk, copied_seq),
			 bpf_ktime_get_ns(), 0);
	return 0;
}

/* A connection ends. Data that the kernel itself has read counts as read. */
SEC("raw_tp/tcp_destroy_sock")
int trace_closed(struct bpf_raw_tracepoint_args *ctx)
{
	struct sock *sk = (void *)ctx->args[0];
	__u64 cookie = rx_cookie(sk);

	if (!rx_reader(cookie))
		return 0;
	rx_end_read(cookie, BPF_CORE_READ((struct tcp_sock *)sk, copied_seq), 0, 1);
	bpf_map_delete_elem(&readers, &cookie);
	return 0;
}

/*
 * Reports whether a datagram has left the queue of its socket. Until it is read,
 * the skb is linked in a list. Before the skb is in a list, dev is a kernel
 * address, which is negative as a number, or the scratch value of the socket
 * (udp_set_dev_scratch): then all queued datagrams are older.
 */
static __always_inline bool rx_dequeued(struct sock *sk, struct sk_buff *skb,
				    __u64 arrival)
{
	struct sk_buff *other;

	if (BPF_CORE_READ(skb, tstamp) != arrival)
		return true; /* the skb was reused */
	other = BPF_CORE_READ(skb, prev);
	if (other && BPF_CORE_READ(other, next) == skb)
		return false;
	if ((__s64)BPF_CORE_READ(skb, dev) < 0)
		return false;
	other = udp_queue_head(sk);
	return !other || BPF_CORE_READ(other, tstamp) >= arrival;
}

/*
 * Returns the slot of the oldest sample of a socket that is newer than after;
 * TRACE_READER_SAMPLES: none.
 */
__noinline int rx_oldest(__u64 cookie, __u64 after)
{
	struct trace_reader *r = rx_reader(cookie);
	__u32 i, slot = TRACE_READER_SAMPLES;
	__u64 oldest = ~0ULL;

	if (!r)
		return TRACE_READER_SAMPLES;
	for (i = 0; i < TRACE_READER_SAMPLES; i++) {
		if (r->since[i] > after && r->since[i] < oldest) {
			oldest = r->since[i];
			slot = i;
		}
	}
	return slot;
}

/*
 * Ends the wait of the datagram in a slot if the datagram has left the socket,
 * which is a pointer as a number. Sets *since to the time at which the datagram
 * reached the socket. Returns 0 if the slot is free.
 */
__noinline int rx_check(__u64 socket, __u64 cookie, __u32 slot, __u64 *since)
{
	struct trace_reader *r = rx_reader(cookie);
	struct sock *sk = (struct sock *)socket;
	struct trace_waiting_key key = {};
	struct trace_waiting *w;

	if (!since || !r || slot >= TRACE_READER_SAMPLES)
		return 0;
	*since = __sync_fetch_and_add(&r->since[slot], 0);
	if (*since <= TRACE_RESERVED)
		return 0;
	key.of = r->of[slot];
	w = bpf_map_lookup_elem(&waiting, &key);
	if (w && w->socket != *since)
		w = NULL;
	if (w && !rx_dequeued(sk, (void *)key.of, w->arrival))
		return 1;
	if (__sync_val_compare_and_swap(&r->since[slot], *since, 0) == *since)
		rx_end_sample(key.of, 0, *since, bpf_ktime_get_ns(), TRACE_RX_READ);
	return 1;
}

/*
 * The application has read the oldest datagram of a socket; several threads may
 * do so at once. Datagrams that were received by several CPUs are not queued in
 * the order of their arrival, so that a datagram that was read may be newer than
 * one that was not. If the queue is empty, no other read may follow: then all
 * samples are checked.
 */
SEC("raw_tp/sock_recv_length")
int trace_datagrams(struct bpf_raw_tracepoint_args *ctx)
{
	struct sock *sk = (void *)ctx->args[0];
	struct trace_counts *c = trace_counts();
	__u64 cookie, since = TRACE_RESERVED;
	struct trace_reader *r;
	__u32 i;

	if (!c || !c->datagrams)
		return 0;
	if ((int)ctx->args[1] < 0 || (ctx->args[2] & (MSG_PEEK | MSG_ERRQUEUE)))
		return 0;
	cookie = rx_cookie(sk);
	r = rx_reader(cookie);
	/* The tracepoint also runs for TCP. */
	if (!r || BPF_CORE_READ(sk, sk_protocol) != IPPROTO_UDP)
		return 0;
	if (!udp_queue_head(sk)) {
		for (i = 0; i < TRACE_READER_SAMPLES; i++)
			if (r->since[i] > TRACE_RESERVED)
				rx_check((__u64)sk, cookie, i, &since);
		return 0;
	}
	for (i = 0; i < READ_CHECKS; i++)
		if (!rx_check((__u64)sk, cookie, rx_oldest(cookie, since), &since))
			return 0;
	return 0;
}

/* Returns the sample of a datagram by its skb, or NULL. */
static __always_inline struct trace_waiting *rx_find_by_skb(struct sk_buff *skb)
{
	struct trace_waiting_key key = { .of = (__u64)skb };
	struct trace_counts *c = trace_counts();

	return c && c->datagrams ? bpf_map_lookup_elem(&waiting, &key) : NULL;
}

/* Reports whether the skb is still that datagram's, and was not reused. */
static __always_inline bool rx_same_datagram(struct sk_buff *skb, const struct trace_waiting *w)
{
	return BPF_CORE_READ(skb, tstamp) == w->arrival;
}

/* A datagram is freed without an error: it was read. */
SEC("raw_tp/consume_skb")
int trace_consumed(struct bpf_raw_tracepoint_args *ctx)
{
	struct sk_buff *skb = (void *)ctx->args[0];
	struct trace_waiting *w = rx_find_by_skb(skb);

	if (w)
		rx_end_datagram((__u64)skb, w, rx_same_datagram(skb, w) ? bpf_ktime_get_ns() : 0,
			TRACE_RX_READ);
	return 0;
}

/* A datagram is dropped: before it is queued, or when the socket is closed. */
SEC("raw_tp/kfree_skb")
int trace_dropped(struct bpf_raw_tracepoint_args *ctx)
{
	struct sk_buff *skb = (void *)ctx->args[0];
	struct trace_waiting *w = rx_find_by_skb(skb);
	__u32 outcome = TRACE_RX_DROPPED;
	struct sock *sk;

	if (!w)
		return 0;
	sk = (void *)w->sk;
	if (!rx_same_datagram(skb, w))
		outcome = TRACE_RX_READ; /* it was read before, unnoticed */
	else if (BPF_CORE_READ(sk, __sk_common.skc_flags) & (1UL << SOCK_DEAD))
		outcome = TRACE_RX_UNREAD;
	rx_end_datagram((__u64)skb, w, 0, outcome);
	return 0;
}

/*
 * Ends the wait of the datagrams of a socket that is closed. kfree_skb is not
 * enough: the kernel drops them in an RCU callback, and a raw tracepoint may be
 * skipped there, e.g. if the callback interrupts a run of the same program
 * (bpf_prog_get_recursion_context).
 */
static __always_inline void rx_end_datagrams(__u64 cookie)
{
	struct trace_reader *r = rx_reader(cookie);
	struct trace_waiting_key key = {};
	struct trace_waiting *w;
	__u32 i, outcome;
	__u64 since;

	if (!r)
		return;
	for (i = 0; i < TRACE_READER_SAMPLES; i++) {
		since = r->since[i];
		if (since <= TRACE_RESERVED)
			continue;
		key.of = r->of[i];
		w = bpf_map_lookup_elem(&waiting, &key);
		if (!w || w->socket != since)
			continue;
		outcome = rx_dequeued((void *)w->sk, (void *)key.of, w->arrival) ?
			TRACE_RX_READ : TRACE_RX_UNREAD;
		rx_end_sample(key.of, 0, since, 0, outcome);
	}
	bpf_map_delete_elem(&readers, &cookie);
}

/*
 * A UDP socket is closed. The kernel drops its datagrams later: kfree_skb ends
 * the wait of those that arrive until then, and of all without by_socket.
 */
SEC("cgroup/sock_release")
int trace_release(struct bpf_sock *ctx)
{
	if (by_socket && ctx->protocol == IPPROTO_UDP)
		rx_end_datagrams(bpf_get_socket_cookie(ctx));
	return 1;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
