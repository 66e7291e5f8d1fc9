// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/rlimit"

	"sockeye/internal/bpf"
	"sockeye/internal/fault"
	"sockeye/internal/sockdiag"
)

// NewReport returns a report without findings. Known is nil without an agent.
func NewReport(known *Known) *doctor { return &doctor{known: known} }

// Kernel looks at the rights of the caller and at the kernel.
func (d *doctor) Kernel() {
	// Probes load programs, which kernels before 5.11 charge to RLIMIT_MEMLOCK.
	// Where it cannot be raised, they say so.
	_ = rlimit.RemoveMemlock()
	d.capabilities()
	d.pidNamespace()
	d.kernel()
	d.destroy()
}

// Host looks at the mounts and the sysctls.
func (d *doctor) Host(pins string) {
	d.mounts(pins)
	d.sysctls()
}

func (d *doctor) capabilities() {
	missing, err := missingCapabilities()
	switch {
	case err != nil:
		d.fail("rights", "capabilities", fault.CodeFailed, err.Error(), "")
	case len(missing) > 0:
		d.fail("rights", "capabilities", fault.CodeNotPermitted, "missing "+strings.Join(missing, ", "),
			"run as root, or give these capabilities to the agent's service")
	default:
		d.add("rights", "capabilities", ResultOK, "all that the agent needs", "")
	}
}

// inOwnPIDs tells whether this process is in a PID namespace that is not the host's (PROC_PID_INIT_INO of
// include/linux/proc_ns.h). BPF programs report processes by the numbers that the host knows them by.
func inOwnPIDs() bool {
	link, err := os.Readlink("/proc/self/ns/pid")
	return err == nil && link != "pid:[4026531836]"
}

const ownPIDs = "a PID namespace of its own: new members are found when the agent starts, when a policy is applied, and when a process that waits is looked at by sockeye status"

func (d *doctor) pidNamespace() {
	if inOwnPIDs() {
		d.add("host", "PID namespace", ResultWarning, ownPIDs, "run the agent in the host's PID namespace")
	}
}

func (d *doctor) kernel() {
	for _, f := range bpf.Features {
		switch err := f.Probe(); {
		case err == nil:
			d.add("kernel", f.Name, ResultOK, "", "")
		case !errors.Is(err, ebpf.ErrNotSupported):
			d.add("kernel", f.Name, ResultWarning, "not known: "+err.Error(), fault.Hint(err))
		case f.Optional:
			d.add("kernel", f.Name, ResultNote, f.Needed, f.Hint(err))
		default:
			d.fail("kernel", f.Name, fault.CodeUnsupported, "needed for "+f.Needed, f.Hint(err))
		}
	}
}

// destroy tells whether connections of other processes can be closed.
func (d *doctor) destroy() {
	const check, needed = "SOCK_DESTROY", "without it on_start: reset closes no connections"
	conn, err := sockdiag.Open()
	if err == nil {
		err = conn.CanDestroy()
		conn.Close()
	}
	switch {
	case err == nil:
		d.add("kernel", check, ResultOK, "", "")
	case errors.Is(err, sockdiag.ErrCannotDestroy), errors.Is(err, sockdiag.ErrUnsupported):
		d.add("kernel", check, ResultNote, needed, "came with Linux 4.9, needs CONFIG_INET_DIAG_DESTROY")
	default:
		d.add("kernel", check, ResultWarning, "not known: "+err.Error(), fault.Hint(err))
	}
}

func (d *doctor) mounts(pins string) {
	if mount, err := CgroupMount(); err != nil {
		d.fail("mounts", "cgroup v2", fault.Code(err), err.Error(), fault.Hint(err))
	} else {
		d.add("mounts", "cgroup v2", ResultOK, mount, "")
	}
	if dir := filepath.Dir(pins); isBPFFS(dir) {
		d.add("mounts", "bpffs", ResultOK, dir, "")
	} else {
		d.add("mounts", "bpffs", ResultNote, dir+" is no bpffs, the agent mounts one", "")
	}
	info, err := os.Stat(pins)
	switch {
	case err == nil && info.Mode().Perm() != 0o700:
		d.add("mounts", "pin directory", ResultWarning, fmt.Sprintf("%s has mode %#o", pins, info.Mode().Perm()), "chmod 700 "+pins)
	case err == nil:
		d.add("mounts", "pin directory", ResultOK, pins, "")
	}
}

func (d *doctor) sysctls() {
	read := func(name string) (int, bool) {
		text, err := os.ReadFile("/proc/sys/" + name)
		if err != nil {
			return 0, false
		}
		n, err := strconv.Atoi(strings.TrimSpace(string(text)))
		return n, err == nil
	}
	if n, ok := read("net/core/somaxconn"); ok && n < 1024 {
		d.add("sysctl", "net.core.somaxconn", ResultWarning, fmt.Sprintf("%d; it bounds the members' backlogs", n),
			"sysctl -w net.core.somaxconn=4096, or more than devices that may connect at once")
	} else if ok {
		d.add("sysctl", "net.core.somaxconn", ResultOK, strconv.Itoa(n), "")
	}
	migrate := errors.Is(probe("sk_reuseport migration"), ebpf.ErrNotSupported)
	if n, ok := read("net/ipv4/tcp_migrate_req"); ok && n == 1 && migrate {
		d.add("sysctl", "net.ipv4.tcp_migrate_req", ResultWarning, "1: the kernel's hash moves connections of a closing listener to other members",
			"sysctl -w net.ipv4.tcp_migrate_req=0")
	} else if ok {
		d.add("sysctl", "net.ipv4.tcp_migrate_req", ResultOK, fmt.Sprintf("%d; the program decides about migration", n), "")
	}
}

func probe(name string) error {
	i := slices.IndexFunc(bpf.Features, func(f bpf.Feature) bool { return f.Name == name })
	return bpf.Features[i].Probe()
}

// Rights tells whether the agent, by its process id, has the capabilities beyond those of the unit
// that a policy needs; 0: no agent runs.
func (d *doctor) Rights(needs []Need, pid int) {
	permitted, bounding, err := capabilitiesOf(pid)
	for _, n := range needs {
		detail := "needed for " + n.For
		switch {
		case pid == 0:
			d.add("rights", n.Name, ResultNote, detail+"; the drop-in "+n.DropIn+" gives it to the unit", n.DropInHint())
		case err != nil:
			d.add("rights", n.Name, ResultWarning, detail+"; whether the agent has it is not known: "+err.Error(), fault.Hint(err))
		case permitted&(1<<n.Capability) != 0:
			d.add("rights", n.Name, ResultOK, detail, "")
		case bounding&(1<<n.Capability) != 0:
			d.add("rights", n.Name, ResultWarning, detail+"; the agent gave it up, as its policy did not need it when it started",
				"restart the agent")
		default:
			d.add("rights", n.Name, ResultWarning, detail+"; the agent lacks it", n.DropInHint())
		}
	}
}
