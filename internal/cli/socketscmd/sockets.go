// SPDX-License-Identifier: Apache-2.0

// Package socketscmd implements the command sockeye sockets.
package socketscmd

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"sockeye/internal/bigtcp/netif"
	"sockeye/internal/cgroup"
	"sockeye/internal/cli/command"
	"sockeye/internal/config"
	"sockeye/internal/fault"
	"sockeye/internal/format"
	"sockeye/internal/sockdiag"
	"sockeye/room"
)

// Shown is the JSON output of sockets.
type Shown struct {
	Netns    string         `json:"netns,omitempty"`
	Matched  int            `json:"matched"`
	ByLimit  map[string]int `json:"by_limit"`
	Sockets  []socketShown  `json:"sockets"`
	Problems []string       `json:"problems"` // read errors
}

// socketShown is a socket. Pointers are nil if the kernel reports no value, as for a listener or a connection in
// TIME_WAIT.
type socketShown struct {
	Local      string             `json:"local"`
	Remote     string             `json:"remote,omitempty"`
	State      string             `json:"state"`
	Cookie     uint64             `json:"cookie"`
	UID        uint32             `json:"uid"`
	CgroupID   uint64             `json:"cgroup_id,omitempty"`
	Cgroup     string             `json:"cgroup,omitempty"`
	Processes  []sockdiag.Process `json:"processes,omitempty"`
	Congestion string             `json:"congestion,omitempty"`

	Payload     *uint32     `json:"payload,omitempty"` // all sizes are in bytes
	Unsent      *uint32     `json:"unsent,omitempty"`
	Unread      *uint32     `json:"unread,omitempty"`
	Queued      *int        `json:"queued,omitempty"`
	Buffer      *int        `json:"buffer,omitempty"`
	Overhead    *float64    `json:"overhead,omitempty"`
	Room        *socketRoom `json:"room,omitempty"`
	Waiting     *uint32     `json:"waiting,omitempty"` // listeners only
	MostWaiting *uint32     `json:"most_waiting,omitempty"`

	Path      *socketPath     `json:"path,omitempty"`
	LimitedBy sockdiag.Limit  `json:"limited_by,omitempty"`
	Share     *float64        `json:"limited_share,omitempty"`
	Times     *sockdiag.Times `json:"times,omitempty"`
	// Advice is set if the send buffer is the bottleneck.
	Advice *sockdiag.Advice `json:"advice,omitempty"`

	local, remote netip.AddrPort
}

type socketRoom struct {
	Safe  int `json:"safe"`
	Exact int `json:"exact"`
}

type socketPath struct {
	RTT           time.Duration `json:"rtt_ns"`
	MSS           uint32        `json:"mss"`
	Window        uint32        `json:"congestion_window"` // packets
	SendWindow    uint32        `json:"send_window"`       // bytes; 0 before Linux 5.4
	DeliveryRate  uint64        `json:"delivery_rate"`     // bytes per second
	Retransmitted uint32        `json:"retransmitted"`     // packets
}

// socketsView has the selection and the order of the sockets to be shown.
type socketsView struct {
	netns      string
	query      sockdiag.Query
	local      endFilter
	remote     endFilter
	port       uint16
	cgroup     string // its path below the mount; "" for any
	limits     []sockdiag.Limit
	sort       string
	number     int // 0 for all
	processes  bool
	mount      string // of cgroup v2; "" if there is none
	problems   []string
	kernel     room.Kernel
	calibrated bool
}

// endFilter matches one endpoint of a connection. The zero value matches all endpoints.
type endFilter struct {
	prefix netip.Prefix
	port   uint16
}

func (f endFilter) matches(a netip.AddrPort) bool {
	return (f.port == 0 || a.Port() == f.port) && (!f.prefix.IsValid() || f.prefix.Contains(a.Addr().WithZone("")))
}

// commands are the commands of one invocation.
type commands struct{ *command.Command }

// New returns `sockeye sockets`.
func New(c *command.Command) *cobra.Command { return (&commands{c}).socketsCommand() }

func (c *commands) socketsCommand() *cobra.Command {
	var (
		v                             socketsView
		states, limits                []string
		local, remote, cgroup, byName string
		port                          int
		all, watch                    bool
	)
	cmd := &cobra.Command{
		Use:   "sockets",
		Short: "Show each TCP socket's bottleneck and free send-buffer space",
		Long: `Sockets shows the TCP sockets of the current or another network namespace. It
needs no agent and no privileges. For each connection it shows, in bytes:

  QUEUED    memory of unsent and unacknowledged data
  PAYLOAD   unsent and unacknowledged data; OVERHEAD is QUEUED/PAYLOAD
  UNSENT    data that is not sent yet
  BUFFER    send buffer size (SO_SNDBUF)
  SAFE      bytes that the socket accepts without a partial send
  EXACT     bytes that one large write would accept now

A line with the addresses shows the received bytes that are not yet read, the
number of retransmitted packets, and the state unless it is established.

The bottleneck of a connection (LIMITED BY) is one of: application (no data to
send), receive window of the peer, congestion control, send buffer (with a
hint), or transmit (pacing, Nagle's algorithm, or queues of this host). It is
the current bottleneck or, if this is not conclusive, the bottleneck for most of
the connection's busy time. With --watch, it is the bottleneck between two
readings, with its share of the time.`,
		Example: `  sockeye sockets
  sockeye sockets --limit-by send_buffer --sort rtt -n 10
  sockeye sockets --remote 192.0.2.0/24:1790 --processes
  sockeye sockets --cgroup telemetry.slice --watch
  sockeye sockets --netns /run/netns/blue --all -o json
  nsenter -U -n --preserve-credentials -t PID sockeye sockets   # of an isolated program`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			given := cmd.Flags().Changed
			var err error
			if v.query.States, err = readStates(states, all); err != nil {
				return err
			}
			if given("local") {
				if v.local, err = readEnd("local", local); err != nil {
					return err
				}
			}
			if given("remote") {
				if v.remote, err = readEnd("remote", remote); err != nil {
					return err
				}
			}
			v.query.LocalPort, v.query.RemotePort = v.local.port, v.remote.port
			if given("port") {
				if port < 1 || port > 65535 {
					return fault.Usage(fmt.Errorf("--port is %d", port), "1 to 65535")
				}
				v.port = uint16(port)
			}
			if given("number") && v.number < 1 {
				return fault.Usage(fmt.Errorf("--number is %d", v.number), "1 or more")
			}
			if v.limits, err = readLimits(limits); err != nil {
				return err
			}
			if !slices.Contains(Orders(), byName) {
				return unknownWord("order", byName, Orders())
			}
			v.sort = byName
			if watch && c.Output == "json" {
				return fault.Usage(errors.New("--watch and --output json are mutually exclusive"), "without --watch there is one answer")
			}
			if err := v.findCgroup(cgroup, given("cgroup")); err != nil {
				return err
			}
			return c.sockets(cmd, &v, watch)
		},
	}
	flags := cmd.Flags()
	flags.StringSliceVar(&states, "state", nil, "show only sockets in this state, named as in ss(8); can be repeated")
	flags.StringVar(&local, "local", "", "show only this local endpoint: ADDRESS, PREFIX, :PORT, or ADDRESS:PORT")
	flags.StringVar(&remote, "remote", "", "show only this peer: ADDRESS, PREFIX, :PORT, or PREFIX:PORT")
	flags.IntVar(&port, "port", 0, "show only sockets with this local or remote port")
	flags.StringVar(&cgroup, "cgroup", "", "show only sockets of this cgroup and its descendants, as in telemetry.slice")
	flags.StringSliceVar(&limits, "limit-by", nil, "show only connections with this bottleneck; can be repeated")
	flags.StringVar(&v.netns, "netns", "", "path of a network namespace, as in /run/netns/NAME; default: the current namespace")
	flags.StringVar(&byName, "sort", "queued", "sort order: "+strings.Join(Orders(), ", "))
	flags.IntVarP(&v.number, "number", "n", 0, "maximum number of sockets; default: all")
	flags.BoolVar(&all, "all", false, "also show listeners, handshakes and closed connections")
	flags.BoolVar(&v.processes, "processes", false, "also show the processes that the caller may inspect")
	flags.BoolVar(&watch, "watch", false, "refresh every second, until Ctrl-C")
	for flag, words := range map[string][]string{
		"state": sockdiag.StateNames(), "limit-by": Limits(), "sort": Orders(),
		"local": nil, "remote": nil, "port": nil, "number": nil,
	} {
		command.CompleteFlag(cmd, flag, words...)
	}
	return cmd
}

// EndpointHint is the hint for an address filter that cannot be parsed.
const EndpointHint = "as in 192.0.2.1, 192.0.2.0/24:1790, [2001:db8::]/32:1790 or :1790"

// readEnd parses an address or a prefix, a port, or both.
func readEnd(flag, text string) (f endFilter, err error) {
	bad := fault.Usage(fmt.Errorf("--%s is %q", flag, text), EndpointHint)
	address, port := text, ""
	if inner, ok := strings.CutPrefix(text, "["); ok {
		var rest string
		if address, rest, ok = strings.Cut(inner, "]"); !ok {
			return f, bad
		}
		length, ported := "", false
		if length, port, ported = strings.Cut(rest, ":"); ported && port == "" || length != "" && length[0] != '/' {
			return f, bad
		}
		address += length
	} else if strings.Count(text, ":") == 1 {
		if address, port, _ = strings.Cut(text, ":"); port == "" {
			return f, bad
		}
	}
	if port != "" {
		n, err := strconv.ParseUint(port, 10, 16)
		if err != nil || n == 0 {
			return f, bad
		}
		f.port = uint16(n)
	}
	switch {
	case (address == "" || address == "*") && f.port != 0:
		return f, nil
	case strings.Contains(address, "/"):
		p, err := netip.ParsePrefix(address)
		if err != nil || p.Addr().Is4In6() {
			return f, bad
		}
		f.prefix = p.Masked()
	default:
		a, err := netip.ParseAddr(address)
		if err != nil || a.Zone() != "" {
			return f, bad
		}
		f.prefix = netip.PrefixFrom(a.Unmap(), a.Unmap().BitLen())
	}
	return f, nil
}

// shortStates are the abbreviations that ss(8) prints.
var shortStates = map[string]string{"estab": "established", "listen": "listening", "unconn": "closed"}

func readStates(names []string, all bool) (sockdiag.States, error) {
	if len(names) == 0 {
		if all {
			return sockdiag.AllStates, nil
		}
		return sockdiag.Connected, nil
	}
	if all {
		return 0, fault.Usage(errors.New("--all and --state are mutually exclusive"), "--all is all states")
	}
	var states sockdiag.States
	for _, name := range names {
		lower := strings.ToLower(name)
		state := sockdiag.StateOf(cmp.Or(shortStates[lower], lower))
		if state == 0 {
			return 0, unknownWord("state", name, sockdiag.StateNames())
		}
		states = states.With(state)
	}
	return states, nil
}

func readLimits(names []string) (limits []sockdiag.Limit, err error) {
	for _, name := range names {
		if !slices.Contains(Limits(), name) {
			return nil, unknownWord("limit", name, Limits())
		}
		limits = append(limits, sockdiag.Limit(name))
	}
	return limits, nil
}

// unknownWord returns an error for an unknown value, with the valid values as the hint.
func unknownWord(what, word string, known []string) error {
	hint := "one of " + strings.Join(known, ", ")
	if near := config.Nearest(word, known); near != "" && word != "" {
		hint = "did you mean " + near + "?"
	}
	return fault.Usage(fmt.Errorf("there is no %s %q", what, word), hint)
}

// Limits returns the values of --limit-by.
func Limits() (names []string) {
	for _, limit := range sockdiag.Limits {
		names = append(names, string(limit))
	}
	return names
}

// findCgroup finds the cgroup mount, and the directory of the named cgroup.
func (v *socketsView) findCgroup(name string, given bool) (err error) {
	v.mount, err = cgroup.Mount()
	if !given {
		if err != nil {
			v.problems = append(v.problems, "cgroups: "+err.Error())
		}
		return nil
	}
	if err != nil {
		return err
	}
	below := filepath.Clean("/" + strings.TrimPrefix(name, v.mount))
	if info, err := os.Stat(v.mount + below); name == "" || err != nil || !info.IsDir() {
		return fault.Usage(fmt.Errorf("there is no cgroup %q", name), "name it by its path below "+v.mount+", as in telemetry.slice")
	}
	v.cgroup = below
	return nil
}

// socketsLooker reads the sockets repeatedly.
type socketsLooker struct {
	*socketsView
	diag    *sockdiag.Conn
	cgroups sockdiag.Cgroups
	now     func() time.Time         // nil for a single reading
	earlier map[uint64]sockdiag.Look // by cookie
}

// sockets prints the sockets once, or every second.
func (c *commands) sockets(cmd *cobra.Command, v *socketsView, watch bool) error {
	network, err := netif.OpenNamespace(v.netns)
	if err != nil {
		return err
	}
	defer network.Close()
	var diag *sockdiag.Conn
	if err := network.Do(func() (err error) {
		diag, err = sockdiag.Open()
		return err
	}); err != nil {
		return socketsFailure(err)
	}
	defer diag.Close()
	if v.kernel, err = room.Calibrate(); err != nil {
		v.problems = append(v.problems, fmt.Sprintf("SAFE and EXACT: %v; check that lo is up", err))
	}
	v.calibrated = err == nil
	looker := &socketsLooker{socketsView: v, diag: diag, earlier: map[uint64]sockdiag.Look{}}
	if watch {
		looker.now = c.Now
		return c.Watch(cmd.Context(), func() (*command.Text, error) {
			shown, err := looker.look()
			if err != nil {
				return nil, err
			}
			var t command.Text
			socketsText(&t, shown)
			return &t, nil
		})
	}
	shown, err := looker.look()
	if err != nil {
		return err
	}
	return c.Print(shown, func(t *command.Text) { socketsText(t, shown) })
}

// found is a socket to be shown, with its verdict and processes.
type found struct {
	socket  sockdiag.Socket
	verdict sockdiag.Verdict
	times   sockdiag.Times
	room    *room.Estimate
}

// look reads the sockets. It keeps at most twice the number of shown sockets in memory.
func (l *socketsLooker) look() (*Shown, error) {
	shown := &Shown{Netns: l.netns, Sockets: []socketShown{}, Problems: append([]string{}, l.problems...)}
	if l.mount != "" {
		// A missing cgroup was created concurrently, or is outside the cgroup namespace.
		var err error
		if l.cgroups, err = sockdiag.ReadCgroups(l.mount, l.mount+l.cgroup); err != nil {
			shown.Problems = append(shown.Problems, err.Error())
		}
	}
	var kept []*found
	var later map[uint64]sockdiag.Look
	best := func() {
		slices.SortFunc(kept, socketOrders[l.sort])
		if l.number > 0 && len(kept) > l.number {
			kept = kept[:l.number]
		}
	}
	begin := func() {
		kept, later = kept[:0], make(map[uint64]sockdiag.Look)
		shown.Matched, shown.ByLimit = 0, make(map[string]int)
	}
	err := l.diag.Dump(l.query, begin, func(s *sockdiag.Socket) {
		if !l.matches(s) {
			return
		}
		f := &found{socket: *s, times: s.Times()}
		f.verdict = l.judge(s, later)
		if before, ok := l.earlier[s.Cookie]; ok && l.now != nil {
			f.times = f.times.Since(before.Times)
		}
		if len(l.limits) > 0 && !slices.Contains(l.limits, f.verdict.By) {
			return
		}
		if snapshot := s.Snapshot(l.diag.Settings); l.calibrated && !snapshot.Closed {
			var t room.Tracker
			t.Paced(strings.HasPrefix(s.Congestion, "bbr"))
			e := l.kernel.Estimate(snapshot, 0, &t)
			f.room = &e
		}
		shown.Matched++
		if f.verdict.By != "" {
			shown.ByLimit[string(f.verdict.By)]++
		}
		if kept = append(kept, f); l.number > 0 && len(kept) >= 2*l.number+64 {
			best()
		}
	})
	if err != nil {
		return nil, socketsFailure(err)
	}
	l.earlier = later
	best()
	processes := l.owners(kept, shown)
	for i := range kept {
		shown.Sockets = append(shown.Sockets, l.describe(kept[i], processes[kept[i].socket.Inode]))
	}
	return shown, nil
}

// socketsFailure adds the exit code to an error of the kernel.
func socketsFailure(err error) error {
	if errors.Is(err, sockdiag.ErrUnsupported) {
		return &fault.Error{Err: err, Hint: "load the modules inet_diag and tcp_diag", Code: fault.CodeUnsupported}
	}
	return err
}

func (l *socketsLooker) matches(s *sockdiag.Socket) bool {
	if !l.local.matches(s.Local) || !l.remote.matches(s.Remote) || l.port != 0 && s.Local.Port() != l.port && s.Remote.Port() != l.port {
		return false
	}
	_, known := l.cgroups[s.Cgroup]
	return l.cgroup == "" || known
}

// judge returns the bottleneck of a socket, since the previous reading if there was one.
func (l *socketsLooker) judge(s *sockdiag.Socket, later map[uint64]sockdiag.Look) sockdiag.Verdict {
	if l.now == nil || !s.HasInfo {
		return s.Judge()
	}
	look := s.Look(l.now())
	later[s.Cookie] = look
	if before, ok := l.earlier[s.Cookie]; ok {
		return s.JudgeSince(before, look)
	}
	return s.Judge()
}

// owners finds the processes of the sockets, if requested.
func (l *socketsLooker) owners(kept []*found, shown *Shown) map[uint32][]sockdiag.Process {
	if !l.processes {
		return nil
	}
	wanted := make(map[uint32]bool)
	for i := range kept {
		wanted[kept[i].socket.Inode] = true
	}
	delete(wanted, 0)
	processes, hidden, err := sockdiag.ReadProcesses(func(inode uint32) bool { return wanted[inode] })
	switch {
	case err != nil:
		shown.Problems = append(shown.Problems, err.Error())
	case hidden > 0:
		shown.Problems = append(shown.Problems, format.Count(hidden, "process", "processes")+", not permitted to inspect")
	}
	return processes
}

func (l *socketsLooker) describe(f *found, processes []sockdiag.Process) socketShown {
	s := &f.socket
	shown := socketShown{
		Local: s.Local.String(), State: s.State.String(), Cookie: s.Cookie, UID: s.UID, CgroupID: s.Cgroup, Cgroup: l.cgroups[s.Cgroup],
		Processes: processes, Congestion: s.Congestion, LimitedBy: f.verdict.By, local: s.Local, remote: s.Remote,
	}
	if s.State == sockdiag.Listening {
		shown.Waiting, shown.MostWaiting = &s.Unread, &s.Payload
		return shown
	}
	if s.Remote.Port() != 0 {
		shown.Remote = s.Remote.String()
	}
	if s.HasMemory {
		shown.Queued, shown.Buffer = &s.Queued, &s.Buffer
	}
	if !s.HasInfo {
		return shown
	}
	i := &s.Info
	shown.Payload, shown.Unsent, shown.Unread, shown.Times = &s.Payload, &i.Notsent_bytes, &s.Unread, &f.times
	if s.HasMemory && s.Payload > 0 {
		ratio := float64(s.Queued) / float64(s.Payload)
		shown.Overhead = &ratio
	}
	if f.room != nil {
		shown.Room = &socketRoom{f.room.Safe, f.room.Exact}
	}
	shown.Path = &socketPath{
		RTT: time.Duration(i.Rtt) * time.Microsecond, MSS: i.Snd_mss, Window: i.Snd_cwnd, SendWindow: i.Snd_wnd,
		DeliveryRate: i.Delivery_rate, Retransmitted: i.Total_retrans,
	}
	if f.verdict.Share >= 0 {
		shown.Share = &f.verdict.Share
	}
	if f.verdict.By == sockdiag.SendBuffer {
		var asked *sockdiag.Asked
		for _, p := range processes {
			// If the caller may not inspect the process, the advice uses the values of sock_diag only.
			if answer, err := p.Ask(s.Cookie); err == nil {
				asked = answer
				break
			}
		}
		advice := s.Advise(l.diag.Settings, l.kernel, f.times, asked)
		shown.Advice = &advice
	}
	return shown
}
