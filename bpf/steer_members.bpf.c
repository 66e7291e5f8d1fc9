// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Reports to the agent which process binds or listens on a port of the
 * service, and closes a slot when one of the slot's registered sockets is
 * released: at that moment, for all listeners, with or without an agent.
 *
 * Hooks: post_bind, sockops (LISTEN and PASSIVE_ESTABLISHED) and sock_release of the
 * cgroup in which members run.
 * Decision: none, all calls are allowed.
 * Cost: at bind, listen, accept and close one comparison with each of at most
 * STEER_MAX_LISTENERS port ranges, or one lookup; nothing for a packet.
 */
#include "steer.bpf.h"

#include <bpf/bpf_core_read.h>

char _license[] SEC("license") = "Dual BSD/GPL";

STEER_EXPORT(enum, steer_limit);
STEER_EXPORT(enum, steer_reason);
STEER_EXPORT(enum, steer_event_kind);
STEER_EXPORT(struct, steer_event);

const volatile struct steer_ports ports[STEER_MAX_LISTENERS] = {};
const volatile __u32 port_count = 0;

/*
 * SO_NETNS_COOKIE of the service's network namespace, as any user can create a
 * namespace and bind to any port there. 0 before Linux 5.14: sockets of all
 * namespaces are reported then.
 */
const volatile __u64 netns_cookie = 0;
/*
 * Whether sockops programs have bpf_get_netns_cookie (Linux 5.15). If they have
 * not, the verifier removes the call as dead code.
 */
const volatile bool listen_has_netns = false;

/*
 * Whether sock_release programs have bpf_get_current_task and
 * bpf_probe_read_kernel.
 */
const volatile bool release_has_task = false;

/* Ports of the listeners. Members may bind to other ports: see ports. */
const volatile struct steer_ports served[STEER_MAX_LISTENERS] = {};
const volatile __u32 served_count = 0;

/*
 * Cookie of a registered socket -> its slot; + STEER_MAX_SLOTS for a socket in
 * successors.
 */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, STEER_MAX_LISTENERS * STEER_MAX_SLOTS);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u64);
	__type(value, __u32);
} cookies SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 256 * 1024);
} events SEC(".maps");

/* Events lost because the ring was full. The agent rescans when this grows. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} lost_events SEC(".maps");

static __always_inline void emit_event(__u32 kind, __u64 cookie, __u32 pid)
{
	struct steer_event *event;
	__u32 zero = 0;
	__u64 *lost;

	event = bpf_ringbuf_reserve(&events, sizeof(*event), 0);
	if (!event) {
		lost = bpf_map_lookup_elem(&lost_events, &zero);
		if (lost)
			__sync_fetch_and_add(lost, 1);
		return;
	}
	event->cookie = cookie;
	event->kind = kind;
	event->pid = pid;
	bpf_ringbuf_submit(event, 0);
}

static __always_inline bool is_watched(__u32 protocol, __u32 port)
{
	__u32 i;

	for (i = 0; i < STEER_MAX_LISTENERS; i++) {
		if (i >= port_count)
			break;
		if (ports[i].protocol == protocol && port >= ports[i].first &&
		    port <= ports[i].last)
			return true;
	}
	return false;
}

static __always_inline int report_bind(struct bpf_sock *sk)
{
	if (is_watched(sk->protocol, sk->src_port) &&
	    (!netns_cookie || bpf_get_netns_cookie(sk) == netns_cookie))
		emit_event(STEER_EVENT_BIND, bpf_get_socket_cookie(sk),
		     bpf_get_current_pid_tgid() >> 32);
	return 1;
}

SEC("cgroup/post_bind4")
int steer_bind4(struct bpf_sock *sk)
{
	return report_bind(sk);
}

SEC("cgroup/post_bind6")
int steer_bind6(struct bpf_sock *sk)
{
	return report_bind(sk);
}

/*
 * A peer that completes a handshake owns its source address, and gets an entry
 * in the devices map without an allowance. The SYN was counted only if the peer
 * had an entry before.
 */
static __always_inline void add_established(struct bpf_sock_ops *ctx)
{
	struct steer s = {};
	struct steer_seen *seen;
	__u32 i;

	for (i = 0; i < STEER_MAX_LISTENERS; i++) {
		if (i >= served_count)
			return;
		if (served[i].protocol == IPPROTO_TCP &&
		    served[i].first == ctx->local_port)
			break;
	}
	if (i == STEER_MAX_LISTENERS)
		return;
	if (ctx->family == AF_INET) {
		steer_map_ipv4(&s.address, ctx->remote_ip4);
	} else {
		s.address.word[0] = steer_load(ctx->remote_ip6[0]);
		s.address.word[1] = steer_load(ctx->remote_ip6[1]);
		s.address.word[2] = steer_load(ctx->remote_ip6[2]);
		s.address.word[3] = steer_load(ctx->remote_ip6[3]);
	}
	if (bpf_map_lookup_elem(&devices, &s.address))
		return;
	steer_decide(&s);
	seen = steer_add_device(&s.address);
	if (!seen)
		return;
	__sync_fetch_and_add(&seen->connections, 1);
	seen->slot = s.slot;
	seen->last_seen = bpf_ktime_get_ns();
}

SEC("sockops")
int steer_listen(struct bpf_sock_ops *ctx)
{
	bool listens, connected;

	listens = ctx->op == BPF_SOCK_OPS_TCP_LISTEN_CB &&
		  is_watched(IPPROTO_TCP, ctx->local_port);
	connected = ctx->op == BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB &&
		    track_devices;
	if (!listens && !connected)
		return 1;
	if (netns_cookie && listen_has_netns &&
	    bpf_get_netns_cookie(ctx) != netns_cookie)
		return 1;
	if (listens)
		emit_event(STEER_EVENT_LISTEN, bpf_get_socket_cookie(ctx), 0);
	else
		add_established(ctx);
	return 1;
}

/*
 * Returns how the process that closes a socket ends, for steer_event.pid, or 0
 * if it goes on. do_exit() sets exit_code before it closes the files (Linux 5.10
 * to 6.18).
 */
static __always_inline __u32 exit_status(void)
{
	struct task_struct *task;

	if (!release_has_task)
		return 0;
	task = (void *)bpf_get_current_task();
	if (!(BPF_CORE_READ(task, flags) & PF_EXITING))
		return 0;
	return (BPF_CORE_READ(task, exit_code) & 0xffff) | STEER_EXITS;
}

SEC("cgroup/sock_release")
int steer_release(struct bpf_sock *sk)
{
	__u64 cookie = bpf_get_socket_cookie(sk);
	struct steer_slot *state;
	struct steer_wait *wait;
	__u32 *place, slot, bank = 1;

	place = bpf_map_lookup_elem(&cookies, &cookie);
	if (!place)
		return 1;
	slot = *place;
	if (slot >= STEER_MAX_SLOTS) {
		slot -= STEER_MAX_SLOTS;
		bank = 2;
	}
	state = bpf_map_lookup_elem(&slots, &slot);
	wait = bpf_map_lookup_elem(&waits, &slot);
	/* Another member may have taken the slot over. */
	if (state && wait && (state->ready ? state->ready == bank :
			      !wait->filling || (wait->filling & STEER_FILLING_BANK) == bank)) {
		if (wait->length) {
			wait->filling = 0;
			wait->until = bpf_ktime_get_ns() + wait->length;
		}
		state->ready = 0;
	}
	bpf_map_delete_elem(&cookies, &cookie);
	emit_event(STEER_EVENT_RELEASE, cookie, exit_status());
	return 1;
}
