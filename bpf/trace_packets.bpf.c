// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Reports every packet of one TCP connection to user space: when the packet
 * reaches a queueing discipline and a driver, when TCP retransmits a segment, and
 * what the connection receives.
 *
 * Hooks: raw tracepoints, which need neither fentry nor a cgroup, attached only
 * during "trace packets".
 * Decision: none.
 * Cost for other connections: two reads for each packet that reaches a queueing
 * discipline or a driver, and for each that an established connection receives
 * or retransmits; one comparison for each packet that the host receives.
 * Cost for the connection: an event of 80 or 272 bytes for each of these.
 */
#include "packets.bpf.h"

char _license[] SEC("license") = "Dual BSD/GPL";

/* Window scale of the packets that the connection sends and receives, bits. */
struct {
	__u8 out;
	__u8 in;
} scale;

/* Addresses of the peer's packets, to recognize them when the host receives them. */
struct {
	struct net *net;
	__u64 local6[2];
	__u64 remote6[2];
	__be32 local4;
	__be32 remote4;
	__be16 local_port;
	__be16 remote_port;
	__u32 active; /* tcp_probe does not report packets in this state */
} watched;

/*
 * The kernel does not run a program that is already running on the same CPU
 * (__bpf_trace_run, Linux 6.18). If a process reaches a tracepoint with softirqs
 * enabled, as when it processes the backlog of its socket, a softirq on that CPU
 * reaches the tracepoint for another socket without running the program. So each
 * such tracepoint has two programs, one of which always runs; the second one does
 * not report what the first has reported. The socket is locked meanwhile.
 */
struct {
	__u64 receive;
	__u64 resend;
	__u64 state;
} reported;

/* Identifies a segment, also if the memory of its skb is reused. */
static __always_inline __u64 packets_segment_id(const struct sk_buff *skb)
{
	const struct tcp_skb_cb *cb = (const void *)skb +
				      bpf_core_field_offset(struct sk_buff, cb);

	return (__u64)skb ^ (__u64)BPF_CORE_READ(cb, seq) << 32 ^
	       BPF_CORE_READ(cb, ack_seq);
}

static __always_inline bool packets_reported(__u64 *last, __u64 what)
{
	if (*last == what) {
		*last = 0;
		return true;
	}
	*last = what;
	return false;
}

struct packets_place {
	__u32 tcp; /* offset of the TCP header from the network header */
	__u32 total; /* length in the IP header; 0: a jumbogram or BIG TCP packet */
	bool ipv4;
};

/* Finds the TCP header after a network header. Returns false for other protocols. */
static __always_inline bool packets_tcp(const void *network,
					struct packets_place *place)
{
	__u8 header[40], extension[2];
	__u8 next;
	int i;

	if (bpf_probe_read_kernel(header, 20, network))
		return false;
	if (header[0] >> 4 == 4) {
		if (header[9] != IPPROTO_TCP ||
		    ((header[6] << 8 | header[7]) & IP_OFFSET))
			return false;
		place->tcp = (header[0] & 15) * 4;
		place->total = header[2] << 8 | header[3];
		place->ipv4 = true;
		return place->tcp >= 20;
	}
	if (header[0] >> 4 != 6)
		return false;
	next = header[6];
	place->tcp = 40;
	place->total = header[4] << 8 | header[5];
	if (place->total)
		place->total += 40;
#pragma unroll
	for (i = 0; i < IPV6_EXTENSIONS; i++) {
		if (next != IPPROTO_HOPOPTS && next != IPPROTO_ROUTING &&
		    next != IPPROTO_DSTOPTS)
			break;
		if (bpf_probe_read_kernel(extension, sizeof(extension),
					  network + place->tcp))
			return false;
		next = extension[0];
		place->tcp += (extension[1] + 1) * 8;
	}
	return next == IPPROTO_TCP;
}

/* Reports whether a socket in a state is a struct tcp_sock. */
static __always_inline bool packets_is_full_socket(__u8 state)
{
	return state != BPF_TCP_TIME_WAIT && state != BPF_TCP_NEW_SYN_RECV;
}

/*
 * Only established connections reach the tracepoint tcp_probe. In other states
 * the program recognizes the peer's packets by their addresses, when the host
 * receives them.
 */
static __always_inline void packets_watch_addresses(const struct sock *sk, __u8 state)
{
	if (state == BPF_TCP_ESTABLISHED) {
		watched.active = 0;
		return;
	}
	if (watched.active || !packets_is_full_socket(state))
		return;
	watched.net = BPF_CORE_READ(sk, __sk_common.skc_net.net);
	watched.local4 = BPF_CORE_READ(sk, __sk_common.skc_rcv_saddr);
	watched.remote4 = BPF_CORE_READ(sk, __sk_common.skc_daddr);
	watched.local_port = bpf_htons(BPF_CORE_READ(sk, __sk_common.skc_num));
	watched.remote_port = BPF_CORE_READ(sk, __sk_common.skc_dport);
	if (bpf_core_field_exists(sk->__sk_common.skc_v6_daddr) &&
	    BPF_CORE_READ(sk, __sk_common.skc_family) == AF_INET6) {
		BPF_CORE_READ_INTO(&watched.local6, sk, __sk_common.skc_v6_rcv_saddr);
		BPF_CORE_READ_INTO(&watched.remote6, sk, __sk_common.skc_v6_daddr);
	}
	watched.active = 1;
}

static __always_inline void packets_scale(const struct sock *sk, __u8 state)
{
	const struct tcp_sock *tp = (const void *)sk;

	if (!packets_is_full_socket(state))
		return;
	scale.out = BPF_CORE_READ_BITFIELD_PROBED(tp, rx_opt.rcv_wscale);
	scale.in = BPF_CORE_READ_BITFIELD_PROBED(tp, rx_opt.snd_wscale);
}

/*
 * Sets the fields that are in the headers of a packet. network is the offset of
 * the network header. Returns the offset of the IP packet that has the TCP
 * header, which is another one for tunnels.
 */
static __always_inline __u32 packets_describe(struct packets_event *e,
					      const struct sk_buff *skb,
					      __u32 network, __u8 shift)
{
	void *head = BPF_CORE_READ(skb, head);
	__u32 data = (void *)BPF_CORE_READ(skb, data) - head, headers;
	struct skb_shared_info *shared;
	struct packets_place place = {};
	__u8 tcp[20];

	shared = head + BPF_CORE_READ(skb, end);
	e->gso_size = BPF_CORE_READ(shared, gso_size);
	e->gso_segments = BPF_CORE_READ(shared, gso_segs);
	if (packets_tcp(head + network, &place)) {
		e->flags |= PACKETS_TCP;
	} else {
		headers = BPF_CORE_READ(skb, inner_network_header);
		if (headers && packets_tcp(head + headers, &place)) {
			e->flags |= PACKETS_TCP | PACKETS_INNER;
			network = headers;
		}
	}
	e->size = BPF_CORE_READ(skb, len) + data - network;
	if (!(e->flags & PACKETS_TCP))
		return network;
	if (place.total && place.total < e->size)
		e->size = place.total;
	if (bpf_probe_read_kernel(tcp, sizeof(tcp), head + network + place.tcp)) {
		e->flags &= ~PACKETS_TCP;
		return network;
	}
	e->seq = bpf_ntohl(*(__be32 *)&tcp[4]);
	e->ack = bpf_ntohl(*(__be32 *)&tcp[8]);
	e->tcp = tcp[13];
	e->window = bpf_ntohs(*(__be16 *)&tcp[14]);
	if (!(e->tcp & TCPHDR_SYN))
		e->window <<= shift & 15;
	headers = place.tcp + (tcp[12] >> 4) * 4;
	if (e->size > headers)
		e->length = e->size - headers;
	return network;
}

SEC("raw_tracepoint/net_dev_queue")
int packets_queue(struct bpf_raw_tracepoint_args *ctx)
{
	const struct sk_buff *skb = (const void *)ctx->args[0];
	const struct sock *sk = BPF_CORE_READ(skb, sk);
	struct packets_packet *p;
	__u32 network;
	__u8 state;

	if (!packets_is_followed(sk))
		return 0;
	state = BPF_CORE_READ(sk, __sk_common.skc_state);
	packets_watch_addresses(sk, state);
	packets_scale(sk, state);
	p = packets_packet(PACKETS_QUEUE, skb, state);
	if (!p)
		return 0;
	packets_device(&p->event, BPF_CORE_READ(skb, dev));
	network = packets_describe(&p->event, skb,
				   BPF_CORE_READ(skb, network_header), scale.out);
	packets_copy(p, skb, network);
	bpf_ringbuf_submit(p, 0);
	return 0;
}

SEC("raw_tracepoint/net_dev_start_xmit")
int packets_driver(struct bpf_raw_tracepoint_args *ctx)
{
	const struct sk_buff *skb = (const void *)ctx->args[0];
	const struct sock *sk = BPF_CORE_READ(skb, sk);
	struct packets_event *e;

	if (!packets_is_followed(sk))
		return 0;
	e = packets_event(PACKETS_DRIVER, skb,
			  BPF_CORE_READ(sk, __sk_common.skc_state));
	if (!e)
		return 0;
	packets_device(e, (const void *)ctx->args[1]);
	packets_describe(e, skb, BPF_CORE_READ(skb, network_header), scale.out);
	bpf_ringbuf_submit(e, 0);
	return 0;
}

static __always_inline int packets_resent(struct bpf_raw_tracepoint_args *ctx)
{
	const struct sock *sk = (const void *)ctx->args[0];
	const struct sk_buff *skb = (const void *)ctx->args[1];
	const struct inet_connection_sock *icsk = (const void *)sk;
	const struct tcp_skb_cb *cb;
	struct packets_event *e;

	if (!packets_is_followed(sk) || packets_reported(&reported.resend, packets_segment_id(skb)))
		return 0;
	e = packets_event(PACKETS_RETRANSMIT, skb,
			  BPF_CORE_READ(sk, __sk_common.skc_state));
	if (!e)
		return 0;
	cb = (const void *)skb + bpf_core_field_offset(struct sk_buff, cb);
	e->seq = BPF_CORE_READ(cb, seq);
	e->length = BPF_CORE_READ(cb, end_seq) - e->seq;
	e->flags = PACKETS_TCP;
	e->congestion = BPF_CORE_READ_BITFIELD_PROBED(icsk, icsk_ca_state);
	bpf_ringbuf_submit(e, 0);
	return 0;
}

SEC("raw_tracepoint/tcp_retransmit_skb")
int packets_resend(struct bpf_raw_tracepoint_args *ctx)
{
	return packets_resent(ctx);
}

SEC("raw_tracepoint/tcp_retransmit_skb")
int packets_resend_2(struct bpf_raw_tracepoint_args *ctx)
{
	return packets_resent(ctx);
}

static __always_inline int packets_received(struct bpf_raw_tracepoint_args *ctx)
{
	const struct sock *sk = (const void *)ctx->args[0];
	const struct sk_buff *skb = (const void *)ctx->args[1];
	struct packets_packet *p;
	__u32 network;
	__u8 state;

	if (!packets_is_followed(sk) || packets_reported(&reported.receive, packets_segment_id(skb)))
		return 0;
	state = BPF_CORE_READ(sk, __sk_common.skc_state);
	packets_scale(sk, state);
	p = packets_packet(PACKETS_RECEIVE, skb, state);
	if (!p)
		return 0;
	p->event.ifindex = BPF_CORE_READ(skb, skb_iif);
	network = packets_describe(&p->event, skb,
				   BPF_CORE_READ(skb, network_header), scale.in);
	packets_copy(p, skb, network);
	bpf_ringbuf_submit(p, 0);
	return 0;
}

SEC("raw_tracepoint/tcp_probe")
int packets_receive(struct bpf_raw_tracepoint_args *ctx)
{
	return packets_received(ctx);
}

SEC("raw_tracepoint/tcp_probe")
int packets_receive_2(struct bpf_raw_tracepoint_args *ctx)
{
	return packets_received(ctx);
}

/* Reports whether a packet that the host receives is for the connection. */
static __always_inline bool packets_for_connection(const struct sk_buff *skb)
{
	const struct net_device *dev = BPF_CORE_READ(skb, dev);
	const void *network = BPF_CORE_READ(skb, data);
	struct packets_place place = {};
	__u64 address[4];
	__be32 address4[2];
	__be16 port[2];
	__u32 linear;

	if (!dev || BPF_CORE_READ(dev, nd_net.net) != watched.net ||
	    !packets_tcp(network, &place))
		return false;
	linear = BPF_CORE_READ(skb, len) - BPF_CORE_READ(skb, data_len);
	if (linear < place.tcp + 20)
		return false;
	if (bpf_probe_read_kernel(port, sizeof(port), network + place.tcp) ||
	    port[0] != watched.remote_port || port[1] != watched.local_port)
		return false;
	if (place.ipv4)
		return !bpf_probe_read_kernel(address4, sizeof(address4), network + 12) &&
		       address4[0] == watched.remote4 && address4[1] == watched.local4;
	return !bpf_probe_read_kernel(address, sizeof(address), network + 8) &&
	       address[0] == watched.remote6[0] && address[1] == watched.remote6[1] &&
	       address[2] == watched.local6[0] && address[3] == watched.local6[1];
}

SEC("raw_tracepoint/netif_receive_skb")
int packets_early(struct bpf_raw_tracepoint_args *ctx)
{
	const struct sk_buff *skb = (const void *)ctx->args[0];
	struct packets_packet *p;
	__u32 network;

	if (!watched.active || !packets_for_connection(skb))
		return 0;
	p = packets_packet(PACKETS_RECEIVE, skb, 0);
	if (!p)
		return 0;
	p->event.flags = PACKETS_EARLY;
	packets_device(&p->event, BPF_CORE_READ(skb, dev));
	network = BPF_CORE_READ(skb, data) - BPF_CORE_READ(skb, head);
	network = packets_describe(&p->event, skb, network, scale.in);
	packets_copy(p, skb, network);
	bpf_ringbuf_submit(p, 0);
	return 0;
}

static __always_inline int packets_changed(struct bpf_raw_tracepoint_args *ctx)
{
	const struct sock *sk = (const void *)ctx->args[0];
	const struct tcp_sock *tp = (const void *)sk;
	__u8 before = ctx->args[1], state = ctx->args[2];
	struct packets_event *e;

	if (!packets_is_followed(sk) || packets_reported(&reported.state, 1 + state))
		return 0;
	packets_watch_addresses(sk, state);
	e = packets_event(PACKETS_STATE, NULL, state);
	if (!e)
		return 0;
	if (packets_is_full_socket(before)) {
		packets_scale(sk, before);
		e->flags = PACKETS_TCP;
		e->ack = BPF_CORE_READ(tp, snd_una);
	}
	bpf_ringbuf_submit(e, 0);
	return 0;
}

SEC("raw_tracepoint/inet_sock_set_state")
int packets_state(struct bpf_raw_tracepoint_args *ctx)
{
	return packets_changed(ctx);
}

SEC("raw_tracepoint/inet_sock_set_state")
int packets_state_2(struct bpf_raw_tracepoint_args *ctx)
{
	return packets_changed(ctx);
}
