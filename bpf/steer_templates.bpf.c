// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Copies datagrams with template sets of IPFIX (RFC 7011) or NetFlow v9
 * (RFC 3954) to the agent, which keeps the templates for the next member.
 *
 * Hook: socket filter of a member's UDP socket.
 * Decision: none, all packets pass.
 * Cost: one load of the version; for IPFIX and NetFlow v9, one load for each
 * set. A datagram without template sets does not leave the kernel.
 */
#include "kernel.h"

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include <linux/ip.h>
#include <linux/ipv6.h>

#include "steer.h"

char _license[] SEC("license") = "Dual BSD/GPL";

STEER_EXPORT(struct, steer_templates);

enum {
	UDP_HEADER = 8,
	NETFLOW9_HEADER = 20,
	IPFIX_HEADER = 16,
	MAX_SETS = 32,
	/* Powers of two, as the verifier understands masks. */
	SMALL = 2048,
	LARGE = 65536,
	PASS = 0xffffffff,
};

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1024 * 1024);
} template_sets SEC(".maps");

/* Datagrams with template sets that did not fit into the ring. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} lost_templates SEC(".maps");

/*
 * Load two or four bytes in host byte order. A load beyond the end of the packet
 * would end the program, and drop the packet.
 */
unsigned long long load_half(void *skb, unsigned long long offset) asm("llvm.bpf.load.half");
unsigned long long load_word(void *skb, unsigned long long offset) asm("llvm.bpf.load.word");

enum { SET_HEADER = 4 };

/*
 * Reports whether a datagram has a set with an id of first or first + 1. A
 * template set may follow data sets. Only the first MAX_SETS sets of a datagram
 * are examined; exporters rarely send more sets in one datagram.
 */
static __always_inline bool has_templates(struct __sk_buff *skb, __u32 offset,
					  __u16 first)
{
	__u32 i, set, length, end = skb->len;

	for (i = 0; i < MAX_SETS; i++) {
		if (offset + SET_HEADER > end)
			return false;
		set = load_word(skb, offset);
		if ((__u16)((set >> 16) - first) <= 1)
			return true;
		length = (__u16)set;
		if (length < SET_HEADER)
			return false;
		offset += length;
	}
	return false;
}

static __always_inline bool read_source(struct __sk_buff *skb,
					struct steer_templates *t)
{
	__u32 ipv4;
	__u8 ttl;

	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		if (bpf_skb_load_bytes_relative(skb, offsetof(struct iphdr, ttl),
						&ttl, 1, BPF_HDR_START_NET) ||
		    bpf_skb_load_bytes_relative(skb, offsetof(struct iphdr, saddr),
						&ipv4, sizeof(ipv4),
						BPF_HDR_START_NET))
			return false;
		t->address.word[2] = bpf_htonl(0xffff);
		t->address.word[3] = ipv4;
	} else if (bpf_skb_load_bytes_relative(
			   skb, offsetof(struct ipv6hdr, hop_limit), &ttl, 1,
			   BPF_HDR_START_NET) ||
		   bpf_skb_load_bytes_relative(
			   skb, offsetof(struct ipv6hdr, saddr), &t->address,
			   sizeof(t->address), BPF_HDR_START_NET)) {
		return false;
	}
	/* The agent itself sends templates again. */
	return ttl != STEER_REPLAY_TTL &&
	       !bpf_skb_load_bytes(skb, 0, &t->port, sizeof(t->port));
}

static __always_inline bool copy(struct __sk_buff *skb,
				 const struct steer_templates *t,
				 const __u32 size)
{
	struct steer_templates *to;

	to = bpf_ringbuf_reserve(&template_sets, sizeof(*t) + size, 0);
	if (!to)
		return false;
	*to = *t;
	if (bpf_skb_load_bytes(skb, UDP_HEADER, to + 1,
			       ((t->length - 1) & (size - 1)) + 1))
		to->length = 0;
	bpf_ringbuf_submit(to, 0);
	return true;
}

static __always_inline void emit(struct __sk_buff *skb)
{
	struct steer_templates t = { .length = skb->len - UDP_HEADER };
	__u32 zero = 0;
	__u64 *lost;

	if (!read_source(skb, &t))
		return;
	t.cookie = bpf_get_socket_cookie(skb);
	if (t.length <= SMALL ? copy(skb, &t, SMALL) : copy(skb, &t, LARGE))
		return;
	lost = bpf_map_lookup_elem(&lost_templates, &zero);
	if (lost)
		(*lost)++;
}

SEC("socket")
int steer_copy_templates(struct __sk_buff *skb)
{
	if (skb->len < UDP_HEADER + sizeof(__be16))
		return PASS;
	switch (load_half(skb, UDP_HEADER)) {
	case 9:
		if (has_templates(skb, UDP_HEADER + NETFLOW9_HEADER, 0))
			emit(skb);
		break;
	case 10:
		if (has_templates(skb, UDP_HEADER + IPFIX_HEADER, 2))
			emit(skb);
		break;
	}
	return PASS;
}
