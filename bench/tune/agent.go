// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"sockeye/internal/api"
)

// tuneRules is the policy for the cgroups of the tuned arms. The cgroups of the baseline have no program.
const tuneRules = `tune:
  - name: incast
    cgroup: %[1]s/incast-tuned
    match: {remote: 10.79.0.0/16}
    set: {syn_rto: 10ms, synack_rto: 10ms, sndbuf: %[2]d, rcvbuf: %[2]d, cwnd_clamp: %[3]d}
  - name: far-receive
    cgroup: %[1]s/window-tuned
    match: {role: connect}
    set: {initial_rwnd: 40}
  - name: far-send
    cgroup: %[1]s/window-tuned
    match: {role: accept}
    set: {initial_cwnd: 40}
  - name: near-connect
    cgroup: %[1]s/handshake-tuned
    match: {role: connect}
    set: {syn_rto: 10ms}
  - name: near-accept
    cgroup: %[1]s/handshake-tuned
    match: {role: accept}
    set: {synack_rto: 10ms}
  - name: learning
    cgroup: %[1]s/learning
    match: {role: accept}
    set: {initial_cwnd: {explore: [10, 16, 24, 40, 64], by: remote/24, share: 100%%, bytes: 64KB}}
  - name: elsewhere
    cgroup: %[1]s/cost-unmatched
    match: {remote: 192.0.2.0/24}
    set: {initial_cwnd: 40}
  - name: other-ports
    cgroup: %[1]s/cost-unmatched
    match: {port: 1790, role: accept}
    set: {sndbuf: 150KB}
  - name: many
    cgroup: %[1]s/cost-unmatched_10000_prefixes
    match: {remote_file: prefixes.txt}
    set: {initial_cwnd: 40}
  - name: here
    cgroup: %[1]s/cost-matched
    match: {remote: 127.0.0.0/8}
    set: {syn_rto: 10ms, synack_rto: 10ms, sndbuf: 150KB, rcvbuf: 150KB, cwnd_clamp: 100}
`

// startAgent starts an agent with the policy, and returns when its programs are attached.
func (t *bench) startAgent(ctx context.Context) error {
	dir := t.Lab.Dir()
	for _, group := range []string{"incast-" + tuned, iwGroup + "-" + tuned, handshakeGroup + "-" + tuned, learningGroup,
		"cost-" + costUnmatched, "cost-" + costMany, "cost-" + costMatched} {
		if _, err := t.Group(group); err != nil {
			return err
		}
	}
	var prefixes strings.Builder
	for i := range 10_000 {
		fmt.Fprintln(&prefixes, netip.PrefixFrom(netip.AddrFrom4([4]byte{172, 16 + byte(i>>12), byte(i >> 4), byte(i << 4)}), 28))
	}
	policy := fmt.Sprintf(tuneRules, "/"+t.Lab.CgroupPath(), t.Buffers, t.Clamp)
	for name, text := range map[string]string{"prefixes.txt": prefixes.String(), "policy.yaml": policy} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			return fmt.Errorf("write policy: %w", err)
		}
	}
	n, err := t.Lab.Namespace("agent")
	if err != nil {
		return err
	}
	// The agent mounts the bpffs in the mount namespace of this process.
	bpffs := filepath.Join(dir, "bpf")
	t.Lab.AtClose(func() error {
		if err := unix.Unmount(bpffs, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("unmount %s: %w", bpffs, err)
		}
		return nil
	})
	p := n.Command(ctx, t.Binary, "agent", "--policy", filepath.Join(dir, "policy.yaml"), "--run-dir", t.RunDir(),
		"--state-dir", filepath.Join(dir, "state"), "--pins", filepath.Join(bpffs, "sockeye"))
	p.Name = "agent"
	if err := p.Start(); err != nil {
		return err
	}
	return t.Lab.WaitFor(ctx, "the agent's rules", func() (bool, error) {
		var groups []api.TuneStatus
		err := t.Ask(ctx, "/v1/tune", &groups)
		if errors.Is(err, api.ErrNoAgent) {
			return false, p.Err()
		}
		if err != nil {
			return false, fmt.Errorf("%w; last lines of the agent's log:\n%s", err, p.LogTail(15))
		}
		for _, g := range groups {
			if !g.Attached {
				return false, nil
			}
		}
		return len(groups) > 0, nil
	})
}

// rules returns the counters of the rules.
func (t *bench) rules(ctx context.Context) (rules []api.TuneRuleStatus, err error) {
	var groups []api.TuneStatus
	if err := t.Ask(ctx, "/v1/tune", &groups); err != nil {
		return nil, err
	}
	for _, g := range groups {
		rules = append(rules, g.Rules...)
	}
	return rules, nil
}
