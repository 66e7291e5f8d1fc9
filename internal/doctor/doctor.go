// SPDX-License-Identifier: Apache-2.0

// Package doctor checks whether a host can run Sockeye.
package doctor

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/rlimit"
	"golang.org/x/sys/unix"

	"sockeye/internal/bpf"
	"sockeye/internal/bpf/load"
	"sockeye/internal/bpf/probe"
	"sockeye/internal/cgroup"
	"sockeye/internal/fault"
	"sockeye/internal/rights"
	"sockeye/internal/sockdiag"
	"sockeye/internal/sysctl"
)

// NewReport returns an empty report. known is nil if no agent runs.
func NewReport(known *Known) *Report { return &Report{Known: known} }

// Kernel checks the capabilities of the caller and the features of the kernel.
func (d *Report) Kernel() {
	// Probes load programs, which kernels before 5.11 charge to RLIMIT_MEMLOCK. If the limit cannot be raised, the
	// probes fail with an error that says so.
	_ = rlimit.RemoveMemlock()
	d.capabilities()
	d.pidNamespace()
	d.kernel()
	d.destroy()
}

// Host checks the mounts, the device of isolated programs and the sysctls.
func (d *Report) Host(pins string) {
	d.mounts(pins)
	d.tun()
	d.sysctls()
}

func (d *Report) capabilities() {
	missing, err := rights.Missing()
	switch {
	case err != nil:
		d.Fail("rights", "capabilities", fault.CodeFailed, err.Error(), "")
	case len(missing) > 0 && d.Known != nil: // the agent has its own, and what they lack is in the findings about it
		d.Add("rights", "capabilities", Note, "doctor lacks "+strings.Join(missing, ", ")+"; the running agent has its own", "run doctor as root for all checks")
	case len(missing) > 0:
		d.Fail("rights", "capabilities", fault.CodeNotPermitted, "missing "+strings.Join(missing, ", "),
			"run as root, or give these capabilities to the agent's service")
	default:
		d.Add("rights", "capabilities", OK, "all that the agent needs", "")
	}
}

// OwnPIDs describes an agent in a PID namespace of its own, and the consequences.
const OwnPIDs = "a PID namespace of its own: new members are found when the agent starts, when a policy is applied, and when a process that waits is looked at by sockeye status"

func (d *Report) pidNamespace() {
	if InOwnPIDs() {
		d.Add("host", "PID namespace", Warning, OwnPIDs, "run the agent in the host's PID namespace")
	}
}

// InOwnPIDs reports whether this process is in another PID namespace than the initial one (PROC_PID_INIT_INO of
// include/linux/proc_ns.h). BPF programs report process ids of the initial namespace.
func InOwnPIDs() bool {
	link, err := os.Readlink("/proc/self/ns/pid")
	return err == nil && link != "pid:[4026531836]"
}

// probeNeeds are the capabilities with which the kernel loads the programs and maps of the probes.
var probeNeeds = []string{"CAP_BPF", "CAP_NET_ADMIN", "CAP_PERFMON"}

func (d *Report) kernel() {
	// Without the capabilities, the probes say less about the kernel than about the caller.
	if err := load.Available(); err != nil && rights.Has(unix.CAP_BPF) {
		d.Fail("kernel", "bpf(2)", fault.Code(err), err.Error(), fault.Hint(err))
		return
	}
	// The errors of a caller without these capabilities say nothing about the kernel. The check of the capabilities has
	// the hint.
	missing, _ := rights.Missing()
	missing = slices.DeleteFunc(missing, func(name string) bool { return !slices.Contains(probeNeeds, name) })
	for _, f := range probe.Features(bpf.HaveSend) {
		switch err := f.Probe(); {
		case err == nil:
			d.Add("kernel", f.Name, OK, "", "")
		case errors.Is(err, unix.EPERM) && len(missing) > 0:
			d.Add("kernel", f.Name, Warning, "not known: the check needs "+strings.Join(missing, ", "), "")
		case !errors.Is(err, ebpf.ErrNotSupported):
			d.Add("kernel", f.Name, Warning, "not known: "+err.Error(), fault.Hint(err))
		case f.Optional:
			d.Add("kernel", f.Name, Note, f.Needed, f.Hint(err))
		default:
			d.Fail("kernel", f.Name, fault.CodeUnsupported, "needed for "+f.Needed, f.Hint(err))
		}
	}
}

// destroy checks whether the kernel can close connections of other processes.
func (d *Report) destroy() {
	const check, needed = "SOCK_DESTROY", "without it on_move: reset and on_start: reset close no connections, so that devices are split after a change"
	conn, err := sockdiag.Open()
	if err == nil {
		err = conn.CanDestroy()
		conn.Close()
	}
	switch {
	case err == nil:
		d.Add("kernel", check, OK, "", "")
	case errors.Is(err, sockdiag.ErrCannotDestroy), errors.Is(err, sockdiag.ErrUnsupported):
		d.Add("kernel", check, Note, needed, "needs Linux 4.9, needs CONFIG_INET_DIAG_DESTROY")
	default:
		d.Add("kernel", check, Warning, "not known: "+err.Error(), fault.Hint(err))
	}
}

// HiddenCgroups describes an agent that does not see the cgroups of the host, and the consequences, and HiddenHint what
// to do.
const (
	HiddenCgroups = "a cgroup namespace whose mount shows only its own cgroup: no rule by cgroup or systemd_unit finds members, and tune and trace reach no cgroup of the host"
	HiddenHint    = "mount the host's /sys/fs/cgroup in the container of the agent"
)

func (d *Report) mounts(pins string) {
	if mount, err := cgroup.Mount(); err != nil {
		d.Fail("mounts", "cgroup v2", fault.Code(err), err.Error(), fault.Hint(err))
	} else if HostCgroupsHidden() {
		d.Add("mounts", "cgroup v2", Warning, HiddenCgroups, HiddenHint)
	} else {
		d.Add("mounts", "cgroup v2", OK, mount, "")
	}
	if dir := filepath.Dir(pins); bpf.IsBPFFS(dir) {
		d.Add("mounts", "bpffs", OK, dir, "")
	} else {
		d.Add("mounts", "bpffs", Note, dir+" is not a bpffs, the agent mounts one", "")
	}
	info, err := os.Stat(pins)
	switch {
	case err == nil && !bpf.IsBPFFS(pins):
		d.Fail("mounts", "pin directory", fault.CodeUsage, pins+" is not in a bpffs", "give --pins a directory in a bpffs, as in /sys/fs/bpf/sockeye")
	case err == nil && info.Mode().Perm() != 0o700:
		d.Add("mounts", "pin directory", Warning, fmt.Sprintf("%s has mode %#o", pins, info.Mode().Perm()), "chmod 700 "+pins)
	case err == nil:
		d.Add("mounts", "pin directory", OK, pins, "")
	}
}

// HostCgroupsHidden reports whether the cgroups of the host are not below the cgroup v2 mount of this process, as in a
// container that shows only its own cgroup: process 1 is then in a cgroup outside of the mount.
func HostCgroupsHidden() bool {
	path, err := cgroup.Of(1)
	return err == nil && cgroup.Outside(path)
}

// openTUN is the hint for a TUN device that only some users may open.
const openTUN = "chmod 0666 /dev/net/tun, as udev does"

func (d *Report) tun() {
	const check = "/dev/net/tun"
	info, err := os.Stat(check)
	switch {
	case err == nil && info.Mode()&os.ModeCharDevice != 0:
		device, err := os.OpenFile(check, os.O_RDWR, 0) // makes no interface
		switch mode := info.Mode().Perm(); {
		case errors.Is(err, fs.ErrPermission):
			d.Add("host", check, Warning, "sockeye isolate cannot open this device: "+err.Error(), openTUN)
		case err != nil:
			d.Add("host", check, Warning, "sockeye isolate cannot open this device: "+err.Error(), "modprobe tun")
		case mode&0o006 != 0o006:
			d.Add("host", check, Note, fmt.Sprintf("mode %04o: sockeye isolate works only for root, and for the owner and the group of the device", mode), openTUN)
		default:
			d.Add("host", check, OK, "", "")
		}
		if err == nil {
			device.Close()
		}
	case err == nil || errors.Is(err, fs.ErrNotExist):
		d.Add("host", check, Note, "sockeye isolate needs this device", "modprobe tun; in a container, add the device to the container")
	default:
		d.Add("host", check, Warning, "not known: "+err.Error(), "")
	}
}

func (d *Report) sysctls() {
	if n, ok := sysctl.Number("net.core.somaxconn"); ok && n < 1024 {
		d.Add("sysctl", "net.core.somaxconn", Warning, fmt.Sprintf("%d; it bounds the members' backlogs", n),
			"sysctl -w net.core.somaxconn=4096, or more than devices that may connect at once")
	} else if ok {
		d.Add("sysctl", "net.core.somaxconn", OK, strconv.FormatInt(n, 10), "")
	}
	migrate := errors.Is(probe.HaveMigration(), ebpf.ErrNotSupported)
	if n, ok := sysctl.Number("net.ipv4.tcp_migrate_req"); ok && n == 1 && migrate {
		d.Add("sysctl", "net.ipv4.tcp_migrate_req", Warning, "1: the kernel's hash moves connections of a closing listener to other members",
			"sysctl -w net.ipv4.tcp_migrate_req=0")
	} else if ok {
		d.Add("sysctl", "net.ipv4.tcp_migrate_req", OK, fmt.Sprintf("%d; the program decides about migration", n), "")
	}
}

// Rights checks whether the agent with a process id has the capabilities that a policy needs beyond those of the
// systemd unit. A pid of 0 means that no agent runs.
func (d *Report) Rights(needs []rights.Need, pid int) {
	permitted, bounding, err := rights.Of(pid)
	for _, n := range needs {
		detail := "needed for " + n.For
		switch {
		case pid == 0:
			d.Add("rights", n.Name, Note, detail+"; the drop-in "+n.DropIn+" gives it to the unit", n.DropInHint())
		case err != nil:
			d.Add("rights", n.Name, Warning, detail+"; whether the agent has it is not known: "+err.Error(), fault.Hint(err))
		case permitted&(1<<n.Capability) != 0:
			d.Add("rights", n.Name, OK, detail, "")
		case bounding&(1<<n.Capability) != 0:
			d.Add("rights", n.Name, Warning, detail+"; the agent gave it up, as its policy did not need it when it started",
				"restart the agent")
		default:
			d.Add("rights", n.Name, Warning, detail+"; the agent lacks it", n.DropInHint())
		}
	}
}

// ForeignPrograms reports the programs that others have attached to a network namespace, and that decide about sockets.
func (d *Report) ForeignPrograms(area string, netns int) {
	programs, err := probe.ForeignPrograms(netns)
	if err != nil && !rights.Has(unix.CAP_SYS_ADMIN) {
		d.Add(area, "foreign programs", Warning, "not known: the check needs CAP_SYS_ADMIN", "run sockeye doctor as root")
		return
	}
	if err != nil {
		d.Add(area, "foreign programs", Warning, "not known: "+err.Error(), fault.Hint(err))
		return
	}
	for _, p := range programs {
		level, where := Warning, ""
		if !p.Here {
			level, where = Note, ", attached to sockets somewhere on this host"
		}
		d.Add(area, "foreign programs", level, fmt.Sprintf("%s program %d (%s) of another owner%s", p.Kind, p.ID, p.Name, where),
			"if it decides about the same ports, the last one attached wins")
	}
	if len(programs) == 0 {
		d.Add(area, "foreign programs", OK, "none", "")
	}
}
