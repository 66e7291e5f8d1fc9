// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Reports every packet of one UDP socket to user space: when the packet reaches a
 * queueing discipline and a driver, when a datagram reaches the socket and when
 * the application has received the datagram, and what the host drops.
 *
 * Hooks: raw tracepoints, and cgroup_skb/ingress of the socket's cgroup, attached
 * only during "trace packets".
 * Decision: none, all packets pass.
 * Cost for other sockets: two reads for each packet that reaches a queueing
 * discipline or a driver; one comparison for each packet that the cgroup
 * receives; one or two reads for each receive operation; one lookup for each
 * packet that the host drops.
 * Cost for the socket: an event of 80 or 272 bytes for each of these.
 */
#include "packets.bpf.h"

#define UDP_HEADER 8
#define ARRIVED 16384 /* datagrams in the receive queue that are recognized */

char _license[] SEC("license") = "Dual BSD/GPL";

/*
 * Describes struct net in BTF. The order of types that BTF only declares, such as
 * struct bpf_flow_keys, depends on addresses in clang 19: the object would differ
 * between directories.
 */
PACKETS_EXPORT(struct, net);

/* The tracepoint kfree_skb has the reason, since Linux 5.17. */
const volatile bool has_reason = true;

/* Datagrams that reached the socket, by skb, until they are read or dropped. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, ARRIVED);
	__type(key, __u64);
	__type(value, __u8);
} arrived SEC(".maps");

struct udp_place {
	__u32 payload; /* offset of the payload from the network header */
	__u32 total; /* length in the IP header; 0: a jumbogram or BIG TCP packet */
	__u32 offset; /* of a fragment, bytes */
	__u32 id; /* of a fragment */
	__u32 source; /* hash of the address and the port */
	__u32 destination;
	bool fragment;
};

static __always_inline __u32 udp_fold(const __u8 *address, int words)
{
	const __u32 *word = (const void *)address;
	__u32 hash = 0;
	int i;

#pragma unroll
	for (i = 0; i < words; i++)
		hash = (hash ^ word[i]) * 0x9e3779b1;
	return hash;
}

/* Finds the payload after a network header. Returns false for other protocols. */
static __always_inline bool udp_parse(const void *network, struct udp_place *place)
{
	__u8 header[40] __attribute__((aligned(8))), extension[8];
	__be16 port[2];
	__u8 next;
	int i;

	if (bpf_probe_read_kernel(header, 20, network))
		return false;
	if (header[0] >> 4 == 4) {
		if (header[9] != IPPROTO_UDP)
			return false;
		place->payload = (header[0] & 15) * 4;
		place->total = header[2] << 8 | header[3];
		place->offset = ((header[6] << 8 | header[7]) & IP_OFFSET) * 8;
		place->fragment = place->offset || ((header[6] << 8 | header[7]) & IP_MF);
		place->id = header[4] << 8 | header[5];
		place->source = udp_fold(header + 12, 1);
		place->destination = udp_fold(header + 16, 1);
	} else if (header[0] >> 4 == 6) {
		if (bpf_probe_read_kernel(header, 40, network))
			return false;
		place->payload = 40;
		place->total = header[4] << 8 | header[5];
		if (place->total)
			place->total += 40;
		place->source = udp_fold(header + 8, 4);
		place->destination = udp_fold(header + 24, 4);
		next = header[6];
#pragma unroll
		for (i = 0; i < IPV6_EXTENSIONS; i++) {
			if (next != IPPROTO_HOPOPTS && next != IPPROTO_ROUTING &&
			    next != IPPROTO_DSTOPTS && next != IPPROTO_FRAGMENT)
				break;
			if (bpf_probe_read_kernel(extension, sizeof(extension),
						  network + place->payload))
				return false;
			if (next == IPPROTO_FRAGMENT) {
				place->fragment = true;
				place->offset = (extension[2] << 8 | extension[3]) & IP6_OFFSET;
				place->id = bpf_ntohl(*(__be32 *)&extension[4]);
				place->payload += 8;
			} else {
				place->payload += (extension[1] + 1) * 8;
			}
			next = extension[0];
		}
		if (next != IPPROTO_UDP)
			return false;
	} else {
		return false;
	}
	if (place->offset)
		return true;
	/* Only the first fragment has the ports. */
	if (!place->fragment) {
		if (bpf_probe_read_kernel(port, sizeof(port), network + place->payload))
			return false;
		place->source ^= port[0];
		place->destination ^= port[1];
	}
	place->payload += UDP_HEADER;
	return true;
}

/*
 * Sets the fields that are in the headers of a packet. network is the offset of
 * the network header. Returns the offset of the IP packet that has the UDP
 * header, which is another one for tunnels.
 */
static __always_inline __u32 udp_describe(struct packets_event *e,
					  const struct sk_buff *skb,
					  __u32 network)
{
	void *head = BPF_CORE_READ(skb, head);
	__u32 data = (void *)BPF_CORE_READ(skb, data) - head, inner;
	struct skb_shared_info *shared;
	struct udp_place place = {};

	shared = head + BPF_CORE_READ(skb, end);
	e->gso_size = BPF_CORE_READ(shared, gso_size);
	e->gso_segments = BPF_CORE_READ(shared, gso_segs);
	if (udp_parse(head + network, &place)) {
		e->flags |= PACKETS_UDP;
	} else {
		inner = BPF_CORE_READ(skb, inner_network_header);
		if (inner && udp_parse(head + inner, &place)) {
			e->flags |= PACKETS_UDP | PACKETS_INNER;
			network = inner;
		}
	}
	e->size = BPF_CORE_READ(skb, len) + data - network;
	if (!(e->flags & PACKETS_UDP))
		return network;
	if (place.total && (place.total < e->size || !e->gso_size))
		e->size = place.total;
	e->peer = place.destination;
	if (place.fragment) {
		e->flags |= PACKETS_FRAGMENT;
		e->seq = place.offset;
		e->ack = place.id;
	}
	if (e->size > place.payload)
		e->length = e->size - place.payload;
	return network;
}

SEC("raw_tracepoint/net_dev_queue")
int udp_queue(struct bpf_raw_tracepoint_args *ctx)
{
	const struct sk_buff *skb = (const void *)ctx->args[0];
	struct packets_packet *p;
	__u32 network;

	if (!packets_is_followed(BPF_CORE_READ(skb, sk)))
		return 0;
	p = packets_packet(PACKETS_QUEUE, skb, 0);
	if (!p)
		return 0;
	packets_device(&p->event, BPF_CORE_READ(skb, dev));
	network = udp_describe(&p->event, skb, BPF_CORE_READ(skb, network_header));
	packets_copy(p, skb, network);
	bpf_ringbuf_submit(p, 0);
	return 0;
}

SEC("raw_tracepoint/net_dev_start_xmit")
int udp_driver(struct bpf_raw_tracepoint_args *ctx)
{
	const struct sk_buff *skb = (const void *)ctx->args[0];
	struct packets_event *e;

	if (!packets_is_followed(BPF_CORE_READ(skb, sk)))
		return 0;
	e = packets_event(PACKETS_DRIVER, skb, 0);
	if (!e)
		return 0;
	packets_device(e, (const void *)ctx->args[1]);
	udp_describe(e, skb, BPF_CORE_READ(skb, network_header));
	bpf_ringbuf_submit(e, 0);
	return 0;
}

/* A datagram reaches the socket, before the limit of its receive buffer. */
SEC("cgroup_skb/ingress")
int udp_arrive(struct __sk_buff *ctx)
{
	struct packets_packet *p;
	__u32 size = ctx->len, n;
	__u8 one = 1;
	__u64 key;

	if (bpf_get_socket_cookie(ctx) != cookie)
		return 1;
	key = pointer_value(ctx);
	p = packets_packet(PACKETS_RECEIVE, (void *)key, 0);
	if (!p)
		return 1;
	packets_device(&p->event, BPF_CORE_READ((struct sk_buff *)key, dev));
	p->event.size = size;
	p->event.gso_size = ctx->gso_size;
	p->event.gso_segments = ctx->gso_segs;
	/* The verifier of Linux 5.10 wants a length of 1 or more. */
	n = size - 1;
	barrier_var(n);
	if (n > PACKETS_BYTES - 1)
		n = PACKETS_BYTES - 1;
	if (!bpf_skb_load_bytes(ctx, 0, p->bytes, n + 1))
		p->event.captured = n + 1;
	bpf_ringbuf_submit(p, 0);
	bpf_map_update_elem(&arrived, &key, &one, BPF_ANY);
	return 1;
}

/*
 * The application has received a datagram. The kernel does not say which one; the
 * event has the oldest one that is left.
 */
SEC("raw_tracepoint/sock_recv_length")
int udp_read(struct bpf_raw_tracepoint_args *ctx)
{
	struct sock *sk = (void *)ctx->args[0];
	int length = ctx->args[1];
	struct packets_event *e;

	if (length < 0 || (ctx->args[2] & (MSG_PEEK | MSG_ERRQUEUE)) ||
	    !packets_is_followed(sk))
		return 0;
	e = packets_event(PACKETS_READ, udp_queue_head(sk), 0);
	if (!e)
		return 0;
	e->flags = PACKETS_LEFT;
	e->length = length;
	bpf_ringbuf_submit(e, 0);
	return 0;
}

/* Reports the end of a datagram that reached the socket. */
static __always_inline void udp_end(__u64 skb, __u32 kind, __u32 reason)
{
	struct packets_event *e;

	if (!bpf_map_lookup_elem(&arrived, &skb) || bpf_map_delete_elem(&arrived, &skb))
		return;
	e = packets_event(kind, (void *)skb, 0);
	if (!e)
		return;
	e->flags = PACKETS_INWARD;
	e->reason = reason;
	bpf_ringbuf_submit(e, 0);
}

/* Before Linux 6.3, without sock_recv_length: a datagram is freed without an error, because it was read. */
SEC("raw_tracepoint/consume_skb")
int udp_consume(struct bpf_raw_tracepoint_args *ctx)
{
	udp_end(ctx->args[0], PACKETS_READ, 0);
	return 0;
}

SEC("raw_tracepoint/kfree_skb")
int udp_drop(struct bpf_raw_tracepoint_args *ctx)
{
	const struct sk_buff *skb = (const void *)ctx->args[0];
	struct packets_packet *p;
	__u32 reason = 0, network, data, size;

	if (has_reason)
		reason = ctx->args[2];
	if (!packets_is_followed(BPF_CORE_READ(skb, sk))) {
		udp_end((__u64)skb, PACKETS_DROP, reason);
		return 0;
	}
	/* The other end of a veth has received it. */
	if (BPF_CORE_READ(skb, skb_iif))
		return 0;
	p = packets_packet(PACKETS_DROP, skb, 0);
	if (!p)
		return 0;
	p->event.reason = reason;
	packets_device(&p->event, BPF_CORE_READ(skb, dev));
	network = udp_describe(&p->event, skb, BPF_CORE_READ(skb, network_header));
	data = BPF_CORE_READ(skb, data) - BPF_CORE_READ(skb, head);
	size = BPF_CORE_READ(skb, len) + data - network;
	/*
	 * If the first fragment is dropped, ip_do_fragment and ip6_fragment free the
	 * others before their headers are written: ip_fraglist_prepare and
	 * ip6_fraglist_prepare move data back to the network header. Until then, the
	 * memory has the header of an earlier packet of any flow and namespace.
	 */
	if (data > network || p->event.size != size)
		p->event.flags &= ~PACKETS_UDP;
	else
		packets_copy(p, skb, network);
	bpf_ringbuf_submit(p, 0);
	return 0;
}
