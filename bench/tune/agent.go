// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"sockeye/internal/api"
)

var ruleGroup = regexp.MustCompile(`cgroup: \S+/([^/,]+),`)

// startAgent starts an agent with the policy, and returns when its programs are attached.
func (t *bench) startAgent(ctx context.Context) error {
	dir := t.Lab.Dir()
	rules := t.rulesOf("/" + t.Lab.CgroupPath())
	for _, m := range ruleGroup.FindAllStringSubmatch(rules, -1) {
		if _, err := t.Group(m[1]); err != nil {
			return err
		}
	}
	var prefixes strings.Builder
	for i := range 10_000 {
		fmt.Fprintln(&prefixes, netip.PrefixFrom(netip.AddrFrom4([4]byte{172, 16 + byte(i>>12), byte(i >> 4), byte(i << 4)}), 28))
	}
	for name, text := range map[string]string{"prefixes.txt": prefixes.String(), "policy.yaml": rules} {
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

// rulesOf returns the rules of the parts for the cgroups of the arms, which are below a cgroup. The cgroups of the baseline
// have no program. The rules of the incast are those of the TCP-BPF paper, with another clamp.
func (t *bench) rulesOf(cgroup string) string {
	var b strings.Builder
	b.WriteString("tune:\n")
	rule := func(part, name, group, match, set string) {
		if t.wants(part) {
			fmt.Fprintf(&b, "  - {name: %s, cgroup: %s/%s, match: {%s}, set: {%s}}\n", name, cgroup, group, match, set)
		}
	}
	rule(incastPart, "incast", "incast-"+tuned, "same_prefix: {ipv6: 44}", fmt.Sprintf("syn_rto: 10ms, synack_rto: 10ms, sndbuf: %[1]d, rcvbuf: %[1]d, cwnd_clamp: %[2]d", t.Buffers, t.Clamp))
	if slices.Contains(t.Arms, byDCTCP) {
		rule(incastPart, "incast-dctcp", "incast-"+byDCTCP, "same_prefix: {ipv6: 44}", "syn_rto: 10ms, synack_rto: 10ms, ecn: true, congestion: dctcp")
	}
	for _, window := range []struct{ arm, receive, send string }{
		{fixed40, "40", "40"},
		{explored, "64", "{explore: [10, 16, 24, 40, 64], by: remote/24, share: 100%, bytes: 64KB}"},
	} {
		rule(iwPart, window.arm+"-receive", iwGroup+"-"+window.arm, "role: connect", "initial_rwnd: "+window.receive)
		rule(iwPart, window.arm+"-send", iwGroup+"-"+window.arm, "role: accept", "initial_cwnd: "+window.send)
	}
	rule(synPart, "near-connect", handshakeGroup+"-"+tuned, "role: connect", "syn_rto: 10ms")
	rule(synPart, "near-accept", handshakeGroup+"-"+tuned, "role: accept", "synack_rto: 10ms")
	rule(learningPart, "learning", learningGroup, "role: accept", "initial_cwnd: {explore: [10, 16, 24, 40, 64], by: remote/24, share: 100%, bytes: 64KB}")
	rule(costPart, "elsewhere", "cost-"+costUnmatched, "remote: 192.0.2.0/24", "initial_cwnd: 40")
	rule(costPart, "other-ports", "cost-"+costUnmatched, "port: 1790, role: accept", "sndbuf: 150KB")
	rule(costPart, "many", "cost-"+costMany, "remote_file: prefixes.txt", "initial_cwnd: 40")
	rule(costPart, "here", "cost-"+costMatched, "remote: 127.0.0.0/8", "syn_rto: 10ms, synack_rto: 10ms, sndbuf: 150KB, rcvbuf: 150KB, cwnd_clamp: 100")
	return b.String()
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
