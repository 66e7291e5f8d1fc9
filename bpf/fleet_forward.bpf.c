// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Forwards packets to the services of a fleet to the host that owns the bucket
 * of their device.
 *
 * Hook: ingress of the interfaces of the fleet (fleet_ingress), and of its tunnel
 * (fleet_tunnel): TCX, before all other programs. With a tunnel, egress of the
 * interfaces (fleet_egress), which lowers the MSS that services announce.
 * Decision: TC_ACT_UNSPEC for packets that this host serves and for all that are
 * not to a service; a redirect to the interface of the owner; TC_ACT_SHOT for
 * packets that no host can serve.
 * Cost: for a packet to a service, one lookup in a hash of listeners, the hash
 * of the address, and two array lookups; with a device map see device.bpf.h. For
 * a packet by a peer, one more lookup. For other packets, the lookup of the
 * listener. The direct writes make the kernel unclone cloned packets before it
 * runs the programs (bpf_unclone_prologue).
 *
 * There is no state of flows: the source address and the table decide. Packets
 * that a peer has forwarded are never forwarded again, except between the two
 * owners of a bucket that moves (decide_moving); the TTL bounds loops of hosts
 * with wrong tables.
 */
#include "device.bpf.h"
#include "fleet.h"

#include <linux/if_packet.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/pkt_cls.h>

char _license[] SEC("license") = "Dual BSD/GPL";

STEER_EXPORT(enum, fleet_limit);
STEER_EXPORT(enum, fleet_outcome);
STEER_EXPORT(struct, fleet_table);
STEER_EXPORT(struct, fleet_listener);
STEER_EXPORT(struct, fleet_peer);
STEER_EXPORT(enum, fleet_sender_kind);
STEER_EXPORT(struct, fleet_sender);
STEER_EXPORT(struct, fleet_connection);

/* The destination of packets in the tunnel: the address of the tunnel of every host. */
const volatile __u8 tunnel_mac[ETH_ALEN] = {};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, 1);
	__type(key, __u32);
	__array(values, struct {
		__uint(type, BPF_MAP_TYPE_ARRAY);
		__uint(max_entries, 1);
		__type(key, __u32);
		__type(value, struct fleet_table);
	});
} fleet_tables SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, FLEET_SERVED);
	__type(key, struct fleet_listener);
	__type(value, __u32);
} served SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4 * FLEET_HOSTS);
	__type(key, struct fleet_peer);
	__type(value, struct fleet_sender);
} peers SEC(".maps");

/*
 * A connection of each device that leaves this host, by the hash of the device.
 * The agent closes the connections right after the flip of the table. Until then,
 * this host serves the datagrams of the device.
 */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, FLEET_LEAVING);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, struct fleet_connection);
} leaving SEC(".maps");

/* Packets by outcome; a GRO packet counts as its segments. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, FLEET_OUTCOMES);
	__type(key, __u32);
	__type(value, __u64);
} outcomes SEC(".maps");

/* The fields of struct iphdr from the TTL on. For IPv6, ttl is the hop limit. */
struct ttl_fields {
	__u8 ttl;
	__u8 protocol;
	__be16 check;
};

struct packet {
	struct steer_address device;
	__u32 hash; /* of the device */
	struct fleet_listener to;
	struct ttl_fields ip;
	__be16 device_port;
	bool segment; /* of TCP, without SYN: part of a connection */
};

static __always_inline bool load(struct __sk_buff *skb, __u32 offset, void *to,
				 __u32 n)
{
	return !bpf_skb_load_bytes(skb, offset, to, n);
}

#define NEAR 127 /* bytes; a mask for the verifier */

/*
 * The same without a call if the bytes are near the beginning of the packet and
 * in the linear part, as headers are. n is a constant.
 */
static __always_inline bool load_near(struct __sk_buff *skb, __u32 offset,
				      void *to, __u32 n)
{
	void *from = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;

	/* Otherwise clang merges the loads of two branches, see steer_load. */
	barrier_var(from);
	barrier_var(end);
	from += offset & NEAR;
	if (offset > NEAR || from + n > end)
		return load(skb, offset, to, n);
	__builtin_memcpy(to, from, n);
	return true;
}

/* Reads the ports of a packet from the device, or to the device with reverse. */
static __always_inline bool read_ports(struct __sk_buff *skb, __u32 offset,
				       struct packet *p, __u8 protocol,
				       bool reverse)
{
	__be16 ports[2];
	__u8 flags;

	if (protocol != IPPROTO_TCP && protocol != IPPROTO_UDP)
		return false;
	if (!load_near(skb, offset, ports, sizeof(ports)))
		return false;
	p->to.protocol = protocol;
	p->to.port = ports[!reverse];
	p->device_port = ports[reverse];
	if (protocol == IPPROTO_TCP && !reverse) {
		if (!load_near(skb, offset + 13, &flags, sizeof(flags)))
			return false;
		p->segment = !(flags & TCPHDR_SYN);
	}
	return true;
}

/*
 * An error about a packet of a service belongs to the device that the packet was
 * sent to: Packet Too Big must reach the host that has the connection.
 */
static __always_inline bool read_quoted4(struct __sk_buff *skb, __u32 offset,
					 struct packet *p, __be32 to)
{
	struct iphdr ip;
	__u8 type;

	if (!load(skb, offset, &type, sizeof(type)) ||
	    (type != ICMP_DEST_UNREACH && type != ICMP_TIME_EXCEEDED &&
	     type != ICMP_PARAMETERPROB))
		return false;
	offset += ICMP_HEADER;
	if (!load(skb, offset, &ip, sizeof(ip)) || ip.version != 4 || ip.saddr != to)
		return false;
	steer_map_ipv4(&p->device, ip.daddr);
	steer_map_ipv4(&p->to.address, ip.saddr);
	if (ip.frag_off & bpf_htons(IP_OFFSET))
		return true;
	return read_ports(skb, offset + ip.ihl * 4, p, ip.protocol, true);
}

static __always_inline bool read_ipv4(struct __sk_buff *skb, struct packet *p)
{
	struct iphdr ip;
	__u32 next;

	if (!load_near(skb, ETH_HLEN, &ip, sizeof(ip)))
		return false;
	p->ip.ttl = ip.ttl;
	p->ip.protocol = ip.protocol;
	p->ip.check = ip.check;
	next = ETH_HLEN + ip.ihl * 4;
	if (ip.protocol == IPPROTO_ICMP)
		return !(ip.frag_off & bpf_htons(IP_OFFSET)) &&
		       read_quoted4(skb, next, p, ip.daddr);
	steer_map_ipv4(&p->device, ip.saddr);
	steer_map_ipv4(&p->to.address, ip.daddr);
	/* All fragments of a datagram reach one host: only the first one has ports. */
	if (ip.frag_off & bpf_htons(IP_OFFSET | IP_MF))
		return ip.protocol == IPPROTO_TCP || ip.protocol == IPPROTO_UDP;
	return read_ports(skb, next, p, ip.protocol, false);
}

static __always_inline bool is_extension(__u8 next)
{
	return next == IPPROTO_HOPOPTS || next == IPPROTO_ROUTING ||
	       next == IPPROTO_DSTOPTS || next == IPPROTO_FRAGMENT;
}

/*
 * Returns the offset of the transport header, or 0 behind a fragment header and
 * behind more extensions than are examined: all packets of a datagram reach one
 * host.
 */
static __always_inline __u32 skip_extensions(struct __sk_buff *skb,
					     __u32 offset, __u8 *next)
{
	__u8 extension[2];
	int i;

#pragma unroll
	for (i = 0; i < IPV6_EXTENSIONS; i++) {
		if (!is_extension(*next))
			break;
		if (!load(skb, offset, extension, sizeof(extension))) {
			*next = IPPROTO_NONE;
			break;
		}
		if (*next == IPPROTO_FRAGMENT) {
			*next = extension[0];
			return 0;
		}
		*next = extension[0];
		offset += (extension[1] + 1) * 8;
	}
	return is_extension(*next) ? 0 : offset;
}

static __always_inline bool read_quoted6(struct __sk_buff *skb, __u32 offset,
					 struct packet *p,
					 const struct in6_addr *to)
{
	struct ipv6hdr ip;
	__u8 type, next;

	if (!load(skb, offset, &type, sizeof(type)) ||
	    type < ICMPV6_DEST_UNREACH || type > ICMPV6_PARAMPROB)
		return false;
	offset += ICMP_HEADER;
	if (!load(skb, offset, &ip, sizeof(ip)) ||
	    __builtin_memcmp(&ip.saddr, to, sizeof(*to)))
		return false;
	__builtin_memcpy(&p->device, &ip.daddr, sizeof(p->device));
	__builtin_memcpy(&p->to.address, &ip.saddr, sizeof(p->to.address));
	next = ip.nexthdr;
	offset = skip_extensions(skb, offset + sizeof(ip), &next);
	return !offset || read_ports(skb, offset, p, next, true);
}

static __always_inline bool read_ipv6(struct __sk_buff *skb, struct packet *p)
{
	struct ipv6hdr ip;
	__u32 offset;
	__u8 next;

	if (!load_near(skb, ETH_HLEN, &ip, sizeof(ip)))
		return false;
	p->ip.ttl = ip.hop_limit;
	next = ip.nexthdr;
	offset = skip_extensions(skb, ETH_HLEN + sizeof(ip), &next);
	if (offset && next == IPPROTO_ICMPV6)
		return read_quoted6(skb, offset, p, &ip.daddr);
	__builtin_memcpy(&p->device, &ip.saddr, sizeof(p->device));
	__builtin_memcpy(&p->to.address, &ip.daddr, sizeof(p->to.address));
	if (!offset)
		return next == IPPROTO_TCP || next == IPPROTO_UDP ||
		       is_extension(next);
	return read_ports(skb, offset, p, next, false);
}

#define VLAN_ID 0xfff /* bits of vlan_tci, which may be stale without vlan_present */

/*
 * Reports whether a frame has several tags of VLAN ID 0. The kernel removes all of
 * them, and no switch or router sends such a frame.
 */
static __always_inline bool has_nested_priority(struct __sk_buff *skb)
{
	__be16 tci;

	if (!skb->vlan_present || skb->vlan_tci & VLAN_ID ||
	    (skb->protocol != bpf_htons(ETH_P_8021Q) &&
	     skb->protocol != bpf_htons(ETH_P_8021AD)))
		return false;
	return load(skb, ETH_HLEN, &tci, sizeof(tci)) &&
	       !(bpf_ntohs(tci) & VLAN_ID);
}

/* Reads a packet. Returns false if it is not to a service. */
static __always_inline bool read_packet(struct __sk_buff *skb, struct packet *p)
{
	/* Frames with VLAN ID 0, which have a priority alone, are of this interface. */
	if (skb->vlan_present && skb->vlan_tci & VLAN_ID)
		return false; /* of the VLAN's interface */
	switch (skb->protocol) {
	case bpf_htons(ETH_P_IP):
		if (!read_ipv4(skb, p))
			return false;
		break;
	case bpf_htons(ETH_P_IPV6):
		if (!read_ipv6(skb, p))
			return false;
		break;
	default:
		return false;
	}
	return bpf_map_lookup_elem(&served, &p->to);
}

static __always_inline bool is_ipv4(const struct steer_address *address)
{
	return !address->word[0] && !address->word[1] &&
	       address->word[2] == bpf_htonl(0xffff);
}

/*
 * Returns the state of the socket that a connection, or else a SYN for it, has on
 * this host; 0 without a socket.
 */
static __always_inline __u32 socket_state(struct __sk_buff *skb,
					  const struct fleet_connection *c)
{
	struct bpf_sock_tuple tuple = {};
	__u32 size = sizeof(tuple.ipv6), state;
	struct bpf_sock *sk;

	if (is_ipv4(&c->device)) {
		tuple.ipv4.saddr = c->device.word[3];
		tuple.ipv4.daddr = c->local.word[3];
		tuple.ipv4.sport = c->device_port;
		tuple.ipv4.dport = c->port;
		size = sizeof(tuple.ipv4);
	} else {
		__builtin_memcpy(tuple.ipv6.saddr, &c->device, sizeof(c->device));
		__builtin_memcpy(tuple.ipv6.daddr, &c->local, sizeof(c->local));
		tuple.ipv6.sport = c->device_port;
		tuple.ipv6.dport = c->port;
	}
	sk = bpf_skc_lookup_tcp(skb, &tuple, size, BPF_F_CURRENT_NETNS, 0);
	if (!sk)
		return 0;
	state = sk->state;
	bpf_sk_release(sk);
	return state;
}

/* Reports whether the connection of a segment has a socket on this host. */
static __always_inline bool has_socket(struct __sk_buff *skb,
				       const struct packet *p)
{
	struct fleet_connection c = {
		.device = p->device,
		.local = p->to.address,
		.device_port = p->device_port,
		.port = p->to.port,
	};
	__u32 state = socket_state(skb, &c);

	return state && state != BPF_TCP_LISTEN;
}

/* Reports whether the device of a packet has a connection that is about to be closed. */
static __always_inline bool leaves(struct __sk_buff *skb, const struct packet *p)
{
	struct fleet_connection *found = bpf_map_lookup_elem(&leaving, &p->hash);
	struct fleet_connection c;

	if (!found)
		return false;
	c = *found;
	return socket_state(skb, &c) == BPF_TCP_ESTABLISHED;
}

static __always_inline const struct fleet_host *
host_of(const struct fleet_table *table, __u32 index)
{
	return &table->host[index & (FLEET_HOSTS - 1)];
}

/*
 * Reports whether a host of the table has sent a packet. Hosts are compared, not
 * addresses: the routes between two hosts may be of different families.
 */
static __always_inline bool sent_by(const struct fleet_sender *peer,
				    const struct fleet_host *host)
{
	return peer && peer->host == host->id;
}

/* Reports whether packets that a host forwards are recognized. */
static __always_inline bool recognized(const struct fleet_host *host)
{
	return host->vni || host->mac[0] | host->mac[1] | host->mac[2] |
			    host->mac[3] | host->mac[4] | host->mac[5];
}

/* A host by index, or FLEET_NO_HOST to serve the packet here, and the outcome. */
struct decision {
	__u32 to;
	enum fleet_outcome outcome;
};

/*
 * Decides about a packet to a bucket that moves. Hosts may have different epochs
 * for a moment. Each owner serves packets for which it has a socket, and sends a
 * TCP segment without a socket to the other owner. A packet that one owner has
 * sent to the other one is not sent back, with one exception: the previous owner
 * sends packets that it does not serve to the owner. So a packet is forwarded at
 * most three times.
 * The previous owner serves datagrams until it has closed the connection of their
 * device.
 * table.Decide of internal/fleet/table is the same in Go, and its test tries all
 * states of three hosts.
 */
static __always_inline struct decision
decide_moving(struct __sk_buff *skb, const struct packet *p,
	      const struct fleet_table *table, const struct fleet_bucket *bucket,
	      const struct fleet_sender *peer)
{
	bool prepared = bucket->other & FLEET_PREPARED;
	__u32 other = bucket->other & ~FLEET_PREPARED;
	struct decision local = { FLEET_NO_HOST, FLEET_LOCAL };
	struct decision owner = { bucket->owner, FLEET_FORWARDED };
	bool socket;

	if (table->self != bucket->owner && table->self != other) {
		if (!peer)
			return owner;
		local.outcome = FLEET_DISAGREED;
		return local;
	}
	socket = p->segment && has_socket(skb, p);
	if (socket)
		return local;
	if (table->self == bucket->owner) {
		/* Without the MAC address, the packet would come back again and again. */
		if (!p->segment || !recognized(host_of(table, other)) ||
		    sent_by(peer, host_of(table, other)))
			return local;
		return (struct decision){ other, FLEET_CHANCE };
	}
	if (sent_by(peer, host_of(table, bucket->owner)) &&
	    (prepared || p->segment))
		return local;
	if (!prepared && p->to.protocol != IPPROTO_TCP && leaves(skb, p))
		return local;
	return owner;
}

/* Reports whether a MAC address may be that of a peer. Few routers need the lookup. */
static __always_inline bool may_be_peer(const struct fleet_table *table,
					const __u8 *mac)
{
	__u8 bit = mac[4] ^ mac[5];

	return table->peer_bits[bit / 64] & 1ULL << bit % 64;
}

static __always_inline struct decision
decide(struct __sk_buff *skb, const struct packet *p,
       const struct fleet_table *table, const struct fleet_bucket *bucket,
       struct fleet_peer *from, bool tunnel)
{
	struct decision d = { FLEET_NO_HOST, FLEET_LOCAL };
	const struct fleet_sender *peer = NULL;

	if (bucket->owner == FLEET_NO_HOST) {
		d.outcome = FLEET_OWNER;
		return d;
	}
	if (bucket->owner == table->self && bucket->other == FLEET_NO_HOST)
		return d;
	if (!tunnel && !load_near(skb, ETH_ALEN, from->mac, sizeof(from->mac)))
		return d;
	if (tunnel || may_be_peer(table, from->mac))
		peer = bpf_map_lookup_elem(&peers, from);
	if (peer && peer->kind != FLEET_PEER)
		peer = NULL;
	if (bucket->other != FLEET_NO_HOST)
		return decide_moving(skb, p, table, bucket, peer);
	if (peer) {
		d.outcome = FLEET_DISAGREED;
		return d;
	}
	return (struct decision){ bucket->owner, FLEET_FORWARDED };
}

static __always_inline void count(struct __sk_buff *skb, __u32 outcome)
{
	__u64 *n = bpf_map_lookup_elem(&outcomes, &outcome);

	if (n)
		*n += skb->gso_segs ?: 1;
}

/*
 * Writes bytes near the beginning of the packet, without a call if they are in the
 * linear part. n is a constant.
 */
static __always_inline bool store_near(struct __sk_buff *skb, __u32 offset,
				       const void *from, __u32 n)
{
	void *to = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;

	barrier_var(to);
	barrier_var(end);
	to += offset;
	if (to + n > end)
		return !bpf_skb_store_bytes(skb, offset, from, n, 0);
	__builtin_memcpy(to, from, n);
	return true;
}

/* Like ip_decrease_ttl: the sum over the packet with its checksum stays the same. */
static __always_inline bool decrement_ttl(struct __sk_buff *skb,
					  const struct packet *p)
{
	struct ttl_fields ip = p->ip;
	__u32 check;

	if (ip.ttl <= 1)
		return false;
	ip.ttl--;
	if (skb->protocol != bpf_htons(ETH_P_IP))
		return store_near(skb, ETH_HLEN + offsetof(struct ipv6hdr, hop_limit),
				  &ip.ttl, sizeof(ip.ttl));
	check = ip.check + bpf_htons(0x0100);
	ip.check = check + (check >= 0xffff);
	return store_near(skb, ETH_HLEN + offsetof(struct iphdr, ttl), &ip,
			  sizeof(ip));
}

/* The size of the key in Linux 5.10, which rejects larger keys. */
#define TUNNEL_KEY offsetof(struct bpf_tunnel_key, local_ipv6)

/* Sends a packet to the tunnel of another host. */
static __always_inline long send_in_tunnel(struct __sk_buff *skb,
					   const struct fleet_host *host)
{
	struct bpf_tunnel_key key = { .tunnel_id = host->vni, .tunnel_ttl = 64 };
	__u8 mac[ETH_ALEN];
	__u64 flags = 0;
	int i;

	if (is_ipv4(&host->address)) {
		key.remote_ipv4 = bpf_ntohl(host->address.word[3]);
	} else {
		__builtin_memcpy(key.remote_ipv6, &host->address,
				 sizeof(key.remote_ipv6));
		flags = BPF_F_TUNINFO_IPV6;
	}
	for (i = 0; i < ETH_ALEN; i++)
		mac[i] = tunnel_mac[i];
	if (bpf_skb_set_tunnel_key(skb, &key, TUNNEL_KEY, flags) ||
	    bpf_skb_store_bytes(skb, 0, mac, sizeof(mac), 0))
		return TC_ACT_SHOT;
	return bpf_redirect(host->ifindex, 0);
}

static __always_inline bool reachable(struct __sk_buff *skb,
				      const struct fleet_host *host)
{
	if (!host->ifindex)
		return false;
	return host->vni || host->address.word[0] ||
	       (host->ipv4 && skb->protocol == bpf_htons(ETH_P_IP));
}

static __always_inline int forward(struct __sk_buff *skb, const struct packet *p,
				   const struct fleet_host *host, __u32 outcome)
{
	struct bpf_redir_neigh next = {};

	if (!reachable(skb, host))
		outcome = FLEET_UNREACHABLE;
	else if (!decrement_ttl(skb, p))
		outcome = FLEET_TTL;
	count(skb, outcome);
	if (outcome == FLEET_UNREACHABLE || outcome == FLEET_TTL)
		return TC_ACT_SHOT;
	/* The priority is one of this link, and the tunnel has no room for a tag. */
	if (skb->vlan_present)
		bpf_skb_vlan_pop(skb);
	if (host->vni)
		return send_in_tunnel(skb, host);
	if (host->ipv4 && skb->protocol == bpf_htons(ETH_P_IP)) {
		next.nh_family = AF_INET;
		next.ipv4_nh = host->ipv4;
	} else {
		next.nh_family = AF_INET6;
		__builtin_memcpy(next.ipv6_nh, &host->address,
				 sizeof(next.ipv6_nh));
	}
	return bpf_redirect_neigh(host->ifindex, &next, sizeof(next), 0);
}

static __always_inline const struct fleet_table *table_in_force(void)
{
	__u32 zero = 0;
	void *inner = bpf_map_lookup_elem(&fleet_tables, &zero);

	return inner ? bpf_map_lookup_elem(inner, &zero) : NULL;
}

static __always_inline int handle(struct __sk_buff *skb, struct packet *p,
				  const struct fleet_table *table,
				  struct fleet_peer *from, bool tunnel)
{
	const struct steer_device_id *id = NULL;
	const struct fleet_bucket *bucket;
	struct decision d;

	if (!table) {
		count(skb, FLEET_TABLE);
		return TC_ACT_SHOT;
	}
	if (table->named)
		id = steer_find_name(&p->device, table->named);
	p->hash = id ? id->hash : steer_hash(&p->device, table->nonce);
	bucket = &table->bucket[p->hash & (STEER_BUCKETS - 1)];
	d = decide(skb, p, table, bucket, from, tunnel);
	if (d.to != FLEET_NO_HOST)
		return forward(skb, p, host_of(table, d.to), d.outcome);
	count(skb, d.outcome);
	return d.outcome == FLEET_OWNER ? TC_ACT_SHOT : TC_ACT_UNSPEC;
}

SEC("tc")
int fleet_ingress(struct __sk_buff *skb)
{
	struct fleet_peer from = {};
	struct packet p = {};

	if (has_nested_priority(skb)) {
		count(skb, FLEET_UNTRUSTED);
		return TC_ACT_SHOT;
	}
	/*
	 * The kernel drops packets to other MAC addresses later: those that a
	 * switch floods, for example to a host that has died, and those that a
	 * promiscuous interface sees.
	 */
	if (skb->pkt_type == PACKET_OTHERHOST || !read_packet(skb, &p))
		return TC_ACT_UNSPEC;
	/* Every host would serve a packet in a broadcast or multicast frame. */
	if (skb->pkt_type != PACKET_HOST) {
		count(skb, FLEET_UNTRUSTED);
		return TC_ACT_SHOT;
	}
	return handle(skb, &p, table_in_force(), &from, false);
}

SEC("tc")
int fleet_tunnel(struct __sk_buff *skb)
{
	const struct fleet_table *table = table_in_force();
	struct bpf_tunnel_key key = {};
	struct fleet_peer from = {};
	struct packet p = {};

	if (!bpf_skb_get_tunnel_key(skb, &key, TUNNEL_KEY, 0))
		steer_map_ipv4(&from.address, bpf_htonl(key.remote_ipv4));
	else if (!bpf_skb_get_tunnel_key(skb, &key, TUNNEL_KEY, BPF_F_TUNINFO_IPV6))
		__builtin_memcpy(&from.address, key.remote_ipv6,
				 sizeof(from.address));
	/* The interface receives all virtual networks (vxlan_vs_find_vni). */
	if ((table && key.tunnel_id != table->vni) ||
	    !bpf_map_lookup_elem(&peers, &from) || !read_packet(skb, &p)) {
		count(skb, FLEET_UNTRUSTED);
		return TC_ACT_SHOT;
	}
	return handle(skb, &p, table, &from, true);
}

#define TCPOPT_EOL 0
#define TCPOPT_NOP 1
#define TCPOPT_MSS 2
#define TCP_OPTIONS 10 /* that are examined; the kernel writes the MSS first */

/* Lowers the MSS option of a segment to at most most. tcp is the offset of its header. */
static __always_inline void lower_mss(struct __sk_buff *skb, __u32 tcp,
				      __u16 most)
{
	__u32 at = tcp + sizeof(struct tcphdr), end;
	__u8 option[4], offset;
	__be16 old, new;
	int i;

	if (!load(skb, tcp + 12, &offset, sizeof(offset)))
		return;
	end = tcp + (offset >> 4) * 4;
#pragma unroll
	for (i = 0; i < TCP_OPTIONS; i++) {
		if (at + sizeof(option) > end ||
		    !load(skb, at, option, sizeof(option)) ||
		    option[0] == TCPOPT_EOL)
			return;
		if (option[0] == TCPOPT_NOP) {
			at++;
			continue;
		}
		if (option[0] == TCPOPT_MSS && option[1] == 4)
			break;
		if (option[1] < 2)
			return;
		at += option[1];
	}
	if (i == TCP_OPTIONS || (option[2] << 8 | option[3]) <= most)
		return;
	__builtin_memcpy(&old, option + 2, sizeof(old));
	new = bpf_htons(most);
	if (!bpf_l4_csum_replace(skb, tcp + offsetof(struct tcphdr, check), old,
				 new, sizeof(new)))
		bpf_skb_store_bytes(skb, at + 2, &new, sizeof(new), 0);
}

/*
 * Devices send segments that fit into the tunnel, because any host may forward
 * them: the program lowers the MSS in the SYN-ACK of a service.
 */
SEC("tc")
int fleet_egress(struct __sk_buff *skb)
{
	const struct fleet_table *table = table_in_force();
	struct fleet_listener from = { .protocol = IPPROTO_TCP };
	struct ipv6hdr ip6;
	struct iphdr ip4;
	__u32 tcp, headers;
	__u8 flags;

	if (!table || !table->room)
		return TC_ACT_UNSPEC;
	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		if (!load(skb, ETH_HLEN, &ip4, sizeof(ip4)) ||
		    ip4.protocol != IPPROTO_TCP)
			return TC_ACT_UNSPEC;
		steer_map_ipv4(&from.address, ip4.saddr);
		tcp = ETH_HLEN + ip4.ihl * 4;
		headers = sizeof(ip4) + sizeof(struct tcphdr);
	} else if (skb->protocol == bpf_htons(ETH_P_IPV6)) {
		if (!load(skb, ETH_HLEN, &ip6, sizeof(ip6)) ||
		    ip6.nexthdr != IPPROTO_TCP)
			return TC_ACT_UNSPEC;
		__builtin_memcpy(&from.address, &ip6.saddr, sizeof(from.address));
		tcp = ETH_HLEN + sizeof(ip6);
		headers = sizeof(ip6) + sizeof(struct tcphdr);
	} else {
		return TC_ACT_UNSPEC;
	}
	if (!load(skb, tcp + 13, &flags, sizeof(flags)) || !(flags & TCPHDR_SYN) ||
	    !load(skb, tcp, &from.port, sizeof(from.port)) ||
	    !bpf_map_lookup_elem(&served, &from))
		return TC_ACT_UNSPEC;
	lower_mss(skb, tcp, table->room - headers);
	return TC_ACT_UNSPEC;
}
