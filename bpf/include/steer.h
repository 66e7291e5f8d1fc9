/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * What the steering programs and user space share. bpf2go turns these types
 * into Go; nothing here is written twice by hand.
 */
#ifndef SOCKEYE_STEER_H
#define SOCKEYE_STEER_H

#include <linux/types.h>
#include <stdbool.h>

enum steer_limit {
	STEER_MAX_SLOTS = 1024,
	STEER_MAX_LISTENERS = 16,
	STEER_BUCKETS = 16384,
	STEER_PENDING = 256, /* entries a CPU */
	STEER_NEXT_DEVICES = 2, /* of steer_table.named: the map next_devices */
	STEER_NO_SLOT = 0xffff,
	STEER_NO_DEVICE = 0x7fffffff,
	/* Bumped when a pinned map or a type below changes its meaning. */
	STEER_SCHEMA = 1,
};

/* Why a SYN or a datagram was refused. */
enum steer_reason {
	STEER_REASON_EMPTY,	/* no ready member in the slot */
	STEER_REASON_SOCKET,	/* the slot is ready, its socket cannot be used */
	STEER_REASON_ADDRESS,	/* the source address could not be read */
	STEER_REASON_TABLE,	/* no bucket table is installed */
	STEER_REASONS,
};

/* Source address as IPv6, IPv4 as ::ffff:a.b.c.d; network byte order. */
struct steer_address {
	__u32 word[4];
};

/* One version of the mapping: replaced as a whole, never written in place. */
struct steer_table {
	__u64 nonce;
	__u16 slots;
	__u16 standby; /* STEER_NO_SLOT: an empty slot refuses */
	__u32 named;   /* the device map: 0 none, 1 device_maps, 2 next_devices */
	__u16 bucket[STEER_BUCKETS];
};

/* LPM trie key; prefixlen counts from the top of the mapped address. */
struct steer_prefix {
	__u32 prefixlen;
	struct steer_address address;
};

/*
 * The device of a prefix. STEER_NO_DEVICE stands at the root of the IPv4
 * part, so that a short IPv6 prefix such as ::/0 does not cover IPv4.
 */
struct steer_device_id {
	__u32 hash;   /* of the device's name, with the table's nonce */
	__u32 device; /* index into the device map's list of names */
};

/*
 * A seat and who sits in it. The agent writes it, the release hook clears
 * ready: a slot is served only while ready is 1, for all listeners alike.
 */
struct steer_slot {
	__u32 ready;
	__u32 pid;
	__u64 start_time; /* clock ticks since boot, as in /proc/PID/stat */
};

/* Per slot and CPU; index STEER_MAX_SLOTS counts what has no slot. */
struct steer_counters {
	__u64 connections;
	__u64 datagrams;
	__u64 diverted; /* sent to the standby slot instead */
	__u64 refused_connections[STEER_REASONS];
	__u64 refused_datagrams[STEER_REASONS];
};

/* A source address that was seen. */
struct steer_seen {
	__u64 datagrams;
	__u64 connections;
	__u64 refused;
	__u64 last_seen; /* CLOCK_MONOTONIC, nanoseconds; to 64 jiffies */
	__u32 slot;
	__u32 padding;
};

/* Who gets a place in the devices map, and in the CPUs' tables of counts. */
struct steer_admission {
	__u64 until; /* the allowance is used, CLOCK_MONOTONIC, nanoseconds */
	__u64 key[4]; /* secret, random; of the index into pending */
};

/*
 * Datagrams that a CPU has counted and not yet added to the devices map. One
 * entry stands for the addresses that share it, one at a time.
 */
struct steer_pending {
	struct steer_address address;
	__u32 datagrams;
	__u32 slot;
	__u32 tick; /* of the last addition; see steer_count_datagram */
	__u32 padding;
};

/* Where a service listens: an address of all zeros with family 0 is any. */
struct steer_listener {
	struct steer_address address;
	__u16 port; /* host byte order */
	__u8 protocol;
	__u8 family; /* AF_INET, AF_INET6; AF_UNSPEC: both */
};

/* Ports on which members bind; host byte order, both ends included. */
struct steer_ports {
	__u16 first;
	__u16 last;
	__u8 protocol;
	__u8 padding[3];
};

enum steer_event_kind {
	STEER_EVENT_BIND,    /* a process bound a socket to one of the ports */
	STEER_EVENT_LISTEN,  /* a bound TCP socket listens now */
	STEER_EVENT_RELEASE, /* a registered socket was closed */
};

struct steer_event {
	__u64 cookie;
	__u32 kind;
	__u32 pid; /* of the binding process; 0 with LISTEN and RELEASE */
};

/* Keeps a type in the object's BTF, from which bpf2go and the loader read it. */
#define STEER_EXPORT(kind, name) \
	const kind name *unused_##name __attribute__((unused))

_Static_assert(sizeof(struct steer_address) == 16, "address");
_Static_assert(sizeof(struct steer_prefix) == 20, "prefix");
_Static_assert(sizeof(struct steer_slot) == 16, "slot");
_Static_assert(sizeof(struct steer_counters) == 88, "counters");
_Static_assert(sizeof(struct steer_seen) == 40, "seen");
_Static_assert(sizeof(struct steer_pending) == 32, "pending");
_Static_assert(sizeof(struct steer_admission) == 40, "admission");
_Static_assert(sizeof(struct steer_listener) == 20, "listener");
_Static_assert(sizeof(struct steer_ports) == 8, "ports");
_Static_assert(sizeof(struct steer_event) == 16, "event");
_Static_assert(sizeof(struct steer_table) == 16 + 2 * STEER_BUCKETS, "table");
_Static_assert((STEER_BUCKETS & (STEER_BUCKETS - 1)) == 0, "buckets");
_Static_assert((STEER_PENDING & (STEER_PENDING - 1)) == 0, "pending");

#endif
