// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/api"
	"sockeye/internal/sockaddr"
	"sockeye/internal/testenv"
)

// The tests in this file direct packets past the service, as any process of the members' user can.

// openBeside opens a socket with SO_REUSEPORT, as in "udp [::]:4739", which is connected to a peer if there is one.
func openBeside(t *testing.T, spec, peer string) (fd int, end func()) {
	t.Helper()
	domain, kind, local := parseSpec(spec)
	fd, err := unix.Socket(domain, kind|unix.SOCK_CLOEXEC, 0)
	if err == nil {
		err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1)
	}
	if err == nil {
		err = unix.Bind(fd, local)
	}
	if err == nil && kind == unix.SOCK_STREAM {
		err = unix.Listen(fd, 1)
	}
	if err == nil && peer != "" {
		err = unix.Connect(fd, sockaddr.Of(netip.MustParseAddrPort(peer)))
	}
	if err != nil {
		t.Fatalf("%s: %v", spec, err)
	}
	open := true
	end = func() {
		if open {
			unix.Close(fd)
		}
		open = false
	}
	t.Cleanup(end)
	return fd, end
}

// openPast opens a socket that takes packets past the service. "lo" binds the socket to the loopback interface. "unshared" and
// "disconnected" end after bind that the socket shares the address. "hidden" is disconnected, and no process has a descriptor: the socket is in a
// message that is not read.
func openPast(t *testing.T, spec, peer string) (end func()) {
	t.Helper()
	fields := strings.Fields(spec)
	how := strings.Join(fields[2:], "")
	fd, end := openBeside(t, strings.Join(fields[:2], " "), peer)
	var err error
	switch how {
	case "lo":
		err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_BINDTOIFINDEX, 1)
	case "unshared":
		err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 0)
	case "disconnected", "hidden":
		err = leaveGroup(fd)
	}
	if err == nil && how == "hidden" {
		var pair [2]int
		if pair, err = unix.Socketpair(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0); err == nil {
			err = unix.Sendmsg(pair[0], []byte("x"), unix.UnixRights(fd), nil, 0)
			end()
			end = sync.OnceFunc(func() { unix.Close(pair[0]); unix.Close(pair[1]) })
			t.Cleanup(end)
		}
	}
	if err != nil {
		t.Fatalf("%s: %v", spec, err)
	}
	return end
}

// leaveGroup takes a UDP socket at [::] out of its group.
func leaveGroup(fd int) error {
	return errors.Join(unix.Connect(fd, sockaddr.Of(netip.MustParseAddrPort("[::ffff:127.0.0.9]:9999"))), testenv.Disconnect(fd))
}

// telemetryOf returns the status of the service.
func telemetryOf(h *host) api.ServiceStatus {
	h.t.Helper()
	for _, s := range must[api.Status](h, "status").Services {
		if s.Name == "telemetry" {
			return s
		}
	}
	h.t.Fatal("no service telemetry")
	return api.ServiceStatus{}
}

// TestProgramReplaced replaces or detaches the program of each listener. The agent attaches it again, and says so.
func TestProgramReplaced(t *testing.T) {
	h, _ := running(t)
	steering := func() (list string) {
		for n := range 12 {
			for _, network := range []string{"tcp", "udp"} {
				address := fmt.Sprintf("127.0.1.%d", n+1)
				list += fmt.Sprintln(network, address, ask(network, address))
			}
		}
		return list
	}
	before := steering()
	replaced := uint64(0)
	first := unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K}
	for name, end := range map[string]func(fd int) error{
		"detach": func(fd int) error { return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DETACH_REUSEPORT_BPF, 0) },
		"replace": func(fd int) error {
			return unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_REUSEPORT_CBPF, &unix.SockFprog{Len: 1, Filter: &first})
		},
	} {
		for _, listener := range []string{"tcp [::]:1790", "udp [::]:4739"} {
			fd, exit := openBeside(t, listener, "")
			if err := end(fd); err != nil {
				t.Fatalf("%s %s: %v", name, listener, err)
			}
			exit()
			replaced++
			h.eventually(name+" is noticed", func() bool { return telemetryOf(h).ProgramsReplaced == replaced })
			if after := steering(); after != before {
				t.Errorf("%s: steering\n%s\nwas\n%s", name, after, before)
			}
			if problem := telemetryOf(h).Problem; !strings.Contains(problem, "another process has replaced or detached the program of "+listener) {
				t.Errorf("%s: %q", name, problem)
			}
		}
	}
	// The registration of a member replaces the program, and does not count.
	pid, _ := h.member(nil, "tcp [::]:1790", "udp [::]:4739")
	must[api.Membership](h, "register", "--service", "telemetry", "--slot", "3", "--pid", strconv.Itoa(pid))
	_ = unix.Nanosleep(&unix.Timespec{Sec: 3}, nil)
	if r := h.sockeye("events", "--kind", "program_replaced"); r.code != 0 || !strings.Contains(r.out, "listener tcp [::]:1790") {
		t.Errorf("events: %+v", r)
	}
	h.refused(2, `there is no service "telemetri"`, "did you mean telemetry?", nil, "events", "--service", "telemetri")
	h.refused(2, `there is no service "telemetri"`, "did you mean telemetry?", nil, "events", "--follow", "--service", "telemetri")
	h.shows("nothing changed\n", nil, "apply")
	if now := telemetryOf(h).ProgramsReplaced; now != replaced {
		t.Errorf("%d programs replaced after apply, want %d", now, replaced)
	}
}

// TestBypass opens sockets that the kernel prefers to those of the service, and sockets that it does not prefer.
func TestBypass(t *testing.T) {
	h, _ := running(t)
	pid, _ := h.member(nil, "tcp [::]:1790", "udp [::]:4739")
	must[api.Membership](h, "register", "--service", "telemetry", "--slot", "3", "--pid", strconv.Itoa(pid))
	const silent = "udp [::]:4739" // in the group, but not registered
	openBeside(t, silent, "")
	unnamed := 0
	for _, c := range []struct{ spec, peer, socket, takes, device, beside string }{
		{"udp 127.0.0.1:4739", "", "udp 127.0.0.1:4739", "packets to 127.0.0.1", "192.0.2.1", "2001:db8::1"},
		{"udp 0.0.0.0:4739", "", "udp 0.0.0.0:4739", "IPv4 packets", "192.0.2.1", "2001:db8::1"},
		{"tcp [::1]:1790", "", "tcp [::1]:1790", "packets to ::1", "2001:db8::1", "192.0.2.1"},
		{"udp 127.0.0.1:4739", "127.0.0.9:9999", "udp 127.0.0.1:4739 from 127.0.0.9:9999", "datagrams from 127.0.0.9:9999", "127.0.0.9", "127.0.0.8"},
		{"udp [::]:4739 lo", "", "udp [::]:4739", "packets of interface lo", "192.0.2.1", ""},
		{"udp [::]:4739 hidden", "", "udp [::]:4739", "packets to [::]:4739 (it has left the group)", "2001:db8::1", ""},
		{"udp [::]:4739 disconnected", "", "udp [::]:4739", "packets to [::]:4739 (it has left the group)", "2001:db8::1", ""},
	} {
		end := openPast(t, c.spec, c.peer)
		hidden := strings.HasSuffix(c.spec, "hidden")
		opened := time.Now()
		h.eventually(c.socket+" is found", func() bool { // on a busy host, its process a little later
			found := telemetryOf(h).Bypass
			return len(found) > 0 && (hidden || found[0].PID != 0)
		})
		if hidden || time.Since(opened) > 9*time.Second {
			unnamed++
		}
		service := telemetryOf(h)
		if b := service.Bypass; len(b) != 1 || b[0].Socket != c.socket || b[0].Takes != c.takes || (b[0].PID == 0) != hidden {
			t.Errorf("%s: %+v", c.socket, b)
		}
		if !strings.Contains(service.Problem, "can take "+c.takes+" past the service") {
			t.Errorf("%s: %q", c.socket, service.Problem)
		}
		if r := h.sockeye("why", c.device); !strings.Contains(r.out, "can take "+c.takes) {
			t.Errorf("%s: why %s: %+v", c.socket, c.device, r)
		}
		if c.beside != "" {
			if r := h.sockeye("why", c.beside); strings.Contains(r.out, "can take "+c.takes) {
				t.Errorf("%s: why %s: %+v", c.socket, c.beside, r)
			}
		}
		findings, _ := h.examine(nil, "sockeye")
		for _, f := range findings {
			if strings.Contains(f.Detail, fmt.Sprintf("%s of process %d ", c.socket, os.Getpid())) && strings.Contains(f.Detail, "receives nothing") && c.socket != silent {
				t.Errorf("%s: doctor: %+v", c.socket, f)
			}
		}
		if !strings.Contains(fmt.Sprint(findings), "can take "+c.takes+" past the service") {
			t.Errorf("%s: doctor: %+v", c.socket, findings)
		}
		end()
		h.eventually(c.socket+" is gone", func() bool { return len(telemetryOf(h).Bypass) == 0 })
	}
	for _, kind := range []string{"socket_bypasses", "no_socket_bypasses"} {
		r := h.sockeye("events", "--kind", kind)
		if strings.Count(r.out, "\n") < 4 {
			t.Errorf("events %s: %+v", kind, r)
		}
		// Each event has the process, unless it hides the socket, or is not found for a long time on a busy host.
		if without := strings.Count(r.out, "\n") - strings.Count(r.out, fmt.Sprintf("pid %d", os.Getpid())); kind == "socket_bypasses" && without > unnamed {
			t.Errorf("%d events without a process: %+v", without, r)
		}
	}
}

// TestBypassSpecific has two services on one port, of which one has an address. Its sockets do not bypass the other service. More sockets with
// a peer than the agent reports do not hide one that takes the packets of all devices.
func TestBypassSpecific(t *testing.T) {
	h := newHost(t, `services:
  telemetry:
    slots: 2
    listeners: [{protocol: udp, address: "0.0.0.0:4739"}]
    user: root
    cgroup: CGROUP
  one:
    slots: 1
    listeners: [{protocol: udp, address: "127.0.0.3:4739"}]
    user: root
    cgroup: CGROUP
`)
	h.start()
	for service, spec := range map[string]string{"telemetry": "udp 0.0.0.0:4739", "one": "udp 127.0.0.3:4739"} {
		pid, _ := h.member(nil, spec)
		must[api.Membership](h, "register", "--service", service, "--slot", "0", "--pid", strconv.Itoa(pid))
		openBeside(t, spec, "") // in the group, but not registered
	}
	bypass := func() map[string][]api.BypassStatus {
		all := make(map[string][]api.BypassStatus)
		for _, s := range must[api.Status](h, "status").Services {
			all[s.Name] = s.Bypass
		}
		return all
	}
	waitSearch := func() { time.Sleep(1100 * time.Millisecond) } // status searches once a second
	waitSearch()
	if all := bypass(); len(all["telemetry"])+len(all["one"]) > 0 {
		t.Errorf("sockets of the services: %+v", all)
	}
	findings, _ := h.examine(nil, "sockeye")
	if text := fmt.Sprint(findings); strings.Contains(text, "past the service") {
		t.Errorf("doctor: %s", text)
	}
	h.eventually("an answer from 127.0.0.3", func() bool { return memberReplies(t, "127.0.0.3:4739") })
	// The kernel finds an IPv4 socket before those that were bound earlier.
	end := openPast(t, "udp 127.0.0.3:4739 unshared", "")
	h.eventually("a socket that is not shared is found", func() bool { return len(bypass()["one"]) > 0 })
	if all := bypass(); len(all["one"]) != 1 || all["one"][0].Takes != "packets to 127.0.0.3:4739 (it has left the group)" || len(all["telemetry"]) != 0 {
		t.Errorf("a socket that is not shared: %+v", all)
	}
	if memberReplies(t, "127.0.0.3:4739") {
		t.Error("the member of 127.0.0.3 has received a datagram")
	}
	end()
	// A member has a second socket.
	pid, exit := h.member(nil, "udp 0.0.0.0:4739", "udp 127.0.0.5:4739")
	must[api.Membership](h, "register", "--service", "telemetry", "--slot", "1", "--pid", strconv.Itoa(pid))
	h.eventually("the second socket of a member is found", func() bool {
		return strings.Contains(telemetryOf(h).Problem, fmt.Sprintf("udp 127.0.0.5:4739 of process %d (exe, member of slot 1) can take", pid))
	})
	exit()
	for i := range 150 {
		openBeside(t, "udp 127.0.0.2:4739", fmt.Sprintf("127.0.0.9:%d", 10000+i))
	}
	_, end = openBeside(t, "udp 127.0.0.4:4739", "")
	h.eventually("many sockets are found", func() bool { return len(bypass()["telemetry"]) > 1 })
	all := bypass()["telemetry"]
	if len(all) != 100 || all[0].Socket != "udp 127.0.0.4:4739" {
		t.Errorf("%d sockets, the first is %+v", len(all), all[0])
	}
	if problem := telemetryOf(h).Problem; !strings.Contains(problem, ", and 97 sockets more") {
		t.Errorf("problem: %s", problem)
	}
	end()
}

// TestLockedConnection is that a local user who holds the lock of a connection with the service's port makes neither the agent nor a command
// wait, and does not keep the agent from ending.
func TestLockedConnection(t *testing.T) {
	h := newHost(t, `services:
  telemetry:
    slots: 1
    steering: lookup
    listeners: [{protocol: tcp, address: "0.0.0.0:1790"}, {protocol: udp, address: "0.0.0.0:4739"}]
    user: daemon
    cgroup: CGROUP
metrics: {listen: "127.0.0.1:9732"}
`)
	h.start()
	device, err := net.Listen("tcp", "127.0.0.3:0")
	if err != nil {
		t.Fatal(err)
	}
	defer device.Close()
	dialer := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(netip.MustParseAddrPort("127.0.0.2:1790"))}
	client, err := dialer.Dial("tcp", device.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	raw, err := client.(*net.TCPConn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var release func()
	const stranger = 12345 // no user of the service
	if failed := raw.Control(func(fd uintptr) {
		if err = unix.Fchown(int(fd), stranger, -1); err == nil {
			release = testenv.HoldLock(t, int(fd))
		}
	}); failed != nil || err != nil {
		t.Fatal(failed, err)
	}
	done := make(chan string, 1)
	go func() {
		problem := ""
		for _, args := range [][]string{{"status"}, {"devices"}, {"why", "127.0.0.1"}, {"slot", "set", "0", "maint"}, {"slot", "set", "0", "ready"}, {"apply"}, {"doctor"}} {
			if r := h.sockeye(args...); r.code != 0 && args[0] != "doctor" {
				problem += fmt.Sprintf("%s: %s%s", args, r.out, r.err)
			}
		}
		if page, err := http.Get("http://127.0.0.1:9732/metrics"); err != nil {
			problem += err.Error()
		} else {
			text, err := io.ReadAll(page.Body)
			page.Body.Close()
			if err != nil || !strings.Contains(string(text), "sockeye_sockets{") {
				problem += fmt.Sprintf("the metrics have no sockets: %v", err)
			}
		}
		done <- problem
	}()
	select {
	case problem := <-done:
		if problem != "" {
			t.Error(problem)
		}
		if problem, want := must[api.Status](h, "status").Services[0].Problem, "1 connection with the port of the service at a process of user 12345, who has no members: "+
			device.Addr().String()+" to 127.0.0.2:1790"; problem != want {
			t.Errorf("problem %q, want %q", problem, want)
		}
		ended := make(chan error, 1)
		go func() { ended <- errors.Join(h.agent.Process.Signal(unix.SIGTERM), h.agent.Wait()) }()
		select {
		case err := <-ended:
			if err != nil {
				t.Errorf("end of the agent: %v", err)
			}
			release()
		case <-time.After(20 * time.Second):
			release()
			t.Errorf("the agent does not end while the lock is held; then: %v", <-ended)
		}
	case <-time.After(30 * time.Second):
		t.Error("the agent waits for the owner of the connection")
		release()
		<-done
	}
}

// memberReplies reports whether a member answers a datagram to an address.
func memberReplies(t *testing.T, address string) bool {
	t.Helper()
	conn, err := net.Dial("udp", address)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := conn.Write([]byte("?")); err != nil {
		t.Fatal(err)
	}
	_ = conn.SetReadDeadline(time.Now().Add(time.Second))
	_, err = conn.Read(make([]byte, 64))
	return err == nil
}
