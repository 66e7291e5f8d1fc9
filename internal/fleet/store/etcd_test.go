// SPDX-License-Identifier: Apache-2.0

package store

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"sockeye/internal/fleet/lead"
	"sockeye/internal/fleet/table"
	"sockeye/internal/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

// patience is the timeout for events on a busy host.
const patience = time.Minute

// server is a process of etcd.
type server struct {
	t         *testing.T
	arguments []string
	cmd       *exec.Cmd
	log       string
}

// clusters is the number of clusters of this process: each has ports of its own.
var clusters atomic.Int32

// startCluster starts servers of etcd on loopback ports, and returns their endpoints.
func startCluster(t *testing.T, size int, more ...string) (servers []*server, endpoints []string) {
	t.Helper()
	port := 2300 + 10*int(clusters.Add(1))
	scheme := "http"
	if slices.Contains(more, "--client-cert-auth") {
		scheme = "https"
	}
	var peers []string
	for i := range size {
		peers = append(peers, fmt.Sprintf("m%d=http://127.0.0.1:%d", i, port+5+i))
	}
	for i := range size {
		dir := t.TempDir()
		client, peer := fmt.Sprintf("%s://127.0.0.1:%d", scheme, port+i), fmt.Sprintf("http://127.0.0.1:%d", port+5+i)
		s := &server{t: t, log: filepath.Join(dir, "log"), arguments: append([]string{
			"--name", fmt.Sprintf("m%d", i), "--data-dir", filepath.Join(dir, "data"),
			"--listen-client-urls", client, "--advertise-client-urls", client, "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
			"--initial-cluster", strings.Join(peers, ","), "--logger", "zap", "--log-level", "error", "--unsafe-no-fsync",
		}, more...)}
		endpoints = append(endpoints, client)
		s.start()
		servers = append(servers, s)
	}
	return servers, endpoints
}

func (s *server) start() {
	s.t.Helper()
	file, err := os.OpenFile(s.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		s.t.Fatal(err)
	}
	defer file.Close()
	s.cmd = exec.Command("etcd", s.arguments...)
	s.cmd.Stdout, s.cmd.Stderr = file, file
	if err := s.cmd.Start(); err != nil {
		s.t.Fatalf("%v\nhint: tools/setup etcd-server", err)
	}
	s.t.Cleanup(s.kill)
}

func (s *server) kill() {
	if s.cmd != nil {
		_ = s.cmd.Process.Signal(unix.SIGCONT)
		_ = s.cmd.Process.Kill()
		_ = s.cmd.Wait()
		s.cmd = nil
	}
}

func (s *server) signal(signal unix.Signal) {
	s.t.Helper()
	if err := s.cmd.Process.Signal(signal); err != nil {
		s.t.Fatal(err)
	}
}

// member is a store of a host, with its last snapshot.
type member struct {
	*Etcd
	t         *testing.T
	name      string
	snapshots chan *Snapshot
	last      *Snapshot
	stop      func()
	leave     func()
}

// join opens the store of a host.
func join(t *testing.T, endpoints []string, name string, change ...func(*EtcdConfig)) *member {
	t.Helper()
	// A busy host does not run a process for a while.
	c := EtcdConfig{Endpoints: endpoints, Fleet: "test", Lease: 2 * DefaultLease, Log: slog.New(slog.DiscardHandler), Host: Registration{
		Host: table.Host{Name: name, Weight: 10, Addresses: []netip.Addr{netip.MustParseAddr("192.0.2.1")}}, Healthy: true,
	}}
	for _, f := range change {
		f(&c)
	}
	e, err := OpenEtcd(c)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	m := &member{Etcd: e, t: t, name: name, snapshots: make(chan *Snapshot, 1)}
	done := make(chan struct{})
	go func() { e.Run(ctx, m.snapshots); close(done) }()
	end := func(leave bool) { // as a participation ends
		cancel()
		<-done
		_ = e.Close(leave)
	}
	m.stop, m.leave = func() { end(false) }, func() { end(true) }
	t.Cleanup(m.stop)
	return m
}

// await waits for a snapshot that meets a condition.
func (m *member) await(what string, met func(s *Snapshot) bool) *Snapshot {
	m.t.Helper()
	deadline := time.After(patience)
	for {
		if m.last != nil && met(m.last) {
			return m.last
		}
		select {
		case m.last = <-m.snapshots:
		case <-deadline:
			m.t.Fatalf("%s: no snapshot with %s; the last one: %+v", m.name, what, m.last)
		}
	}
}

// alive returns the names of the hosts that are registered.
func alive(s *Snapshot) string {
	var names []string
	for i := range s.Hosts {
		if s.Hosts[i].Alive {
			names = append(names, s.Hosts[i].Name)
		}
	}
	return strings.Join(names, " ")
}

func (m *member) awaitAlive(names string) *Snapshot {
	m.t.Helper()
	return m.await("the hosts "+names, func(s *Snapshot) bool { return s.Connected && alive(s) == names })
}

// leads waits until one of the hosts leads, and returns that host: the first snapshot with all hosts may have no leader yet.
func leads(hosts ...*member) *member {
	hosts[0].t.Helper()
	s := hosts[0].await("a leader", func(s *Snapshot) bool { return s.Connected && s.Leader != "" })
	return hosts[slices.IndexFunc(hosts, func(m *member) bool { return m.name == s.Leader })]
}

// first returns a table in which one host has all buckets.
func first(epoch uint64, name string) *table.Table {
	t := &table.Table{Epoch: epoch, Nonce: 5, Hosts: []table.Host{{Name: name, Weight: 10}}}
	for b := range table.Buckets {
		t.Previous[b], t.Next[b] = table.None, table.None
	}
	return t
}

func (m *member) write(t *table.Table) {
	m.t.Helper()
	m.await("leadership", func(s *Snapshot) bool { return s.Connected && s.Leads })
	written(t, m)
}

// written writes a table by the host that leads, and returns that host. On a busy host, a request may end without an answer, and another host
// may lead then.
func written(t *table.Table, hosts ...*member) *member {
	hosts[0].t.Helper()
	for begun := time.Now(); ; time.Sleep(50 * time.Millisecond) {
		var err error
		for _, m := range hosts {
			select {
			case m.last = <-m.snapshots:
			default:
			}
			if m.last == nil || !m.last.Connected || !m.last.Leads {
				continue
			}
			if err = m.Write(m.t.Context(), m.last, t); err == nil {
				return m
			}
		}
		if time.Since(begun) > patience {
			hosts[0].t.Fatalf("no host has written the table: %v", err)
		}
	}
}

func (m *member) awaitEpoch(epoch uint64) *Snapshot {
	m.t.Helper()
	return m.await(fmt.Sprintf("epoch %d", epoch), func(s *Snapshot) bool { return s.Connected && s.Table != nil && s.Table.Epoch == epoch })
}

// TestHosts checks registration, settings, leadership and the end of hosts.
func TestHosts(t *testing.T) {
	t.Parallel()
	_, endpoints := startCluster(t, 1)
	a := join(t, endpoints, "a")
	a.await("leadership", func(s *Snapshot) bool { return s.Leads && s.Leader == "a" })
	b := join(t, endpoints, "b")
	b.awaitAlive("a b")
	a.awaitAlive("a b")
	if b.last.Leads || b.last.Leader != "a" {
		t.Errorf("two leaders: %+v", b.last)
	}
	if err := b.Write(t.Context(), b.last, first(1, "b")); !errors.Is(err, ErrNotLeader) {
		t.Errorf("a host that does not lead writes: %v", err)
	}
	old := a.last
	a.write(first(1, "a"))
	b.awaitEpoch(1)
	if err := a.Write(t.Context(), old, first(1, "b")); !errors.Is(err, ErrNotLeader) {
		t.Errorf("a table that was made from an earlier one is written: %v", err)
	}

	b.Update(Registration{Host: table.Host{Name: "b", Weight: 30}, Healthy: false, Applied: 1, Prepared: 1})
	of := func(s *Snapshot, name string) *lead.Host {
		for i := range s.Hosts {
			if s.Hosts[i].Name == name {
				return &s.Hosts[i]
			}
		}
		return &lead.Host{}
	}
	a.await("what b says", func(s *Snapshot) bool {
		h := of(s, "b")
		return h.Weight == 30 && !h.Healthy && h.Applied == 1 && h.Prepared == 1
	})
	if err := a.ChangeSetting(t.Context(), "b", to(Setting{State: lead.Drain, Weight: 7})); err != nil {
		t.Fatal(err)
	}
	b.await("the setting", func(s *Snapshot) bool { h := of(s, "b"); return h.State == lead.Drain && h.Weight == 7 })
	if err := b.ChangeSetting(t.Context(), "b", to(Setting{})); err != nil {
		t.Fatal(err)
	}
	a.await("no setting", func(s *Snapshot) bool { h := of(s, "b"); return h.State == lead.Ready && h.Weight == 30 })
	for name, w := range map[string]Setting{"b": {State: "gone"}, "c": {Weight: table.MostWeight + 1}, "": {State: lead.Drain}, "x\n": {State: lead.Drain}} {
		if err := a.ChangeSetting(t.Context(), name, to(w)); err == nil {
			t.Errorf("the setting %+v for %q is accepted", w, name)
		}
	}

	a.stop() // its lease expires
	b.await("the other leader", func(s *Snapshot) bool { return s.Leads && alive(s) == "b" })
	if h := of(b.last, "a"); h.Name != "a" || h.Alive {
		t.Errorf("the dead host of the table is %+v", h)
	}
	c := join(t, endpoints, "c")
	b.awaitAlive("b c")
	c.leave()
	begun := time.Now()
	b.awaitAlive("b")
	if took := time.Since(begun); took > patience/2 {
		t.Errorf("a host that leaves is alive for %v", took)
	}
}

// to returns a change to a setting.
func to(s Setting) func(Setting) (Setting, error) {
	return func(Setting) (Setting, error) { return s, nil }
}

// TestSettingsTogether changes the state and the weight of a host at the same time: no change is lost, although each of them writes
// both.
func TestSettingsTogether(t *testing.T) {
	t.Parallel()
	_, endpoints := startCluster(t, 1)
	a := join(t, endpoints, "a")
	a.awaitAlive("a")
	const changes = 50
	var both sync.WaitGroup
	for _, change := range []func(*Setting){func(s *Setting) { s.State = map[lead.State]lead.State{"": lead.Drain, lead.Drain: ""}[s.State] }, func(s *Setting) { s.Weight++ }} {
		both.Go(func() {
			for range changes {
				if err := a.ChangeSetting(t.Context(), "a", func(s Setting) (Setting, error) {
					change(&s)
					return s, nil
				}); err != nil {
					t.Error(err)
				}
			}
		})
	}
	both.Wait()
	var last Setting
	if err := a.ChangeSetting(t.Context(), "a", func(s Setting) (Setting, error) { last = s; return s, nil }); err != nil || last != (Setting{Weight: changes}) {
		t.Errorf("%+v, %v", last, err)
	}
}

// TestSettingWaits checks that a change of a setting waits for an etcd that is busy, or elects a leader, and that the error names an etcd that
// does not answer.
func TestSettingWaits(t *testing.T) {
	t.Parallel()
	servers, endpoints := startCluster(t, 1)
	a := join(t, endpoints, "a")
	a.awaitAlive("a")
	signal := func(s unix.Signal) {
		if err := servers[0].cmd.Process.Signal(s); err != nil {
			t.Error(err)
		}
	}
	stop := func() {
		signal(unix.SIGSTOP)
		testenv.Within(t, "the stop of all threads", func() bool {
			tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", servers[0].cmd.Process.Pid))
			return err == nil && len(tasks) > 0 && !slices.ContainsFunc(tasks, func(path string) bool {
				stat, err := os.ReadFile(path)
				return err == nil && !bytes.Contains(stat, []byte(") T "))
			})
		})
	}
	drain := func(s Setting) (Setting, error) { s.State = lead.Drain; return s, nil }
	stop()
	continued := time.AfterFunc(2*requestTimeout, func() { signal(unix.SIGCONT) })
	defer continued.Stop()
	if err := a.ChangeSetting(t.Context(), "a", drain); err != nil {
		t.Error(err)
	}
	stop()
	defer signal(unix.SIGCONT)
	if err := a.ChangeSetting(t.Context(), "a", drain); err == nil || err.Error() != "read the setting of host a: etcd has not answered within 10s" {
		t.Error(err)
	}
}

// TestOneName checks that a second process with the name of a host does not take its place, and says so.
func TestOneName(t *testing.T) {
	t.Parallel()
	_, endpoints := startCluster(t, 1)
	a := join(t, endpoints, "a")
	a.awaitAlive("a")
	second := join(t, endpoints, "a", func(c *EtcdConfig) { c.Host.Weight = 99 })
	s := second.await("the name to be taken", func(s *Snapshot) bool { return s.Taken })
	if !strings.Contains(strings.Join(s.Problems, "\n"), "another process has registered host a") || s.Leads {
		t.Errorf("%+v", s)
	}
	a.Update(Registration{Host: table.Host{Name: "a", Weight: 11}})
	a.await("its own weight", func(s *Snapshot) bool { return len(s.Hosts) == 1 && s.Hosts[0].Weight == 11 })
	a.stop()
	second.await("its place after the end of the first one", func(s *Snapshot) bool {
		return s.Leads && len(s.Problems) == 0 && !s.Taken && len(s.Hosts) == 1 && s.Hosts[0].Weight == 99
	})
}

// TestRubbish checks what the store may contain: the last good table stays in force, and the problem is named.
func TestRubbish(t *testing.T) {
	t.Parallel()
	_, endpoints := startCluster(t, 1)
	a := join(t, endpoints, "a")
	a.write(first(7, "a"))
	a.awaitEpoch(7)
	client := raw(t, endpoints)
	encode := func(table *table.Table) string {
		data, err := table.Encode()
		if err != nil {
			t.Fatal(err)
		}
		return string(data)
	}
	stranger := first(9, "a")
	stranger.Nonce = 6
	for _, one := range []struct{ key, value, problem string }{
		{tableKey, "\xff\x00rubbish", "the table in the store is refused: decode table"},
		{tableKey, encode(first(6, "a")), "the epoch of the table goes back from 7 to 6"},
		{tableKey, encode(stranger), "another nonce"},
		{tableKey, "", "the table in the store is refused"},
		{tableKey, encode(first(8+MostEpochs, "a")), "the epoch of the table jumps"},
		{hostKeys + "f", `{"name":"f","weight":1}`, `the registration of host "f" is damaged`}, // without a lease
		{hostKeys + "g", `{"name":"g","weight":4294967295}`, `the registration of host "g" is damaged`},
		{hostKeys + "b", "{", `the registration of host "b" is damaged`},
		{hostKeys + "c", `{"name":"d","weight":1}`, `the registration of host "c" is damaged`},
		{hostKeys + "e", `{"name":"` + strings.Repeat("e", mostValue) + `"}`, `the registration of host "e" is damaged`},
		{settingKeys + "a", `{"state":"gone"}`, `the setting of host "a" is damaged`},
	} {
		if _, err := client.Put(t.Context(), a.prefix+one.key, one.value); err != nil {
			t.Fatal(err)
		}
		s := a.await(one.problem, func(s *Snapshot) bool {
			return strings.Contains(strings.Join(s.Problems, "\n"), one.problem)
		})
		if s.Table == nil || s.Table.Epoch != 7 || one.key == tableKey && !s.Damaged {
			t.Errorf("%s: %+v", one.problem, s)
		}
		if _, err := client.Delete(t.Context(), a.prefix+one.key); err != nil {
			t.Fatal(err)
		}
	}
	// A leader that no lease ends is replaced.
	for _, value := range []string{"{", `{"name":"b","instance":"another"}`} {
		put, err := client.Put(t.Context(), a.prefix+leaderKey, value)
		if err != nil {
			t.Fatal(err)
		}
		for end := time.Now().Add(patience); ; time.Sleep(10 * time.Millisecond) {
			got, err := client.Get(t.Context(), a.prefix+leaderKey)
			if err != nil {
				t.Fatal(err)
			}
			if len(got.Kvs) == 1 && got.Kvs[0].ModRevision > put.Header.Revision && strings.Contains(string(got.Kvs[0].Value), a.instance) {
				break
			}
			if time.Now().After(end) {
				t.Fatalf("the leader %s is not replaced: %v", value, got.Kvs)
			}
		}
	}
	a.await("the lost table, and leadership again", func(s *Snapshot) bool {
		return s.Leads && s.Damaged && strings.Contains(strings.Join(s.Problems, "\n"), "has lost the table")
	})
	a.write(first(8, "a"))
	if s := a.awaitEpoch(8); s.Damaged || len(s.Problems) > 0 {
		t.Errorf("after the table was written again: %+v", s)
	}
}

func raw(t *testing.T, endpoints []string) *clientv3.Client {
	t.Helper()
	client, err := clientv3.New(clientv3.Config{Endpoints: endpoints, Logger: zap.NewNop(), DialTimeout: requestTimeout})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close() })
	return client
}

// TestRegistrationDeleted deletes the registration of a host, and puts one that no lease ends in its place: the host registers
// again.
func TestRegistrationDeleted(t *testing.T) {
	t.Parallel()
	_, endpoints := startCluster(t, 1)
	a, b := join(t, endpoints, "a"), join(t, endpoints, "b")
	b.awaitAlive("a b")
	client := raw(t, endpoints)
	for _, value := range []string{"", `{"name":"a","weight":5,"instance":"another"}`} {
		if _, err := client.Delete(t.Context(), a.prefix+hostKeys+"a"); err != nil {
			t.Fatal(err)
		}
		if value != "" {
			b.awaitAlive("a b")
			if _, err := client.Put(t.Context(), a.prefix+hostKeys+"a", value); err != nil {
				t.Fatal(err)
			}
			b.await("the damaged registration, or the next one", func(s *Snapshot) bool { return len(s.Problems) > 0 || alive(s) == "a b" })
		}
		b.await("the registration", func(s *Snapshot) bool { return alive(s) == "a b" && len(s.Problems) == 0 })
	}
}

// TestAbsent is that a host of the table that is not registered is unknown for a while after this host has reached the store,
// unless it was registered in this time.
func TestAbsent(t *testing.T) {
	v := &view{instance: "i", table: first(3, "b")}
	unknown := func(at time.Duration) bool {
		s := v.snapshot(at)
		i := slices.IndexFunc(s.Hosts, func(h lead.Host) bool { return h.Name == "b" })
		return s.Hosts[i].Unknown
	}
	register := func() { v.set(hostKeys+"b", []byte(`{"name":"b","weight":1}`), 1, true) }
	v.startSession(time.Minute, DefaultLease)
	if !unknown(time.Minute) || !unknown(time.Minute+absentTime-1) || unknown(time.Minute+absentTime) {
		t.Error("a host that was never registered")
	}
	if register(); unknown(time.Minute) {
		t.Error("a registered host is unknown")
	}
	if v.set(hostKeys+"b", nil, 2, false); unknown(time.Minute) {
		t.Error("a host whose registration has ended is unknown")
	}
	if v.startSession(time.Hour, DefaultLease); !unknown(time.Hour) {
		t.Error("a host is known in a session after an outage")
	}
	// The connection is lost again and again, for less than a lease.
	for at := time.Hour; at < time.Hour+absentTime; at += DefaultLease - 1 {
		if v.startSession(at, DefaultLease); !unknown(at) {
			t.Errorf("a host is known after %v", at-time.Hour)
		}
	}
	if v.startSession(time.Hour+absentTime, DefaultLease); unknown(time.Hour + absentTime) {
		t.Error("with an unstable connection, a host is unknown for ever")
	}
	v.startSession(2*time.Hour, DefaultLease)
	if v.set(settingKeys+"b", []byte(`{"state":"drain"}`), 3, false); !unknown(2 * time.Hour) {
		t.Error("a host with a setting is known")
	}
	// Somebody replaces the registration of a living host: the host writes it again, or is dead after a while.
	v.startSession(3*time.Hour, DefaultLease)
	register()
	v.contact += time.Minute
	v.set(hostKeys+"b", []byte("rubbish"), 2, true)
	if !unknown(v.contact + absentTime - 1) {
		t.Error("a host with a damaged registration is dead at once")
	}
	if unknown(v.contact + absentTime) {
		t.Error("a host with a damaged registration stays unknown")
	}
}

// TestServerEnds checks that a host keeps its table while the server does not run, and goes on with it afterwards.
func TestServerEnds(t *testing.T) {
	t.Parallel()
	servers, endpoints := startCluster(t, 1)
	a, b := join(t, endpoints, "a"), join(t, endpoints, "b")
	a.awaitAlive("a b")
	b.awaitAlive("a b")
	leader := leads(a, b)
	leader.write(first(3, "a"))
	b.awaitEpoch(3)
	servers[0].kill()
	s := b.await("no connection", func(s *Snapshot) bool { return !s.Connected })
	if s.Table == nil || s.Table.Epoch != 3 || s.Leads || alive(s) != "a b" || !strings.Contains(strings.Join(s.Problems, ""), "not connected to etcd") {
		t.Errorf("without the server: %+v", s)
	}
	if err := leader.Write(t.Context(), leader.last, first(4, "b")); err == nil {
		t.Error("a table is written without a server")
	}
	servers[0].start()
	if s := b.awaitAlive("a b"); s.Table.Epoch != 3 || len(s.Problems) > 0 {
		t.Errorf("with the server again: %+v", s)
	}
	// The history is compacted while a host does not listen.
	client := raw(t, endpoints)
	servers[0].signal(unix.SIGSTOP)
	a.await("no connection", func(s *Snapshot) bool { return !s.Connected })
	servers[0].signal(unix.SIGCONT)
	var revision int64
	for range 20 {
		put, err := client.Put(t.Context(), a.prefix+settingKeys+"a", `{"weight":5}`)
		if err != nil {
			t.Fatal(err)
		}
		revision = put.Header.Revision
	}
	if _, err := client.Compact(t.Context(), revision); err != nil {
		t.Fatal(err)
	}
	a.await("the last setting", func(s *Snapshot) bool { return s.Connected && len(s.Hosts) == 2 && s.Hosts[0].Weight == 5 })
}

// TestQuorum stops servers of three: nothing changes without one of them, and nobody writes without two.
func TestQuorum(t *testing.T) {
	t.Parallel()
	servers, endpoints := startCluster(t, 3)
	// Each host talks to one server only, as behind a partition.
	a, b, c := join(t, endpoints[:1], "a"), join(t, endpoints[1:2], "b"), join(t, endpoints[2:], "c")
	all := []*member{a, b, c}
	for _, m := range all {
		m.awaitAlive("a b c")
	}
	leader := leads(all...)
	leader.write(first(1, "a"))
	for _, m := range all {
		m.awaitEpoch(1)
	}
	// The server of a host that does not lead is cut off: the host is dead for the others, and keeps its table.
	at := slices.Index(all, leader)
	lone, rest := (at+1)%3, (at+2)%3
	servers[lone].signal(unix.SIGSTOP)
	names := []string{leader.name, all[rest].name}
	slices.Sort(names)
	leader.awaitAlive(strings.Join(names, " "))
	written(first(2, "a"), leader, all[rest])
	all[rest].awaitEpoch(2)
	if s := all[lone].await("no connection", func(s *Snapshot) bool { return !s.Connected }); s.Table.Epoch != 1 || s.Leads {
		t.Errorf("the host that is cut off: %+v", s)
	}
	// A second one: no quorum, and no writer.
	servers[rest].signal(unix.SIGSTOP)
	s := leader.await("no connection", func(s *Snapshot) bool { return !s.Connected })
	if s.Leads || s.Table.Epoch != 2 {
		t.Errorf("the leader without a quorum: %+v", s)
	}
	if err := leader.Write(t.Context(), s, first(3, "a")); err == nil {
		t.Error("a table is written without a quorum")
	}
	servers[lone].signal(unix.SIGCONT)
	servers[rest].signal(unix.SIGCONT)
	for _, m := range all {
		if s := m.awaitAlive("a b c"); s.Table.Epoch != 2 {
			t.Errorf("%s has epoch %d at the end", m.name, s.Table.Epoch)
		}
	}
}
