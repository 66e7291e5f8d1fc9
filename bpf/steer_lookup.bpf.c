// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Selects the socket that receives a SYN or a datagram for a listener of the
 * service: the socket in the slot of the source address, whatever port,
 * address or user that socket has.
 *
 * Hook: sk_lookup of the network namespace. The kernel runs the program for
 * each SYN and each datagram that no connected socket receives.
 * Decision: SK_PASS with a socket, SK_DROP if the service has no ready member,
 * SK_PASS without a socket for packets of other ports.
 * Cost: one pass over at most STEER_MAX_LISTENERS listeners; for packets of
 * the service, see steer.bpf.h, and one lookup of the socket.
 */
#include "steer.bpf.h"

#include <linux/in.h>

char _license[] SEC("license") = "Dual BSD/GPL";

const volatile struct steer_listener listeners[STEER_MAX_LISTENERS] = {};
const volatile __u32 listener_count = 0;

struct {
	__uint(type, BPF_MAP_TYPE_SOCKMAP);
	__uint(max_entries, STEER_MAX_LISTENERS * STEER_MAX_SLOTS);
	__type(key, __u32);
	__type(value, __u64);
} sockets SEC(".maps");

/* The sockets of members that took over from the one in sockets. */
struct {
	__uint(type, BPF_MAP_TYPE_SOCKMAP);
	__uint(max_entries, STEER_MAX_LISTENERS * STEER_MAX_SLOTS);
	__type(key, __u32);
	__type(value, __u64);
} successors SEC(".maps");

/* The sockets of closed gates, by listener. */
struct {
	__uint(type, BPF_MAP_TYPE_SOCKMAP);
	__uint(max_entries, STEER_MAX_LISTENERS);
	__type(key, __u32);
	__type(value, __u64);
} gates SEC(".maps");

/*
 * The waiting rooms, by listener. The room of a TCP listener has a socket filter
 * that drops SYNs.
 */
struct {
	__uint(type, BPF_MAP_TYPE_SOCKMAP);
	__uint(max_entries, STEER_MAX_LISTENERS);
	__type(key, __u32);
	__type(value, __u64);
} rooms SEC(".maps");

static __always_inline bool same_address(const volatile struct steer_address *a,
				 const struct steer_address *b)
{
	return a->word[0] == b->word[0] && a->word[1] == b->word[1] &&
	       a->word[2] == b->word[2] && a->word[3] == b->word[3];
}

static __always_inline bool any_address(const volatile struct steer_address *a)
{
	return !(a->word[0] | a->word[1] | a->word[2] | a->word[3]);
}

/*
 * Returns the row of the listener, or STEER_MAX_LISTENERS. As in the kernel's
 * own lookup, the most specific listener wins.
 */
static __always_inline __u32 find_listener(struct bpf_sk_lookup *ctx,
					   const struct steer_address *local)
{
	__u32 i, found = STEER_MAX_LISTENERS;

	for (i = 0; i < STEER_MAX_LISTENERS; i++) {
		const volatile struct steer_listener *l = &listeners[i];

		if (i >= listener_count)
			break;
		if (l->port != ctx->local_port || l->protocol != ctx->protocol)
			continue;
		if (l->family && l->family != ctx->family)
			continue;
		if (same_address(&l->address, local))
			return i;
		if (any_address(&l->address))
			found = i;
	}
	return found;
}

static __always_inline bool assign(struct bpf_sk_lookup *ctx, void *map,
				   __u32 index, bool connection)
{
	struct bpf_sock *sk = bpf_map_lookup_elem(map, &index);
	bool assigned;

	if (!sk)
		return false;
	/* A SYN for a listener that was shut down would get no answer. */
	assigned = (!connection || sk->state == BPF_TCP_LISTEN) &&
		   !bpf_sk_assign(ctx, sk, BPF_SK_LOOKUP_F_NO_REUSEPORT);
	bpf_sk_release(sk);
	return assigned;
}

/* Assigns the socket of the member in a slot. */
static __always_inline bool assign_member(struct bpf_sk_lookup *ctx,
					  const struct steer *s, __u32 row,
					  __u32 slot)
{
	__u32 index = row * STEER_MAX_SLOTS + slot;

	if (s->bank == 2)
		return assign(ctx, &successors, index, s->connection);
	return assign(ctx, &sockets, index, s->connection);
}

/*
 * Returns the row of the listener whose waiting room has the packet's
 * destination, or STEER_MAX_LISTENERS. The agent sends datagrams again to the
 * address of the room, which the program replaces by the member.
 */
static __always_inline __u32 find_room(struct bpf_sk_lookup *ctx)
{
	__u32 i, row, *port;

	if (ctx->protocol != IPPROTO_UDP)
		return STEER_MAX_LISTENERS;
	if (ctx->family == AF_INET) {
		if (ctx->local_ip4 != bpf_htonl(INADDR_LOOPBACK))
			return STEER_MAX_LISTENERS;
	} else if (steer_load(ctx->local_ip6[0]) | steer_load(ctx->local_ip6[1]) |
		   steer_load(ctx->local_ip6[2]) |
		   (steer_load(ctx->local_ip6[3]) ^ bpf_htonl(1))) {
		return STEER_MAX_LISTENERS;
	}
	for (i = 0; i < STEER_MAX_LISTENERS; i++) {
		if (i >= listener_count)
			break;
		row = i; /* i stays in a register, for the verifier of 5.10 */
		port = bpf_map_lookup_elem(&room_ports, &row);
		if (port && *port == ctx->local_port)
			return i;
	}
	return STEER_MAX_LISTENERS;
}

static __always_inline void wait_in_room(struct bpf_sk_lookup *ctx,
					 struct steer *s, __u32 row,
					 bool replayed)
{
	if (steer_fills(s, replayed) &&
	    assign_member(ctx, s, row, s->home)) {
		s->slot = s->home;
	} else if (steer_store(s, 0) && assign(ctx, &rooms, row, s->connection)) {
		s->slot = s->home;
		s->held = true;
	}
}

SEC("sk_lookup")
int steer_lookup(struct bpf_sk_lookup *ctx)
{
	struct steer s = { .home = STEER_NO_SLOT, .slot = STEER_NO_SLOT };
	struct steer_address local;
	bool replayed = false;
	__u32 row;

	if (ctx->family == AF_INET) {
		steer_map_ipv4(&s.address, ctx->remote_ip4);
		steer_map_ipv4(&local, ctx->local_ip4);
	} else {
		s.address.word[0] = steer_load(ctx->remote_ip6[0]);
		s.address.word[1] = steer_load(ctx->remote_ip6[1]);
		s.address.word[2] = steer_load(ctx->remote_ip6[2]);
		s.address.word[3] = steer_load(ctx->remote_ip6[3]);
		local.word[0] = steer_load(ctx->local_ip6[0]);
		local.word[1] = steer_load(ctx->local_ip6[1]);
		local.word[2] = steer_load(ctx->local_ip6[2]);
		local.word[3] = steer_load(ctx->local_ip6[3]);
	}
	row = find_listener(ctx, &local);
	if (row >= STEER_MAX_LISTENERS) {
		row = find_room(ctx);
		if (row >= STEER_MAX_LISTENERS)
			return SK_PASS;
		replayed = true;
	}

	s.connection = ctx->protocol == IPPROTO_TCP;
	steer_decide(&s);
	if (replayed && s.slot != s.home && steer_fills_instead(&s))
		s.slot = s.home;
	if (s.waits)
		wait_in_room(ctx, &s, row, replayed);
	else if (s.gated && assign(ctx, &gates, row, true))
		s.held = true;
	else if (s.slot != STEER_NO_SLOT && !assign_member(ctx, &s, row, s.slot))
		steer_refuse(&s, STEER_REASON_SOCKET);
	steer_conclude(&s);
	return s.slot == STEER_NO_SLOT ? SK_DROP : SK_PASS;
}
