// SPDX-License-Identifier: Apache-2.0

// Package checkup checks the sockets, the users and the members of services without an agent, for the commands doctor and check.
package checkup

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"sockeye/internal/api"
	"sockeye/internal/cgroup"
	"sockeye/internal/config"
	"sockeye/internal/doctor"
	"sockeye/internal/fault"
	"sockeye/internal/format"
	"sockeye/internal/member"
	"sockeye/internal/steer/core"
	"sockeye/internal/steer/keeper"
	"sockeye/internal/steer/listener"
)

// report adds findings about services.
type report struct{ *doctor.Report }

// Examine checks the sockets on the ports of the services of a policy.
func Examine(d *doctor.Report, policy *config.Policy) {
	for _, c := range policy.Services {
		report{d}.service(c, policy)
	}
}

// ExamineAgent adds findings of a running agent about its services and their members.
func ExamineAgent(_ context.Context, d *doctor.Report, _ *api.Client, status *api.Status) {
	for _, s := range status.Services {
		area := "service " + s.Name
		if s.Problem != "" {
			check := "port steering"
			if s.PortsSteered {
				check = "devices" // split devices, or sockets that take their packets
			}
			d.Add(area, check, doctor.Warning, s.Problem, s.Hint)
		}
		for _, w := range s.Waiting {
			d.Add(area, fmt.Sprintf("process %d", w.PID), doctor.Warning, w.Problem, w.Hint)
		}
		for _, r := range s.Refused {
			d.Add(area, fmt.Sprintf("process %d", r.PID), doctor.Warning, "refused as a member: "+r.Problem, r.Hint)
		}
	}
}

// CheckPolicy reads the device maps of a policy for the command check. The notes name cgroups and network namespaces that this host lacks.
func CheckPolicy(_ context.Context, _ *api.Client, policy *config.Policy) (notes []string, err error) {
	mount, unmounted := cgroup.Mount()
	if unmounted != nil && len(policy.Services) > 0 {
		notes = append(notes, "the cgroups and network namespaces of services were not checked: "+unmounted.Error())
	}
	for _, c := range policy.Services {
		if _, err := core.ReadDevices(c); err != nil {
			return nil, core.OfService(c.Name, err)
		}
		if err := core.CheckExists(mount, c); err != nil && unmounted == nil && !errors.Is(err, fs.ErrPermission) {
			notes = append(notes, fmt.Sprintf("sockeye apply refuses the policy on this host: service %s: %v", c.Name, err))
		}
	}
	return notes, nil
}

// examined is a service without a data path.
type examined struct{ core.Service }

// portSocket is a socket on one of the ports of a service, with its process.
type portSocket struct {
	process *member.Process
	socket  *member.Socket
	backlog uint32 // listening TCP sockets only
	ifindex int    // index of the bound interface, or 0
}

func (d report) service(c config.Service, policy *config.Policy) {
	area := "service " + c.Name
	s := &examined{Service: core.Service{Name: c.Name, Config: c}}
	if err := s.OpenNetns(); err != nil {
		d.Fail(area, "network namespace", fault.Code(err), err.Error(), "create it, or correct netns")
		return
	}
	defer s.Netns.Close()
	d.ForeignPrograms(area, int(s.Netns.Fd()))
	rules, users, err := core.ResolveMembers(c)
	if err != nil {
		d.Fail(area, "user", fault.Code(err), err.Error(), fault.Hint(err))
		return
	}
	sockets, processes, err := s.findSockets(users)
	if err != nil {
		d.Add(area, "sockets", doctor.Warning, "not known: "+err.Error(), fault.Hint(err))
		return
	}
	sockets = slices.DeleteFunc(sockets, func(one portSocket) bool { return one.isOfOther(c, policy) })
	if d.Known == nil && len(rules) > 0 { // a running agent tells whom it refuses
		d.members(area, c, rules, users, processes)
	}
	if c.Steering == config.Lookup {
		for _, rule := range rules {
			for _, uid := range rule.Users(nil) { // users has those of the service already
				if !slices.Contains(users, uid) {
					users = append(users, uid)
				}
			}
		}
	}
	for _, l := range c.Listeners {
		d.listener(area, c, l, users, sockets)
	}
}

// isOfOther reports whether a socket has the address of a listener of another service in the same network namespace.
func (p *portSocket) isOfOther(c config.Service, policy *config.Policy) bool {
	return p.ifindex == 0 && slices.ContainsFunc(policy.Services, func(other config.Service) bool {
		return other.Name != c.Name && other.Netns == c.Netns && slices.ContainsFunc(other.Listeners, func(l config.Listener) bool {
			return (p.socket.Protocol == unix.IPPROTO_UDP) == (l.Protocol == config.UDP) && p.socket.Local == l.Address
		})
	})
}

// mostRefused is the number of processes that members names.
const mostRefused = 16

// members reports which processes with sockets on the ports of a service the rules would give a slot. A running agent reports this itself, and
// knows more: claims, and the command lines of processes that have overwritten theirs.
func (d report) members(area string, c config.Service, rules []member.Rule, users []uint32, processes []*member.Process) {
	const check = "members"
	host, err := member.ReadHost()
	if err != nil {
		d.Add(area, check, doctor.Warning, "not known: "+err.Error(), "")
		return
	}
	matching, others, refused, free := 0, 0, 0, c.Slots
	taken := make(map[int]bool)
	refuse := func(p *member.Process, why, hint string) {
		if refused++; refused <= mostRefused {
			d.Add(area, check, doctor.Warning, fmt.Sprintf("process %d (%s) would %s", p.PID, p.Args[0], why), hint)
		}
	}
	for _, p := range processes {
		if keeper.IsKeeper(p) || !p.InCgroup(c.Cgroup) {
			continue
		}
		slot, why := slotOf(p, c, rules, users, host)
		switch refusal, ok := errors.AsType[*member.Refusal](why); {
		case errors.Is(why, errNoRule):
			others++
		case ok:
			refuse(p, "be refused: "+refusal.Reason, refusal.Hint)
		case why != nil:
			refuse(p, "not get a slot: "+why.Error(), fault.Hint(why))
		case taken[slot] && !c.Takeover:
			refuse(p, fmt.Sprintf("not get a slot: another process has slot %d", slot), "end one of the processes, or give it another slot")
		case free == 0 && !taken[slot]:
			refuse(p, fmt.Sprintf("not get a slot: the service has %d", c.Slots), "raise slots in the policy")
		default:
			if matching++; !taken[slot] {
				free--
			}
			taken[slot] = slot != member.AnySlot
		}
	}
	if more := refused - mostRefused; more > 0 {
		d.Add(area, check, doctor.Warning, fmt.Sprintf("and %s more", format.Count(more, "process", "processes")), "")
	}
	if others > 0 {
		d.Add(area, check, doctor.Note, format.Count(others, "process", "processes")+" with sockets: no rule matches", "add a rule to members, or use sockeye register")
	}
	d.Add(area, check, doctor.OK, format.Count(matching, "process", "processes")+" with sockets: a rule matches", "")
}

var errNoRule = errors.New("no rule matches")

// slotOf returns the slot that the first rule that admits a process gives it, or member.AnySlot. The error is the first member.Refusal if no
// rule admits the process, or errNoRule.
func slotOf(p *member.Process, c config.Service, rules []member.Rule, users []uint32, host *member.Host) (int, error) {
	why := errNoRule
	for i := range rules {
		if !rules[i].Matches(p) {
			continue
		}
		refusal := rules[i].Admit(p, users, host)
		if refusal == nil {
			return rules[i].Slot(p, c.Slots)
		}
		if errors.Is(why, errNoRule) {
			why = refusal
		}
	}
	return 0, why
}

// findSockets returns the sockets on the ports of the service, including those of keepers, and the processes that have them. The copied descriptors are
// closed; only the attributes are returned. Sockets of other users than root and users are not copied, see member.Handle.TableSockets.
func (s *examined) findSockets(users []uint32) (sockets []portSocket, owners []*member.Process, err error) {
	processes, err := member.All()
	if err != nil {
		return nil, nil, err
	}
	known := append([]uint32{0}, users...)
	seen := make(map[uint64]bool)
	// A process whose sockets all belong to an earlier one has inherited them, as a plugin of nfacctd: it is no member.
	addOwner := func(p *member.Process, own []*member.Socket) {
		if slices.ContainsFunc(own, func(socket *member.Socket) bool { return !seen[socket.Cookie] }) {
			owners = append(owners, p)
		}
	}
	for _, p := range processes {
		if p.Netns != s.NetnsInode {
			continue
		}
		handle, err := member.Open(p.PID)
		if err != nil {
			continue
		}
		if len(users) > 0 && !p.UIDs.Within(known) {
			own := handle.TableSockets(s.isOnServicePort)
			addOwner(p, own)
			for _, socket := range own {
				seen[socket.Cookie] = true
				sockets = append(sockets, portSocket{process: p, socket: socket, backlog: math.MaxUint32})
			}
			handle.Close()
			continue
		}
		own, err := handle.Sockets(s.isOnServicePort)
		handle.Close()
		if err != nil {
			if errors.Is(err, os.ErrPermission) {
				return nil, nil, err
			}
			continue
		}
		addOwner(p, own)
		for _, socket := range own {
			if !seen[socket.Cookie] {
				seen[socket.Cookie] = true
				one := portSocket{process: p, socket: socket}
				// tcpi_sacked of a listening socket is its backlog (tcp_get_info).
				if info, err := unix.GetsockoptTCPInfo(socket.FD(), unix.IPPROTO_TCP, unix.TCP_INFO); err == nil {
					one.backlog = info.Sacked
				}
				if ifindex, err := unix.GetsockoptInt(socket.FD(), unix.SOL_SOCKET, unix.SO_BINDTOIFINDEX); err == nil {
					one.ifindex = ifindex
				}
				sockets = append(sockets, one)
			}
		}
		member.CloseAll(own)
	}
	return sockets, owners, nil
}

// isOnServicePort reports whether a socket is on the port of a listener or on one of the members' ports.
func (s *examined) isOnServicePort(socket *member.Socket) bool {
	if socket.Connected {
		return false
	}
	if listener.MatchesAny(slices.Values(s.Config.Listeners), socket) {
		return true
	}
	return slices.ContainsFunc(s.Config.Listeners, func(l config.Listener) bool {
		return (socket.Protocol == unix.IPPROTO_UDP) == (l.Protocol == config.UDP) &&
			socket.Local.Port() == l.Address.Port()
	})
}

func (d report) listener(area string, c config.Service, l config.Listener, users []uint32, all []portSocket) {
	first, last := listener.MemberPorts(l)
	var here []portSocket
	for _, one := range all {
		port := one.socket.Local.Port()
		// An accepted connection that was reset has no peer any more, and keeps its local address until it is closed.
		if !one.socket.Listening && one.socket.Local.Addr() != l.Address.Addr() {
			continue
		}
		if (one.socket.Protocol == unix.IPPROTO_UDP) == (l.Protocol == config.UDP) && port >= first && port <= last {
			here = append(here, one)
		}
	}
	check := l.String()
	before := len(d.Findings)
	uids := make(map[uint32]bool)
	wildcards := make(map[netip.Addr]bool)
	for _, one := range here {
		who := fmt.Sprintf("%s of process %d (%s)", one.socket, one.process.PID, one.process.Args[0])
		if one.socket.Protocol == unix.IPPROTO_MPTCP {
			d.Add(area, check, doctor.Warning, who+" is MPTCP, which the kernel does not steer",
				"programs in Go: GODEBUG=multipathtcp=0")
		}
		if len(users) > 0 && !slices.Contains(users, one.socket.UID) {
			d.Add(area, check, doctor.Warning, fmt.Sprintf("%s belongs to user %s, members to %s", who, member.UserName(one.socket.UID), member.UserNames(users)),
				"start the program as that user, or name the owner in user of the service")
		}
		elsewhere := c.Steering != config.Lookup && one.socket.ReusePort &&
			(one.socket.Local.Addr() != l.Address.Addr() || one.ifindex != 0 || l.Address.Addr().IsUnspecified() && one.socket.V6Only != l.V6Only)
		if d.isUnregistered(one, users) && !elsewhere {
			d.Add(area, check, doctor.Warning, who+" is in no slot, and receives nothing from the service",
				fmt.Sprintf("sockeye register --service %s --pid %d, or add a rule to members", c.Name, one.process.PID))
		}
		if c.Steering == config.Lookup {
			continue
		}
		uids[one.socket.UID] = true
		if one.socket.Local.Addr().IsUnspecified() && !one.socket.V6Only {
			wildcards[one.socket.Local.Addr()] = true
		}
		switch {
		case !one.socket.ReusePort:
			d.Add(area, check, doctor.Warning, who+" lacks SO_REUSEPORT: it keeps the port for itself",
				"make the program set it before bind, and keep it, or use steering: lookup")
		case elsewhere && one.ifindex != 0:
			d.Add(area, check, doctor.Warning, fmt.Sprintf("%s can take the packets of interface %d past the service", who, one.ifindex),
				"end the process, or make it bind no interface")
		case elsewhere && one.socket.Local.Addr().IsUnspecified():
			d.Add(area, check, doctor.Warning, who+" is in another group than the listener's, and can take packets past the service", "end the process, or make it bind the address of the listener; if it should be a member, give the listener the address that the members bind")
		case elsewhere:
			d.Add(area, check, doctor.Warning, fmt.Sprintf("%s can take the packets to %s past the service", who, one.socket.Local.Addr()),
				"end the process, or make it bind the address of the listener")
		}
		if l.Protocol == config.TCP && one.socket.Listening && one.backlog < 128 && filepath.Base(one.process.Args[0]) != "sockeye" {
			d.Add(area, check, doctor.Note, fmt.Sprintf("%s has a backlog of %d", who, one.backlog),
				"the agent raises it when the member is registered")
		}
	}
	if len(uids) > 1 {
		var list []string
		for uid := range uids {
			list = append(list, strconv.FormatUint(uint64(uid), 10))
		}
		slices.Sort(list)
		d.Add(area, check, doctor.Warning, "sockets of several users: "+strings.Join(list, ", "),
			"a SO_REUSEPORT group has one user; use steering: lookup")
	}
	if len(wildcards) > 1 {
		d.Add(area, check, doctor.Warning, "0.0.0.0 and [::] are both bound: two groups, IPv4 goes to the first",
			"bind all members to [::], which serves IPv4 too")
	}
	if len(d.Findings) == before {
		d.Add(area, check, doctor.OK, format.Count(len(here), "socket", "sockets"), "")
	}
}

// isUnregistered reports whether a socket could serve the service, is not registered, and is not listed by status.
func (d report) isUnregistered(one portSocket, users []uint32) bool {
	return d.Known != nil && !keeper.IsKeeper(one.process) && one.socket.Listening && slices.Contains(users, one.socket.UID) &&
		!d.Known.Sockets[one.socket.Cookie] && !d.Known.Processes[one.process.PID]
}
