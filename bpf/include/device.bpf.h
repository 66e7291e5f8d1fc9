/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Maps a source address to the hash of its device. The programs of services and
 * of fleets include this file, so that a device has the same bucket in both.
 */
#ifndef SOCKEYE_DEVICE_BPF_H
#define SOCKEYE_DEVICE_BPF_H

#include "kernel.h"

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "steer.h"

STEER_EXPORT(struct, steer_prefix);
STEER_EXPORT(struct, steer_device_id);

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
 * A new device map is first stored in next_devices; one write of the table that
 * refers to next_devices puts both in force. Then the map moves to device_maps,
 * where every version of Sockeye expects it.
 */
STEER_DEVICE_MAP(device_maps);
STEER_DEVICE_MAP(next_devices);

/*
 * The prefixes of one address in device_maps and next_devices: most device maps
 * consist of them, and a lookup in a trie of 10,000 prefixes touches up to 14
 * nodes. The maps change together with those of the tries, which have all
 * prefixes.
 */
#define STEER_HOST_MAP(name)                                          \
	struct {                                                      \
		__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);             \
		__uint(max_entries, 1);                               \
		__type(key, __u32);                                   \
		__array(values, struct {                              \
			__uint(type, BPF_MAP_TYPE_HASH);              \
			__uint(max_entries, 1);                       \
			__type(key, struct steer_address);            \
			__type(value, struct steer_device_id);        \
		});                                                   \
	} name SEC(".maps")

STEER_HOST_MAP(host_maps);
STEER_HOST_MAP(next_hosts);

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

/* The two halves of an address, in the order of memory. */
static __always_inline __u64 steer_half(const struct steer_address *address,
					int half)
{
	return address->word[2 * half] |
	       (__u64)address->word[2 * half + 1] << 32;
}

static __always_inline struct steer_address steer_address_of(__u64 high,
							      __u64 low)
{
	return (struct steer_address){ { high, high >> 32, low, low >> 32 } };
}

static __always_inline const struct steer_device_id *
steer_find_in(const struct steer_address *address, void *hosts, void *tries)
{
	struct steer_prefix prefix = { .prefixlen = 128, .address = *address };
	struct steer_device_id *id = NULL;
	__u32 zero = 0;
	void *inner;

	inner = bpf_map_lookup_elem(hosts, &zero);
	if (inner)
		id = bpf_map_lookup_elem(inner, address);
	if (!id) {
		inner = bpf_map_lookup_elem(tries, &zero);
		if (!inner)
			return NULL;
		id = bpf_map_lookup_elem(inner, &prefix);
	}
	return id && id->device != STEER_NO_DEVICE ? id : NULL;
}

/*
 * The kernel inlines a lookup only if one map reaches the call, and clang would
 * merge the calls of two branches.
 */
static __noinline const struct steer_device_id *
steer_find_next(const struct steer_address *address)
{
	return steer_find_in(address, &next_hosts, &next_devices);
}

/*
 * Finds the device to which an address belongs. map is the field "named" of the
 * bucket table. Returns NULL if there is no such device.
 */
static __always_inline const struct steer_device_id *
steer_find_name(const struct steer_address *address, __u32 map)
{
	if (map == STEER_NEXT_DEVICES)
		return steer_find_next(address);
	return steer_find_in(address, &host_maps, &device_maps);
}

/*
 * Returns a field of a context or a socket. Without the barrier clang merges
 * the loads of two branches into one load at a computed offset, which the
 * verifier rejects.
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
