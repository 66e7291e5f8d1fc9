// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Chooses the connections of which what is received is traced, on kernels
 * that cannot trace what is sent. A connection pays for one search, when it is
 * established.
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
