// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/rlimit"

	"sockeye/internal/api"
	"sockeye/internal/bpf"
	"sockeye/internal/cgroup"
	"sockeye/internal/config"
	"sockeye/internal/domain"
	"sockeye/internal/fault"
	"sockeye/internal/rights"
	"sockeye/internal/scope"
	"sockeye/internal/sysctl"
)

// Options lists the options that the running kernel cannot set.
func (d *Domain) Options() ([]api.TuneSkipped, error) { return d.kernel.unsupported() }

// ProbeOptions lists the options that the running kernel cannot set, without an agent. ProbeOptions needs the
// capabilities of an agent and leaves nothing behind.
func ProbeOptions() (_ []api.TuneSkipped, err error) {
	const bpffs = "/sys/fs/bpf"
	if missing, err := rights.Missing(); err != nil {
		return nil, err
	} else if len(missing) > 0 {
		return nil, &fault.Error{Err: fmt.Errorf("try options: missing %s", strings.Join(missing, ", ")), Hint: "run as root", Code: fault.CodeNotPermitted}
	}
	if !bpf.IsBPFFS(bpffs) {
		return nil, &fault.Error{Err: fmt.Errorf("try options: %s is not a bpffs", bpffs), Hint: "mount -t bpf bpf " + bpffs, Code: fault.CodeFailed}
	}
	// Kernels before 5.11 charge maps to RLIMIT_MEMLOCK.
	if err := rlimit.RemoveMemlock(); err != nil {
		return nil, fmt.Errorf("raise RLIMIT_MEMLOCK: %w", err)
	}
	cgroups, err := cgroup.Mount()
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp(bpffs, "sockeye_check_")
	if err != nil {
		return nil, fmt.Errorf("try options: %w", err)
	}
	defer func() { err = fault.Join(err, os.RemoveAll(dir)) }()
	p := &optionProbe{host: &domain.Host{Root: &bpf.Root{Dir: dir}, Cgroups: scope.Tree{Mount: cgroups}}}
	return p.unsupported()
}

// Check compares rules with lacks, the options that the kernel cannot set (from Options or ProbeOptions), and with
// the kernel's congestion controls. Check returns an error for an option that a rule needs, and the options that
// rules with optional skip, by rule.
func Check(rules []config.TuneRule, lacks []api.TuneSkipped) (map[string][]api.TuneSkipped, error) {
	p := &optionProbe{probed: make(map[string]error)}
	for _, l := range lacks {
		p.probed[l.Option] = ebpf.ErrNotSupported
	}
	return p.skippedOptions(rules)
}

// optionProbe caches which options the kernel can set.
type optionProbe struct {
	host *domain.Host

	mu     sync.Mutex
	probed map[string]error // by option; nil before the first probe
}

// skippedOptions returns the options of rules that the kernel cannot set. It returns an error for a rule without
// optional.
func (p *optionProbe) skippedOptions(rules []config.TuneRule) (map[string][]api.TuneSkipped, error) {
	skipped := make(map[string][]api.TuneSkipped)
	for _, rule := range rules {
		settings := rule.Set
		if rule.React != nil {
			settings = slices.Concat(settings, rule.React.Set)
		}
		for _, s := range settings {
			needs, err := p.requirement(s)
			if err != nil {
				return nil, err
			}
			if needs == "" {
				continue
			}
			if !rule.Optional {
				return nil, &fault.Error{Err: fmt.Errorf("rule %s: this kernel cannot set %s: it needs %s", rule.Name, s.Option, needs),
					Hint: "remove it, or set optional: true in the rule to skip it", Code: fault.CodeUnsupported}
			}
			skipped[rule.Name] = append(skipped[rule.Name], api.TuneSkipped{Option: s.Option, Needs: needs})
		}
	}
	return skipped, nil
}

// requirement returns the requirement of a setting that the kernel does not meet, or "".
func (p *optionProbe) requirement(s config.Setting) (string, error) {
	supported, err := p.probe()
	if err != nil {
		return "", err
	}
	o, _ := FindOption(s.Option)
	if err := supported[s.Option]; errors.Is(err, ebpf.ErrNotSupported) {
		return "Linux " + o.Since + " or later", nil
	} else if err != nil {
		return "", fmt.Errorf("probe %s: %w", s.Option, err)
	}
	if s.Option == "congestion" {
		available, err := sysctl.Read("net.ipv4.tcp_available_congestion_control")
		if err != nil {
			return "", err
		}
		if !slices.Contains(strings.Fields(available), s.Text) {
			return fmt.Sprintf("the module tcp_%s, loaded", s.Text), nil
		}
	}
	return "", nil
}

// unsupported lists the options that the running kernel cannot set.
func (p *optionProbe) unsupported() ([]api.TuneSkipped, error) {
	probed, err := p.probe()
	if err != nil {
		return nil, err
	}
	list := []api.TuneSkipped{}
	for _, o := range AllOptions() {
		if err := probed[o.Name]; err != nil {
			list = append(list, api.TuneSkipped{Option: o.Name, Needs: "Linux " + o.Since + " or later"})
		}
	}
	return list, nil
}

// probe probes the options on the first call and returns the cached result afterwards.
func (p *optionProbe) probe() (map[string]error, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.probed == nil {
		probed, err := p.probeOptions()
		if err != nil {
			return nil, fmt.Errorf("probe options: %w", err)
		}
		for _, err := range probed {
			if err != nil && !errors.Is(err, ebpf.ErrNotSupported) {
				return probed, nil // the error may pass, such as a lack of memory
			}
		}
		p.probed = probed
	}
	return p.probed, nil
}

// probeOptions probes in the cgroup of the agent, to which the agent needs no write permission.
func (p *optionProbe) probeOptions() (map[string]error, error) {
	own, err := cgroup.Of(os.Getpid())
	if err != nil {
		return nil, err
	}
	return Probe(filepath.Join(p.host.Cgroups.Mount, own), p.host.Root.Dir)
}
