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
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"sockeye/internal/api"
	"sockeye/internal/doctor"
)

// onStartPolicy is a policy with a port that no other test uses. Connections in TIME_WAIT of a member that closed first
// would prevent a member of another user from binding the port.
const onStartPolicy = `services:
  telemetry:
    slots: 4
    steering: STEERING
    on_start: ON_START
    listeners:
      - {protocol: tcp, address: "ADDRESS:1796"}
      - {protocol: udp, address: "ADDRESS:4746"}
    user: root
    cgroup: CGROUP
    members: [{match: {user: root, command_line: "slot(.)$"}, slot: group}]
metrics: {listen: "127.0.0.1:9747"}
`

// ofDevices returns the device metrics of the service.
func ofDevices(t *testing.T) (split, adopted int) {
	t.Helper()
	client := &http.Client{Timeout: patience, Transport: &http.Transport{DisableKeepAlives: true}}
	answer, err := client.Get("http://127.0.0.1:9747/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		_, _ = fmt.Sscanf(line, `sockeye_devices_split{service="telemetry"} %d`, &split)
		_, _ = fmt.Sscanf(line, `sockeye_devices_adopted{service="telemetry"} %d`, &adopted)
	}
	return split, adopted
}

// early is a device that connected before the agent started.
type early struct {
	address string
	conn    net.Conn
	pid     string // of the member that has the connection
}

// connectEarly connects from an address and records the member that accepted.
func connectEarly(t *testing.T, address string) *early {
	t.Helper()
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(address)}, Timeout: patience}
	d.SetMultipathTCP(false)
	conn, err := d.Dial("tcp", target(address, "1796"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	answer := make([]byte, 64)
	if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	n, err := conn.Read(answer)
	if err != nil {
		t.Fatal(err)
	}
	return &early{address, conn, string(answer[:n])}
}

// target returns the destination of a device: for IPv6 the address of the device itself, because the kernel answers
// from it.
func target(address, port string) string {
	if strings.Contains(address, ":") {
		return net.JoinHostPort(address, port)
	}
	return net.JoinHostPort("127.0.0.1", port)
}

// lives reports whether the connection is open, without sending data.
func (e *early) lives(t *testing.T) bool {
	t.Helper()
	if err := e.conn.SetDeadline(time.Now().Add(20 * time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	_, err := e.conn.Read(make([]byte, 1))
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		return true
	case errors.Is(err, unix.ECONNRESET), errors.Is(err, io.EOF):
		return false
	}
	t.Fatalf("%s: %v", e.address, err)
	return false
}

// datagram returns the member that answers a datagram from the address.
func datagram(t *testing.T, address string) string {
	t.Helper()
	d := net.Dialer{LocalAddr: &net.UDPAddr{IP: net.ParseIP(address)}, Timeout: patience}
	conn, err := d.Dial("udp", target(address, "4746"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	answer := make([]byte, 64)
	if err = conn.SetDeadline(time.Now().Add(patience)); err == nil {
		_, err = conn.Write([]byte("?"))
	}
	n := 0
	if err == nil {
		n, err = conn.Read(answer)
	}
	if err != nil {
		return reason(err)
	}
	return string(answer[:n])
}

// networks counts the IPv6 prefixes.
var networks int

// addresses returns the addresses of devices, IPv6 if the listener accepts it.
func addresses(t *testing.T, ipv6 bool) (list []string) {
	t.Helper()
	for i := range 24 {
		list = append(list, fmt.Sprintf("127.0.1.%d", i+1))
	}
	if !ipv6 {
		return list
	}
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	// The kernel refuses for a short time to add an address that was just removed.
	networks++
	for i := range 12 {
		text := fmt.Sprintf("fd00:%x::%x", networks, i+1)
		addr, err := netlink.ParseAddr(text + "/128")
		if err != nil {
			t.Fatal(err)
		}
		addr.Flags = unix.IFA_F_NODAD
		if err := netlink.AddrAdd(lo, addr); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := netlink.AddrDel(lo, addr); err != nil {
				t.Error(err)
			}
		})
		awaitLocal(t, netip.MustParseAddr(text))
		list = append(list, text)
	}
	return list
}

// beforeAgent starts the members, then the devices, then the agent.
func beforeAgent(t *testing.T, steering, address, onStart string, flags ...string) (h *host, pids []int, ends []func(), devices []*early) {
	t.Helper()
	h = newHost(t, strings.NewReplacer("STEERING", steering, "ADDRESS", address, "ON_START", onStart).Replace(onStartPolicy))
	for slot := range 4 {
		pid, end := h.member(nil, strings.Join(append([]string{"tcp", address + ":1796"}, flags...), " "), fmt.Sprintf("udp %s:4746 slot%d", address, slot))
		pids, ends = append(pids, pid), append(ends, end)
	}
	all := addresses(t, address == "[::]")
	for i := range 40 { // of 24 devices alone, the kernel's hash splits all in one of 1000 runs
		all = append(all, fmt.Sprintf("127.0.2.%d", i+1))
	}
	for _, address := range all {
		devices = append(devices, connectEarly(t, address))
	}
	h.start()
	h.eventually("the members are registered", func() bool { return must[api.Status](h, "status").Services[0].Ready == 4 })
	return h, pids, ends, devices
}

// rightful returns the member in the slot of a device.
func (h *host) rightful(address string) string {
	h.t.Helper()
	where := must[[]api.WhereStatus](h, "where", address)
	for _, slot := range must[[]api.SlotStatus](h, "slots") {
		if slot.Slot == where[0].Slot {
			return strconv.Itoa(slot.PID)
		}
	}
	return ""
}

// TestOnStartReset starts the agent after members and devices: in both steering modes, it closes exactly the
// connections that are not at the member of their device's slot.
func TestOnStartReset(t *testing.T) {
	for _, steering := range []string{"reuseport", "lookup"} {
		for _, address := range []string{"[::]", "0.0.0.0"} {
			t.Run(steering+" "+address, func(t *testing.T) {
				h, _, _, devices := beforeAgent(t, steering, address, "reset")
				split := 0
				for _, d := range devices {
					rightful := h.rightful(d.address)
					if d.pid == rightful {
						continue
					}
					split++
					h.eventually(d.address+" is reset", func() bool { return !d.lives(t) })
					again := connectEarly(t, d.address)
					if udp := datagram(t, d.address); again.pid != rightful || udp != rightful {
						t.Errorf("%s: TCP at %s, UDP at %s, should be at %s", d.address, again.pid, udp, rightful)
					}
				}
				h.eventually("no device is split", func() bool { return must[api.Status](h, "status").Services[0].SplitDevices == 0 })
				for _, d := range devices {
					if d.pid == h.rightful(d.address) && !d.lives(t) {
						t.Errorf("%s was at the member of its slot, and was reset", d.address)
					}
				}
				if split == 0 || split == len(devices) {
					t.Fatalf("%d of %d devices were split", split, len(devices))
				}
				t.Logf("%d of %d devices were split", split, len(devices))
				// The next agent has nothing to close.
				h.kill()
				h.start()
				_ = unix.Nanosleep(&unix.Timespec{Sec: 2}, nil)
				for _, d := range devices {
					if d.pid == h.rightful(d.address) && !d.lives(t) {
						t.Errorf("%s was reset by the next agent", d.address)
					}
				}
			})
		}
	}
}

// TestOnStartForked checks that a connection held by a child of a member counts as the member's: it stays if the
// member is the right one, and is closed otherwise.
func TestOnStartForked(t *testing.T) {
	h, _, _, devices := beforeAgent(t, "reuseport", "0.0.0.0", "reset", "handover")
	split := 0
	for _, d := range devices {
		if d.pid != h.rightful(d.address) {
			split++
			h.eventually(d.address+" is reset", func() bool { return !d.lives(t) })
		}
	}
	h.eventually("no device is split", func() bool { return must[api.Status](h, "status").Services[0].SplitDevices == 0 })
	for _, d := range devices {
		if d.pid == h.rightful(d.address) && !d.lives(t) {
			t.Errorf("%s was at the member of its slot, and was reset", d.address)
		}
	}
	if split == 0 || split == len(devices) {
		t.Errorf("%d of %d devices were split", split, len(devices))
	}
}

// TestOnStartManyConnections checks that 10,000 connections are examined and closed within seconds, and that the
// agent answers meanwhile.
func TestOnStartManyConnections(t *testing.T) {
	const count = 10000
	h := newHost(t, strings.NewReplacer("STEERING", "reuseport", "ADDRESS", "0.0.0.0", "ON_START", "reset").Replace(onStartPolicy))
	for slot := range 4 {
		h.member(nil, "tcp 0.0.0.0:1796", fmt.Sprintf("udp 0.0.0.0:4746 slot%d", slot))
	}
	var devices []*early
	for i := range count {
		devices = append(devices, connectEarly(t, fmt.Sprintf("127.1.%d.%d", i/250, i%250+1)))
	}
	h.start()
	began, slowest := time.Now(), time.Duration(0)
	h.eventually("the members are registered", func() bool { return must[api.Status](h, "status").Services[0].Ready == 4 })
	for {
		asked := time.Now()
		status := must[api.Status](h, "status").Services[0]
		slowest = max(slowest, time.Since(asked))
		log, err := os.ReadFile(h.log)
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(string(log), "closed connections") && status.SplitDevices == 0 {
			break
		}
		if time.Since(began) > patience {
			t.Fatalf("%d devices are split after %v: %s", status.SplitDevices, time.Since(began), log)
		}
	}
	took := time.Since(began)
	var addresses []string
	for _, d := range devices {
		addresses = append(addresses, d.address)
	}
	pids := make(map[int]string)
	for _, slot := range must[[]api.SlotStatus](h, "slots") {
		pids[slot.Slot] = strconv.Itoa(slot.PID)
	}
	// One command line can hold a part of the addresses only.
	closed, wrong := 0, 0
	for part := range slices.Chunk(addresses, 500) {
		for _, where := range must[[]api.WhereStatus](h, append([]string{"where"}, part...)...) {
			d := devices[slices.Index(addresses, where.Address.String())]
			poll := []unix.PollFd{{Fd: descriptor(t, d.conn), Events: unix.POLLIN}}
			_, err := unix.Poll(poll, 0)
			for errors.Is(err, unix.EINTR) { // because of signals of the Go runtime
				_, err = unix.Poll(poll, 0)
			}
			if err != nil {
				t.Fatal(err)
			}
			gone := poll[0].Revents != 0
			if gone {
				closed++
			}
			if gone == (d.pid == pids[where.Slot]) {
				wrong++
			}
		}
	}
	if wrong > 0 {
		t.Errorf("%d of %d connections have the wrong state", wrong, count)
	}
	t.Logf("%d of %d connections closed in %v; the slowest status took %v", closed, count, took, slowest)
	if slowest > 20*time.Second { // on a busy host
		t.Errorf("a status took %v", slowest)
	}
}

func descriptor(t *testing.T, conn net.Conn) (number int32) {
	t.Helper()
	raw, err := conn.(*net.TCPConn).SyscallConn()
	if err == nil {
		err = raw.Control(func(fd uintptr) { number = int32(fd) })
	}
	if err != nil {
		t.Fatal(err)
	}
	return number
}

// TestOnStartAdopt checks that a device stays with the member of its connections across restarts of the agent, until
// that member exits. A device with connections at two members cannot be adopted.
func TestOnStartAdopt(t *testing.T) {
	for _, steering := range []string{"reuseport", "lookup"} {
		t.Run(steering, func(t *testing.T) {
			h, pids, ends, devices := beforeAgent(t, steering, "[::]", "adopt")
			together := func(when string) {
				t.Helper()
				for _, d := range devices {
					if udp := datagram(t, d.address); udp != d.pid || !d.lives(t) || h.rightful(d.address) != d.pid {
						t.Errorf("%s: %s: TCP at %s, alive %v, UDP at %s, its slot's is %s", when, d.address, d.pid, d.lives(t), udp, h.rightful(d.address))
					}
				}
			}
			var adopted int
			h.eventually("no device is split", func() bool {
				status := must[api.Status](h, "status").Services[0]
				adopted = status.AdoptedDevices
				return status.SplitDevices == 0 && adopted > 0 && !slices.ContainsFunc(devices, func(d *early) bool { return h.rightful(d.address) != d.pid })
			})
			together("adopted")
			if split, n := ofDevices(t); split != 0 || n != adopted {
				t.Errorf("metrics: %d devices split, %d adopted, want 0 and %d", split, n, adopted)
			}
			h.kill()
			together2 := func() {
				for _, d := range devices {
					if udp := datagram(t, d.address); udp != d.pid {
						t.Errorf("no agent: %s: UDP at %s, TCP at %s", d.address, udp, d.pid)
					}
				}
			}
			together2()
			h.start()
			h.eventually("the next agent has adopted the devices", func() bool { return must[api.Status](h, "status").Services[0].AdoptedDevices == adopted })
			together("the next agent")
			// When a member exits, the adopted devices return to their home slots.
			ends[0]()
			gone := strconv.Itoa(pids[0])
			h.eventually("the guests of slot 0 went home", func() bool {
				return must[api.Status](h, "status").Services[0].AdoptedDevices < adopted
			})
			for _, d := range devices {
				if where := must[[]api.WhereStatus](h, "where", d.address)[0]; d.pid != gone && !d.lives(t) {
					t.Errorf("%s was reset when another member exited", d.address)
				} else if udp := datagram(t, d.address); d.pid == gone && where.Slot != 0 && udp != strconv.Itoa(pids[where.Slot]) {
					t.Errorf("%s: UDP at %s, its slot is %d", d.address, udp, where.Slot)
				}
			}
		})
	}
}

// TestOnStartAdoptTwo checks that a device with connections at two members is not adopted: its connections at the
// wrong member are closed.
func TestOnStartAdoptTwo(t *testing.T) {
	h := newHost(t, strings.NewReplacer("STEERING", "reuseport", "ADDRESS", "[::]", "ON_START", "adopt").Replace(onStartPolicy))
	for slot := range 4 {
		h.member(nil, "tcp [::]:1796", fmt.Sprintf("udp [::]:4746 slot%d", slot))
	}
	var all []*early
	for members := map[string]bool{}; len(members) < 3; {
		all = append(all, connectEarly(t, "127.0.0.9"))
		members[all[len(all)-1].pid] = true
		if len(all) > 200 {
			t.Fatal("all connections are at two members")
		}
	}
	h.start()
	h.eventually("the members are registered", func() bool { return must[api.Status](h, "status").Services[0].Ready == 4 })
	rightful := h.rightful("127.0.0.9")
	for _, d := range all {
		if d.pid != rightful {
			h.eventually("its other connections are closed", func() bool { return !d.lives(t) })
		} else if !d.lives(t) {
			t.Error("a connection to the member of its slot was closed")
		}
	}
	if status := must[api.Status](h, "status").Services[0]; status.AdoptedDevices != 0 {
		t.Errorf("%d devices adopted", status.AdoptedDevices)
	}
}

// TestOnStartReport checks that the agent reports the devices and closes nothing.
func TestOnStartReport(t *testing.T) {
	h, _, _, devices := beforeAgent(t, "reuseport", "[::]", "report")
	split := 0
	for _, d := range devices {
		if d.pid != h.rightful(d.address) {
			split++
		}
	}
	var status api.ServiceStatus
	h.eventually("status counts the devices", func() bool {
		status = must[api.Status](h, "status").Services[0]
		return status.SplitDevices > 0
	})
	if status.SplitDevices != split || status.AdoptedDevices != 0 ||
		!strings.HasPrefix(status.Problem, fmt.Sprintf("%d devices have TCP connections at another member than their slot's: ", split)) ||
		!strings.HasSuffix(status.Problem, fmt.Sprintf(" and %d more", split-3)) {
		t.Errorf("want %d devices: %+v", split, status)
	}
	if n, adopted := ofDevices(t); n != split || adopted != 0 {
		t.Errorf("metrics: %d devices split, %d adopted, want %d and 0", n, adopted, split)
	}
	if r := h.sockeye("status"); !strings.Contains(r.out, "telemetry: "+status.Problem+"\nhint: set on_start: reset, which closes such connections, or adopt, which leaves the device with that member; or restart the member\n") {
		t.Errorf("status: %s", r.out)
	}
	findings, _ := h.examine(nil, "sockeye")
	if want := (doctor.Finding{Area: "service telemetry", Check: "devices", Result: "warning", Detail: status.Problem, Hint: status.Hint}); !slices.Contains(findings, want) {
		t.Errorf("doctor: want %+v in\n%+v", want, findings)
	}
	for _, d := range devices {
		if !d.lives(t) {
			t.Errorf("%s was reset", d.address)
		}
		d.conn.Close()
	}
	h.eventually("no device is split after the connections are closed", func() bool {
		return must[api.Status](h, "status").Services[0].SplitDevices == 0
	})
}

// TestOnStartRegisteredLater checks a process that accepted connections and is registered by command long after the
// start of the agent.
func TestOnStartRegisteredLater(t *testing.T) {
	h := newHost(t, strings.NewReplacer("STEERING", "reuseport", "ADDRESS", "[::]", "ON_START", "reset", "slot(.)$", "never(.)$").Replace(onStartPolicy))
	var pids []int
	for range 4 {
		pid, _ := h.member(nil, "tcp [::]:1796", "udp [::]:4746")
		pids = append(pids, pid)
	}
	var devices []*early
	for _, address := range addresses(t, false) {
		devices = append(devices, connectEarly(t, address))
	}
	h.start()
	_ = unix.Nanosleep(&unix.Timespec{Sec: 1}, nil)
	for _, d := range devices {
		if !d.lives(t) {
			t.Errorf("%s was reset while no slot was ready", d.address)
		}
	}
	for slot, pid := range pids {
		must[api.Membership](h, "register", "--slot", strconv.Itoa(slot), "--pid", strconv.Itoa(pid))
	}
	for _, d := range devices {
		if rightful := h.rightful(d.address); d.pid != rightful {
			h.eventually(d.address+" is reset", func() bool { return !d.lives(t) })
			if again := connectEarly(t, d.address); again.pid != rightful {
				t.Errorf("%s: TCP at %s, should be at %s", d.address, again.pid, rightful)
			}
		} else if !d.lives(t) {
			t.Errorf("%s was at the member of its slot, and was reset", d.address)
		}
	}
}
