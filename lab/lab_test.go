// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/cgroup"
	"sockeye/internal/testenv"
)

// helperEnv makes the test binary keep a lab open until it is killed.
const helperEnv = "SOCKEYE_LAB_HOLD"

func TestMain(m *testing.M) {
	if os.Getenv(helperEnv) != "" {
		hold()
	}
	os.Exit(testenv.Run(m))
}

func hold() {
	err := func() error {
		l, err := New(context.Background(), Options{Routers: 2, Dir: os.Getenv(helperEnv)})
		if err != nil {
			return err
		}
		for i := range 2 {
			if _, err := l.StartRouter(RouterConfig{Router: i}); err != nil {
				return err
			}
			if _, err := l.StartExporter(ExporterConfig{Router: i}); err != nil {
				return err
			}
		}
		c, err := l.StartCollector(CollectorConfig{})
		if err != nil {
			return err
		}
		// As an agent's bpffs.
		mounted := filepath.Join(l.Dir(), "mounted")
		if err := os.Mkdir(mounted, 0o755); err != nil {
			return err
		}
		if err := unix.Mount("none", mounted, "tmpfs", 0, ""); err != nil {
			return err
		}
		// A program that detaches from its parent and its process group, like a daemon.
		if err := l.Router(0).Namespace.Command(context.Background(), "sh", "-c", "setsid sleep 1000 & setsid sleep 1000 & wait").Start(); err != nil {
			return err
		}
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := l.WaitFor(ctx, "plugins", func() (bool, error) {
			pids, err := c.PIDs()
			return len(pids) > 1, err
		}); err != nil {
			return err
		}
		fmt.Println("up", l.Cgroup())
		select {}
	}()
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

// patience is the timeout for expected events on a busy host.
const patience = 2 * time.Minute

func newLab(t *testing.T, o Options) (*Lab, context.Context) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("network namespaces need root")
	}
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	o.Log = slog.New(slog.NewTextHandler(t.Output(), nil))
	l, err := New(ctx, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
	return l, ctx
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// held lists the network namespaces of processes and of their descriptors. process is a /proc pattern: "*", "self" or
// a number.
func held(process string) []string {
	var namespaces []string
	for _, pattern := range []string{"/ns/net", "/task/*/ns/net", "/fd/*"} {
		links, _ := filepath.Glob("/proc/" + process + pattern)
		for _, link := range links {
			if to, err := os.Readlink(link); err == nil && strings.HasPrefix(to, "net:[") {
				namespaces = append(namespaces, to)
			}
		}
	}
	slices.Sort(namespaces)
	return slices.Compact(namespaces)
}

// inodes returns the inodes of a lab's network namespaces.
func inodes(t *testing.T, l *Lab) []string {
	t.Helper()
	var all []string
	for _, n := range l.namespaces {
		to, err := os.Readlink(n.Path())
		must(t, err)
		all = append(all, to)
	}
	return all
}

// gone waits until no process or descriptor refers to the namespaces and the cgroup is removed.
func gone(t *testing.T, namespaces []string, cgroup string) {
	t.Helper()
	for deadline := time.Now().Add(patience); ; time.Sleep(20 * time.Millisecond) {
		present := held("[0-9]*")
		var left []string
		for _, n := range namespaces {
			if slices.Contains(present, n) {
				left = append(left, n)
			}
		}
		if _, err := os.Stat(cgroup); !os.IsNotExist(err) {
			left = append(left, cgroup)
		}
		if len(left) == 0 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("left behind: %v", left)
		}
	}
}

func TestPing(t *testing.T) {
	l, _ := newLab(t, Options{Routers: 3})
	collector, err := l.Namespace("collector")
	must(t, err)
	r := l.Routers()
	for _, c := range []struct {
		from *Namespace
		to   netip.Addr
	}{
		{collector, r[0].IPv4}, {collector, r[2].IPv6}, {r[0].Namespace, r[1].IPv4}, {r[1].Namespace, r[2].IPv6},
		{r[2].Namespace, CollectorIPv4}, {r[2].Namespace, CollectorIPv6},
	} {
		// One attempt, because addresses and interfaces are usable immediately.
		if err := c.from.Do(func() error { return ping(c.to, patience) }); err != nil {
			t.Errorf("%s to %v: %v", c.from.Name(), c.to, err)
		}
	}
	if err := collector.Do(func() error { return ping(netip.MustParseAddr("10.77.0.99"), 2*time.Second) }); err == nil {
		t.Error("an unassigned address replies")
	}

	extra, owned := netip.MustParsePrefix("fd77::1000/64"), netip.MustParsePrefix("10.79.0.0/16")
	must(t, r[0].Namespace.AddAddress("eth0", extra))
	must(t, r[0].Namespace.Own(owned))
	must(t, collector.AddRoute(owned, r[0].IPv4))
	for _, a := range []netip.Addr{extra.Addr(), netip.MustParseAddr("10.79.200.9")} {
		if err := collector.Do(func() error { return ping(a, patience) }); err != nil {
			t.Errorf("collector to %v of router 0: %v", a, err)
		}
	}
}

// ping sends one echo request from the calling thread's namespace and waits for the reply.
func ping(to netip.Addr, wait time.Duration) error {
	network, request, reply := "ip4:icmp", byte(8), byte(0)
	if to.Is6() {
		network, request, reply = "ip6:ipv6-icmp", 128, 129
	}
	c, err := net.DialIP(network, nil, &net.IPAddr{IP: to.AsSlice()})
	if err != nil {
		return err
	}
	defer c.Close()
	p := []byte{request, 0, 0, 0, 0x12, 0x34, 0, 1}
	if to.Is4() {
		p[2], p[3] = 0xe5, 0xca // checksum of this request; for IPv6 the kernel computes it
	}
	if _, err := c.Write(p); err != nil {
		return err
	}
	_ = c.SetReadDeadline(time.Now().Add(wait))
	for b := make([]byte, 1500); ; {
		n, _, err := c.ReadFrom(b) // without the IPv4 header, unlike Read
		if err != nil {
			return err
		}
		if n >= 8 && b[0] == reply {
			return nil
		}
	}
}

func TestRecordsAreCorrelated(t *testing.T) {
	l, ctx := newLab(t, Options{Routers: 3})
	c, err := l.StartCollector(CollectorConfig{User: "nobody", Wrap: []string{"env", "X=1"}})
	must(t, err)
	must(t, l.WaitListeners(ctx))
	for i, to := range []netip.Addr{CollectorIPv4, CollectorIPv6, CollectorIPv6} {
		_, err := l.StartRouter(RouterConfig{Router: i, Collector: netip.AddrPortFrom(to, 1790)})
		must(t, err)
	}
	// One router uses IPv4, one uses IPv6, and one sends BMP over IPv6 and IPFIX over IPv4; nfacctd identifies it by its router ID.
	exports := []netip.Addr{l.Router(0).IPv4, l.Router(1).IPv6, l.Router(2).IPv4}
	for i, source := range exports {
		_, err = l.StartExporter(ExporterConfig{Router: i, Source: source})
		must(t, err)
	}
	stop, err := l.StartTraffic(TrafficConfig{})
	must(t, err)
	must(t, l.WaitSessions(ctx))
	must(t, l.WaitBGP(ctx))
	sessions, err := l.Sessions()
	must(t, err)
	want := map[netip.Addr]int{l.Router(0).IPv4: 0, l.Router(1).IPv6: 0, l.Router(2).IPv6: 0}
	if !maps.Equal(sessions, want) {
		t.Errorf("sessions: %v, want %v", sessions, want)
	}
	// Records of IPv4 and IPv6 flows have the community and the AS path of the destination.
	var all []Record
	next := int64(0)
	err = l.WaitFor(ctx, "correlated records of all flows", func() (bool, error) {
		records, n, err := c.Records(next)
		next, all = n, append(all, records...)
		for i, peer := range exports {
			for j, to := range l.Routers() {
				for _, dst := range []netip.Addr{host(to.Prefix4), host(to.Prefix6)} {
					if i != j && !slices.ContainsFunc(all, func(x Record) bool {
						return x.Peer == peer && x.Dst == dst && x.Packets > 0 && strings.HasPrefix(x.Comms, to.Community) &&
							strings.HasSuffix(x.ASPath, fmt.Sprint(to.ASN))
					}) {
						return false, err
					}
				}
			}
		}
		return true, err
	})
	if err != nil {
		t.Errorf("%v; records: %+v", err, all[max(0, len(all)-20):])
	}
	// The current batch of records may have older flows.
	var o Outcome
	for o.CorrelatedShare != 1 {
		m, err := l.NewMeter()
		must(t, err)
		if err := l.WaitRecords(ctx); err != nil {
			t.Fatalf("correlated share %.2f; %v", o.CorrelatedShare, err)
		}
		o, err = m.Read()
		must(t, err)
		for _, r := range o.Routers {
			if !r.Together() || r.WithBMP != r.Records {
				t.Errorf("with one collector: %+v", r)
			}
		}
	}
	stop()
	stop()
}

func TestProcess(t *testing.T) {
	l, ctx := newLab(t, Options{Routers: 1})
	n := l.Router(0).Namespace

	p := n.Command(ctx, "sh", "-c", "id -un; echo $X; echo broken >&2; exit 3")
	p.User, p.Cmd.Env = "nobody", append(os.Environ(), "X=from-env")
	must(t, p.Start())
	var exit *exec.ExitError
	if err := p.Wait(); !errors.As(err, &exit) || exit.ExitCode() != 3 {
		t.Errorf("exit: %v", err)
	}
	if err := p.Err(); err == nil || !strings.HasSuffix(err.Error(), "nobody\nfrom-env\nbroken") {
		t.Errorf("the error does not contain the end of the log: %v", err)
	}

	// Child processes stay in the cgroup of their program, and Stop kills them.
	p = n.Command(ctx, "sh", "-c", "setsid sleep 1000 & trap '' TERM; setsid sleep 1000")
	must(t, p.Start())
	must(t, l.WaitFor(ctx, "forks", func() (bool, error) { pids, err := p.PIDs(); return len(pids) == 3, err }))
	must(t, p.Stop(50*time.Millisecond))
	if pids, err := p.PIDs(); len(pids) != 0 || err != nil {
		t.Errorf("after Stop: %v, %v", pids, err)
	}

	if err := n.Command(ctx, "/nonexistent").Start(); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("start of nothing: %v", err)
	}
	c, err := l.StartCollector(CollectorConfig{Extra: []string{"plugins: print[x"}})
	must(t, err)
	if err := l.WaitCollectors(ctx); err == nil || !strings.Contains(err.Error(), "brackets") || c.Running() {
		t.Errorf("collector with a wrong configuration: %v", err)
	}
	if _, err := program("no-such-program", "some-package"); err == nil || !strings.Contains(err.Error(), "some-package") {
		t.Errorf("missing program: %v", err)
	}
}

func TestCloseLeavesNothing(t *testing.T) {
	l, ctx := newLab(t, Options{Routers: 2})
	c, err := l.StartCollector(CollectorConfig{User: "nobody"})
	must(t, err)
	for i := range 2 {
		_, err := l.StartRouter(RouterConfig{Router: i})
		must(t, err)
		_, err = l.StartExporter(ExporterConfig{Router: i})
		must(t, err)
	}
	_, err = l.StartTraffic(TrafficConfig{})
	must(t, err)
	must(t, l.WaitFor(ctx, "plugins", func() (bool, error) { pids, err := c.PIDs(); return len(pids) > 1, err }))
	pids, err := cgroupPIDs(l.Cgroup())
	must(t, err)
	namespaces := inodes(t, l)
	if len(namespaces) != 4 || len(pids) < 6 {
		t.Errorf("namespaces %v, processes %v", namespaces, pids)
	}
	must(t, l.Close())
	must(t, l.Close())
	// Threads that were in a namespace may take a moment to exit.
	gone(t, namespaces, l.Cgroup())
	assertDead(t, pids)
	if _, err := os.Stat(l.Dir()); !os.IsNotExist(err) {
		t.Errorf("work directory: %v", err)
	}
	if err := c.ns.Command(ctx, "true").Start(); err == nil {
		t.Error("a process was started in a closed lab")
	}
}

func TestKillLeavesNothing(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("network namespaces need root")
	}
	t.Parallel()
	dir := t.TempDir()
	must(t, os.Chmod(filepath.Dir(dir), 0o755))
	exe, err := os.Executable()
	must(t, err)
	helper := exec.Command(exe)
	helper.Env = append(os.Environ(), helperEnv+"="+dir)
	helper.Stderr = t.Output()
	helper.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Unshareflags: unix.CLONE_NEWNS}
	out, err := helper.StdoutPipe()
	must(t, err)
	must(t, helper.Start())
	pgid := helper.Process.Pid
	defer func() { _ = unix.Kill(-pgid, unix.SIGKILL) }()
	line, err := bufio.NewReader(out).ReadString('\n')
	must(t, err)
	cgroup := strings.TrimSpace(strings.TrimPrefix(line, "up "))
	pids, err := cgroupPIDs(cgroup)
	must(t, err)
	if len(pids) < 8 {
		t.Errorf("too few processes for the test: %v", pids)
	}
	var namespaces []string
	for _, pid := range append(pids, pgid) {
		namespaces = append(namespaces, held(strconv.Itoa(pid))...)
	}
	own, err := os.Readlink("/proc/self/ns/net")
	must(t, err)
	slices.Sort(namespaces)
	namespaces = slices.DeleteFunc(slices.Compact(namespaces), func(s string) bool { return s == own })
	if len(namespaces) != 4 {
		t.Errorf("namespaces: %v", namespaces)
	}

	must(t, unix.Kill(-pgid, unix.SIGKILL)) // the whole group: a shell's job, a CI runner's timeout
	_ = helper.Wait()
	gone(t, namespaces, cgroup)
	assertDead(t, pids)
	for deadline := time.Now().Add(patience); ; time.Sleep(20 * time.Millisecond) {
		left, err := os.ReadDir(dir)
		must(t, err)
		if len(left) == 0 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("work files left behind: %v", left)
		}
	}
}

func assertDead(t *testing.T, pids []int) {
	t.Helper()
	for _, pid := range pids {
		b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
		if err != nil {
			continue
		}
		// A zombie has exited, but its new parent has not waited for it.
		if _, rest, _ := strings.Cut(string(b), ") "); !strings.HasPrefix(rest, "Z") && !strings.HasPrefix(rest, "X") {
			t.Errorf("process lives: %s", b)
		}
	}
}

func TestFailedNewLeavesNothing(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("network namespaces need root")
	}
	before := held("self")
	dir := t.TempDir()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := New(ctx, Options{Routers: 3, Dir: dir}); !errors.Is(err, context.Canceled) {
		t.Fatalf("error: %v", err)
	}
	if left, _ := os.ReadDir(dir); len(left) != 0 {
		t.Errorf("work files left behind: %v", left)
	}
	// Threads that were in a namespace may take a moment to exit.
	for deadline := time.Now().Add(patience); ; time.Sleep(20 * time.Millisecond) {
		left := slices.DeleteFunc(held("self"), func(n string) bool { return slices.Contains(before, n) })
		if len(left) == 0 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("namespaces left behind: %v, before %v", left, before)
		}
	}
	mount, err := cgroup.Mount()
	must(t, err)
	left, _ := filepath.Glob(filepath.Join(mount, cgroupPrefix+strconv.Itoa(os.Getpid())+"*"))
	if len(left) != 0 {
		t.Errorf("cgroups left behind: %v", left)
	}
	for _, n := range []int{-1, MaxRouters + 1} {
		if _, err := New(t.Context(), Options{Routers: n}); err == nil {
			t.Errorf("%d routers are taken", n)
		}
	}
}

func TestStaleCgroupsAreRemoved(t *testing.T) {
	l, ctx := newLab(t, Options{})
	dead := exec.Command("true") // its PID is not reused immediately
	must(t, dead.Run())
	stale := filepath.Join(l.mount, cgroupPrefix+strconv.Itoa(dead.Process.Pid)+cgroupSuffix)
	must(t, os.MkdirAll(filepath.Join(stale, "nfacctd-0"), 0o755))
	t.Cleanup(func() { _ = cgroup.Remove(stale) })
	second, err := New(ctx, Options{})
	must(t, err)
	must(t, second.Close())
	if _, err := os.Stat(stale); !os.IsNotExist(err) {
		t.Errorf("stale cgroup: %v", err)
	}
	if _, err := os.Stat(l.Cgroup()); err != nil {
		t.Errorf("cgroup of a running lab: %v", err)
	}
}
