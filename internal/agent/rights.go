// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"bufio"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"sockeye/internal/config"
	"sockeye/internal/fault"
)

// right is a capability that only some policies need. The agent's unit has it in
// a drop-in alone.
type right struct {
	capability uintptr
	name       string
	dropIn     string // file name
	// needed says what of a policy needs it, "" if nothing does.
	needed func(*config.Policy) string
}

var rights = []right{
	{unix.CAP_SYS_ADMIN, "CAP_SYS_ADMIN", "netns.conf", func(policy *config.Policy) string {
		for _, s := range policy.Services {
			if s.Netns != "" {
				return "netns of service " + s.Name
			}
		}
		for _, r := range policy.BigTCP {
			if r.Netns != "" {
				return "netns " + r.Netns + " of a bigtcp rule"
			}
		}
		return ""
	}},
	{unix.CAP_DAC_OVERRIDE, "CAP_DAC_OVERRIDE", "cgroups.conf", func(policy *config.Policy) string {
		mount, err := CgroupMount()
		if err != nil {
			return ""
		}
		// What is at the root may be the agent's own, which a reboot removes.
		made := func(name string) bool {
			_, err := os.Stat(filepath.Join(mount, name))
			return !isUnit(name) && (err != nil || isTop(name))
		}
		for _, r := range policy.Tune {
			if made(r.Cgroup) {
				return "cgroup " + r.Cgroup + " of tune rule " + r.Name + ", which the agent creates where there is none"
			}
		}
		for _, r := range policy.Trace {
			if made(r.Cgroup) {
				return "cgroup " + r.Cgroup + " of trace rule " + r.Name + ", which the agent creates where there is none"
			}
		}
		return ""
	}},
	{unix.CAP_NET_BIND_SERVICE, "CAP_NET_BIND_SERVICE", "ports.conf", func(policy *config.Policy) string {
		first := unprivilegedPorts()
		for _, s := range policy.Services {
			if s.Steering == config.Lookup {
				continue // no socket of the agent's is bound
			}
			for _, l := range s.Listeners {
				if l.Address.Port() < first {
					return fmt.Sprintf("listener %s of service %s, which the agent holds", l, s.Name)
				}
			}
		}
		if at, err := netip.ParseAddrPort(policy.Metrics.Listen); err == nil && at.Port() < first {
			return "metrics on " + policy.Metrics.Listen
		}
		return ""
	}},
}

// unprivilegedPorts is the first port that everybody may bind in this network
// namespace; in others of the host it may differ.
func unprivilegedPorts() uint16 {
	text, err := os.ReadFile("/proc/sys/net/ipv4/ip_unprivileged_port_start")
	if err == nil {
		if n, err := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 16); err == nil {
			return uint16(n)
		}
	}
	return 1024
}

// dropInHint says how the unit is given a right.
func dropInHint(file string) string {
	from := file
	if exe, err := os.Executable(); err == nil {
		from = filepath.Join(filepath.Dir(filepath.Dir(exe)), "share/sockeye/sockeye.service.d", file)
	}
	return fmt.Sprintf("install -D -m 644 %s /etc/systemd/system/sockeye.service.d/%s; systemctl daemon-reload; systemctl restart sockeye", from, file)
}

// missingHint says how a running agent is given a right that it has not: one that
// it gave up comes back with a restart.
func missingHint(capability uintptr, restart string) string {
	if _, bounding, err := capabilitiesOf(os.Getpid()); err != nil || bounding&(1<<capability) != 0 {
		return restart
	}
	for _, r := range rights {
		if r.capability == capability {
			return dropInHint(r.dropIn)
		}
	}
	return restart
}

// warnOfRights logs what the policy needs and this process has not.
func (a *Agent) warnOfRights(policy *config.Policy) {
	for _, r := range rights {
		if why := r.needed(policy); why != "" && !hasCapability(r.capability) {
			a.log.Warn("right missing", "capability", r.name, "needed_for", why, "hint", dropInHint(r.dropIn))
		}
	}
}

// ExamineRights tells which rights beyond those of the unit a policy needs, and
// whether the agent, by its process id, has them; 0: no agent runs.
func ExamineRights(policy *config.Policy, pid int) []Finding {
	d := &doctor{}
	permitted, bounding, err := capabilitiesOf(pid)
	for _, r := range rights {
		why := r.needed(policy)
		if why == "" {
			continue
		}
		detail := "needed for " + why
		switch {
		case pid == 0:
			d.add("rights", r.name, ResultNote, detail+"; the drop-in "+r.dropIn+" gives it to the unit", dropInHint(r.dropIn))
		case err != nil:
			d.add("rights", r.name, ResultWarning, detail+"; whether the agent has it is not known: "+err.Error(), fault.Hint(err))
		case permitted&(1<<r.capability) != 0:
			d.add("rights", r.name, ResultOK, detail, "")
		case bounding&(1<<r.capability) != 0:
			d.add("rights", r.name, ResultWarning, detail+"; the agent gave it up, as its policy did not need it when it started",
				"restart the agent")
		default:
			d.add("rights", r.name, ResultWarning, detail+"; the agent lacks it", dropInHint(r.dropIn))
		}
	}
	return d.findings
}

// capabilitiesOf reads the permitted and the bounding set of a process.
func capabilitiesOf(pid int) (permitted, bounding uint64, err error) {
	f, err := os.Open(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, 0, fmt.Errorf("read capabilities of process: %w", err)
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		key, value, _ := strings.Cut(lines.Text(), ":")
		to := map[string]*uint64{"CapPrm": &permitted, "CapBnd": &bounding}[key]
		if to == nil {
			continue
		}
		if *to, err = strconv.ParseUint(strings.TrimSpace(value), 16, 64); err != nil {
			return 0, 0, fmt.Errorf("read capabilities of process %d: %w", pid, err)
		}
	}
	return permitted, bounding, lines.Err()
}
