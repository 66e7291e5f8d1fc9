// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Records when sendmsg(2) starts on a chosen connection. trace_sockops runs at
 * the end of the call.
 *
 * Hook: fentry of tcp_sendmsg, as no other hook runs at that point. It is attached
 * only if a rule measures the stage "send".
 * Decision: none.
 * Cost: a trampoline and a lookup in the socket's storage, for each sendmsg(2) of
 * all TCP connections of the host.
 */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

#include "trace.h"

struct sock;

struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct trace_connection);
} connections SEC(".maps");

SEC("fentry/tcp_sendmsg")
int BPF_PROG(trace_send, struct sock *sk)
{
	struct trace_connection *c;

	c = bpf_sk_storage_get(&connections, sk, NULL, 0);
	if (c && !c->skip)
		c->started = bpf_ktime_get_ns();
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
