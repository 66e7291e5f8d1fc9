// SPDX-License-Identifier: Apache-2.0

// Package firstpolicy writes the first policy of a host: a service for each group of processes that share ports by
// SO_REUSEPORT.
package firstpolicy

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"sockeye/internal/bpf"
	"sockeye/internal/config"
	"sockeye/internal/fault"
	"sockeye/internal/member"
	"sockeye/internal/rights"
	"sockeye/internal/steer/keeper"
)

// Port is what processes share: sockets with the same protocol and address.
type Port struct {
	Protocol string // tcp or udp
	Address  netip.AddrPort
	V6Only   bool
}

func (p Port) String() string { return p.Protocol + " " + p.Address.String() }

func comparePorts(a, b Port) int {
	return cmp.Or(cmp.Compare(a.Protocol, b.Protocol), a.Address.Compare(b.Address), strings.Compare(fmt.Sprint(a.V6Only), fmt.Sprint(b.V6Only)))
}

// Program is a process with listening sockets of its own. Children that inherit the sockets do not count.
type Program struct {
	PID      int
	UID      uint32
	Exe      string // "" if unknown
	Unit     string // systemd unit; "" for none
	Instance string // of the unit
	Ports    map[Port]bool
}

// Name returns the base name of the executable, quoted if it has characters that a terminal does not print.
func (p *Program) Name() string {
	if p.Exe == "" {
		return "unknown"
	}
	if name := filepath.Base(p.Exe); isPrintable(name) {
		return name
	}
	return strconv.Quote(filepath.Base(p.Exe))
}

// Host is what listens on a host, in the network namespace of this process.
type Host struct {
	Programs []*Program // by process id
}

// Read finds the programs of this network namespace that have sockets with SO_REUSEPORT. It needs CAP_SYS_PTRACE.
func Read() (*Host, error) {
	if !rights.Has(unix.CAP_SYS_PTRACE) {
		return nil, &fault.Error{Err: errors.New("the sockets of other processes cannot be read"), Hint: "run it as root", Code: fault.CodeNotPermitted}
	}
	self, err := member.Read(os.Getpid())
	if err != nil {
		return nil, err
	}
	all, err := member.All()
	if err != nil {
		return nil, err
	}
	holders := make(map[uint64]*member.Process)                 // the first process with a socket, by cookie
	ports, kept := make(map[uint64]Port), make(map[uint64]bool) // the agent holds the sockets of its keepers, too
	for _, p := range all {
		if p.Netns != self.Netns || p.PID == 1 { // systemd holds the sockets of socket units
			continue
		}
		sockets := socketsOf(p.PID)
		for _, s := range sockets {
			if isKeeper(p) {
				kept[s.Cookie] = true
			}
			if holder := holders[s.Cookie]; holder == nil || p.StartTime < holder.StartTime {
				holders[s.Cookie] = p
			}
			ports[s.Cookie] = portOf(s)
		}
		member.CloseAll(sockets)
	}
	programs := make(map[int]*Program)
	for cookie, p := range holders {
		if kept[cookie] {
			continue
		}
		one := programs[p.PID]
		if one == nil {
			one = &Program{PID: p.PID, UID: p.UIDs[0], Exe: executable(p), Ports: make(map[Port]bool)}
			one.Unit, one.Instance = p.Unit()
			programs[p.PID] = one
		}
		one.Ports[ports[cookie]] = true
	}
	h := &Host{}
	for _, pid := range slices.Sorted(maps.Keys(programs)) {
		h.Programs = append(h.Programs, programs[pid])
	}
	return h, nil
}

// isKeeper reports whether a process keeps the ports of a service of Sockeye.
func isKeeper(p *member.Process) bool { return len(p.Args) > 1 && p.Args[1] == keeper.Command }

// executable returns the path of a process's executable, or "" if the path on the host is another file.
func executable(p *member.Process) string {
	var stat unix.Stat_t
	if unix.Stat(p.Exe, &stat) != nil || (member.FileID{Device: uint64(stat.Dev), Inode: stat.Ino}) != p.File {
		return ""
	}
	return p.Exe
}

// socketsOf returns the sockets of a process that other processes can share; none if the process has exited.
func socketsOf(pid int) []*member.Socket {
	h, err := member.Open(pid)
	if err != nil {
		return nil
	}
	defer h.Close()
	sockets, _ := h.Sockets(func(s *member.Socket) bool {
		return s.ReusePort && s.Listening && !s.Connected && (s.Protocol == unix.IPPROTO_TCP || s.Protocol == unix.IPPROTO_UDP) && !s.Local.Addr().IsMulticast()
	})
	return sockets
}

func portOf(s *member.Socket) Port {
	protocol := "udp"
	if s.Protocol == unix.IPPROTO_TCP {
		protocol = "tcp"
	}
	return Port{protocol, s.Local, s.V6Only}
}

// Service is a group of programs that share ports.
type Service struct {
	Name     string
	User     string
	Ports    []Port     // that all programs have
	Programs []*Program // by instance or process id
	Slots    int
	Members  []Rule
	Others   []Port // that some programs have

	refused string // the reason why a policy with the service is not valid
}

// Rule is a member rule.
type Rule struct {
	Unit, Executable string // one of both, a glob
	Slot             string // instance, free or a number
}

// Services returns the groups of programs that share a port, and the programs that share none.
func (h *Host) Services() (services []*Service, alone []*Program) {
	users := make(map[Port]map[uint32][]*Program)
	for _, p := range h.Programs {
		for port := range p.Ports {
			if users[port] == nil {
				users[port] = make(map[uint32][]*Program)
			}
			users[port][p.UID] = append(users[port][p.UID], p) // a SO_REUSEPORT group has sockets of one user
		}
	}
	grouped := make(map[*Program]bool)
	for _, first := range h.Programs {
		if grouped[first] {
			continue
		}
		group := []*Program{first}
		grouped[first] = true
		for i := 0; i < len(group); i++ {
			for port := range group[i].Ports {
				for _, p := range users[port][first.UID] {
					if !grouped[p] {
						grouped[p] = true
						group = append(group, p)
					}
				}
			}
		}
		if len(group) == 1 {
			alone = append(alone, first)
			continue
		}
		services = append(services, newService(group))
	}
	nameServices(services)
	return services, alone
}

func newService(group []*Program) *Service {
	s := &Service{Programs: group, Name: group[0].Name(), User: member.UserName(group[0].UID), Slots: len(group)}
	count := make(map[Port]int)
	for _, p := range group {
		for port := range p.Ports {
			count[port]++
		}
		if p.Name() != s.Name {
			s.Name = "telemetry"
		}
	}
	for _, port := range slices.SortedFunc(maps.Keys(count), comparePorts) {
		if count[port] == len(group) {
			s.Ports = append(s.Ports, port)
		} else {
			s.Others = append(s.Others, port)
		}
	}
	slices.SortFunc(s.Programs, func(a, b *Program) int {
		return cmp.Or(cmp.Compare(instance(a), instance(b)), strings.Compare(a.Unit, b.Unit), a.PID-b.PID)
	})
	s.Members = s.rules()
	return s
}

// maxGap is the maximum number of slots without a program: the slots of a service are its instances, and a slot without
// a member refuses its devices.
const maxGap = 8

// rules returns the member rules: units by instance, units by name, or the executable.
func (s *Service) rules() []Rule {
	units, instances := make(map[string]bool), make(map[int]bool)
	template, highest := "", -1
	for i, p := range s.Programs {
		units[p.Unit] = true
		base, _, _ := strings.Cut(p.Unit, "@")
		if i == 0 {
			template = base
		}
		if n := instance(p); n >= 0 && base == template {
			instances[n] = true
			highest = max(highest, n)
		}
	}
	switch {
	case len(instances) == len(s.Programs) && highest < len(s.Programs)+maxGap && highest < bpf.MaxSlots:
		s.Slots = highest + 1
		return []Rule{{Unit: template + "@*.service", Slot: "instance"}}
	case len(units) == len(s.Programs) && !units[""]:
		var rules []Rule
		for slot, p := range s.Programs {
			rules = append(rules, Rule{Unit: p.Unit, Slot: strconv.Itoa(slot)})
		}
		return rules
	}
	var rules []Rule
	for _, p := range s.Programs {
		if one := (Rule{Executable: p.Exe, Slot: "free"}); p.Exe != "" && !slices.Contains(rules, one) {
			rules = append(rules, one)
		}
	}
	return rules
}

// instance returns the number of a unit's instance as slot: instance reads it, or -1.
func instance(p *Program) int {
	n, err := strconv.Atoi(p.Instance)
	if err != nil || strconv.Itoa(n) != p.Instance || n < 0 || !strings.HasSuffix(p.Unit, ".service") {
		return -1
	}
	return n
}

var noName = regexp.MustCompile(`[^a-z0-9_]+`)

// nameServices makes the names valid and unique.
func nameServices(services []*Service) {
	used := make(map[string]bool)
	for _, s := range services {
		base := strings.Trim(noName.ReplaceAllString(strings.ToLower(s.Name), "_"), "_")
		if base == "" || base[0] < 'a' {
			base = "service_" + base
		}
		base = base[:min(len(base), 20)]
		name := base
		for n := 2; used[name]; n++ {
			name = fmt.Sprintf("%s_%d", base, n)
		}
		used[name], s.Name = true, name
	}
}

// isPrintable reports whether a text is UTF-8 without characters that YAML or a terminal interprets.
func isPrintable(text string) bool {
	return utf8.ValidString(text) && !strings.ContainsFunc(text, func(r rune) bool { return !unicode.IsPrint(r) })
}

// Policy returns the text of a policy with the services that have no problem. ok is false if there is none. Any user can
// start processes that share a port: a service with which the policy would not be valid is left out, and has this problem
// from then on.
func Policy(services []*Service) (text string, ok bool) {
	text = "# Written by sockeye init from the processes that shared ports at that time. man sockeye-policy describes all keys.\nservices:\n"
	for _, s := range services {
		if s.Problem() != "" {
			continue
		}
		var b strings.Builder
		s.write(&b)
		if _, err := config.Parse([]byte(text+b.String()), "policy.yaml"); err != nil {
			s.refused, _, _ = strings.Cut(err.Error(), "\n")
			continue
		}
		text, ok = text+b.String(), true
	}
	return text, ok
}

// Problem returns the reason why no policy can have the service, or "".
func (s *Service) Problem() string {
	switch {
	case len(s.Ports) == 0:
		return "no port that all of them have"
	case len(s.Programs) > bpf.MaxSlots:
		return fmt.Sprintf("more than %d processes", bpf.MaxSlots)
	case len(s.Ports) > bpf.MaxListeners:
		return fmt.Sprintf("more than %d shared ports", bpf.MaxListeners)
	case len(s.Members) == 0:
		return "their executables are not files of this host"
	case slices.ContainsFunc(s.Members, func(r Rule) bool { return strings.ContainsAny(r.Executable, `*?[\`) }):
		return "the path of an executable is a pattern"
	case slices.ContainsFunc(s.Members, func(r Rule) bool { return !isPrintable(r.Executable) || !isPrintable(r.Unit) }):
		return "the path of an executable, or a unit, has control characters or is not UTF-8"
	}
	return s.refused
}

func (s *Service) write(b *strings.Builder) {
	fmt.Fprintf(b, "  %s:\n    slots: %d\n    user: %s\n    listeners:\n", s.Name, s.Slots, quote(s.User))
	for _, p := range s.Ports {
		only := ""
		if p.V6Only {
			only = ", v6only: true"
		}
		fmt.Fprintf(b, "      - {protocol: %s, address: %s%s}\n", p.Protocol, quote(p.Address.String()), only)
	}
	for _, p := range s.Others {
		fmt.Fprintf(b, "      # not all of them listen on %s\n", p)
	}
	b.WriteString("    members:\n")
	for _, r := range s.Members {
		match := "systemd_unit: " + quote(r.Unit)
		if r.Executable != "" {
			match = "executable: " + quote(r.Executable)
		}
		fmt.Fprintf(b, "      - {match: {%s}, slot: %s}\n", match, r.Slot)
	}
}

// notPlain are words that are not strings in YAML 1.1.
var notPlain = []string{"y", "yes", "n", "no", "true", "false", "on", "off", "null"}

var plain = regexp.MustCompile(`^[a-z_][a-z0-9_-]*$`)

// quote returns a YAML scalar: a plain word, or a JSON string.
func quote(text string) string {
	if plain.MatchString(text) && !slices.Contains(notPlain, text) {
		return text
	}
	b, _ := json.Marshal(text) // it never fails for a string
	return string(b)
}
