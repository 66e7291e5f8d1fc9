/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Maps and counters that the tune programs share. The counters of a rule are not
 * per CPU: each addition is atomic.
 */
#ifndef SOCKEYE_TUNE_BPF_H
#define SOCKEYE_TUNE_BPF_H

#include "match.bpf.h"
#include "tune.h"

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, struct tune_rule);
} rules SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 8192);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct tune_stats_key);
	__type(value, struct tune_stats);
} stats SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, TUNE_FAILURES);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct tune_failure);
	__type(value, __u64);
} failures SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct tune_connection);
} connections SEC(".maps");

static __always_inline struct tune_stats *tune_counts(__u32 rule, __u32 arm)
{
	struct tune_stats_key key = { .rule = rule, .arm = arm };

	return bpf_map_lookup_elem(&stats, &key);
}

static __always_inline void tune_count_failure(__u32 rule, __u16 option, long error)
{
	struct tune_failure key = { .rule = rule, .option = option,
				    .error = (__u16)-error };
	__u64 one = 1, *count = bpf_map_lookup_elem(&failures, &key);

	if (count)
		__sync_fetch_and_add(count, 1);
	else
		bpf_map_update_elem(&failures, &key, &one, BPF_NOEXIST);
}

/* Adds a value to a histogram with 4 buckets for each power of two. */
static __always_inline void tune_histogram(__u64 *buckets, __u64 value)
{
	__u32 v = value > 0xffffffff ? 0xffffffff : (__u32)value;
	__u32 e, i = v;

	if (v >= 4) {
		e = 31 - match_clz(v);
		i = (e - 1) * 4 + ((v >> (e - 2)) & 3);
	}
	if (i < TUNE_BUCKETS)
		__sync_fetch_and_add(&buckets[i], 1);
}

/* Returns the phase bit of options that do not apply to an address family. */
static __always_inline __u16 tune_other_family(__u32 family)
{
	return family == AF_INET ? TUNE_PHASE_IPV6 : TUNE_PHASE_IPV4;
}

#endif
