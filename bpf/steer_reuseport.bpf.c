// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Selects the member of a SO_REUSEPORT group that receives a SYN or a datagram:
 * the socket in the slot of the source address.
 *
 * Hook: sk_reuseport of one listener's group. The kernel runs the program for
 * each SYN and each UDP datagram, not for segments of established connections.
 * Decision: SK_PASS with a socket, or SK_DROP (RST, or ICMP port unreachable)
 * if there is no ready member. SK_PASS without a socket would let the kernel's
 * own hash select one.
 * Cost: see steer.bpf.h, and one lookup of the socket.
 *
 * steer_migrate is the same program for Linux 5.14 and newer. The kernel also
 * runs it when a listener closes with connections in its queue
 * (d4f2c86b2b7e): they migrate only to the member that a new connection of
 * their device would reach, whatever net.ipv4.tcp_migrate_req is.
 */
#include "steer.bpf.h"

#include <linux/ip.h>
#include <linux/ipv6.h>

char _license[] SEC("license") = "Dual BSD/GPL";

/* The row of this program's listener in sockets. */
const volatile __u32 listener = 0;

struct {
	__uint(type, BPF_MAP_TYPE_REUSEPORT_SOCKARRAY);
	__uint(max_entries, STEER_MAX_LISTENERS * STEER_MAX_SLOTS);
	__type(key, __u32);
	__type(value, __u64);
} sockets SEC(".maps");

/* The sockets of members that took over from the one in sockets. */
struct {
	__uint(type, BPF_MAP_TYPE_REUSEPORT_SOCKARRAY);
	__uint(max_entries, STEER_MAX_LISTENERS * STEER_MAX_SLOTS);
	__type(key, __u32);
	__type(value, __u64);
} successors SEC(".maps");

/* The sockets of closed gates, by listener. */
struct {
	__uint(type, BPF_MAP_TYPE_REUSEPORT_SOCKARRAY);
	__uint(max_entries, STEER_MAX_LISTENERS);
	__type(key, __u32);
	__type(value, __u64);
} gates SEC(".maps");

/* The waiting rooms, by listener. */
struct {
	__uint(type, BPF_MAP_TYPE_REUSEPORT_SOCKARRAY);
	__uint(max_entries, STEER_MAX_LISTENERS);
	__type(key, __u32);
	__type(value, __u64);
} rooms SEC(".maps");

/*
 * Whether the kernel completes the handshakes of connections that wait (Linux
 * 5.14), or a socket filter of the room drops SYNs.
 */
const volatile bool room_accepts = false;

static __always_inline bool read_source(struct sk_reuseport_md *ctx,
					struct steer_address *address)
{
	__u32 ipv4;

	switch (ctx->eth_protocol) {
	case bpf_htons(ETH_P_IP):
		if (bpf_skb_load_bytes_relative(ctx,
						offsetof(struct iphdr, saddr),
						&ipv4, sizeof(ipv4),
						BPF_HDR_START_NET))
			return false;
		steer_map_ipv4(address, ipv4);
		return true;
	case bpf_htons(ETH_P_IPV6):
		return !bpf_skb_load_bytes_relative(
			ctx, offsetof(struct ipv6hdr, saddr), address,
			sizeof(*address), BPF_HDR_START_NET);
	}
	return false;
}

/* Reports whether the agent sent a datagram again. */
static __always_inline bool is_replayed(struct sk_reuseport_md *ctx)
{
	__u32 offset = offsetof(struct iphdr, ttl);
	__u8 ttl;

	if (ctx->eth_protocol == bpf_htons(ETH_P_IPV6))
		offset = offsetof(struct ipv6hdr, hop_limit);
	return !bpf_skb_load_bytes_relative(ctx, offset, &ttl, sizeof(ttl),
					    BPF_HDR_START_NET) &&
	       ttl == STEER_REPLAY_TTL;
}

/* Selects the socket of the member in a slot. Returns 0 on success. */
static __always_inline long select_member(struct sk_reuseport_md *ctx,
					  const struct steer *s, __u32 slot)
{
	__u32 index = listener * STEER_MAX_SLOTS + slot;

	if (s->bank == 2)
		return bpf_sk_select_reuseport(ctx, &successors, &index, 0);
	return bpf_sk_select_reuseport(ctx, &sockets, &index, 0);
}

static __always_inline void wait_in_room(struct sk_reuseport_md *ctx,
					 struct steer *s)
{
	__u32 index = listener;

	/* A connection that migrates has no packet. */
	if (steer_fills(s, !s->connection && is_replayed(ctx)) &&
	    !select_member(ctx, s, s->home)) {
		s->slot = s->home;
		return;
	}
	if (steer_store(s, s->connection ? 0 : ctx->len) &&
	    !bpf_sk_select_reuseport(ctx, &rooms, &index, 0)) {
		s->slot = s->home;
		s->held = !s->connection || !room_accepts;
	}
}

static __always_inline void select(struct sk_reuseport_md *ctx,
				   struct steer *s)
{
	__u32 index;

	steer_decide(s);
	if (s->waits) {
		wait_in_room(ctx, s);
		return;
	}
	if (s->slot == STEER_NO_SLOT)
		return;
	if (s->slot != s->home && !s->connection && is_replayed(ctx) &&
	    steer_fills_instead(s))
		s->slot = s->home;
	if (s->gated) {
		index = listener;
		s->held = !bpf_sk_select_reuseport(ctx, &gates, &index, 0);
		if (s->held)
			return;
	}
	if (select_member(ctx, s, s->slot))
		steer_refuse(s, STEER_REASON_SOCKET);
}

/*
 * Reports whether a segment is a SYN. The kernel also runs the program for
 * acknowledgements of SYN cookies, and for segments of unknown connections.
 */
static __always_inline bool is_syn(struct sk_reuseport_md *ctx)
{
	const struct tcphdr *tcp = (void *)(long)ctx->data;

	return (void *)(tcp + 1) <= (void *)(long)ctx->data_end && tcp->syn;
}

static __always_inline int steer(struct sk_reuseport_md *ctx)
{
	struct steer s = { .home = STEER_NO_SLOT, .slot = STEER_NO_SLOT };

	s.connection = ctx->ip_protocol == IPPROTO_TCP;
	s.uncounted = s.connection && !is_syn(ctx);
	if (read_source(ctx, &s.address))
		select(ctx, &s);
	else
		steer_refuse(&s, STEER_REASON_ADDRESS);
	steer_conclude(&s);
	return s.slot == STEER_NO_SLOT ? SK_DROP : SK_PASS;
}

SEC("sk_reuseport")
int steer_reuseport(struct sk_reuseport_md *ctx)
{
	return steer(ctx);
}

SEC("sk_reuseport/migrate")
int steer_migrate(struct sk_reuseport_md *ctx)
{
	struct steer s = { .home = STEER_NO_SLOT, .slot = STEER_NO_SLOT };
	struct bpf_sock *sk = ctx->migrating_sk;

	if (!sk)
		return steer(ctx);

	/* There is no packet: the device is the peer of the connection. */
	s.connection = true;
	s.uncounted = true;
	if (sk->family == AF_INET) {
		steer_map_ipv4(&s.address, sk->dst_ip4);
	} else {
		s.address.word[0] = steer_load(sk->dst_ip6[0]);
		s.address.word[1] = steer_load(sk->dst_ip6[1]);
		s.address.word[2] = steer_load(sk->dst_ip6[2]);
		s.address.word[3] = steer_load(sk->dst_ip6[3]);
	}
	select(ctx, &s);
	return s.slot == STEER_NO_SLOT ? SK_DROP : SK_PASS;
}
