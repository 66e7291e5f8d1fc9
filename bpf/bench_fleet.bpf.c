// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * The sender and the receiver of the datagrams of bench fleet.
 *
 * Hook: bench_send runs by BPF_PROG_TEST_RUN with live frames, and the kernel
 * transmits them from an interface; bench_drop is at the ingress of the
 * receiver's interface (TCX).
 * Decision: XDP_TX; TC_ACT_SHOT for IPv4 packets while dropping is set.
 * Cost: a part of what bench fleet measures, the same for all arms.
 */
#include "kernel.h"

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>
#include <linux/ip.h>
#include <linux/pkt_cls.h>
#include <linux/udp.h>

char _license[] SEC("license") = "Dual BSD/GPL";

#define HEADERS (ETH_HLEN + sizeof(struct iphdr) + sizeof(struct udphdr))
#define DEVICES 256 /* source addresses, used in turn */

/* The headers, with a source address that ends with 0, without lengths and checksum. */
const volatile __u64 headers[HEADERS / 8] = {};
const volatile __u32 sum = 0; /* of the IP header */

__u32 sent;
__u32 dropping;

/* The kernel uses the frames again, so all headers are written. */
SEC("xdp")
int bench_send(struct xdp_md *ctx)
{
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	__u32 device = sent++ % DEVICES, length = end - data - ETH_HLEN, check;
	struct iphdr *ip = data + ETH_HLEN;
	struct udphdr *udp = (void *)(ip + 1);
	__u64 *to = data;
	int i;

	if (data + HEADERS > end)
		return XDP_ABORTED;
#pragma unroll
	for (i = 0; i < HEADERS / 8; i++)
		to[i] = headers[i];
	((__u8 *)&ip->saddr)[3] = device;
	ip->tot_len = bpf_htons(length);
	check = sum + device + length;
	ip->check = bpf_htons(~((check & 0xffff) + (check >> 16)));
	udp->len = bpf_htons(length - sizeof(*ip));
	udp->check = 0;
	return XDP_TX;
}

SEC("tc")
int bench_drop(struct __sk_buff *skb)
{
	return dropping && skb->protocol == bpf_htons(ETH_P_IP) ? TC_ACT_SHOT :
								  TC_ACT_UNSPEC;
}
