// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Notes when sendmsg(2) begins on a chosen connection; its end is seen by
 * trace_sockops. A trampoline on tcp_sendmsg is the only way to know, and all
 * connections of the host pay for it, each call: hence only where a policy asks
 * for the stage "send".
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
	if (c)
		c->started = bpf_ktime_get_ns();
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
