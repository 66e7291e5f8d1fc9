// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/rlimit"
	"golang.org/x/sys/unix"

	"sockeye/internal/bigtcp/netif"
	"sockeye/internal/bpf"
	"sockeye/internal/config"
	"sockeye/internal/member"
	"sockeye/internal/sockdiag"
)

// Finding is one thing that the doctor looked at.
type Finding struct {
	Area   string `json:"area"`
	Check  string `json:"check"`
	Result string `json:"result"` // ok, note, warning, failure
	Detail string `json:"detail,omitempty"`
	Hint   string `json:"hint,omitempty"`
	// Code is the exit code that a failure stands for.
	Code int `json:"code,omitempty"`
}

// The results of findings.
const (
	ResultOK      = "ok"
	ResultNote    = "note"
	ResultWarning = "warning"
	ResultFailure = "failure"
)

// doctor collects findings.
type doctor struct {
	findings []Finding
	known    *Known
}

// Known is what an agent knows of processes on its services' ports: sockets of members by cookie, and processes
// that status tells of.
type Known struct {
	Sockets   map[uint64]bool
	Processes map[int]bool
}

func (d *doctor) add(area, check, result, detail, hint string) {
	d.findings = append(d.findings, Finding{Area: area, Check: check, Result: result, Detail: detail, Hint: hint})
}

func (d *doctor) fail(area, check string, code int, detail, hint string) {
	d.findings = append(d.findings, Finding{area, check, ResultFailure, detail, hint, code})
}

// Examine looks at the host and, with a policy, at what it names. Known is nil without an agent. It changes
// nothing.
func Examine(policy *config.Policy, pins string, known *Known) []Finding {
	d := &doctor{known: known}
	// Probes load programs, which kernels before 5.11 charge to RLIMIT_MEMLOCK.
	// Where it cannot be raised, they say so.
	_ = rlimit.RemoveMemlock()
	d.capabilities()
	d.pidNamespace()
	d.kernel()
	d.destroy()
	d.bigTCP()
	d.mounts(pins)
	d.sysctls()
	if policy != nil {
		for _, s := range policy.Services {
			d.service(s)
		}
	}
	return d.findings
}

func (d *doctor) capabilities() {
	missing, err := missingCapabilities()
	switch {
	case err != nil:
		d.fail("rights", "capabilities", CodeFailed, err.Error(), "")
	case len(missing) > 0:
		d.fail("rights", "capabilities", CodeNotPermitted, "missing "+strings.Join(missing, ", "),
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
			d.add("kernel", f.Name, ResultWarning, "not known: "+err.Error(), Hint(err))
		case f.Optional:
			d.add("kernel", f.Name, ResultNote, f.Needed, f.Hint(err))
		default:
			d.fail("kernel", f.Name, CodeUnsupported, "needed for "+f.Needed, f.Hint(err))
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
		d.add("kernel", check, ResultWarning, "not known: "+err.Error(), Hint(err))
	}
}

// bigTCP tells which families may have packets above 64 KiB.
func (d *doctor) bigTCP() {
	const ipv6, ipv4 = "BIG TCP for IPv6", "BIG TCP for IPv4"
	n, err := netif.OpenNamespace("")
	if err != nil {
		d.add("kernel", ipv6, ResultWarning, "not known: "+err.Error(), Hint(err))
		return
	}
	defer n.Close()
	support := n.Support()
	for _, family := range []struct {
		check     string
		supported bool
		since     string
	}{{ipv6, support.IPv6, "5.19"}, {ipv4, support.IPv4, "6.3"}} {
		if family.supported {
			d.add("kernel", family.check, ResultOK, "", "")
		} else {
			d.add("kernel", family.check, ResultNote, "bigtcp, for packets above 64 KiB", "came with Linux "+family.since)
		}
	}
}

func (d *doctor) mounts(pins string) {
	if mount, err := CgroupMount(); err != nil {
		d.fail("mounts", "cgroup v2", Code(err), err.Error(), Hint(err))
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

// holder is a socket on one of a service's ports, and whose it is.
type holder struct {
	process *member.Process
	socket  *member.Socket
	backlog uint32 // of a listening TCP socket
}

func (d *doctor) service(c config.Service) {
	area := "service " + c.Name
	s := &service{config: c}
	s.assignRows([bpf.MaxListeners]bpf.Listener{})
	if err := s.openNetns(); err != nil {
		d.fail(area, "network namespace", Code(err), err.Error(), "create it, or correct netns")
		return
	}
	defer s.netns.Close()
	d.foreign(area, int(s.netns.Fd()))
	holders, err := s.holders()
	if err != nil {
		d.add(area, "sockets", ResultWarning, "not known: "+err.Error(), Hint(err))
		return
	}
	rules, users, err := resolveMembers(c)
	if err != nil {
		d.fail(area, "user", Code(err), err.Error(), Hint(err))
		return
	}
	if c.Steering == config.Lookup {
		for _, rule := range rules {
			for _, uid := range rule.Users(nil) { // those of the service are there already
				if !slices.Contains(users, uid) {
					users = append(users, uid)
				}
			}
		}
	}
	for _, l := range c.Listeners {
		d.listener(area, c, l, users, holders)
	}
}

func (d *doctor) foreign(area string, netns int) {
	programs, err := bpf.ForeignPrograms(netns)
	if err != nil {
		d.add(area, "foreign programs", ResultWarning, "not known: "+err.Error(), Hint(err))
		return
	}
	for _, p := range programs {
		d.add(area, "foreign programs", ResultWarning, fmt.Sprintf("%s program %d (%s) of somebody else", p.Kind, p.ID, p.Name),
			"if it decides about the same ports, the last one attached wins")
	}
	if len(programs) == 0 {
		d.add(area, "foreign programs", ResultOK, "none", "")
	}
}

// holders finds the sockets on the service's ports, keepers' included. The
// copies are closed, only what they tell is returned.
func (s *service) holders() ([]holder, error) {
	processes, err := member.All()
	if err != nil {
		return nil, err
	}
	var holders []holder
	seen := make(map[uint64]bool)
	for _, p := range processes {
		if p.Netns != s.inode {
			continue
		}
		handle, err := member.Open(p.PID)
		if err != nil {
			continue
		}
		sockets, err := handle.Sockets(s.onPort)
		handle.Close()
		if err != nil {
			if errors.Is(err, os.ErrPermission) {
				return nil, err
			}
			continue
		}
		for _, socket := range sockets {
			if !seen[socket.Cookie] {
				seen[socket.Cookie] = true
				h := holder{process: p, socket: socket}
				// Of a listening socket, tcpi_sacked is the backlog (tcp_get_info).
				if info, err := unix.GetsockoptTCPInfo(socket.FD(), unix.IPPROTO_TCP, unix.TCP_INFO); err == nil {
					h.backlog = info.Sacked
				}
				holders = append(holders, h)
			}
		}
		member.CloseAll(sockets)
	}
	return holders, nil
}

// onPort tells whether a socket is on a listener's port or where its members
// should be.
func (s *service) onPort(socket *member.Socket) bool {
	if socket.Connected {
		return false
	}
	if s.wants(socket) {
		return true
	}
	return slices.ContainsFunc(s.config.Listeners, func(l config.Listener) bool {
		return (socket.Protocol == unix.IPPROTO_UDP) == (l.Protocol == config.UDP) &&
			socket.Local.Port() == l.Address.Port()
	})
}

// inNoSlot tells whether a process that could be a member is none, and nobody has told of that.
func (d *doctor) inNoSlot(h holder, users []uint32) bool {
	return d.known != nil && !isKeeper(h.process) && h.socket.Listening && slices.Contains(users, h.socket.UID) &&
		!d.known.Sockets[h.socket.Cookie] && !d.known.Processes[h.process.PID]
}

func (d *doctor) listener(area string, c config.Service, l config.Listener, users []uint32, all []holder) {
	first, last := memberPorts(l)
	var here []holder
	for _, h := range all {
		port := h.socket.Local.Port()
		if (h.socket.Protocol == unix.IPPROTO_UDP) == (l.Protocol == config.UDP) && port >= first && port <= last {
			here = append(here, h)
		}
	}
	check := l.String()
	before := len(d.findings)
	uids := make(map[uint32]bool)
	wildcards := make(map[netip.Addr]bool)
	for _, h := range here {
		who := fmt.Sprintf("%s of process %d (%s)", h.socket, h.process.PID, h.process.Args[0])
		if h.socket.Protocol == unix.IPPROTO_MPTCP {
			d.add(area, check, ResultWarning, who+" is MPTCP, which the kernel does not steer",
				"programs in Go: GODEBUG=multipathtcp=0")
		}
		if len(users) > 0 && !slices.Contains(users, h.socket.UID) {
			d.add(area, check, ResultWarning, fmt.Sprintf("%s belongs to user %s, members to %s", who, member.UserName(h.socket.UID), member.UserNames(users)),
				"start the program as that user, or name the owner in user of the service")
		}
		if d.inNoSlot(h, users) {
			d.add(area, check, ResultWarning, who+" is in no slot, and gets nothing of the service",
				fmt.Sprintf("sockeye register --service %s --pid %d, or add a rule to members", c.Name, h.process.PID))
		}
		if c.Steering == config.Lookup {
			continue
		}
		uids[h.socket.UID] = true
		if h.socket.Local.Addr().IsUnspecified() && !h.socket.V6Only {
			wildcards[h.socket.Local.Addr()] = true
		}
		switch {
		case !h.socket.ReusePort:
			d.add(area, check, ResultWarning, who+" lacks SO_REUSEPORT: it keeps the port for itself",
				"make the program set it before bind, or use steering: lookup")
		case h.socket.Local.Addr() != l.Address.Addr():
			d.add(area, check, ResultWarning, who+" is another group than the listener's",
				"make the listener's address what the members bind; a more specific address takes its packets past the service")
		}
		if l.Protocol == config.TCP && h.socket.Listening && h.backlog < 128 && filepath.Base(h.process.Args[0]) != "sockeye" {
			d.add(area, check, ResultNote, fmt.Sprintf("%s has a backlog of %d", who, h.backlog),
				"the agent raises it when the member is registered")
		}
	}
	if len(uids) > 1 {
		var list []string
		for uid := range uids {
			list = append(list, strconv.FormatUint(uint64(uid), 10))
		}
		slices.Sort(list)
		d.add(area, check, ResultWarning, "sockets of several users: "+strings.Join(list, ", "),
			"a SO_REUSEPORT group has one user; use steering: lookup")
	}
	if len(wildcards) > 1 {
		d.add(area, check, ResultWarning, "0.0.0.0 and [::] are both bound: two groups, IPv4 goes to the first",
			"bind all members to [::], which serves IPv4 too")
	}
	if len(d.findings) == before {
		d.add(area, check, ResultOK, counted(len(here), "socket", "sockets"), "")
	}
}
