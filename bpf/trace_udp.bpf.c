// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Measures how long datagrams take from their socket to the queueing discipline,
 * and from there to the driver, of the first device on their path.
 *
 * Hooks: cgroup_skb/egress of the cgroup, after routing, chooses datagrams; raw
 * tracepoints of the host follow the chosen ones by the address of their skb.
 * Decision: none, all packets pass.
 * Cost: for each packet of the cgroup a check of the protocol, and for datagrams
 * a search of the rule, see match.bpf.h; for all packets of the host one load,
 * and one lookup while chosen datagrams are between socket and driver, which
 * takes microseconds.
 *
 * The data of one sendmsg(2) is one datagram, even if the kernel segments it
 * after the queueing discipline (UDP_SEGMENT). A datagram that exceeds the MTU is
 * followed by its first fragment. If the kernel copies the datagram into fragments
 * (the slow path of ip_do_fragment and ip6_fragment), the first fragment is a new
 * skb, which is recognized by its socket, ports and length.
 */
#include "trace_skb.bpf.h"

TRACE_EXPORT(struct, trace_sending);

/* Datagrams in progress, by skb. Whoever deletes an entry counts its outcome. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, TRACE_SENDING);
	__type(key, __u64);
	__type(value, struct trace_sending);
} sending SEC(".maps");

/*
 * The last datagram that a CPU has chosen. The kernel fragments a datagram next. If
 * the process is interrupted by another chosen datagram, or continues on another
 * CPU, the fragments are not recognized.
 */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} last_sending SEC(".maps");

/* Counts the outcome of a datagram, unless another CPU does. */
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
	__u32 group, zero = 0;
	struct trace_stats *s;
	__u64 *last;

	if (!d || !c)
		return;
	if (other)
		udp_end_datagram(skb, 0, TRACE_MISSED);
	group = d->group;
	s = trace_stats(group);
	if (!s)
		return;
	__sync_fetch_and_add(&s->chosen, 1);
	if (bpf_map_update_elem(&sending, &skb, d, BPF_NOEXIST)) {
		__sync_fetch_and_add(&s->outcome[TRACE_FULL], 1);
		return;
	}
	__sync_fetch_and_add(&c->sending, 1);
	last = bpf_map_lookup_elem(&last_sending, &zero);
	if (last)
		*last = skb;
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
	d.local_port = q.tuple.local_port;
	d.remote_port = q.tuple.remote_port;
	d.sk = pointer_value(sk);
	d.sent = bpf_ktime_get_ns();
	udp_track(pointer_value(ctx), &d);
	return 1;
}

/* Returns the chosen datagram of a packet, or NULL. */
static __always_inline struct trace_sending *udp_find(struct sk_buff *skb)
{
	struct trace_counts *c = trace_counts();
	__u64 key = (__u64)skb;

	return c && c->sending ? bpf_map_lookup_elem(&sending, &key) : NULL;
}

/* Reports whether the skb is still that datagram's, and was not reused. */
static __always_inline bool udp_same_datagram(struct sk_buff *skb, const struct trace_sending *d)
{
	return (__u64)BPF_CORE_READ(skb, sk) == d->sk;
}

struct udp_header {
	__be16 source;
	__be16 destination;
	__be16 length;
};

/*
 * Reads the UDP header of a first fragment. Returns false if the packet is none, or
 * has IPv6 extension headers.
 */
static __always_inline bool udp_first_fragment(struct sk_buff *skb,
					       struct udp_header *udp)
{
	const __u8 *ip = BPF_CORE_READ(skb, head) + BPF_CORE_READ(skb, network_header);
	__u8 start[48]; /* of an IPv6 header with a fragment header */
	__u32 at = sizeof(start), offset;

	if (bpf_probe_read_kernel(start, sizeof(start), ip))
		return false;
	if (start[0] >> 4 == 4) {
		offset = start[6] << 8 | start[7];
		if (!(offset & IP_MF) || (offset & IP_OFFSET) || start[9] != IPPROTO_UDP)
			return false;
		at = (start[0] & 15) * 4;
	} else {
		offset = start[42] << 8 | start[43];
		if (start[6] != IPPROTO_FRAGMENT || start[40] != IPPROTO_UDP ||
		    !(offset & IP6_MF) || (offset & IP6_OFFSET))
			return false;
	}
	return !bpf_probe_read_kernel(udp, sizeof(*udp), ip + at);
}

/*
 * If a packet is the first fragment of the datagram that this CPU sends, which the
 * kernel has copied, the packet takes the place of the datagram.
 */
static __always_inline void udp_follow_fragment(struct sk_buff *skb)
{
	struct trace_counts *c = trace_counts();
	__u64 key = (__u64)skb, *last;
	struct trace_sending *d, copy;
	struct udp_header udp = {};
	struct trace_stats *s;
	__u32 zero = 0;

	if (!c || !c->sending)
		return;
	last = bpf_map_lookup_elem(&last_sending, &zero);
	d = last ? bpf_map_lookup_elem(&sending, last) : NULL;
	if (!d || d->queued || !udp_same_datagram(skb, d) || !udp_first_fragment(skb, &udp))
		return;
	copy = *d;
	if (bpf_ntohs(udp.source) != copy.local_port ||
	    bpf_ntohs(udp.destination) != copy.remote_port ||
	    bpf_ntohs(udp.length) != (__u16)(copy.length + 8))
		return;
	if (bpf_map_delete_elem(&sending, last))
		return;
	copy.queued = bpf_ktime_get_ns();
	if (!bpf_map_update_elem(&sending, &key, &copy, BPF_NOEXIST))
		return;
	__sync_fetch_and_add(&c->sending, -1);
	s = trace_stats(copy.group);
	if (s)
		__sync_fetch_and_add(&s->outcome[TRACE_SPLIT], 1);
}

SEC("raw_tp/net_dev_queue")
int trace_udp_queue(struct bpf_raw_tracepoint_args *ctx)
{
	struct sk_buff *skb = (void *)ctx->args[0];
	struct trace_sending *d = udp_find(skb);

	if (!d) {
		udp_follow_fragment(skb);
		return 0;
	}
	/* A second time: the end of the first was missed, and the skb reused. */
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
 * Ends datagrams whose skb is freed without an error. A driver without UDP
 * segmentation gets segments instead of the datagram (validate_xmit_skb in
 * net/core/dev.c), and the segments take the socket from the skb
 * (__udp_gso_segment in net/ipv4/udp_offload.c).
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
