// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Chooses the connections whose received data is traced, on kernels without BPF
 * timestamping (before Linux 6.15). trace_sockops.bpf.c does so on newer ones.
 *
 * Hook: sockops of the cgroup.
 * Decision: which connections are sampled; the kernel's behaviour stays.
 * Cost: one search for each connection, see match.bpf.h.
 */
#include "trace.bpf.h"

SEC("sockops")
int trace_choose(struct bpf_sock_ops *ctx)
{
	switch (ctx->op) {
	case BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB:
		trace_established(ctx, MATCH_CONNECT);
		break;
	case BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB:
		trace_established(ctx, MATCH_ACCEPT);
		break;
	}
	return 1;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
