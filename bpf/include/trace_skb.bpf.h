/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Sampling of datagrams, and parsing of packets. Programs that include this file
 * load on Linux 5.10, which has no atomic operation that returns the old value.
 */
#ifndef SOCKEYE_TRACE_SKB_BPF_H
#define SOCKEYE_TRACE_SKB_BPF_H

#include "skb.bpf.h"
#include "trace.bpf.h"

TRACE_EXPORT(struct, trace_samplers);

struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct trace_samplers);
} samplers SEC(".maps");

/*
 * Adds a time in nanoseconds to a histogram. A process and an interrupt of a CPU
 * may use the same histogram: hence the atomic operations. If an interrupt adds a
 * larger value between the last two statements, that maximum is lost.
 */
static __always_inline void trace_histogram_count(struct trace_histogram *h, __u64 ns)
{
	__u32 i = trace_bucket(ns);

	barrier_var(i);
	if (i >= TRACE_BUCKETS)
		return;
	__sync_fetch_and_add(&h->bucket[i], 1);
	__sync_fetch_and_add(&h->sum, ns);
	if (ns > h->max)
		h->max = ns;
}

/*
 * Returns the transport header, or NULL if fewer than size bytes of the header
 * are in the linear part, which does not happen to packets that the kernel has
 * parsed or built. *at is the offset of the header from the network header.
 */
static __always_inline void *trace_transport(struct __sk_buff *ctx, __u8 protocol,
					     __u32 size, __u32 *at)
{
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	struct {
		__u8 next;
		__u8 length;
	} extension;
	__u8 *ip = data, next;
	__u32 offset = 40;
	int i;

	if (data + 40 > end && ctx->protocol != bpf_htons(ETH_P_IP))
		return NULL;
	if (data + 20 > end)
		return NULL;
	if (ctx->protocol == bpf_htons(ETH_P_IP)) {
		offset = (ip[0] & 15) * 4;
	} else if (ip[6] != protocol) {
		next = ip[6];
		for (i = 0; i < IPV6_EXTENSIONS && next != protocol; i++) {
			if (next != IPPROTO_HOPOPTS && next != IPPROTO_ROUTING &&
			    next != IPPROTO_DSTOPTS)
				return NULL;
			if (bpf_skb_load_bytes(ctx, offset, &extension, sizeof(extension)))
				return NULL;
			next = extension.next;
			offset += (extension.length + 1) * 8;
		}
		if (next != protocol)
			return NULL;
	}
	*at = offset;
	data += offset;
	return data + size > end ? NULL : data;
}

struct trace_ports {
	__be16 source;
	__be16 destination;
};

/*
 * Sets the addresses and ports of a datagram. Returns the length with the UDP
 * header in bytes; 0: not known.
 */
static __always_inline __u32 trace_datagram(struct __sk_buff *ctx,
					    struct match_tuple *t, bool received)
{
	struct match_address *from = received ? &t->remote : &t->local;
	struct match_address *to = received ? &t->local : &t->remote;
	void *data, *end;
	struct trace_ports *ports;
	__u32 at, *word;
	int i;

	ports = trace_transport(ctx, IPPROTO_UDP, sizeof(*ports), &at);
	if (!ports)
		return 0;
	t->remote_port = bpf_ntohs(received ? ports->source : ports->destination);
	t->local_port = bpf_ntohs(received ? ports->destination : ports->source);
	data = (void *)(long)ctx->data;
	end = (void *)(long)ctx->data_end;
	if (ctx->protocol == bpf_htons(ETH_P_IP)) {
		if (data + 20 > end)
			return 0;
		word = data + 12;
		match_map_ipv4(from, word[0]);
		match_map_ipv4(to, word[1]);
	} else {
		if (data + 40 > end)
			return 0;
		word = data + 8;
#pragma unroll
		for (i = 0; i < 4; i++) {
			from->word[i] = word[i];
			to->word[i] = word[4 + i];
		}
	}
	return ctx->len - at;
}

/*
 * Returns the number of the rule of a datagram that is chosen, otherwise 0. Only
 * rules with all of the flags count. The group is set only if the datagram is
 * chosen.
 */
static __always_inline __u32 trace_choose_datagram(struct __sk_buff *ctx,
					  struct bpf_sock *sk,
					  struct match_question *q,
					  __u32 flags, bool received,
					  __u32 *group)
{
	struct trace_state *st = trace_state();
	struct trace_samplers *all;
	struct trace_sampler *sampler;
	struct trace_rule *rule;
	__u64 cgroup = 0;
	__u32 id, index;

	id = MATCH_RULE(match_find(q));
	rule = id ? trace_rule(id) : NULL;
	if (!rule || !st || (rule->flags & flags) != flags)
		return 0;
	/* The addresses and ports of a datagram stand for a connection. */
	if (rule->connections > 1 &&
	    match_hash(&q->tuple, st->seed) % rule->connections)
		return 0;
	all = bpf_sk_storage_get(&samplers, sk, NULL, BPF_SK_STORAGE_GET_F_CREATE);
	/* Another CPU may have created the storage meanwhile. */
	if (!all)
		all = bpf_sk_storage_get(&samplers, sk, NULL, 0);
	index = id - 1;
	barrier_var(index);
	if (!all || index >= TRACE_RULES)
		return 0;
	sampler = received ? &all->received[index] : &all->sent[index];
	if (!sampler->initialized) {
		sampler->initialized = 1;
		sampler->skip = trace_first_gap(rule);
	}
	if (!trace_sampled(rule, &sampler->skip, &sampler->next,
			rule->interval ? bpf_ktime_get_ns() : 0))
		return 0;
	if (rule->group_by & TRACE_BY_CGROUP)
		cgroup = bpf_sk_cgroup_id(sk);
	*group = trace_group(id, rule, &q->tuple, q->role, IPPROTO_UDP, cgroup, NULL);
	return id;
}

#endif
