// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"bufio"
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/godbus/dbus/v5"
	"golang.org/x/sys/unix"

	"sockeye/internal/api"
	"sockeye/internal/cgroup"
	"sockeye/internal/domain/domaintest"
	"sockeye/internal/member"
	"sockeye/internal/steer/keeper"
	"sockeye/internal/testenv"
)

// units is a fake systemd on a private message bus: it moves processes into cgroups, as systemd does for scope units.
// The tests in a virtual machine make the same call to the real systemd.
type units struct {
	mu      sync.Mutex
	started []string
	block   chan struct{} // an answer waits for it, unless nil
}

// property and auxiliaryUnit are the D-Bus types (sv) and (sa(sv)).
type property struct {
	Name  string
	Value dbus.Variant
}

type auxiliaryUnit struct {
	Name       string
	Properties []property
}

func (u *units) StartTransientUnit(name, mode string, properties []property, _ []auxiliaryUnit) (dbus.ObjectPath, *dbus.Error) {
	u.mu.Lock()
	block := u.block
	u.mu.Unlock()
	if block != nil {
		<-block
	}
	var pids []uint32
	var before []string
	for _, p := range properties {
		switch p.Name {
		case "PIDs":
			pids, _ = p.Value.Value().([]uint32)
		case "Before":
			before, _ = p.Value.Value().([]string)
		}
	}
	if want := []string{filepath.Base(testenv.CgroupPath())}; !slices.Equal(before, want) {
		return "", dbus.MakeFailedError(fmt.Errorf("Before=%q, want %q", before, want))
	}
	dir := filepath.Join(testenv.Cgroup(), name)
	if err := os.Mkdir(dir, 0o755); err != nil {
		return "", dbus.MakeFailedError(err)
	}
	// Before the move, which the tests wait for.
	u.mu.Lock()
	u.started = append(u.started, name)
	u.mu.Unlock()
	if len(pids) == 1 && mode == "fail" {
		if err := cgroup.Move(dir, int(pids[0])); err != nil {
			return "", dbus.MakeFailedError(err)
		}
	}
	return "/org/freedesktop/systemd1/job/1", nil
}

func (u *units) count() int {
	u.mu.Lock()
	defer u.mu.Unlock()
	return len(u.started)
}

// startBus starts a message bus with units as systemd.
func startBus(t *testing.T, u *units) *keeper.Manager {
	t.Helper()
	cmd := exec.Command("dbus-daemon", "--session", "--nofork", "--nopidfile", "--print-address", "--address=unix:path="+filepath.Join(t.TempDir(), "bus"))
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatalf("%v; the Debian package is dbus-daemon", err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
	})
	address, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	dial := func(ctx context.Context) (*dbus.Conn, error) {
		return dbus.Connect(strings.TrimSpace(address), dbus.WithContext(ctx))
	}
	conn, err := dial(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	if err := conn.Export(u, "/org/freedesktop/systemd1", "org.freedesktop.systemd1.Manager"); err != nil {
		t.Fatal(err)
	}
	if reply, err := conn.RequestName("org.freedesktop.systemd1", dbus.NameFlagDoNotQueue); err != nil || reply != dbus.RequestNameReplyPrimaryOwner {
		t.Fatalf("%v, %v", reply, err)
	}
	return &keeper.Manager{Dial: dial, Unit: testenv.CgroupPath()}
}

func comesTrue(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not within a minute: %s", what)
		}
	}
}

func keepersCgroup(pid int) string {
	p, err := member.Read(pid)
	if err != nil {
		return err.Error()
	}
	return p.Cgroup
}

const keptPolicy = `services:
  telemetry:
    slots: 4
    listeners:
      - {protocol: tcp, address: "[::]:1790"}
      - {protocol: udp, address: "[::]:4739"}
    user: root
    cgroup: CGROUP
`

// TestKeeperScope: a keeper gets one scope unit, and so does its replacement. The keeper does not become a member by that. An agent
// without an answer of systemd works, too.
func TestKeeperScope(t *testing.T) {
	dir, pins := t.TempDir(), testenv.BPFFS(t)+"/sockeye"
	policy := domaintest.Policy(keptPolicy, "cgroup: CGROUP", "cgroup: CGROUP\n    members: [{match: {user: root, systemd_unit: \"sockeye-keeper-*.scope\"}, slot: free}]")
	policy = domaintest.Policy(policy)
	u := new(units)
	manager := startBus(t, u)
	begin := func() *domaintest.Runner {
		t.Helper()
		d := New(domaintest.Host(t, dir, pins, slog.DiscardHandler))
		d.host.Systemd = manager
		a := domaintest.New(d.host.Host, d)
		a.Start(t, policy)
		return a
	}
	status := func(a *domaintest.Runner) api.ServiceStatus { return a.Status(t).Services[0] }
	ownUnit := func(pid int) string {
		return fmt.Sprintf("%s/sockeye-keeper-telemetry-%d.scope", testenv.CgroupPath(), pid)
	}

	a := begin()
	first := status(a).Keeper
	comesTrue(t, "the keeper has a unit", func() bool { return keepersCgroup(first) == ownUnit(first) })
	a.Stop()
	a = begin()
	if again := status(a).Keeper; again != first {
		t.Errorf("keeper %d, was %d", again, first)
	}

	time.Sleep(time.Second) // watchKeeper replaces one that lived a second at once
	if err := unix.Kill(first, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	var second int
	comesTrue(t, "another keeper has a unit", func() bool {
		second = status(a).Keeper
		return second != 0 && second != first && keepersCgroup(second) == ownUnit(second)
	})
	if n := u.count(); n != 2 {
		t.Errorf("%d units started, want 2: %q", n, u.started)
	}
	if s := status(a); s.Ready != 0 || len(s.Waiting) != 0 || !s.PortsSteered {
		t.Errorf("%+v", s)
	}
	a.Retire(t)
	a.Stop()

	// systemd does not answer, and nothing blocks.
	block := make(chan struct{})
	u.mu.Lock()
	u.block = block
	u.mu.Unlock()
	began := time.Now()
	a = begin()
	if took := time.Since(began); took > keeper.ScopeTimeout/2 || !status(a).PortsSteered {
		t.Errorf("start took %v: %+v", took, status(a))
	}
	third := status(a).Keeper
	if cgroup := keepersCgroup(third); cgroup != testenv.CgroupPath() {
		t.Errorf("its cgroup is %s", cgroup)
	}
	close(block)
	comesTrue(t, "the keeper has a unit", func() bool { return keepersCgroup(third) == ownUnit(third) })
	a.Retire(t)
	a.Stop()
}

// TestKeeperScopeRefused: without a bus, StartScope fails immediately. A keeper in another cgroup stays there.
func TestKeeperScopeRefused(t *testing.T) {
	self, err := member.Read(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	k := &keeper.Process{Self: member.ID{PID: self.PID, StartTime: self.StartTime}, Service: "a"}
	m := &keeper.Manager{Dial: func(ctx context.Context) (*dbus.Conn, error) {
		return dbus.Connect("unix:path=/nonexistent", dbus.WithContext(ctx))
	}, Unit: self.Cgroup}
	if unit, err := m.StartScope(t.Context(), k); err == nil || unit != "" {
		t.Errorf("%q, %v", unit, err)
	}
	m.Unit = "/system.slice/sockeye.service"
	if unit, err := m.StartScope(t.Context(), k); err != nil || unit != "" {
		t.Errorf("a keeper elsewhere: %q, %v", unit, err)
	}
	if m := keeper.FindManager(); m != nil && !strings.HasSuffix(self.Cgroup, ".service") {
		t.Errorf("found %+v", m)
	}
}
