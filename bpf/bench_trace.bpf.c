// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Programs that bench trace compares with the tracing of messages. They measure
 * nothing: two show what the kernel's own part of BPF timestamping costs, the
 * others what other ways to observe sendmsg(2) cost.
 *
 * Hooks: sockops of a cgroup; fentry and kprobes of tcp_sendmsg.
 * Decision: none.
 * Cost: see docs/bench-trace.md.
 */
#include "kernel.h"

#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

#define HISTOGRAM 64 /* buckets, powers of two of nanoseconds */

void *bpf_cast_to_kern_ctx(void *obj) __ksym;
int bpf_sock_ops_enable_tx_tstamp(struct bpf_sock_ops_kern *skops,
				  __u64 flags) __ksym;

static __always_inline void bench_request(struct bpf_sock_ops *ctx)
{
	int on = SK_BPF_CB_TX_TIMESTAMPING;

	if (ctx->op == BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB ||
	    ctx->op == BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB)
		bpf_setsockopt(ctx, SOL_SOCKET, SK_BPF_CB_FLAGS, &on, sizeof(on));
}

/* Is called at the end of each sendmsg(2), and does nothing. */
SEC("sockops")
int bench_called(struct bpf_sock_ops *ctx)
{
	bench_request(ctx);
	return 1;
}

/* Marks each message, and does nothing at the three timestamps. */
SEC("sockops")
int bench_marking(struct bpf_sock_ops *ctx)
{
	bench_request(ctx);
	if (ctx->op == BPF_SOCK_OPS_TSTAMP_SENDMSG_CB)
		bpf_sock_ops_enable_tx_tstamp(bpf_cast_to_kern_ctx(ctx), 0);
	return 1;
}

SEC("fentry/tcp_sendmsg")
int bench_fentry(void *ctx)
{
	return 0;
}

/* Reads the addresses and ports of the connection. */
SEC("fentry/tcp_sendmsg")
int BPF_PROG(bench_reading, struct sock *sk)
{
	__u32 local = sk->__sk_common.skc_rcv_saddr;
	__u32 remote = sk->__sk_common.skc_daddr;
	__u32 ports = (__u32)sk->__sk_common.skc_num << 16 | sk->__sk_common.skc_dport;
	__u16 family = sk->__sk_common.skc_family;

	/* The values must be in registers: clang keeps the loads. */
	barrier_var(local);
	barrier_var(remote);
	barrier_var(ports);
	barrier_var(family);
	return 0;
}

/*
 * The time in tcp_sendmsg as scripts measure it, e.g. of bpftrace: the start by
 * thread in a hash table, and a histogram of powers of two.
 */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__type(key, __u32);
	__type(value, __u64);
} bench_starts SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, HISTOGRAM);
	__type(key, __u32);
	__type(value, __u64);
} bench_times SEC(".maps");

SEC("kprobe/tcp_sendmsg")
int bench_kprobe(void *ctx)
{
	__u32 thread = bpf_get_current_pid_tgid();
	__u64 now = bpf_ktime_get_ns();

	bpf_map_update_elem(&bench_starts, &thread, &now, BPF_ANY);
	return 0;
}

SEC("kretprobe/tcp_sendmsg")
int bench_kretprobe(void *ctx)
{
	__u32 thread = bpf_get_current_pid_tgid(), bucket = 0;
	__u64 *start = bpf_map_lookup_elem(&bench_starts, &thread), *count, ns;

	if (!start)
		return 0;
	ns = bpf_ktime_get_ns() - *start;
	bpf_map_delete_elem(&bench_starts, &thread);
	while (ns > 1 && bucket < HISTOGRAM - 1) {
		ns >>= 1;
		bucket++;
	}
	count = bpf_map_lookup_elem(&bench_times, &bucket);
	if (count)
		++*count;
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
