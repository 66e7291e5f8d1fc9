// SPDX-License-Identifier: Apache-2.0

// Package sockmetrics exports metrics of TCP connections: their bottlenecks, their queues, and their free send-buffer
// space.
package sockmetrics

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"net/netip"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"sockeye/internal/config"
	"sockeye/internal/domain"
	"sockeye/internal/linux"
	"sockeye/internal/netns"
	"sockeye/internal/scope"
	"sockeye/internal/sockdiag"
	"sockeye/room"
)

var (
	socketLabels       = []string{"service", "cgroup"}
	descSockets        = prometheus.NewDesc("sockeye_sockets", "TCP connections, by their current bottleneck.", append(socketLabels, "limit"), nil)
	descSocketsQueued  = prometheus.NewDesc("sockeye_sockets_queued_bytes", "Memory of the send queues of the connections.", socketLabels, nil)
	descSocketsPayload = prometheus.NewDesc("sockeye_sockets_payload_bytes", "Payload bytes in the send queues of the connections.", socketLabels, nil)
	descSocketsUnsent  = prometheus.NewDesc("sockeye_sockets_unsent_bytes", "Payload bytes that are not sent yet.", socketLabels, nil)
	descSocketsUnread  = prometheus.NewDesc("sockeye_sockets_unread_bytes", "Received bytes that the applications have not read.", socketLabels, nil)
	descSocketsStuck   = prometheus.NewDesc("sockeye_sockets_zero_window", "TCP connections whose receive window is closed, because the application does not read.", socketLabels, nil)
	descSocketsRoom    = prometheus.NewDesc("sockeye_sockets_room_bytes", "Bytes that the connections together accept now without a partial send.", socketLabels, nil)
)

// cacheTime is the time for which scrapes reuse one dump of the sockets.
const cacheTime = 5 * time.Second

// patience is the time for which a scrape waits for a dump. TCP_INFO waits for the lock of the connection (tcp_get_info, net/ipv4/tcp.c,
// Linux 6.18), which any user can hold for as long as they want: in a system call that reads from a file system that does not answer.
const patience = 5 * time.Second

// errWaits is the error of a dump that takes longer.
var errWaits = fmt.Errorf("the kernel has not returned the TCP connections within %v: the host is busy, or a process holds the lock of a connection", patience)

// Collector collects metrics of the sockets of services and cgroups.
type Collector struct {
	log     *slog.Logger
	cgroups scope.Tree
	// services calls a function for each service, with the network namespace of the service.
	services func(func(c config.Service, users map[uint32]bool, inode uint64, enter *os.File))
	// paths returns the names of cgroups in the policy by their directories.
	paths []func() map[string]string

	mu     sync.Mutex
	last   *reading
	next   *reading     // that runs; nil: none
	kernel *room.Kernel // calibration; nil if unknown
}

// reading is a dump of the sockets of all namespaces.
type reading struct {
	begun time.Time
	done  chan struct{}
	// The following are valid when done is closed.
	ended time.Time
	sums  map[socketKey]*socketSum
	err   error
}

// New returns a collector for the sockets of services and of cgroups of the policy. services calls a function for each
// service, with the inode of its network namespace and a file to enter the namespace (nil for the agent's namespace).
// Each function of paths returns names of cgroups in the policy by their directories.
func New(h *domain.Host, services func(func(c config.Service, users map[uint32]bool, inode uint64, enter *os.File)), paths ...func() map[string]string) *Collector {
	return &Collector{log: h.Log, cgroups: h.Cgroups, services: services, paths: paths}
}

// Calibration is the calibration of the room estimator for one kernel.
type Calibration struct {
	Kernel string      `json:"kernel"` // release and version of uname(2)
	Room   room.Kernel `json:"room"`
}

// Calibrate calibrates the room estimator unless known belongs to the running kernel, and stores the result in known.
// The calibration opens a connection, which pinned programs of tune and trace may count.
func (m *Collector) Calibrate(known *Calibration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	release, version, err := linux.Uname()
	if err != nil {
		m.log.Warn("cannot calibrate the room estimator", "error", err)
		return
	}
	running := release + " " + version
	if known.Kernel != running || known.Room.Overhead <= 0 {
		kernel, err := room.Calibrate()
		if err != nil {
			m.log.Warn("cannot calibrate the room estimator", "error", err)
			return
		}
		*known = Calibration{running, kernel}
	}
	kernel := known.Room
	m.kernel = &kernel
}

// Collect sends the metrics of the connections of services and of tuned or traced cgroups. Each connection counts once.
func (m *Collector) Collect(out chan<- prometheus.Metric) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.read(); err != nil {
		return err
	}
	for key, sum := range m.last.sums {
		gauge := func(desc *prometheus.Desc, value int, more ...string) {
			out <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, float64(value), append([]string{key.service, key.cgroup}, more...)...)
		}
		for _, limit := range sockdiag.Limits {
			gauge(descSockets, sum.byLimit[limit], string(limit))
		}
		gauge(descSocketsQueued, sum.queued)
		gauge(descSocketsPayload, sum.payload)
		gauge(descSocketsUnsent, sum.unsent)
		gauge(descSocketsUnread, sum.unread)
		gauge(descSocketsStuck, sum.zeroWindow)
		if m.kernel != nil {
			gauge(descSocketsRoom, sum.room)
		}
	}
	return nil
}

// read makes last a dump that has ended within cacheTime. The caller holds mu.
func (m *Collector) read() error {
	if m.next != nil {
		select {
		case <-m.next.done: // after its scrape
			m.last, m.next = m.next, nil
		default:
		}
	}
	if m.next == nil && m.last != nil && time.Since(m.last.ended) <= cacheTime {
		return m.last.err
	}
	if m.next == nil {
		r := &reading{begun: time.Now(), done: make(chan struct{})}
		go func() {
			defer close(r.done)
			r.sums, r.err = m.sumSockets()
			r.ended = time.Now()
		}()
		m.next = r
	}
	select {
	case <-m.next.done:
		m.last, m.next = m.next, nil
		return m.last.err
	case <-time.After(time.Until(m.next.begun.Add(patience))):
		return errWaits
	}
}

// socketKey is a service and a cgroup of the policy; one of the two may be empty.
type socketKey struct{ service, cgroup string }

// socketSum is the sum over all sockets of a key.
type socketSum struct {
	byLimit                               map[sockdiag.Limit]int
	queued, payload, unsent, unread, room int
	zeroWindow                            int
}

// sumSockets dumps the sockets of each network namespace that has services, and of the agent's own if there are cgroups.
func (m *Collector) sumSockets() (map[socketKey]*socketSum, error) {
	sums := make(map[socketKey]*socketSum)
	cgroups, err := m.policyCgroups(sums)
	if err != nil {
		return nil, err
	}
	networks, err := m.socketNetworks(len(cgroups) > 0, sums)
	defer func() {
		for _, n := range networks {
			n.diag.Close()
		}
	}()
	if err != nil || len(networks) == 0 {
		return sums, err
	}
	for _, n := range networks {
		// A restarted dump discards the results of the interrupted one.
		type found struct {
			key    socketKey
			socket sockdiag.Socket
		}
		var here []found
		err := n.diag.Dump(sockdiag.Query{States: sockdiag.Sending, WithoutInfo: true}, func() { here = here[:0] }, func(s *sockdiag.Socket) {
			if key := (socketKey{n.serviceOf(s.Local, s.UID), cgroups[s.Cgroup]}); key != (socketKey{}) {
				here = append(here, found{key, *s})
			}
		})
		// The kernel waits for the lock of each socket whose TCP_INFO it returns: only connections that count are asked.
		for i := range here {
			if err != nil {
				return nil, err
			}
			one := &here[i]
			var s *sockdiag.Socket
			if s, err = n.diag.Get(&one.socket); s == nil {
				continue // it has ended, or an error
			}
			if sums[one.key] == nil {
				sums[one.key] = newSocketSum()
			}
			sums[one.key].add(s, n.diag.Settings, m.kernel)
		}
		if err != nil {
			return nil, err
		}
	}
	return sums, nil
}

// socketNetwork is a network namespace, and the services in it.
type socketNetwork struct {
	diag     *sockdiag.Conn
	services []servedService
}

// servedService is a service, and the users whose processes may be its members.
type servedService struct {
	config.Service
	users map[uint32]bool
}

// serviceOf returns the service of an accepted connection by its local address, or "". Connections of other users belong to no service.
func (n *socketNetwork) serviceOf(local netip.AddrPort, uid uint32) string {
	for _, s := range n.services {
		if !s.users[uid] {
			continue
		}
		for _, l := range s.Listeners {
			at := l.Address.Addr()
			if l.Protocol == config.TCP && l.Address.Port() == local.Port() &&
				(at == local.Addr() || at.IsUnspecified() && (at.Is4() == local.Addr().Is4() || at.Is6() && !l.V6Only)) {
				return s.Name
			}
		}
	}
	return ""
}

func newSocketSum() *socketSum { return &socketSum{byLimit: make(map[sockdiag.Limit]int)} }

func (t *socketSum) add(s *sockdiag.Socket, settings sockdiag.Settings, kernel *room.Kernel) {
	if v := s.Judge(); v.By != "" {
		t.byLimit[v.By]++
	}
	t.queued += s.Queued
	t.payload += int(s.Payload)
	t.unsent += int(s.Info.Notsent_bytes)
	t.unread += int(s.Unread)
	if s.ZeroWindow {
		t.zeroWindow++
	}
	if kernel != nil {
		t.room += kernel.Estimate(s.Snapshot(settings), 0, nil).Safe
	}
}

// policyCgroups returns the names of the tuned or traced cgroups and their descendants by cgroup id. A descendant has the
// name of its nearest ancestor in the policy. Each name gets an entry in sums.
func (m *Collector) policyCgroups(sums map[socketKey]*socketSum) (map[uint64]string, error) {
	names := make(map[string]string) // by directory
	for _, paths := range m.paths {
		maps.Copy(names, paths())
	}
	byID := make(map[uint64]string)
	for _, folder := range slices.Sorted(maps.Keys(names)) { // descendants come later
		name := names[folder]
		sums[socketKey{cgroup: name}] = newSocketSum()
		below, err := sockdiag.ReadCgroups(m.cgroups.Mount, folder)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		for id := range below {
			byID[id] = name
		}
	}
	return byID, nil
}

// socketNetworks opens sock_diag in each network namespace that has services over TCP, and in the agent's own if own is
// true. Each service gets an entry in sums; errors of a service are logged, and the service is skipped. The caller closes
// the networks, also after an error.
func (m *Collector) socketNetworks(own bool, sums map[socketKey]*socketSum) (networks []*socketNetwork, err error) {
	byInode := make(map[uint64]*socketNetwork)
	m.services(func(c config.Service, users map[uint32]bool, inode uint64, enter *os.File) {
		if !slices.ContainsFunc(c.Listeners, func(l config.Listener) bool { return l.Protocol == config.TCP }) {
			return
		}
		n := byInode[inode]
		if n == nil {
			var err error
			if n, err = openSocketNetwork(enter); err != nil {
				m.log.Error("metrics failed", "service", c.Name, "error", err)
				return
			}
			byInode[inode] = n
			networks = append(networks, n)
		}
		sums[socketKey{service: c.Name}] = newSocketSum()
		n.services = append(n.services, servedService{c, users})
	})
	inode, err := netns.Inode()
	if err != nil {
		return networks, err
	}
	if own && byInode[inode] == nil {
		n, err := openSocketNetwork(nil)
		if err != nil {
			return networks, err
		}
		networks = append(networks, n)
	}
	return networks, nil
}

func openSocketNetwork(network *os.File) (*socketNetwork, error) {
	n := &socketNetwork{}
	err := netns.Do(network, func() (err error) {
		n.diag, err = sockdiag.Open()
		return err
	})
	if err != nil {
		return nil, err
	}
	return n, nil
}
