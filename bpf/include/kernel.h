/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The kernel's own types and constants that the programs use: every one of
 * them is declared here, once. A type has only the fields that a program reads;
 * the loader relocates each access to the running kernel's layout (CO-RE), so
 * order and offsets mean nothing, and a field that no program reads costs
 * nothing. The widths are those of Linux 6.18; an access of a field that has
 * another width elsewhere is relocated too.
 *
 * What the kernel exports to user space comes from its UAPI headers instead.
 */
#ifndef SOCKEYE_KERNEL_H
#define SOCKEYE_KERNEL_H

#include <stdbool.h>
#include <linux/bpf.h>
#include <linux/errno.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/in6.h>
#include <linux/tcp.h>
#include <linux/types.h>

/* Newer than the UAPI headers of the oldest distribution that compiles this. */
#ifndef SK_BPF_CB_FLAGS
#define SK_BPF_CB_FLAGS 1009
#define SK_BPF_CB_TX_TIMESTAMPING 1
#endif
#ifndef TCP_BPF_SOCK_OPS_CB_FLAGS
#define TCP_BPF_SOCK_OPS_CB_FLAGS 1008
#endif
#define BPF_SOCK_OPS_TSTAMP_SCHED_CB 16
#define BPF_SOCK_OPS_TSTAMP_SND_SW_CB 17
#define BPF_SOCK_OPS_TSTAMP_SND_HW_CB 18
#define BPF_SOCK_OPS_TSTAMP_ACK_CB 19
#define BPF_SOCK_OPS_TSTAMP_SENDMSG_CB 20

/* Extension headers that are followed to the transport header; a jumbogram has one. */
#define IPV6_EXTENSIONS 4

/* include/linux/socket.h */
#define AF_UNSPEC 0
#define AF_INET 2
#define AF_INET6 10
#define SOL_TCP 6
#define MSG_PEEK 0x2
#define MSG_ERRQUEUE 0x2000

/* include/uapi/asm-generic/socket.h: <asm/socket.h> is not for the BPF target. */
#define SOL_SOCKET 1

/* include/net/tcp.h: flags of the TCP header, as in bpf_sock_ops. */
#define TCPHDR_SYN 0x02

/* include/net/tcp.h: option kind of RFC 6994. */
#define TCPOPT_EXP 254

/* include/linux/sched.h: bit of task_struct.flags. */
#define PF_EXITING 0x00000004

/* include/linux/tcp.h: bits of tcp_sock.nonagle. */
#define TCP_NAGLE_OFF 1
#define TCP_NAGLE_CORK 2

/* include/linux/tcp.h: enum tcp_chrono. */
#define TCP_CHRONO_RWND_LIMITED 2
#define TCP_CHRONO_SNDBUF_LIMITED 3

/* include/net/tcp.h: bit of tcp_skb_cb.txstamp_ack for the socket's owner. */
#define TSTAMP_ACK_SK 1

/* include/linux/skbuff.h: bits of skb_shared_info.tx_flags. */
#define SKBTX_HW_TSTAMP (1 << 0)
#define SKBTX_SW_TSTAMP (1 << 1)
#define SKBTX_COMPLETION_TSTAMP (1 << 3)
#define SKBTX_SCHED_TSTAMP (1 << 6)

/* include/net/sock.h: enum sock_flags, a bit number of sock_common.skc_flags. */
#define SOCK_DEAD 0

/* include/uapi/linux/icmp.h and icmpv6.h, which include headers of libc: errors quote a packet. */
#define ICMP_DEST_UNREACH 3
#define ICMP_TIME_EXCEEDED 11
#define ICMP_PARAMETERPROB 12
#define ICMPV6_DEST_UNREACH 1
#define ICMPV6_PARAMPROB 4
#define ICMP_HEADER 8 /* bytes before the quoted packet */

/* include/net/ip.h: the fragment offset in the third word of an IPv4 header. */
#define IP_OFFSET 0x1fff
#define IP_MF 0x2000 /* more fragments */

/* include/net/ipv6.h: the same fields of an IPv6 fragment header. */
#define IP6_OFFSET 0xfff8
#define IP6_MF 0x0001

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

typedef struct {
	long long counter;
} atomic64_t;

struct task_struct {
	unsigned int flags;
	int exit_code;
};

struct ns_common {
	unsigned int inum; /* inode of /proc/PID/ns/net, which user space knows */
};

struct net {
	struct ns_common ns;
};

typedef struct {
	struct net *net;
} possible_net_t;

struct net_device {
	char name[16]; /* IFNAMSIZ */
	int ifindex;
	possible_net_t nd_net; /* ifindex is unique only within the namespace */
};

struct kernfs_node {
	__u64 id; /* the cgroup's ID, as bpf_sk_cgroup_id() returns it */
};

struct cgroup {
	struct kernfs_node *kn;
};

struct sock_cgroup_data {
	struct cgroup *cgroup;
};

struct skb_shared_hwtstamps {
	__s64 hwtstamp; /* the NIC's transmit time, ns of the NIC's clock */
};

/* Behind the linear part of an sk_buff, at head + end. */
struct skb_shared_info {
	__u8 tx_flags; /* SKBTX_*: which timestamps the application asked for */
	unsigned short gso_size; /* payload of a segment; 0: the packet is one */
	unsigned short gso_segs;
	struct skb_shared_hwtstamps hwtstamps;
	__u32 tskey; /* sequence number that a timestamp stands for */
};

struct sock;

struct sk_buff {
	struct sk_buff *next;
	struct sk_buff *prev; /* not NULL while the packet is in a queue */
	/*
	 * On its way, the device. In the receive queue of a UDP socket, udp_set_dev_scratch()
	 * keeps the length there instead: the value is not a kernel address then.
	 */
	struct net_device *dev;
	struct sock *sk;
	__s64 tstamp; /* received: CLOCK_REALTIME of the arrival; 0: not taken */
	__u64 skb_mstamp_ns; /* sent by TCP: CLOCK_MONOTONIC, or the pacer's time */
	char cb[48]; /* private to the layer that owns it; of TCP, tcp_skb_cb */
	unsigned int len; /* linear part and fragments */
	unsigned int data_len; /* fragments alone */
	int skb_iif; /* index of the device that received the packet */
	__u16 inner_network_header; /* offsets from head */
	__u16 network_header;
	__u16 transport_header;
	unsigned int end; /* sk_buff_data_t: an offset from head on 64 bits */
	unsigned char *head;
	unsigned char *data;
};

struct sk_buff_head {
	struct sk_buff *next; /* the list's own address when it is empty */
};

struct sock_common {
	__be32 skc_daddr;
	__be32 skc_rcv_saddr;
	__be16 skc_dport;
	__u16 skc_num; /* local port, host byte order */
	unsigned short skc_family;
	volatile unsigned char skc_state; /* BPF_TCP_* */
	possible_net_t skc_net;
	struct in6_addr skc_v6_daddr; /* absent without CONFIG_IPV6 */
	struct in6_addr skc_v6_rcv_saddr;
	atomic64_t skc_cookie; /* SO_COOKIE */
	unsigned long skc_flags; /* bits of enum sock_flags */
};

struct sock {
	struct sock_common __sk_common;
	struct sk_buff_head sk_receive_queue;
	__u16 sk_protocol;
	__u32 sk_tsflags; /* SO_TIMESTAMPING of the application */
	__u32 sk_pacing_status; /* 0: not paced */
	unsigned long sk_pacing_rate; /* bytes per second */
	struct sock_cgroup_data sk_cgrp_data;
};

struct inet_connection_sock {
	__u8 icsk_ca_state : 5; /* TCP_CA_Open and so on */
};

struct minmax_sample {
	__u32 t;
	__u32 v;
};

struct minmax {
	struct minmax_sample s[3];
};

struct tcp_options_received {
	__u16 snd_wscale : 4; /* shift of the windows that the peer announces */
	__u16 rcv_wscale : 4; /* shift of the windows that the host announces */
};

struct tcp_sock {
	__u32 copied_seq; /* first byte that the application has not read */
	__u32 write_seq; /* after the last byte that the application wrote */
	__u32 snd_una;
	__u32 snd_nxt;
	__u32 snd_wnd;
	__u32 snd_cwnd;
	__u32 packets_out;
	__u32 sacked_out;
	__u32 lost_out;
	__u32 retrans_out;
	__u32 total_retrans;
	__u32 data_segs_out;
	__u32 srtt_us; /* 8 times the smoothed RTT */
	__u32 mss_cache;
	__u64 tcp_clock_cache; /* CLOCK_MONOTONIC at the start of the current packet, ns */
	__u64 delivered_mstamp; /* when data was last acknowledged, us */
	__u32 chrono_start; /* jiffies, start of the period in chrono_type */
	__u32 chrono_stat[3]; /* jiffies, by enum tcp_chrono - 1 */
	__u8 chrono_type : 2;
	__u8 nonagle : 4;
	struct minmax rtt_min;
	struct tcp_options_received rx_opt;
};

/* In sk_buff.cb while TCP has the packet. */
struct tcp_skb_cb {
	__u32 seq;
	__u32 end_seq;
	__u32 ack_seq;
	__u8 txstamp_ack : 2; /* who asked for a timestamp of the acknowledgement */
};

struct udp_sock {
	/* recvmsg(2) moves sk_receive_queue here as a whole, then reads from here. */
	struct sk_buff_head reader_queue;
};

struct request_sock_ops {
	int family; /* of the client; the request itself has the listener's */
};

struct request_sock {
	const struct request_sock_ops *rsk_ops;
};

/* The kernel's struct behind the context of a sockops program. */
struct bpf_sock_ops_kern {
	struct sock *sk; /* a request_sock in callbacks before the connection */
	struct sk_buff *skb; /* the packet that the callback is about */
	struct sk_buff *syn_skb; /* NULL unless the SYN is at hand */
};

#pragma clang attribute pop

#endif
