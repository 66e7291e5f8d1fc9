// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Measures how long datagrams take from leaving their socket to the queueing
 * discipline, and from there to the driver, of the first device on their way.
 *
 * trace_udp runs for each packet that a socket of the cgroup sends, once it is
 * routed; for datagrams it searches their rule. The other programs follow what
 * is chosen by its packet, and run for all packets of the host. Cost for the
 * others: one load while no datagram is under way; while some are, which is for
 * microseconds, one lookup.
 *
 * What one sendmsg(2) gave is one datagram, if it is cut into many behind the
 * queueing discipline (UDP_SEGMENT), too. One that is longer than the route lets
 * packets be is followed by its first fragment or, where the kernel copies it
 * into fragments, not.
 */
#include "trace_skb.bpf.h"

TRACE_EXPORT(struct, trace_sending);

/* By skb. Who deletes a datagram counts what became of it. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, TRACE_SENDING);
	__type(key, __u64);
	__type(value, struct trace_sending);
} sending SEC(".maps");

/* Ends the way of a datagram, unless somebody else does. */
__noinline int udp_end_datagram(__u64 skb, __u64 now, __u32 outcome)
{
	struct trace_counts *c = trace_counts();
	struct trace_sending *d, copy;
	struct trace_stats *s;

	d = bpf_map_lookup_elem(&sending, &skb);
	if (!d || !c)
		return 0;
	copy = *d;
	if (bpf_map_delete_elem(&sending, &skb))
		return 0;
	__sync_fetch_and_add(&c->sending, -1);
	s = trace_stats(copy.group);
	if (!s || outcome >= TRACE_OUTCOMES)
		return 0;
	__sync_fetch_and_add(&s->outcome[outcome], 1);
	if (outcome != TRACE_SENT)
		return 0;
	__sync_fetch_and_add(&s->bytes, copy.length);
	if (!copy.queued) {
		__sync_fetch_and_add(&s->unqueued, 1);
		return 0;
	}
	trace_histogram_count(&s->stage[TRACE_STACK], copy.queued > copy.sent ? copy.queued - copy.sent : 0);
	trace_histogram_count(&s->stage[TRACE_QDISC], now > copy.queued ? now - copy.queued : 0);
	return 0;
}

static __always_inline void udp_track(__u64 skb, const struct trace_sending *d)
{
	struct trace_sending *other = bpf_map_lookup_elem(&sending, &skb);
	struct trace_counts *c = trace_counts();
	struct trace_stats *s;
	__u32 group;

	if (!d || !c)
		return;
	if (other)
		udp_end_datagram(skb, 0, TRACE_MISSED);
	group = d->group;
	s = trace_stats(group);
	if (!s)
		return;
	__sync_fetch_and_add(&s->chosen, 1);
	if (bpf_map_update_elem(&sending, &skb, d, BPF_NOEXIST))
		__sync_fetch_and_add(&s->outcome[TRACE_FULL], 1);
	else
		__sync_fetch_and_add(&c->sending, 1);
}

SEC("cgroup_skb/egress")
int trace_udp(struct __sk_buff *ctx)
{
	struct match_question q = {};
	struct trace_sending d = {};
	struct bpf_sock *sk = ctx->sk;

	sk = sk ? bpf_sk_fullsock(sk) : NULL;
	if (!sk || sk->protocol != IPPROTO_UDP)
		return 1;
	q.role = sk->dst_port ? MATCH_UDP_CONNECT : MATCH_UDP_ACCEPT;
	d.length = trace_datagram(ctx, &q.tuple, false);
	if (d.length < 8 || !trace_choose_datagram(ctx, sk, &q, TRACE_RULE_UDP_TX, false, &d.group))
		return 1;
	d.length -= 8;
	d.segments = ctx->gso_segs;
	d.sk = trace_pointer_value(sk);
	d.sent = bpf_ktime_get_ns();
	udp_track(trace_pointer_value(ctx), &d);
	return 1;
}

/* A datagram that is under way, by its packet; NULL for others. */
static __always_inline struct trace_sending *udp_find(struct sk_buff *skb)
{
	struct trace_counts *c = trace_counts();
	__u64 key = (__u64)skb;

	return c && c->sending ? bpf_map_lookup_elem(&sending, &key) : NULL;
}

/* Whether the packet is that datagram's still. */
static __always_inline bool udp_same_datagram(struct sk_buff *skb, const struct trace_sending *d)
{
	return (__u64)BPF_CORE_READ(skb, sk) == d->sk;
}

SEC("raw_tp/net_dev_queue")
int trace_udp_queue(struct bpf_raw_tracepoint_args *ctx)
{
	struct sk_buff *skb = (void *)ctx->args[0];
	struct trace_sending *d = udp_find(skb);

	if (!d)
		return 0;
	/* Twice: the end of the first was missed, this is another. */
	if (d->queued || !udp_same_datagram(skb, d))
		udp_end_datagram((__u64)skb, 0, TRACE_MISSED);
	else
		d->queued = bpf_ktime_get_ns();
	return 0;
}

SEC("raw_tp/net_dev_start_xmit")
int trace_udp_xmit(struct bpf_raw_tracepoint_args *ctx)
{
	struct sk_buff *skb = (void *)ctx->args[0];
	struct trace_sending *d = udp_find(skb);

	if (d)
		udp_end_datagram((__u64)skb, bpf_ktime_get_ns(),
			udp_same_datagram(skb, d) ? TRACE_SENT : TRACE_MISSED);
	return 0;
}

SEC("raw_tp/kfree_skb")
int trace_udp_drop(struct bpf_raw_tracepoint_args *ctx)
{
	struct sk_buff *skb = (void *)ctx->args[0];
	struct trace_sending *d = udp_find(skb);

	if (d)
		udp_end_datagram((__u64)skb, 0, udp_same_datagram(skb, d) ? TRACE_DISCARDED : TRACE_MISSED);
	return 0;
}

/*
 * A datagram of many leaves the queueing discipline as those for a driver that
 * does not cut it itself (validate_xmit_skb in net/core/dev.c), and they have
 * its socket (__udp_gso_segment in net/ipv4/udp_offload.c).
 */
SEC("raw_tp/consume_skb")
int trace_udp_split(struct bpf_raw_tracepoint_args *ctx)
{
	struct sk_buff *skb = (void *)ctx->args[0];
	struct trace_sending *d = udp_find(skb);
	__u32 outcome = TRACE_MISSED;

	if (!d)
		return 0;
	if (d->segments && !BPF_CORE_READ(skb, sk))
		outcome = d->queued ? TRACE_SENT : TRACE_SPLIT;
	else if (udp_same_datagram(skb, d))
		outcome = TRACE_SPLIT;
	udp_end_datagram((__u64)skb, bpf_ktime_get_ns(), outcome);
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
