/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Types and constants that the steering programs share with user space. bpf2go
 * generates the Go declarations from this file.
 */
#ifndef SOCKEYE_STEER_H
#define SOCKEYE_STEER_H

#include <linux/types.h>
#include <stdbool.h>

enum steer_limit {
	STEER_MAX_SLOTS = 1024,
	STEER_MAX_LISTENERS = 16,
	STEER_BUCKETS = 16384,
	STEER_PENDING = 256, /* entries of pending, on each CPU */
	STEER_NEXT_DEVICES = 2, /* value of steer_table.named: the map next_devices */
	STEER_NO_SLOT = 0xffff,
	STEER_NO_DEVICE = 0x7fffffff,
	STEER_GATED = 0x8000, /* bit of steer_table.bucket: SYNs wait, see steer_gated */
	STEER_PINNED = 0x80000000, /* bit of steer_device_id.device */
	/*
	 * TTL or hop limit of a datagram that the agent sends again, with
	 * sk_reuseport; see steer_fills.
	 */
	STEER_REPLAY_TTL = 1,
	/* Bits of steer_wait.filling: the mask of steer_slot.ready, and flags. */
	STEER_FILLING_BANK = 3,
	STEER_HOLD = 4, /* only datagrams of the agent pass */
	STEER_CONNECT = 8, /* connections pass */
	STEER_EXITS = 0x10000, /* bit of steer_event.pid */
	/* Incremented when a pinned map or a type below changes its meaning. */
	STEER_SCHEMA = 1,
};

/* Why a SYN or a datagram was refused. */
enum steer_reason {
	STEER_REASON_EMPTY,	/* no ready member in the slot */
	STEER_REASON_SOCKET,	/* the slot is ready, but its socket cannot be used */
	STEER_REASON_ADDRESS,	/* the source address could not be read */
	STEER_REASON_TABLE,	/* no bucket table is installed */
	STEER_REASONS,
};

/* Source address as IPv6, IPv4 as ::ffff:a.b.c.d; network byte order. */
struct steer_address {
	__u32 word[4];
};

/* The bucket table. A new one replaces the map as a whole. */
struct steer_table {
	__u64 nonce;
	__u16 slots;
	__u16 standby; /* slot; STEER_NO_SLOT: packets of an empty slot are refused */
	__u32 named;   /* device map: 0 none, 1 device_maps, 2 next_devices */
	__u16 bucket[STEER_BUCKETS]; /* slot; | STEER_GATED */
};

/* LPM trie key; prefixlen counts the bits of the mapped address. */
struct steer_prefix {
	__u32 prefixlen;
	struct steer_address address;
};

/*
 * The device of a prefix. ::ffff:0:0/96 has STEER_NO_DEVICE, so that a short
 * IPv6 prefix such as ::/0 does not cover IPv4.
 */
struct steer_device_id {
	__u32 hash;   /* of the device's name, with the table's nonce; of a pinned device: the slot */
	__u32 device; /* index into the device map's list of names, in user space; | STEER_PINNED */
};

/*
 * A slot and its member. The agent writes the entry, and the release hook clears
 * ready. Packets are steered to a slot only while ready is not 0, on all
 * listeners: 1 stands for the sockets in the map sockets, and 2 for those in
 * successors. So one write replaces the member on all listeners.
 */
struct steer_slot {
	__u32 ready;
	__u32 pid;
	__u64 start_time; /* clock ticks since boot, as in /proc/PID/stat */
};

/*
 * The waiting room of a slot. The agent writes the entry, and the release hook
 * sets until. While the slot is not ready, packets wait before until.
 */
struct steer_wait {
	__u64 length; /* for the release hook, nanoseconds; 0: packets are refused */
	__u64 until;  /* CLOCK_MONOTONIC, nanoseconds */
	__u64 left;   /* datagrams that have left the room, of steer_room.datagrams */
	__u64 left_bytes;
	__u32 filling; /* the sockets that receive what left, as ready; | bits */
	__u32 padding;
};

/* The packets that a waiting room has received. */
struct steer_room {
	__u64 datagrams;
	__u64 bytes; /* with UDP headers; 0 with sk_lookup, which sees no length */
	__u64 connections; /* SYNs */
	__u64 full; /* datagrams that were refused because the room was full */
};

/* Per slot and CPU. Index STEER_MAX_SLOTS counts packets without a slot. */
struct steer_counters {
	__u64 connections;
	__u64 datagrams;
	__u64 diverted; /* steered to the standby slot instead */
	__u64 refused_connections[STEER_REASONS];
	__u64 refused_datagrams[STEER_REASONS];
};

/* The counts of a source address. */
struct steer_seen {
	__u64 datagrams;
	__u64 connections;
	__u64 refused;
	__u64 last_seen; /* CLOCK_MONOTONIC, nanoseconds; up to 64 jiffies old */
	__u32 slot;
	__u32 held; /* time of the last SYN that the gate held: last_seen >> 30 */
};

/* State of the token bucket for new devices, and the hash key of pending. */
struct steer_admission {
	__u64 until; /* tokens are used up to here, CLOCK_MONOTONIC, nanoseconds */
	__u64 key[4]; /* random and secret: else forged sources could share entries */
};

/*
 * Datagrams that a CPU has counted and not added to the devices map yet. The
 * addresses that share an entry use it one after the other.
 */
struct steer_pending {
	struct steer_address address;
	__u32 datagrams;
	__u32 slot;
	__u32 tick; /* jiffies / 64 of the last addition; see steer_count_datagram */
	__u32 padding;
};

/* An address on which a service listens: zeros with AF_UNSPEC is any address. */
struct steer_listener {
	struct steer_address address;
	__u16 port; /* host byte order */
	__u8 protocol;
	__u8 family; /* AF_INET, AF_INET6; AF_UNSPEC: both */
};

/* A range of ports on which members bind: host byte order, last included. */
struct steer_ports {
	__u16 first;
	__u16 last;
	__u8 protocol;
	__u8 padding[3];
};

enum steer_event_kind {
	STEER_EVENT_BIND,    /* a process bound a socket to one of the ports */
	STEER_EVENT_LISTEN,  /* a TCP socket was switched to listening */
	STEER_EVENT_RELEASE, /* a registered socket was closed */
};

struct steer_event {
	__u64 cookie;
	__u32 kind;
	/*
	 * BIND: the binding process. RELEASE: if the process that closed the
	 * socket exits, its wait status, as in wait(2), | STEER_EXITS.
	 */
	__u32 pid;
};

/* A refusal that begins: the packets before were served, or long ago. */
struct steer_refusal {
	struct steer_address address;
	__u64 time;	/* CLOCK_MONOTONIC, nanoseconds */
	__u32 slot;	/* of the device, or STEER_NO_SLOT */
	__u16 reason;	/* enum steer_reason */
	__u8 protocol;	/* IPPROTO_TCP or IPPROTO_UDP */
	__u8 padding;
};

/* A datagram with template sets, which follows this header. */
struct steer_templates {
	struct steer_address address; /* source */
	__u64 cookie; /* of the socket */
	__u32 length; /* of the datagram */
	__be16 port;
	__u16 padding;
};

/* Keeps a type in the object's BTF, which bpf2go and the loader read. */
#define STEER_EXPORT(kind, name) \
	const kind name *unused_##name __attribute__((unused))

_Static_assert(sizeof(struct steer_address) == 16, "address");
_Static_assert(sizeof(struct steer_prefix) == 20, "prefix");
_Static_assert(sizeof(struct steer_slot) == 16, "slot");
_Static_assert(sizeof(struct steer_wait) == 40, "wait");
_Static_assert(sizeof(struct steer_room) == 32, "room");
_Static_assert(sizeof(struct steer_counters) == 88, "counters");
_Static_assert(sizeof(struct steer_seen) == 40, "seen");
_Static_assert(sizeof(struct steer_pending) == 32, "pending");
_Static_assert(sizeof(struct steer_admission) == 40, "admission");
_Static_assert(sizeof(struct steer_listener) == 20, "listener");
_Static_assert(sizeof(struct steer_ports) == 8, "ports");
_Static_assert(sizeof(struct steer_event) == 16, "event");
_Static_assert(sizeof(struct steer_refusal) == 32, "refusal");
_Static_assert(sizeof(struct steer_templates) == 32, "templates");
_Static_assert(sizeof(struct steer_table) == 16 + 2 * STEER_BUCKETS, "table");
_Static_assert((STEER_BUCKETS & (STEER_BUCKETS - 1)) == 0, "buckets");
_Static_assert((STEER_PENDING & (STEER_PENDING - 1)) == 0, "pending");

#endif
