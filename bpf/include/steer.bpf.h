/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * From a source address to a slot: the part that both steering modes share,
 * so that a device has the same slot in either. Cost: one hash of six words,
 * four array lookups (all inlined by the JIT) and, where they are in use, one
 * LPM trie lookup (device map) and one more array lookup (devices seen).
 */
#ifndef SOCKEYE_STEER_BPF_H
#define SOCKEYE_STEER_BPF_H

#include "kernel.h"

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "steer.h"

STEER_EXPORT(struct, steer_table);
STEER_EXPORT(struct, steer_prefix);
STEER_EXPORT(struct, steer_device_id);

/* The size of the devices map is set when it is created; 0 turns it off. */
const volatile bool track_devices = true;

/*
 * Sources may be forged. A new one takes a place in the devices map only within
 * an allowance: one in admit_every nanoseconds, and what has gathered in
 * admit_gather. A source that has completed a handshake needs none.
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

#define STEER_DEVICE_MAP(name)                                        \
	struct {                                                      \
		__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);             \
		__uint(max_entries, 1);                               \
		__type(key, __u32);                                   \
		__array(values, struct {                              \
			__uint(type, BPF_MAP_TYPE_LPM_TRIE);          \
			__uint(max_entries, 1);                       \
			__uint(map_flags, BPF_F_NO_PREALLOC);         \
			__type(key, struct steer_prefix);             \
			__type(value, struct steer_device_id);        \
		});                                                   \
	} name SEC(".maps")

/*
 * A new device map is the next one first: the table that names it puts both in
 * force in one step. Then it moves to device_maps, where all versions have it.
 */
STEER_DEVICE_MAP(device_maps);
STEER_DEVICE_MAP(next_devices);

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

/* Packets from sources that the devices map has no place for. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} unlisted SEC(".maps");

/* A decision on its way: where from, which table, which slot. */
struct steer {
	struct steer_address address;
	__u32 home;  /* the slot that the table names */
	__u32 slot;  /* the slot in use: home, or the standby slot */
	__u32 refused; /* enum steer_reason, if slot is STEER_NO_SLOT */
	bool connection;
	bool uncounted; /* not the first packet of a connection */
};

#define STEER_ROL(x, n) (((x) << (n)) | ((x) >> (32 - (n))))

/*
 * Bob Jenkins' lookup3 over six words, as jhash2() of the kernel
 * (include/linux/jhash.h) computes it with initval 0.
 */
static __always_inline __u32 steer_hash(const struct steer_address *address,
					__u64 nonce)
{
	__u32 a, b, c;

	a = b = c = 0xdeadbeef + (6 << 2);
	a += address->word[0];
	b += address->word[1];
	c += address->word[2];
	a -= c; a ^= STEER_ROL(c, 4); c += b;
	b -= a; b ^= STEER_ROL(a, 6); a += c;
	c -= b; c ^= STEER_ROL(b, 8); b += a;
	a -= c; a ^= STEER_ROL(c, 16); c += b;
	b -= a; b ^= STEER_ROL(a, 19); a += c;
	c -= b; c ^= STEER_ROL(b, 4); b += a;
	a += address->word[3];
	b += (__u32)nonce;
	c += (__u32)(nonce >> 32);
	c ^= b; c -= STEER_ROL(b, 14);
	a ^= c; a -= STEER_ROL(c, 11);
	b ^= a; b -= STEER_ROL(a, 25);
	c ^= b; c -= STEER_ROL(b, 16);
	a ^= c; a -= STEER_ROL(c, 4);
	b ^= a; b -= STEER_ROL(a, 14);
	c ^= b; c -= STEER_ROL(b, 24);
	return c;
}

static __always_inline bool steer_ready(__u32 slot)
{
	struct steer_slot *state = bpf_map_lookup_elem(&slots, &slot);

	return state && state->ready;
}

/* Finds the hash of the device to which the table's device map gives an address. */
static __always_inline bool steer_device_hash(const struct steer_address *address,
					__u32 named, __u32 *hash)
{
	struct steer_prefix prefix = { .prefixlen = 128, .address = *address };
	struct steer_device_id *id;
	__u32 zero = 0;
	void *trie;

	if (named == STEER_NEXT_DEVICES)
		trie = bpf_map_lookup_elem(&next_devices, &zero);
	else
		trie = bpf_map_lookup_elem(&device_maps, &zero);
	if (!trie)
		return false;
	id = bpf_map_lookup_elem(trie, &prefix);
	if (!id || id->device == STEER_NO_DEVICE)
		return false;
	*hash = id->hash;
	return true;
}

/* Finds the slot of s->address, or says in s->refused why there is none. */
static __always_inline void steer_decide(struct steer *s)
{
	struct steer_table *table;
	__u32 zero = 0, hash = 0;
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
	if (!table->named || !steer_device_hash(&s->address, table->named, &hash))
		hash = steer_hash(&s->address, table->nonce);
	s->home = table->bucket[hash & (STEER_BUCKETS - 1)];
	if (steer_ready(s->home)) {
		s->slot = s->home;
		return;
	}
	s->refused = STEER_REASON_EMPTY;
	if (table->standby != STEER_NO_SLOT && steer_ready(table->standby))
		s->slot = table->standby;
}

/* Adds an address to the devices map. */
static __always_inline struct steer_seen *
steer_add_device(const struct steer_address *address)
{
	struct steer_seen fresh = {};

	bpf_map_update_elem(&devices, address, &fresh, BPF_NOEXIST);
	return bpf_map_lookup_elem(&devices, address);
}

/*
 * Uses the allowance. CPUs that do so at the same instant may use it once too
 * often each.
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

static __always_inline void steer_count_connection(const struct steer *s)
{
	struct steer_seen *seen = steer_find_device(&s->address);

	if (!seen)
		return;
	if (s->slot == STEER_NO_SLOT)
		__sync_fetch_and_add(&seen->refused, 1);
	else
		__sync_fetch_and_add(&seen->connections, 1);
	seen->slot = s->slot;
	seen->last_seen = bpf_ktime_get_ns();
}

/*
 * Adds a datagram to its device. The LRU map costs as much as all the rest, so
 * that it is asked once in 64 jiffies (a quarter of a second, where there are
 * 250 in one) for each device and CPU; between, a datagram is counted in the
 * CPU's own table. User space adds both. Of addresses that share an entry, the
 * first in a tick has it; the others go to the LRU map, without evicting it.
 */
static __always_inline void steer_count_datagram(const struct steer *s)
{
	__u32 tick = bpf_jiffies64() >> 6, index, before = 0, zero = 0;
	struct steer_seen *seen, *others;
	struct steer_admission *a;
	struct steer_pending *p;
	bool same;

	a = bpf_map_lookup_elem(&admission, &zero);
	if (!a)
		return;
	/* Multilinear: whatever two addresses are, few keys make them collide. */
	index = (a->key[0] * s->address.word[0] + a->key[1] * s->address.word[1] +
		 a->key[2] * s->address.word[2] + a->key[3] * s->address.word[3]) >> 56;
	index &= STEER_PENDING - 1;
	p = bpf_map_lookup_elem(&pending, &index);
	if (!p)
		return;
	same = p->address.word[3] == s->address.word[3] &&
	       p->address.word[2] == s->address.word[2] &&
	       p->address.word[1] == s->address.word[1] &&
	       p->address.word[0] == s->address.word[0];
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

/* Counts the outcome. A refusal has s->slot == STEER_NO_SLOT. */
static __always_inline void steer_account(const struct steer *s)
{
	bool served = s->slot != STEER_NO_SLOT;
	__u32 index = served ? s->slot : s->home;
	struct steer_counters *count, *home;

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

static __always_inline void steer_refuse(struct steer *s, __u32 reason)
{
	s->slot = STEER_NO_SLOT;
	s->refused = reason;
}

/*
 * A field of a context or a socket. clang would merge the loads of two
 * branches into one at a computed offset, which the verifier refuses.
 */
static __always_inline __u32 steer_load(__u32 value)
{
	barrier_var(value);
	return value;
}

static __always_inline void steer_map_ipv4(struct steer_address *address,
					 __u32 ipv4)
{
	address->word[0] = 0;
	address->word[1] = 0;
	address->word[2] = bpf_htonl(0xffff);
	address->word[3] = steer_load(ipv4);
}

#endif
