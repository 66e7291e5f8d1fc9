/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
#ifndef SOCKEYE_SKB_BPF_H
#define SOCKEYE_SKB_BPF_H

#include "kernel.h"

#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>

/*
 * Returns a pointer as a number. The verifier of older kernels rejects a
 * conversion, but allows an atomic addition of a pointer to the stack.
 */
static __always_inline __u64 pointer_value(const void *pointer)
{
	__u64 number = 0;

	asm volatile("lock *(u64 *)(%0 + 0) += %1"
		     :
		     : "r"(&number), "r"(pointer)
		     : "memory");
	return number;
}

/* Returns the oldest datagram in the queues of a socket; NULL: none. */
static __always_inline struct sk_buff *udp_queue_head(struct sock *sk)
{
	struct sk_buff_head *queue;
	struct sk_buff *first;

	queue = __builtin_preserve_access_index(&((struct udp_sock *)sk)->reader_queue);
	first = BPF_CORE_READ(queue, next);
	if (first != (void *)queue)
		return first;
	queue = __builtin_preserve_access_index(&sk->sk_receive_queue);
	first = BPF_CORE_READ(queue, next);
	return first != (void *)queue ? first : NULL;
}

#endif
