// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Counts the packets that the driver of an interface receives, by size and by
 * number of segments: after the kernel has segmented packets that are too large
 * for the device.
 *
 * Hook: raw tracepoint net_dev_start_xmit, attached only during a measurement.
 * Decision: none.
 * Cost: about 45 ns for a packet of another interface, for one read and a
 * comparison; about 130 ns for one of this interface, for seven more reads and
 * an addition to counters of this CPU.
 */
#include "bigtcp.bpf.h"

#include <bpf/bpf_core_read.h>

char _license[] SEC("license") = "Dual BSD/GPL";

/* The interface. Its index is unique only within its network namespace. */
const volatile __u32 ifindex = 0;
const volatile __u32 netns = 0;

static __always_inline long bigtcp_load(const void *from, __u32 offset, void *to,
					__u32 n)
{
	return bpf_probe_read_kernel(to, n, from + offset);
}

SEC("raw_tracepoint/net_dev_start_xmit")
int bigtcp_driver(struct bpf_raw_tracepoint_args *ctx)
{
	const struct sk_buff *skb = (const void *)ctx->args[0];
	const struct net_device *dev = (const void *)ctx->args[1];
	const struct skb_shared_info *shared;
	struct bigtcp_packet p = {};
	const void *head;
	__u32 network;

	if (BPF_CORE_READ(dev, ifindex) != ifindex ||
	    BPF_CORE_READ(dev, nd_net.net, ns.inum) != netns)
		return 0;
	head = BPF_CORE_READ(skb, head);
	shared = head + BPF_CORE_READ(skb, end);
	network = BPF_CORE_READ(skb, network_header);
	p.length = BPF_CORE_READ(skb, len) +
		   ((const void *)BPF_CORE_READ(skb, data) - head) - network;
	p.segments = BPF_CORE_READ(shared, gso_segs) ?: 1;
	bigtcp_classify(&p, head, network, bigtcp_load);
	bigtcp_count(BIGTCP_DRIVER, &p);
	return 0;
}
