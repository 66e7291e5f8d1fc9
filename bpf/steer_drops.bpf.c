// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Counts the datagrams that a member's socket has no space for, by their source.
 * The kernel counts them by socket only (sk_drops).
 *
 * Hook: the tracepoint udp_fail_queue_rcv_skb, which has the datagram since
 * Linux 6.10 (e9669a00bba7, "net: udp: add IP/port data to the tracepoint
 * udp/udp_fail_queue_rcv_skb"). The kernel refuses to attach the program to an
 * older one, because that has fewer arguments.
 * Decision: none.
 * Cost: nothing for datagrams that are queued. For one that is dropped at any
 * socket of the host, one lookup; at a member's, a second one.
 */
#include "kernel.h"

#include <bpf/bpf_core_read.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include <linux/ip.h>
#include <linux/ipv6.h>

#include "steer.h"

char _license[] SEC("license") = "Dual BSD/GPL";

/* As in steer_members.bpf.c, whose map replaces this one. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, STEER_MAX_LISTENERS * STEER_MAX_SLOTS);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u64);
	__type(value, __u32);
} cookies SEC(".maps");

/* Datagrams that were dropped, by source. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 4096);
	__type(key, struct steer_address);
	__type(value, __u64);
} dropped SEC(".maps");

/* Reads the source of a packet. */
static __always_inline bool drops_source(struct sk_buff *skb, struct steer_address *source)
{
	unsigned char *header = BPF_CORE_READ(skb, head) + BPF_CORE_READ(skb, network_header);
	__u8 version;

	if (bpf_probe_read_kernel(&version, sizeof(version), header))
		return false;
	if (version >> 4 == 6)
		return !bpf_probe_read_kernel(source, sizeof(*source),
					      header + offsetof(struct ipv6hdr, saddr));
	if (version >> 4 != 4)
		return false;
	source->word[2] = bpf_htonl(0xffff);
	return !bpf_probe_read_kernel(&source->word[3], sizeof(__u32),
				      header + offsetof(struct iphdr, saddr));
}

SEC("raw_tp/udp_fail_queue_rcv_skb")
int steer_count_drop(struct bpf_raw_tracepoint_args *ctx)
{
	struct sock *sk = (void *)ctx->args[1];
	struct sk_buff *skb = (void *)ctx->args[2];
	__u64 cookie = BPF_CORE_READ(sk, __sk_common.skc_cookie.counter), one = 1, *count;
	struct steer_address source = {};

	if (!bpf_map_lookup_elem(&cookies, &cookie) || !drops_source(skb, &source))
		return 0;
	count = bpf_map_lookup_elem(&dropped, &source);
	if (count)
		__sync_fetch_and_add(count, 1);
	else if (bpf_map_update_elem(&dropped, &source, &one, BPF_NOEXIST) == -EEXIST) {
		count = bpf_map_lookup_elem(&dropped, &source); /* another CPU was first */
		if (count)
			__sync_fetch_and_add(count, 1);
	}
	return 0;
}
