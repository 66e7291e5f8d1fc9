// SPDX-License-Identifier: Apache-2.0

// Package rights lists the capabilities that the agent needs, always or for some policies, and drops all others.
package rights

import (
	"bufio"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"sockeye/internal/config"
	"sockeye/internal/sysctl"
)

// Right is a capability that only some policies need. A drop-in adds the capability to the agent's systemd unit.
type Right struct {
	Capability uintptr
	Name       string
	DropIn     string // file name
}

// The capabilities that only some policies need.
var (
	SysAdmin       = Right{unix.CAP_SYS_ADMIN, "CAP_SYS_ADMIN", "netns.conf"}
	DACOverride    = Right{unix.CAP_DAC_OVERRIDE, "CAP_DAC_OVERRIDE", "cgroups.conf"}
	NetBindService = Right{unix.CAP_NET_BIND_SERVICE, "CAP_NET_BIND_SERVICE", "ports.conf"}

	optional = []Right{SysAdmin, DACOverride, NetBindService}
)

// Need is a capability that a policy needs.
type Need struct {
	Right
	For string // the part of the policy that needs the capability
}

// FirstNeeds returns the first need of each capability, in the order of the declaration of the capabilities.
func FirstNeeds(all []Need) []Need {
	var first []Need
	for _, r := range optional {
		if i := slices.IndexFunc(all, func(n Need) bool { return n.Right == r }); i >= 0 {
			first = append(first, all[i])
		}
	}
	return first
}

// MissingHint returns the hint for a capability that the running agent lacks: restart if the agent has dropped the
// capability, or else the commands that add it to the unit.
func MissingHint(capability uintptr, restart string) string {
	if _, bounding, err := Of(os.Getpid()); err != nil || bounding&(1<<capability) != 0 {
		return restart
	}
	for _, r := range optional {
		if r.Capability == capability {
			return r.DropInHint()
		}
	}
	return restart
}

// DropInHint returns the commands that add the capability to the unit. In a pod of Kubernetes, it returns the value of the
// chart that adds the capability.
func (r Right) DropInHint() string {
	if os.Getenv("KUBERNETES_SERVICE_HOST") != "" { // the kubelet sets it in all containers
		if r == SysAdmin {
			return "the chart does not give this capability: run the agent as a service of the node"
		}
		return fmt.Sprintf("add %s to extraCapabilities in the values of the chart", strings.TrimPrefix(r.Name, "CAP_"))
	}
	from := r.DropIn
	if exe, err := os.Executable(); err == nil {
		from = filepath.Join(filepath.Dir(filepath.Dir(exe)), "share/sockeye/sockeye.service.d", r.DropIn)
	}
	return fmt.Sprintf("install -D -m 644 %s /etc/systemd/system/sockeye.service.d/%s; systemctl daemon-reload; systemctl restart sockeye", from, r.DropIn)
}

// Of returns the permitted and the bounding set of a process.
func Of(pid int) (permitted, bounding uint64, err error) {
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

// EndpointNeeds lists the capabilities that the metrics and the web page of a policy need beyond those of the unit.
func EndpointNeeds(policy *config.Policy) []Need {
	var needs []Need
	for _, e := range []struct{ name, listen string }{{"metrics", policy.Metrics.Listen}, {"web page", policy.UI.Listen}} {
		if at, err := netip.ParseAddrPort(e.listen); err == nil && int(at.Port()) < sysctl.FirstUnprivilegedPort() {
			needs = append(needs, Need{NetBindService, e.name + " on " + e.listen})
		}
	}
	return needs
}
