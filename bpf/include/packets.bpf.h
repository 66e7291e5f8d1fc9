/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The events of "trace packets", for TCP and for UDP. */
#ifndef SOCKEYE_PACKETS_BPF_H
#define SOCKEYE_PACKETS_BPF_H

#include "kernel.h"

#include <bpf/bpf_core_read.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "packets.h"
#include "skb.bpf.h"

/* Low bits of a net_device's address that are 0 (NETDEV_ALIGN). */
#define DEVICE_ALIGN 5

PACKETS_EXPORT(enum, packets_limit);
PACKETS_EXPORT(enum, packets_kind);
PACKETS_EXPORT(enum, packets_flag);
PACKETS_EXPORT(struct, packets_event);
PACKETS_EXPORT(struct, packets_packet);

/* SO_COOKIE of the connection. */
const volatile __u64 cookie = 0;

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1024 * 1024);
} events SEC(".maps");

/* Events that were lost because the ring was full. */
__u64 lost = 0;

static __always_inline bool packets_is_followed(const struct sock *sk)
{
	return sk && BPF_CORE_READ(sk, __sk_common.skc_cookie.counter) == cookie;
}

static __always_inline void packets_device(struct packets_event *e,
					   const struct net_device *dev)
{
	if (!dev)
		return;
	e->ifindex = BPF_CORE_READ(dev, ifindex);
	e->device = (__u64)dev >> DEVICE_ALIGN;
	BPF_CORE_READ_STR_INTO(&e->name, dev, name);
}

/* Reserves an event without bytes. NULL: the ring is full. */
static __always_inline struct packets_event *
packets_event(__u32 kind, const void *skb, __u8 state)
{
	struct packets_event *e;

	e = bpf_ringbuf_reserve(&events, sizeof(*e), 0);
	if (!e) {
		__sync_fetch_and_add(&lost, 1);
		return NULL;
	}
	__builtin_memset(e, 0, sizeof(*e));
	e->time = bpf_ktime_get_ns();
	e->skb = (__u64)skb;
	e->kind = kind;
	e->state = state;
	return e;
}

static __always_inline struct packets_packet *
packets_packet(__u32 kind, const void *skb, __u8 state)
{
	struct packets_packet *p;

	p = bpf_ringbuf_reserve(&events, sizeof(*p), 0);
	if (!p) {
		__sync_fetch_and_add(&lost, 1);
		return NULL;
	}
	__builtin_memset(&p->event, 0, sizeof(p->event));
	p->event.time = bpf_ktime_get_ns();
	p->event.skb = (__u64)skb;
	p->event.kind = kind;
	p->event.state = state;
	return p;
}

/* Copies the first bytes of the linear part. */
static __always_inline void packets_copy(struct packets_packet *p,
					 const struct sk_buff *skb,
					 __u32 network)
{
	void *head = BPF_CORE_READ(skb, head);
	__u32 data = (void *)BPF_CORE_READ(skb, data) - head, n;

	n = data + BPF_CORE_READ(skb, len) - BPF_CORE_READ(skb, data_len) - network;
	if (n > p->event.size)
		n = p->event.size;
	/* Keeps the bound visible to the verifier. */
	barrier_var(n);
	if (n > PACKETS_BYTES)
		n = PACKETS_BYTES;
	if (!bpf_probe_read_kernel(p->bytes, n, head + network))
		p->event.captured = n;
}

#endif
