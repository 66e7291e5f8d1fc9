/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Types and constants that the programs of a fleet share with user space. bpf2go
 * generates the Go declarations from this file.
 */
#ifndef SOCKEYE_FLEET_H
#define SOCKEYE_FLEET_H

#include "steer.h"

enum fleet_limit {
	FLEET_HOSTS = 4096,
	FLEET_SERVED = 1024, /* entries of served */
	FLEET_LEAVING = 1 << 16, /* entries of leaving */
	FLEET_NO_HOST = 0xffff,
	FLEET_PREPARED = 0x8000, /* bit of fleet_bucket.other */
	FLEET_PEER_BITS = 256,
};

/* Kinds of hosts that forward packets to this host. */
enum fleet_sender_kind {
	FLEET_PEER = 1, /* a host of the table */
	/*
	 * A former or dead host: its program may forward by an earlier table. The
	 * packets are treated as those of a router.
	 */
	FLEET_FORMER_PEER,
};

/* What a program did with a packet to a service. */
enum fleet_outcome {
	FLEET_LOCAL,	   /* passed to the services of this host */
	FLEET_FORWARDED,   /* sent to the owner */
	FLEET_CHANCE,	   /* no socket here: sent to the other owner of a bucket that moves */
	FLEET_DISAGREED,   /* a peer sent the packet here, and this host does not own the bucket: passed */
	FLEET_TABLE,	   /* dropped: no table is installed */
	FLEET_OWNER,	   /* dropped: the bucket has no owner */
	FLEET_TTL,	   /* dropped: the TTL or the hop limit is used up */
	FLEET_UNREACHABLE, /* dropped: there is no path to the owner */
	/*
	 * dropped: from the tunnel, and not by a peer or not to a service; to a
	 * service in a broadcast or multicast frame; several tags of VLAN ID 0
	 */
	FLEET_UNTRUSTED,
	FLEET_OUTCOMES,
};

/* The hosts of a bucket: indexes of fleet_table.host, or FLEET_NO_HOST. */
struct fleet_bucket {
	__u16 owner;
	/*
	 * The other host while the bucket moves. Before the flip: the next owner,
	 * with FLEET_PREPARED set. After the flip: the previous owner.
	 */
	__u16 other;
};

/* How to reach a host. */
struct fleet_host {
	__u64 id; /* of the host in all tables: the hash of its name */
	/*
	 * The far end of the tunnel; on a link, the IPv6 next hop, or zeros. The
	 * kernel sends IPv4 packets to an IPv6 next hop, but not the reverse
	 * (bpf_out_neigh_v4 and bpf_out_neigh_v6).
	 */
	struct steer_address address;
	__be32 ipv4; /* next hop on a link, or 0 */
	__u32 ifindex; /* 0: the host cannot be reached */
	__u32 vni; /* of the tunnel; 0: the host is on the link of the interface */
	__u8 mac[6]; /* of the sender of packets that the host forwards; on the link only */
	__u8 padding[2];
};

/* One epoch. A new table replaces the map as a whole. */
struct fleet_table {
	__u64 nonce; /* first, as in steer_table */
	__u64 epoch;
	__u32 named; /* as in steer_table */
	__u16 self; /* index of this host, or FLEET_NO_HOST */
	__u16 room; /* bytes of the largest IP packet in the tunnel, for the MSS; 0: no tunnel */
	__u32 vni; /* of the tunnel; 0: no tunnel */
	__u32 padding;
	__u64 peer_bits[FLEET_PEER_BITS / 64]; /* of the MAC addresses of peers, by the exclusive or of the last two bytes */
	struct fleet_bucket bucket[STEER_BUCKETS];
	struct fleet_host host[FLEET_HOSTS];
};

/*
 * A listener of a service at an address of the fleet. Port and protocol are 0 in
 * the entry of the address alone, for packets without ports.
 */
struct fleet_listener {
	struct steer_address address;
	__be16 port;
	__u8 protocol;
	__u8 padding;
};

/* A host by which packets are forwarded: its MAC address, or its IP address in the tunnel. */
struct fleet_peer {
	struct steer_address address; /* zeros with a MAC address */
	__u8 mac[6];
	__u8 padding[2];
};

/* The host that has such an address. It may have several. */
struct fleet_sender {
	__u64 host; /* fleet_host.id */
	__u32 kind; /* enum fleet_sender_kind */
	__u32 padding;
};

/* A TCP connection of a device with a service. */
struct fleet_connection {
	struct steer_address device;
	struct steer_address local;
	__be16 device_port;
	__be16 port;
};

#endif
