/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Tags: a TCP option of the experimental kind (RFC 6994) in SYN, SYN-ACK and the
 * first segments, by which the peer finds the rule of a connection.
 */
#ifndef SOCKEYE_TUNE_TAG_BPF_H
#define SOCKEYE_TUNE_TAG_BPF_H

#include "tune_connection.bpf.h"

/* The rules of handshakes that have no full socket yet. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, TUNE_REQUESTS);
	__type(key, struct match_tuple);
	__type(value, struct tune_request);
} requests SEC(".maps");

struct tune_option_header {
	__u8 kind;
	__u8 length;
	__u8 exid[2];
	__u8 byte[MATCH_TAG];
};

/* Reads the peer's tag from its SYN or from the packet of the callback. */
static __always_inline bool tune_read_tag(struct bpf_sock_ops *ctx,
					  struct match_tag *tag, __u64 from)
{
	struct tune_option_header h = {
		.kind = TCPOPT_EXP,
		.length = 4,
		.exid = { TUNE_TAG_EXID >> 8, TUNE_TAG_EXID & 0xff },
	};

	if (bpf_load_hdr_opt(ctx, &h, sizeof(h), from) < 0)
		return false;
	if (h.length <= 4 || h.length > sizeof(h))
		return false;
	tag->length = h.length - 4;
	/* The kernel copies only the bytes of the option: the rest is 0. */
	__builtin_memcpy(tag->byte, h.byte, MATCH_TAG);
	return true;
}

enum tune_tag_from {
	TUNE_NO_TAG,
	TUNE_TAG_HERE, /* in the packet at hand */
	TUNE_TAG_SYN, /* in the SYN that was kept */
};

/* Finds the rule of a connection or a handshake; see match_find. */
__noinline __u32 tune_lookup(struct bpf_sock_ops *ctx, __u32 role, __u32 from)
{
	struct match_question q = { .role = role };
	struct tune_stats *s;
	__u32 found, read = 0;

	if (from != TUNE_NO_TAG) {
		if (!tune_read_tag(ctx, &q.tag, from == TUNE_TAG_SYN ?
				   BPF_LOAD_HDR_OPT_TCP_SYN : 0))
			return 0;
		read = MATCH_TAG_READ;
	}
	if (!match_sock_ops_tuple(ctx, &q.tuple))
		return read;
	found = match_find(&q);
	s = (found & MATCH_BY_TAG) && ctx->is_fullsock ?
		    tune_counts(MATCH_RULE(found), TUNE_ARM_TREATED) : NULL;
	if (s)
		__sync_fetch_and_add(&s->tags, 1);
	return found | read;
}

/* Stops writing tags: the peer has the tag, or the path drops it. */
static __always_inline void tune_end_tag(struct bpf_sock_ops *ctx,
				       struct tune_connection *c,
				       const struct tune_rule *rule)
{
	c->flags &= ~TUNE_CONNECTION_TAGGING;
	tune_set_callbacks(ctx, 0, (BPF_SOCK_OPS_WRITE_HDR_OPT_CB_FLAG |
			    BPF_SOCK_OPS_RTO_CB_FLAG) & ~tune_callbacks_of(rule, c));
}

/*
 * Returns the tag for the SYN-ACK of a handshake, or NULL. Only the first SYN-ACK
 * gets a tag, as a middlebox may have dropped the first because of the tag. The
 * kernel has the SYN for the first SYN-ACK only: syn_skb shows that. Before Linux
 * 6.2 TCP_BPF_SYN_MAC fails with another errno than ENOENT while there is a SYN,
 * because TCP_SAVE_SYN of 1 does not keep the MAC header.
 */
static __always_inline const struct match_tag *
tune_synack_tag(struct bpf_sock_ops *ctx)
{
	const struct match_active *state = match_state();
	struct match_tuple t = {};
	struct tune_request *known;
	struct tune_rule *rule;
	__u32 found = 0;

	if (bpf_cast_to_kern_ctx) {
		struct bpf_sock_ops_kern *kern = bpf_cast_to_kern_ctx(ctx);

		if (!kern->syn_skb)
			return NULL;
	} else {
		__u32 start;

		if (bpf_getsockopt(ctx, SOL_TCP, TCP_BPF_SYN_MAC, &start,
				   sizeof(start)) == -ENOENT)
			return NULL;
	}
	if (!state || !match_sock_ops_tuple(ctx, &t))
		return NULL;
	if (state->used & MATCH_USE_TAG)
		found = tune_lookup(ctx, MATCH_ACCEPT, TUNE_TAG_SYN);
	if (!(found & MATCH_BY_TAG)) {
		known = bpf_map_lookup_elem(&requests, &t);
		found = known ? known->rule :
				tune_lookup(ctx, MATCH_ACCEPT, TUNE_NO_TAG);
	}
	rule = MATCH_RULE(found) ? tune_rule(MATCH_RULE(found)) : NULL;
	if (!rule || tune_is_control(rule, &t))
		return NULL;
	return rule->tag.length ? &rule->tag : NULL;
}

/*
 * Returns the tag for a segment, or NULL. After the handshake, segments with data
 * carry the tag until data is acknowledged. Of segments without data, only the
 * first acknowledgement of the connecting side does: if the path drops it, the
 * next one passes.
 */
static __always_inline const struct match_tag *
tune_packet_tag(struct bpf_sock_ops *ctx)
{
	__u32 flags = ctx->skb_tcp_flags;
	struct tune_connection *c;
	struct tune_rule *rule;

	if (!ctx->is_fullsock)
		return tune_synack_tag(ctx);
	c = tune_connection(ctx);
	if (!c || !(c->flags & TUNE_CONNECTION_TAGGING))
		return NULL;
	rule = tune_rule(c->rule);
	if (!rule)
		return NULL;
	if (flags & TCPHDR_SYN)
		return &rule->tag;
	/* bytes_acked includes the SYN of the connecting side. */
	if (ctx->bytes_acked > (c->role == MATCH_CONNECT)) {
		tune_end_tag(ctx, c, rule);
		return NULL;
	}
	/* The flags are 0 while space is reserved: there is no header yet. */
	if (flags && !ctx->skb_len) {
		if (c->role != MATCH_CONNECT ||
		    (c->flags & TUNE_CONNECTION_CONFIRMED))
			return NULL;
		c->flags |= TUNE_CONNECTION_CONFIRMED;
	}
	return &rule->tag;
}

static __always_inline void tune_reserve(struct bpf_sock_ops *ctx)
{
	const struct match_tag *tag = tune_packet_tag(ctx);
	__u32 length;

	if (!tag)
		return;
	length = tag->length;
	if (length <= MATCH_TAG)
		bpf_reserve_hdr_opt(ctx, 4 + length, 0);
}

static __always_inline void tune_write(struct bpf_sock_ops *ctx)
{
	const struct match_tag *tag = tune_packet_tag(ctx);
	struct tune_option_header h = {
		.kind = TCPOPT_EXP,
		.exid = { TUNE_TAG_EXID >> 8, TUNE_TAG_EXID & 0xff },
	};
	__u32 length;

	if (!tag)
		return;
	length = tag->length;
	if (!length || length > MATCH_TAG)
		return;
	h.length = 4 + length;
	__builtin_memcpy(h.byte, tag->byte, MATCH_TAG);
	bpf_store_hdr_opt(ctx, &h, sizeof(h), 0);
}

#endif
