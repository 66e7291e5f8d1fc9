/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Maps a source address to a slot. Both steering modes include this file, so
 * that a device has the same slot in both.
 *
 * Cost: one hash of six words and four array lookups (all inlined by the JIT);
 * with a device map, one lookup in a hash, and for addresses that have no prefix
 * of their own, one in an LPM trie; with a devices map, one more array lookup.
 */
#ifndef SOCKEYE_STEER_BPF_H
#define SOCKEYE_STEER_BPF_H

#include "device.bpf.h"

STEER_EXPORT(struct, steer_table);
STEER_EXPORT(struct, steer_wait);
STEER_EXPORT(struct, steer_room);
STEER_EXPORT(struct, steer_refusal);

/*
 * Whether sources are recorded in the devices map. The loader sets the size of
 * that map when it creates the map.
 */
const volatile bool track_devices = true;

/*
 * Sources may be forged, so a token bucket limits the new entries of the devices
 * map: one in admit_every nanoseconds, with a burst of those that accumulate in
 * admit_gather nanoseconds. A source that completed a handshake needs no token.
 */
const volatile __u64 admit_every = 1;
const volatile __u64 admit_gather = 0;

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, 1);
	__type(key, __u32);
	__array(values, struct {
		__uint(type, BPF_MAP_TYPE_ARRAY);
		__uint(max_entries, 1);
		__type(key, __u32);
		__type(value, struct steer_table);
	});
} tables SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, STEER_MAX_SLOTS);
	__type(key, __u32);
	__type(value, struct steer_slot);
} slots SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, STEER_MAX_SLOTS + 1);
	__type(key, __u32);
	__type(value, struct steer_counters);
} counters SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1);
	__type(key, struct steer_address);
	__type(value, struct steer_seen);
} devices SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, STEER_PENDING);
	__type(key, __u32);
	__type(value, struct steer_pending);
} pending SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct steer_admission);
} admission SEC(".maps");

/*
 * The number of SYNs that the gate of a slot lets pass. Each of several CPUs that
 * let one pass at the same instant may let one too many pass.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, STEER_MAX_SLOTS);
	__type(key, __u32);
	__type(value, __s64);
} passes SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, STEER_MAX_SLOTS);
	__type(key, __u32);
	__type(value, struct steer_wait);
} waits SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, STEER_MAX_SLOTS);
	__type(key, __u32);
	__type(value, struct steer_room);
} stored SEC(".maps");

/* Ports of the waiting rooms of UDP listeners with sk_lookup; 0: none. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, STEER_MAX_LISTENERS);
	__type(key, __u32);
	__type(value, __u32);
} room_ports SEC(".maps");

/* Bounds of the waiting room of each slot. */
const volatile __u64 room_datagrams = 0;
const volatile __u64 room_bytes = 0;

/* Packets of sources that got no entry in the devices map. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} unlisted SEC(".maps");

/*
 * Refusals for the record of events. A device is reported when its packets begin
 * to be refused: the packets before were served, or refused more than
 * STEER_REFUSAL_PAUSE ago. A token bucket limits the reports of a service; all
 * refusals are in counters. The agent reads the ring once a second and is not
 * woken up.
 */
#define STEER_REFUSAL_PAUSE 10000000000ULL

const volatile __u64 report_every = 1;
const volatile __u64 report_gather = 0;

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 128 * 1024);
} refusals SEC(".maps");

/* Reports use tokens up to here, CLOCK_MONOTONIC, nanoseconds. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} reports SEC(".maps");

/* The steering decision for one packet. */
struct steer {
	struct steer_address address;
	__u32 home;  /* slot of the address by its pin or the bucket table */
	__u32 slot;  /* home, the standby slot, or STEER_NO_SLOT */
	__u32 refused; /* enum steer_reason, if slot is STEER_NO_SLOT */
	__u32 bank; /* steer_slot.ready of slot, or steer_wait.filling */
	bool gated; /* the gate of the slot is closed for SYNs of the device */
	bool held;  /* the SYN was dropped silently, or the packet waits */
	bool waits; /* the home slot is empty and has a waiting room */
	bool connection; /* TCP */
	bool uncounted; /* not the SYN of a connection */
};

/* Returns steer_slot.ready. */
static __always_inline __u32 steer_ready(__u32 slot)
{
	struct steer_slot *state = bpf_map_lookup_elem(&slots, &slot);

	return state ? state->ready : 0;
}

/*
 * Returns the slot of an address in the bucket table, with STEER_GATED, or the
 * slot of its pin.
 *
 * While the gate of a bucket is closed, SYNs beyond those of passes get a
 * listening socket of the agent whose socket filter drops all packets, so that
 * the device sends its SYN again later. Without that socket, the gate is open.
 */
static __always_inline __u32 steer_home(const struct steer_table *table,
					const struct steer_address *address)
{
	const struct steer_device_id *id = NULL;
	__u32 hash;

	if (table->named)
		id = steer_find_name(address, table->named);
	if (id && id->device & STEER_PINNED)
		return id->hash;
	hash = id ? id->hash : steer_hash(address, table->nonce);
	return table->bucket[hash & (STEER_BUCKETS - 1)];
}

/* Reports whether the gate of a slot lets a SYN pass, and counts the SYN. */
static __always_inline bool steer_pass(__u32 slot)
{
	__s64 *left = bpf_map_lookup_elem(&passes, &slot);

	if (!left || *left <= 0)
		return false;
	__sync_fetch_and_add(left, -1);
	return true;
}

/* Reports whether the packets of an empty slot wait for its next member. */
static __always_inline bool steer_waits(__u32 slot)
{
	struct steer_wait *wait = bpf_map_lookup_elem(&waits, &slot);

	return wait && wait->until && wait->until > bpf_ktime_get_ns();
}

/*
 * Sets s->slot for s->address, or s->waits, or s->refused if no slot can be
 * used.
 */
static __always_inline void steer_decide(struct steer *s)
{
	struct steer_table *table;
	__u32 zero = 0;
	void *inner;

	s->home = STEER_NO_SLOT;
	s->slot = STEER_NO_SLOT;
	s->refused = STEER_REASON_TABLE;
	inner = bpf_map_lookup_elem(&tables, &zero);
	if (!inner)
		return;
	table = bpf_map_lookup_elem(inner, &zero);
	if (!table)
		return;
	s->home = steer_home(table, &s->address);
	s->gated = s->connection && !s->uncounted && s->home & STEER_GATED;
	s->home &= ~STEER_GATED;
	s->bank = steer_ready(s->home);
	if (s->bank) {
		s->slot = s->home;
		if (s->gated && steer_pass(s->home))
			s->gated = false;
		return;
	}
	s->gated = false;
	s->refused = STEER_REASON_EMPTY;
	if (table->standby != STEER_NO_SLOT)
		s->bank = steer_ready(table->standby);
	if (s->bank)
		s->slot = table->standby;
	else
		s->waits = steer_waits(s->home);
}

static __always_inline void steer_refuse(struct steer *s, __u32 reason)
{
	s->slot = STEER_NO_SLOT;
	s->refused = reason;
}

/*
 * Reports whether a packet of a waiting slot goes to the new member, whose slot
 * is not ready yet.
 *
 * With STEER_CONNECT, connections pass first, so that the member has the routes
 * of the devices. Then the agent sends the datagrams of the room again, and makes
 * the slot ready. New datagrams go to the room until the last datagram has left
 * the room, so that the member receives all in their order, and while STEER_HOLD
 * is set, after the templates of their exporters.
 */
static __always_inline bool steer_fills(struct steer *s, bool replayed)
{
	struct steer_wait *wait = bpf_map_lookup_elem(&waits, &s->home);
	struct steer_room *room = bpf_map_lookup_elem(&stored, &s->home);

	if (!wait || !room)
		return false;
	s->bank = wait->filling & STEER_FILLING_BANK;
	if (!s->bank)
		return false;
	if (s->connection)
		return wait->filling & STEER_CONNECT;
	return replayed || (!(wait->filling & STEER_HOLD) &&
			    room->datagrams == wait->left);
}

/*
 * Reports whether a datagram that was diverted to the standby slot goes to the
 * new member of its own slot, which is not ready yet: the agent sends templates
 * again before new datagrams.
 */
static __always_inline bool steer_fills_instead(struct steer *s)
{
	__u32 bank = s->bank;

	if (s->slot == STEER_NO_SLOT)
		return false;
	if (steer_fills(s, true))
		return true;
	s->bank = bank;
	return false;
}

/*
 * Reports whether the waiting room takes a packet, and counts the packet. bytes
 * is the length from the transport header, or 0 if it is unknown.
 */
static __always_inline bool steer_store(const struct steer *s, __u64 bytes)
{
	struct steer_wait *wait = bpf_map_lookup_elem(&waits, &s->home);
	struct steer_room *room = bpf_map_lookup_elem(&stored, &s->home);

	if (!wait || !room)
		return false;
	if (s->connection) {
		if (!s->uncounted)
			__sync_fetch_and_add(&room->connections, 1);
		return true;
	}
	if (room->datagrams - wait->left >= room_datagrams ||
	    room->bytes - wait->left_bytes >= room_bytes) {
		__sync_fetch_and_add(&room->full, 1);
		return false;
	}
	__sync_fetch_and_add(&room->datagrams, 1);
	/* clang makes an addition of 0 an atomic or, which is newer than 5.10. */
	if (bytes)
		__sync_fetch_and_add(&room->bytes, bytes);
	return true;
}

/* Adds an address to the devices map, without a token. NULL: no memory. */
static __always_inline struct steer_seen *
steer_add_device(const struct steer_address *address)
{
	struct steer_seen fresh = {};

	bpf_map_update_elem(&devices, address, &fresh, BPF_NOEXIST);
	return bpf_map_lookup_elem(&devices, address);
}

/*
 * Takes a token for a new entry. Each of several CPUs that do so at the same
 * instant may take one token too many.
 */
static __always_inline bool steer_admit(void)
{
	__u64 now = bpf_ktime_get_ns(), *missed;
	struct steer_admission *a;
	__u32 zero = 0;

	a = bpf_map_lookup_elem(&admission, &zero);
	if (!a)
		return false;
	if (a->until < now)
		a->until = now;
	if (a->until - now <= admit_gather) {
		__sync_fetch_and_add(&a->until, admit_every);
		return true;
	}
	missed = bpf_map_lookup_elem(&unlisted, &zero);
	if (missed)
		(*missed)++;
	return false;
}

static __always_inline struct steer_seen *
steer_find_device(const struct steer_address *address)
{
	struct steer_seen *seen = bpf_map_lookup_elem(&devices, address);

	if (seen)
		return seen;
	return steer_admit() ? steer_add_device(address) : NULL;
}

static __always_inline void steer_note_held(const struct steer *s)
{
	struct steer_seen *seen = steer_find_device(&s->address);

	if (!seen)
		return;
	seen->last_seen = bpf_ktime_get_ns();
	seen->held = seen->last_seen >> 30;
}

/*
 * Reports a refusal if it begins: see refusals. seen is not updated yet. Each of
 * several CPUs may take one token too many.
 */
static __always_inline void steer_report(const struct steer *s,
					 const struct steer_seen *seen)
{
	__u64 now = bpf_ktime_get_ns(), *until;
	struct steer_refusal refusal = {};
	__u32 zero = 0;

	if (seen->last_seen && seen->slot == STEER_NO_SLOT &&
	    now - seen->last_seen <= STEER_REFUSAL_PAUSE)
		return;
	until = bpf_map_lookup_elem(&reports, &zero);
	if (!until)
		return;
	if (*until < now)
		*until = now;
	if (*until - now > report_gather)
		return;
	__sync_fetch_and_add(until, report_every);
	refusal.address = s->address;
	refusal.time = now;
	refusal.slot = s->home;
	refusal.reason = s->refused;
	refusal.protocol = s->connection ? IPPROTO_TCP : IPPROTO_UDP;
	bpf_ringbuf_output(&refusals, &refusal, sizeof(refusal),
			   BPF_RB_NO_WAKEUP);
}

static __always_inline void steer_count_connection(const struct steer *s)
{
	struct steer_seen *seen = steer_find_device(&s->address);

	if (!seen)
		return;
	if (s->slot == STEER_NO_SLOT) {
		steer_report(s, seen);
		__sync_fetch_and_add(&seen->refused, 1);
	} else {
		__sync_fetch_and_add(&seen->connections, 1);
	}
	seen->slot = s->slot;
	seen->last_seen = bpf_ktime_get_ns();
}

/* Returns the entry of an address in pending, which may have another address. */
static __always_inline struct steer_pending *
steer_pending_of(const struct steer_address *address)
{
	struct steer_admission *a;
	__u32 index, zero = 0;

	a = bpf_map_lookup_elem(&admission, &zero);
	if (!a)
		return NULL;
	/* Multilinear hash: any two addresses collide under few keys only. */
	index = (a->key[0] * address->word[0] + a->key[1] * address->word[1] +
		 a->key[2] * address->word[2] + a->key[3] * address->word[3]) >> 56;
	index &= STEER_PENDING - 1;
	return bpf_map_lookup_elem(&pending, &index);
}

static __always_inline bool steer_pending_is(const struct steer_pending *p,
					     const struct steer_address *address)
{
	return p->address.word[3] == address->word[3] &&
	       p->address.word[2] == address->word[2] &&
	       p->address.word[1] == address->word[1] &&
	       p->address.word[0] == address->word[0];
}

static __always_inline __u32 steer_tick(void)
{
	return bpf_jiffies64() >> 6;
}

/*
 * Counts a datagram of a device. A lookup in the LRU map costs as much as the
 * rest of the program, so each CPU does one lookup in 64 jiffies (256 ms with
 * HZ = 250) for each device, and counts the other datagrams in its own table,
 * pending, see steer_served_again. User space adds both. If several addresses
 * share an entry of pending, the first one in 64 jiffies uses the entry; the
 * others use the LRU map.
 */
static __always_inline void steer_count_datagram(const struct steer *s)
{
	struct steer_pending *p = steer_pending_of(&s->address);
	__u32 tick = steer_tick(), before = 0;
	struct steer_seen *seen, *others;
	bool same;

	if (!p)
		return;
	same = steer_pending_is(p, &s->address);
	if (same && p->tick == tick && p->slot == s->slot) {
		p->datagrams++;
		return;
	}
	seen = steer_find_device(&s->address);
	if (!seen)
		return;
	if (same) {
		before = p->datagrams;
	} else if (p->tick != tick) {
		others = p->datagrams ? bpf_map_lookup_elem(&devices, &p->address) : NULL;
		if (others)
			__sync_fetch_and_add(&others->datagrams, p->datagrams);
		p->address = s->address;
	}
	if (same || p->tick != tick) {
		p->datagrams = 0;
		p->slot = s->slot;
		p->tick = tick;
	}
	__sync_fetch_and_add(&seen->datagrams, before + 1);
	seen->slot = s->slot;
	seen->last_seen = bpf_ktime_get_ns();
}

/*
 * Counts a datagram that the member of its own slot receives, if the device had
 * another one on this CPU in the same 64 jiffies, which is the usual case.
 */
static __always_inline bool steer_served_again(const struct steer *s)
{
	struct steer_counters *count;
	struct steer_pending *p;

	if (s->connection || s->held || s->slot != s->home)
		return false;
	count = bpf_map_lookup_elem(&counters, &s->slot);
	if (!count)
		return false;
	if (track_devices) {
		p = steer_pending_of(&s->address);
		if (!p || p->slot != s->slot || p->tick != steer_tick() ||
		    !steer_pending_is(p, &s->address))
			return false;
		p->datagrams++;
	}
	count->datagrams++;
	return true;
}

static __always_inline void steer_count(const struct steer *s)
{
	bool served = s->slot != STEER_NO_SLOT;
	__u32 index = served ? s->slot : s->home;
	struct steer_counters *count, *home;

	if (s->held) {
		if (track_devices && s->connection)
			steer_note_held(s);
		return;
	}
	if (index >= STEER_MAX_SLOTS)
		index = STEER_MAX_SLOTS;
	count = bpf_map_lookup_elem(&counters, &index);
	if (!count)
		return;
	if (served) {
		if (s->connection)
			count->connections += !s->uncounted;
		else
			count->datagrams++;
		if (s->slot != s->home) {
			home = bpf_map_lookup_elem(&counters, &s->home);
			if (home)
				home->diverted++;
		}
	} else if (s->refused < STEER_REASONS) {
		if (s->connection)
			count->refused_connections[s->refused]++;
		else
			count->refused_datagrams[s->refused]++;
	}
	if (!track_devices || s->refused == STEER_REASON_ADDRESS ||
	    (served && s->uncounted))
		return;
	if (served && !s->connection)
		steer_count_datagram(s);
	else
		steer_count_connection(s);
}

/* Bits of the argument of steer_account, above home, slot and refused. */
#define STEER_SHIFT_SLOT 16
#define STEER_SHIFT_REFUSED 32
#define STEER_HELD (1ULL << 40)
#define STEER_CONNECTION (1ULL << 41)
#define STEER_UNCOUNTED (1ULL << 42)

/*
 * The arguments are numbers, and the function is global: the verifier checks it
 * once, with unknown arguments, instead of once for each path that leads to the
 * call (Linux 5.6; before 5.12 the arguments may not be pointers to memory).
 */
__noinline int steer_account(__u64 high, __u64 low, __u64 outcome)
{
	struct steer s = {
		.address = steer_address_of(high, low),
		.home = outcome & 0xffff,
		.slot = outcome >> STEER_SHIFT_SLOT & 0xffff,
		.refused = outcome >> STEER_SHIFT_REFUSED & 0xff,
		.held = outcome & STEER_HELD,
		.connection = outcome & STEER_CONNECTION,
		.uncounted = outcome & STEER_UNCOUNTED,
	};

	steer_count(&s);
	return 0;
}

/* Counts the outcome of a decision. STEER_NO_SLOT stands for a refusal. */
static __always_inline void steer_conclude(const struct steer *s)
{
	if (steer_served_again(s))
		return;
	steer_account(steer_half(&s->address, 0), steer_half(&s->address, 1),
		      (s->home & 0xffff) | (__u64)s->slot << STEER_SHIFT_SLOT |
			      (__u64)s->refused << STEER_SHIFT_REFUSED |
			      (s->held ? STEER_HELD : 0) |
			      (s->connection ? STEER_CONNECTION : 0) |
			      (s->uncounted ? STEER_UNCOUNTED : 0));
}

#endif
