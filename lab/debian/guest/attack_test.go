// SPDX-License-Identifier: Apache-2.0

//go:build debian

package guest

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"sockeye/internal/api"
)

// The attacker is an ordinary user with a lingering service manager.
const attacker = "mallory"

// attackerHome has the attacker's programs and their output.
const attackerHome = "/home/" + attacker

// stealer uses the name of member 0 and writes all received data to the file stolen.
//
//	stealer.py lookup BMP IPFIX: listen on ports of its own
//	stealer.py pass: get sockets of the service's ports from a private network namespace
const stealer = `import os, socket, sys, threading, time
home = "` + attackerHome + `"
def note(text):
    with open(home + "/stolen", "a") as f:
        f.write(text + "\n")
def sockets(host, bmp, ipfix):
    found = []
    for kind, port in ((socket.SOCK_STREAM, bmp), (socket.SOCK_DGRAM, ipfix)):
        s = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, kind)
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        s.bind((host, port))
        if kind == socket.SOCK_STREAM:
            s.listen(16)
        found.append(s)
    return found
if sys.argv[1] == "give":
    s = socket.socket(socket.AF_UNIX)
    s.connect(home + "/pass")
    own = sockets("::", 1790, 4739)
    socket.send_fds(s, [b"x"], [o.fileno() for o in own])
    s.recv(1)
    time.sleep(600)
if sys.argv[1] == "pass":
    if os.path.exists(home + "/pass"):
        os.unlink(home + "/pass")
    l = socket.socket(socket.AF_UNIX)
    l.bind(home + "/pass")
    l.listen(1)
    if os.fork() == 0:
        os.execvp("unshare", ["unshare", "--user", "--map-root-user", "--net", sys.executable, __file__, "give", "nfacctd-0.conf"])
    c, _ = l.accept()
    _, fds, _, _ = socket.recv_fds(c, 1, 2)
    tcp, udp = [socket.socket(fileno=fd) for fd in fds]
else:
    tcp, udp = sockets("127.0.0.1", int(sys.argv[2]), int(sys.argv[3]))
def accept():
    while True:
        c, a = tcp.accept()
        note("connection from %s" % (a,))
threading.Thread(target=accept, daemon=True).start()
with open(home + "/ready", "w") as f:
    f.write(str(os.getpid()))
while True:
    _, a = udp.recvfrom(65535)
    note("datagram from %s" % (a,))
`

// asAttacker runs a command as the attacker, with the attacker's service manager.
func asAttacker(t *testing.T, args ...string) result {
	t.Helper()
	uid := strings.TrimSpace(must(t, "id", "-u", attacker))
	return run(t, append([]string{"runuser", "-u", attacker, "--", "env", "XDG_RUNTIME_DIR=/run/user/" + uid,
		"DBUS_SESSION_BUS_ADDRESS=unix:path=/run/user/" + uid + "/bus"}, args...)...)
}

// linger creates the attacker with lingering enabled.
func linger(t *testing.T) {
	t.Helper()
	if run(t, "id", attacker).code != 0 {
		must(t, "useradd", "--create-home", "--home-dir", attackerHome, "--shell", "/bin/bash", attacker)
	}
	write(t, attackerHome+"/stealer.py", stealer)
	must(t, "loginctl", "enable-linger", attacker)
	wait(t, "the attacker's service manager runs", func() string {
		if r := asAttacker(t, "systemctl", "--user", "is-system-running"); r.code != 0 && !strings.Contains(r.stdout, "degraded") {
			return r.String()
		}
		return ""
	})
}

// steal runs the stealer as the attacker's nfacctd@0.service until the test ends, and returns its process.
func steal(t *testing.T, args ...string) int {
	t.Helper()
	linger(t)
	for _, name := range []string{"ready", "stolen"} {
		_ = os.Remove(attackerHome + "/" + name)
	}
	t.Cleanup(func() {
		asAttacker(t, "systemctl", "--user", "stop", "nfacctd@0.service")
		asAttacker(t, "systemctl", "--user", "reset-failed", "nfacctd@0.service")
	})
	r := asAttacker(t, append([]string{"systemd-run", "--user", "--unit=nfacctd@0.service", "/usr/bin/python3", attackerHome + "/stealer.py"}, append(args, "nfacctd-0.conf")...)...)
	if r.code != 0 {
		t.Fatalf("start the attack: %s", r)
	}
	wait(t, "the attacker's program has its sockets", func() string {
		if !exists(attackerHome + "/ready") {
			return asAttacker(t, "systemctl", "--user", "status", "--no-pager", "nfacctd@0.service").String()
		}
		return ""
	})
	pid, err := strconv.Atoi(read(t, attackerHome+"/ready"))
	if err != nil || !alive(pid) {
		t.Fatalf("the attacker's process %d does not exist: %v", pid, err)
	}
	if cgroup := read(t, fmt.Sprintf("/proc/%d/cgroup", pid)); !strings.Contains(cgroup, "nfacctd@0.service") {
		t.Fatalf("the attacker's process is in %s", cgroup)
	}
	return pid
}

// notStolen waits, and fails if the agent gave the slot to the attacker.
func notStolen(t *testing.T, pid int) {
	t.Helper()
	for begin := time.Now(); time.Since(begin) < 3*time.Second; time.Sleep(time.Second) {
		for _, s := range query[[]api.SlotStatus](t, "/v1/slots", nil) {
			if s.PID != 0 && (s.PID == pid || systemUnit(s.PID) != fmt.Sprintf("nfacctd@%d.service", s.Slot)) {
				t.Fatalf("slot %d has process %d (%s), the attacker's is %d", s.Slot, s.PID, s.Command, pid)
			}
		}
	}
	if exists(attackerHome + "/stolen") {
		t.Errorf("the attacker received: %s", read(t, attackerHome+"/stolen"))
	}
}

// theftReuseport is the attack with steering: reuseport. Member 0 is stopped, and a process of an ordinary user in a unit
// of the same name has sockets on the service's ports, created in a private network namespace.
func theftReuseport(t *testing.T, w *world, user bool) {
	defer restore(t)
	policy := firstPolicy(t)
	if !user {
		var kept []string
		for line := range strings.Lines(policy) {
			if !strings.HasPrefix(strings.TrimSpace(line), "user:") {
				kept = append(kept, line)
			}
		}
		policy = strings.Join(kept, "")
		path := t.TempDir() + "/policy.yaml"
		write(t, path, policy)
		if r := run(t, binary, "check", path); r.code == 2 {
			if !strings.Contains(r.stdout+r.stderr, "user") {
				t.Errorf("the error of check for a service without user has no hint: %s", r)
			}
			return
		}
	}
	apply(t, policy)
	waitReady(t, 0, 1, 2, 3)
	before := w.before(t)
	must(t, "systemctl", "stop", "nfacctd@0")
	w.whenever(t, always)
	pid := steal(t, "pass")
	notStolen(t, pid)
	// A new agent has no state about the attacker.
	must(t, "systemctl", "restart", "sockeye")
	waitAgent(t)
	notStolen(t, pid)
	w.whenever(t, withSession)
	must(t, "systemctl", "start", "nfacctd@0")
	waitReady(t, 0, 1, 2, 3)
	same(t, before, w.places(t))
}

// theftLookup is the attack with steering: lookup, in which a process of an ordinary user has its own ports. The function
// stops the agent and the members at the end.
func theftLookup(t *testing.T, w *world) {
	stop := func() {
		t.Helper()
		forMembers(t, "stop", "sockeye")
		must(t, binary, "reset")
		w.last = nil
	}
	defer func() {
		stop()
		for slot := range members {
			write(t, fmt.Sprintf("/etc/pmacct/nfacctd-%d.conf", slot), nfacctdConfig(slot, 0, 0))
		}
	}()
	stop()
	for slot := range members {
		write(t, fmt.Sprintf("/etc/pmacct/nfacctd-%d.conf", slot), nfacctdConfig(slot, 20000+slot, 21000+slot))
	}
	policy := strings.Replace(firstPolicy(t), "slots: 4", "slots: 2\n    steering: lookup", 1)
	policy = strings.Replace(policy, `"[::]:1790"`, `"[::]:1790", member_ports: 20000-20099`, 1)
	policy = strings.Replace(policy, `"[::]:4739"`, `"[::]:4739", member_ports: 21000-21099`, 1)
	write(t, policyPath, policy)
	must(t, "systemctl", "start", "sockeye", "nfacctd@0", "nfacctd@1")
	waitReady(t, 0, 1)
	w.places(t)
	must(t, "systemctl", "stop", "nfacctd@0")
	w.whenever(t, always)
	pid := steal(t, "lookup", "20050", "21050")
	notStolen(t, pid)
	must(t, "systemctl", "restart", "sockeye")
	waitAgent(t)
	notStolen(t, pid)
}

// sameNames starts user units of the attacker with the names of system units until the test ends.
func sameNames(t *testing.T) {
	t.Helper()
	linger(t)
	t.Cleanup(func() {
		asAttacker(t, "systemctl", "--user", "stop", "nfacctd@1.service", "telemetry.slice")
	})
	if r := asAttacker(t, "systemd-run", "--user", "--unit=nfacctd@1.service", "--slice=telemetry.slice", "sleep", "600"); r.code != 0 {
		t.Fatal(r)
	}
}
