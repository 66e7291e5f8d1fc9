// SPDX-License-Identifier: Apache-2.0

//go:build debian

package guest

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/api"
)

// placesPath stores the members of the routers across a reboot.
const placesPath = "/var/lib/sockeye-lab.json"

// domains is the part of the policy besides services that uses every domain.
const domains = `
tune:
  - {name: slice, cgroup: telemetry.slice, match: {local_port: 1790}, set: {rcvbuf: 150KB, notsent_lowat: 128KB}}
trace:
  - {name: bmp, cgroup: telemetry.slice, match: {local_port: 1790}, messages: 1/1, stages: [rx_stack, reader]}
bigtcp:
  - {interface: "` + link + `", ipv6: 128KB}
`

// services is the services part of a policy with keys that all versions know.
const services = `
services:
  telemetry:
    slots: 4
    user: pmacct
    listeners:
      - {protocol: tcp, address: "[::]:1790"}
      - {protocol: udp, address: "[::]:4739"}
    members:
      - {match: {systemd_unit: "nfacctd@*.service"}, slot: instance}
`

// TestFirstBoot installs Sockeye on a fresh Debian, and runs the scenarios of operators and
// attackers.
func TestFirstBoot(t *testing.T) {
	begin := time.Now()
	prepareHost(t)
	w := startRouters(t)
	usable := false
	t.Run("installed as the documents say", func(t *testing.T) {
		installAsDocumented(t, w)
		usable = true
	})
	if !usable {
		t.Fatal("Sockeye is not in the payload")
	}
	for _, test := range []struct {
		name string
		f    func(*testing.T, *world)
	}{
		{"steering goes on while the agent is stopped", agentStopped},
		{"an agent that is restarted loses no connection", agentRestarted},
		{"an agent that is killed comes back and loses no connection", agentKilled},
		{"a reload puts the policy in force", reloaded},
		{"a reload with a broken policy fails and says so", reloadedBroken},
		{"an agent that starts with a broken policy keeps the last one", startedBroken},
		{"a member that is restarted gets its routers back", memberRestarted},
		{"a member that is killed gets its routers back", memberKilled},
		{"tune, trace and bigtcp follow units and slices over restarts, and not a user's of the same names", domainsFollow},
		{"a rule for a unit inside a tuned slice is refused by check as by plan", nestedRules},
		{"every command works under the hardened unit", commands},
		{"a lingering user takes no slot in reuseport mode", func(t *testing.T, w *world) { theftReuseport(t, w, true) }},
		{"a lingering user takes no slot in reuseport mode without user", func(t *testing.T, w *world) { theftReuseport(t, w, false) }},
		{"the unit's exposure is 3.0 or less", score},
		// This runs before other versions write log lines.
		{"the journal has priorities, one time a line, and no left-over process", func(t *testing.T, _ *world) { journalLines(t, begin) }},
		// These scenarios start without an agent.
		{"a lingering user takes no slot in lookup mode", theftLookup},
		{"upgrade and return lose nothing", upgrades},
	} {
		t.Run(test.name, func(t *testing.T) { test.f(t, w) })
	}
	t.Run("places are noted for the reboot", func(t *testing.T) {
		restore(t)
		text, err := json.Marshal(w.places(t))
		if err != nil {
			t.Fatal(err)
		}
		write(t, placesPath, string(text))
		forMembers(t, "enable", "--no-reload")
	})
}

// prepareHost creates users, units and networks that exist before Sockeye is installed.
func prepareHost(t *testing.T) {
	t.Helper()
	for name, value := range map[string]string{
		"net/ipv4/icmp_ratelimit": "0", "net/ipv6/icmp/ratelimit": "0",
	} {
		write(t, "/proc/sys/"+name, value)
	}
	// udev sets this mode on a complete Debian.
	if err := os.Chmod("/dev/net/tun", 0o666); err != nil {
		t.Error(err)
	}
	if run(t, "id", memberUser).code != 0 {
		must(t, "useradd", "--system", "--home-dir", "/var/lib/pmacct", "--create-home", "--shell", "/usr/sbin/nologin", memberUser)
	}
	must(t, "install", "-d", "-o", memberUser, filepath.Dir(recordsPath(0)))
	for slot := range members {
		write(t, fmt.Sprintf("/etc/pmacct/nfacctd-%d.conf", slot), nfacctdConfig(slot, 0, 0))
	}
}

// installAsDocumented follows "Install" and "First policy" of the README.
func installAsDocumented(t *testing.T, w *world) {
	must(t, "cp", "-a", filepath.Join(payload, "install")+"/.", "/")
	if r := run(t, binary, "--version"); r.code != 0 || !strings.Contains(r.stdout, "sockeye") {
		t.Errorf("%s", r)
	}
	example := filepath.Join(shared, "examples/nfacctd/etc/systemd/system/nfacctd@.service")
	if !exists(example) {
		t.Errorf("make install does not install the example of a member's unit %s", example)
		write(t, "/etc/systemd/system/nfacctd@.service", "[Unit]\nAfter=sockeye.service\n[Service]\nUser=pmacct\nExecStart=/usr/sbin/nfacctd -f /etc/pmacct/nfacctd-%i.conf\nRestart=always\nRestartSec=1\n[Install]\nWantedBy=multi-user.target\n")
	} else {
		must(t, "install", "-m", "644", example, "/etc/systemd/system/nfacctd@.service")
	}
	// A single malloc arena that grows in large steps halves the start time of nfacctd.
	write(t, "/etc/systemd/system/nfacctd@.service.d/lab.conf",
		"[Service]\nSlice=telemetry.slice\nEnvironment=MALLOC_ARENA_MAX=1 MALLOC_TOP_PAD_=67108864\n"+
			"LoadCredential=\nReadWritePaths=/var/lib/nfacctd\nExecStart=\nExecStart=/usr/sbin/nfacctd -f /etc/pmacct/nfacctd-%i.conf\n")
	must(t, "systemctl", "daemon-reload")
	if unit := read(t, "/etc/systemd/system/nfacctd@.service"); !regexp.MustCompile(`(?m)^After=.*\bsockeye\.service`).MatchString(unit) {
		t.Errorf("the example of a member's unit does not start after the agent:\n%s", unit)
	}
	write(t, policyPath, firstPolicy(t))
	must(t, binary, "check", policyPath)
	must(t, "systemctl", "enable", "--now", "sockeye")
	must(t, binary, "doctor")
	forMembers(t, "start")
	waitReady(t, 0, 1, 2, 3)
	w.places(t)
	noProblem(t)
}

// restore applies the README's policy with a running agent and running members.
func restore(t *testing.T) {
	t.Helper()
	write(t, policyPath, firstPolicy(t))
	forMembers(t, "start", "sockeye")
	must(t, binary, "apply")
	waitReady(t, 0, 1, 2, 3)
}

func installCurrent(t *testing.T) {
	t.Helper()
	install(t, filepath.Join(payload, "install", binary))
	must(t, "install", "-m", "644", filepath.Join(payload, "install/etc/systemd/system/sockeye.service"), "/etc/systemd/system/sockeye.service")
	must(t, "systemctl", "daemon-reload")
}

// noProblem fails if status reports a problem.
func noProblem(t *testing.T) {
	t.Helper()
	wait(t, "status reports no problem", func() string {
		s := waitAgent(t)
		var problems []string
		for _, v := range s.Services {
			problems = append(problems, v.Problem)
			for _, m := range v.Waiting {
				problems = append(problems, m.Problem)
			}
		}
		for _, v := range s.Tune {
			problems = append(problems, v.Problem)
		}
		for _, v := range s.Trace {
			problems = append(problems, v.Problem)
		}
		for _, v := range s.BigTCP {
			problems = append(problems, v.Problem)
			for _, p := range v.Problems {
				problems = append(problems, p.Problem)
			}
		}
		return strings.Join(strings.Fields(strings.Join(problems, " ")), " ")
	})
}

func same(t *testing.T, before, after map[netip.Addr]int) {
	t.Helper()
	if !maps.Equal(before, after) {
		t.Errorf("routers changed their members: before %v, after %v", before, after)
	}
}

func agentStopped(t *testing.T, w *world) {
	before, sessions := w.before(t), w.sessions()
	must(t, "systemctl", "stop", "sockeye")
	same(t, before, w.places(t))
	w.unchanged(t, sessions)
	must(t, "systemctl", "start", "sockeye")
	waitReady(t, 0, 1, 2, 3)
	same(t, before, w.places(t))
	w.unchanged(t, sessions)
}

func agentRestarted(t *testing.T, w *world) {
	before, sessions := w.before(t), w.sessions()
	must(t, "systemctl", "restart", "sockeye")
	waitReady(t, 0, 1, 2, 3)
	same(t, before, w.places(t))
	w.unchanged(t, sessions)
}

func agentKilled(t *testing.T, w *world) {
	before, sessions := w.before(t), w.sessions()
	pid := mainPID(t, "sockeye")
	if err := unix.Kill(pid, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	wait(t, "systemd starts the agent again", func() string {
		if now := mainPID(t, "sockeye"); now == pid || now == 0 || property(t, "sockeye", "ActiveState") != "active" {
			return fmt.Sprintf("its main process is %d, it was %d", now, pid)
		}
		return ""
	})
	waitReady(t, 0, 1, 2, 3)
	same(t, before, w.places(t))
	w.unchanged(t, sessions)
}

func reloaded(t *testing.T, w *world) {
	defer restore(t)
	sessions := w.sessions()
	write(t, policyPath, firstPolicy(t)+domains)
	must(t, "systemctl", "reload", "sockeye")
	s := waitAgent(t)
	if len(s.Tune) != 1 || len(s.Trace) != 1 || len(s.BigTCP) != 1 {
		t.Errorf("after the reload the agent has %d tuned and %d traced cgroups, and %d networks of bigtcp, want 1 of each", len(s.Tune), len(s.Trace), len(s.BigTCP))
	}
	w.unchanged(t, sessions)
}

// broken is an invalid policy.
func broken(t *testing.T) string {
	return strings.Replace(firstPolicy(t), "slots: 4", "slots: many", 1)
}

func reloadedBroken(t *testing.T, w *world) {
	defer restore(t)
	sessions := w.sessions()
	write(t, policyPath, broken(t))
	if r := run(t, "systemctl", "reload", "sockeye"); r.code == 0 {
		t.Errorf("systemctl reload succeeds with a broken policy")
	}
	if r := run(t, binary, "status"); r.code != 0 || !strings.Contains(r.stdout, "not in force") {
		t.Errorf("status does not report that the policy on disk is not in force:\n%s", r)
	}
	waitReady(t, 0, 1, 2, 3)
	w.unchanged(t, sessions)
}

func startedBroken(t *testing.T, w *world) {
	defer restore(t)
	before, sessions := w.before(t), w.sessions()
	write(t, policyPath, broken(t))
	since := time.Now()
	if r := run(t, "systemctl", "restart", "sockeye"); r.code != 0 {
		t.Errorf("the agent does not start: %s", r)
	}
	if limit := property(t, "sockeye", "StartLimitIntervalUSec"); limit != "0" {
		t.Errorf("systemd limits restarts of the agent: StartLimitIntervalUSec=%s", limit)
	}
	if r := run(t, binary, "status"); r.code != 0 || !strings.Contains(r.stdout, "not in force") {
		t.Errorf("status does not report that the policy on disk is not in force:\n%s", r)
	}
	loud := false
	for _, e := range journal(t, since) {
		if p, err := strconv.Atoi(e.Priority); err == nil && p <= 4 && e.Comm == "sockeye" {
			loud = true
		}
	}
	if !loud {
		t.Error("the journal has no line of priority warning or above about the broken policy")
	}
	waitReady(t, 0, 1, 2, 3)
	same(t, before, w.places(t))
	w.unchanged(t, sessions)
}

// memberRestarted restarts a member that has routers with systemctl.
func memberRestarted(t *testing.T, w *world) {
	memberGone(t, w, func(unit string) { must(t, "systemctl", "restart", unit) })
}

func memberKilled(t *testing.T, w *world) {
	memberGone(t, w, func(unit string) {
		if err := unix.Kill(mainPID(t, unit), unix.SIGKILL); err != nil {
			t.Fatal(err)
		}
	})
}

func memberGone(t *testing.T, w *world, end func(unit string)) {
	before, sessions := w.before(t), w.sessions()
	slot := before[w.routers[0].address]
	unit := fmt.Sprintf("nfacctd@%d.service", slot)
	pid := mainPID(t, unit)
	end(unit)
	wait(t, "the member is back", func() string {
		if now := mainPID(t, unit); now == pid || now == 0 {
			return fmt.Sprintf("its main process is %d, it was %d", now, pid)
		}
		return ""
	})
	waitReady(t, 0, 1, 2, 3)
	same(t, before, w.places(t))
	after := w.sessions()
	for i, r := range w.routers {
		if before[r.address] != slot && after[i] != sessions[i] {
			t.Errorf("%v of member %d lost its connection when member %d was stopped", r.address, before[r.address], slot)
		}
	}
}

// tuned returns the tuning of a cgroup.
func tuned(t *testing.T, cgroup string) api.TuneStatus {
	t.Helper()
	for _, v := range query[[]api.TuneStatus](t, "/v1/tune", nil) {
		if v.Cgroup == cgroup {
			return v
		}
	}
	t.Fatalf("tune does not show %s", cgroup)
	return api.TuneStatus{}
}

// waitDomains waits until all rules of domains are in force, shown by counted connections and by
// the interface's size.
func waitDomains(t *testing.T, w *world) {
	t.Helper()
	wait(t, "the rules are in force", func() string {
		s := waitAgent(t)
		for _, v := range s.Tune {
			if !v.Attached || v.Problem != "" {
				return fmt.Sprintf("tune: %+v", v)
			}
		}
		for _, v := range s.Trace {
			if !v.Attached || v.Problem != "" {
				return fmt.Sprintf("trace: %+v", v)
			}
		}
		for _, v := range s.BigTCP {
			if v.Problem != "" || v.Applied != 1 {
				return fmt.Sprintf("bigtcp: %+v", v)
			}
		}
		return ""
	})
	count := func() uint64 { return tuned(t, "telemetry.slice").Rules[0].Connections }
	before := count()
	w.reconnect(t)
	wait(t, "the rule of tune counts a new connection", func() string {
		if now := count(); now <= before {
			return fmt.Sprintf("%d connections, %d before; %s", now, before, run(t, binary, "tune"))
		}
		return ""
	})
}

// domainsFollow starts user units with the names of system units. Rules apply to system units only.
func domainsFollow(t *testing.T, w *world) {
	defer restore(t)
	sameNames(t)
	ofUnit := strings.Replace(domains, "name: bmp, cgroup: telemetry.slice", "name: bmp, cgroup: nfacctd@1.service", 1)
	inForce := func() {
		t.Helper()
		waitDomains(t, w)
		if v := tuned(t, "telemetry.slice"); v.Path != "/telemetry.slice" {
			t.Errorf("tune is attached at %q", v.Path)
		}
	}
	apply(t, firstPolicy(t)+ofUnit)
	inForce()
	if size := gsoMaxSize(t); size != 128000 && size != 128<<10 {
		t.Errorf("%s has gso_max_size %d", link, size)
	}

	must(t, "systemctl", "restart", "nfacctd@1.service")
	waitReady(t, 0, 1, 2, 3)
	inForce()

	// systemd removes the slice when its last unit stops. Neither the running agent nor a new agent may use
	// the user's slice instead.
	forMembers(t, "stop", "telemetry.slice")
	wait(t, "the slice's cgroup is gone", func() string {
		if exists("/sys/fs/cgroup/telemetry.slice") {
			return "it is there"
		}
		return ""
	})
	away := func() {
		t.Helper()
		if s := waitAgent(t); len(s.Tune) != 1 || s.Tune[0].Attached || len(s.Trace) != 1 || s.Trace[0].Attached {
			t.Errorf("removed cgroups: tune status %+v, trace status %+v", s.Tune, s.Trace)
		}
	}
	away()
	must(t, "systemctl", "restart", "sockeye")
	time.Sleep(3 * time.Second)
	away()
	begin := time.Now()
	forMembers(t, "start")
	started := time.Since(begin)
	waitFor(t, patience, "the rule is attached again", func() string {
		if !tuned(t, "telemetry.slice").Attached {
			return "it is not"
		}
		return ""
	})
	t.Logf("the units started in %v; tune was attached %v later", started, time.Since(begin)-started)
	waitReady(t, 0, 1, 2, 3)
	inForce()

	apply(t, firstPolicy(t))
	if size := gsoMaxSize(t); size != 65536 {
		t.Errorf("%s has gso_max_size %d after the rule was removed, want 65536", link, size)
	}
}

// gsoMaxSize returns gso_max_size of the host's end of the routers' link.
func gsoMaxSize(t *testing.T) int {
	t.Helper()
	text := must(t, "ip", "-d", "link", "show", link)
	_, rest, _ := strings.Cut(text, "gso_max_size ")
	size, err := strconv.Atoi(strings.Fields(rest + " none")[0])
	if err != nil {
		t.Fatalf("no gso_max_size in %s", text)
	}
	return size
}

// reconnect closes the session of one router, which connects again.
func (w *world) reconnect(t *testing.T) {
	t.Helper()
	r := w.routers[0]
	r.mu.Lock()
	s, before := r.session, r.opened
	r.mu.Unlock()
	if s != nil {
		_ = s.Close()
	}
	wait(t, "a router connects again", func() string {
		r.mu.Lock()
		defer r.mu.Unlock()
		if r.opened == before {
			return "it did not"
		}
		return ""
	})
}

func nestedRules(t *testing.T, _ *world) {
	policy := filepath.Join(t.TempDir(), "policy.yaml")
	write(t, policy, firstPolicy(t)+`
tune:
  - {name: slice, cgroup: telemetry.slice, set: {rcvbuf: 150KB}}
  - {name: unit, cgroup: nfacctd@1.service, set: {rcvbuf: 100KB}}
`)
	check, plan := run(t, binary, "check", policy), run(t, binary, "plan", policy)
	if (check.code == 0) != (plan.code == 0) {
		t.Errorf("check and plan disagree:\n%s\n%s", check, plan)
	}
}

func score(t *testing.T, _ *world) {
	text := must(t, "systemd-analyze", "security", "--no-pager", "sockeye.service")
	m := exposure.FindStringSubmatch(text)
	if m == nil {
		t.Fatalf("systemd-analyze gives no score:\n%s", text)
	}
	if s, err := strconv.ParseFloat(m[1], 64); err != nil || s > 3.0 {
		t.Errorf("the unit scores %s, want 3.0 or less:\n%s", m[1], text)
	}
}

var ownTime = regexp.MustCompile(`\btime=|^\d{4}[-/]\d\d[-/]\d\d`)

func journalLines(t *testing.T, since time.Time) {
	priorities := map[string]int{}
	for _, e := range journal(t, since) {
		if strings.Contains(e.Message, "left-over process") || strings.Contains(e.Message, "unclean termination") {
			t.Errorf("log line of systemd about the keeper: %s", e.Message)
		}
		if e.Comm != "sockeye" {
			continue
		}
		priorities[e.Priority]++
		if ownTime.MatchString(e.Message) {
			t.Errorf("a line has two timestamps: %s", e.Message)
		}
		if strings.Contains(e.Message, "level=") {
			t.Errorf("a line has the level in its text: %s", e.Message)
		}
		if t.Failed() {
			break
		}
	}
	if len(priorities) < 2 {
		t.Errorf("all lines of the agent have the same priority: %v", priorities)
	}
}

// notedPlaces returns the members of the routers that the previous boot stored.
func notedPlaces(t *testing.T) map[netip.Addr]int {
	t.Helper()
	var places map[netip.Addr]int
	text, err := os.ReadFile(placesPath)
	if err == nil {
		err = json.Unmarshal(text, &places)
	}
	if err != nil {
		t.Fatalf("the first boot did not store the members of the routers: %v", err)
	}
	return places
}
