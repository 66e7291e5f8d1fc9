// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"sockeye/internal/config"
)

const (
	examples   = "../../examples"
	syslogPort = 5140
)

// TestExampleSyslog runs four syslog-ng with the configuration and the policy of examples/syslog-ng. Without Sockeye, the
// kernel's hash separates TCP and UDP of most devices. With Sockeye, the messages of each device reach one process, also those
// that are sent while the process restarts.
func TestExampleSyslog(t *testing.T) {
	h := newHost(t, config.Reuseport)
	e := &syslogExample{host: h, all: addresses(32)}
	for slot := range 4 {
		e.start(slot)
	}
	e.listening()
	e.send("without")
	together := e.count("without", nil)
	t.Logf("without Sockeye, TCP and UDP of %d of %d devices reach the same process", together, len(e.all))
	// Each device has a chance of 1 in 4: more than 20 of 32 have one of 2 in a million.
	if together > 20 {
		t.Errorf("without Sockeye, %d of %d devices are at one process", together, len(e.all))
	}
	e.setExamplePolicy()
	h.startAgent()
	e.ready(0, 1, 2, 3)
	e.send("with")
	if n := e.count("with", h.homes(4)); n != len(e.all) {
		t.Errorf("with Sockeye, TCP and UDP of %d of %d devices reach the same process", n, len(e.all))
	}
	h.kill(2)
	e.send("restart")
	e.start(2)
	e.ready(0, 1, 2, 3)
	if n := e.count("restart", h.homes(4)); n != len(e.all) {
		t.Errorf("during a restart, TCP and UDP of %d of %d devices reach the same process", n, len(e.all))
	}
}

// syslogExample are four syslog-ng processes and the devices that send to them.
type syslogExample struct {
	*host
	all   []netip.Addr
	conns []net.Conn
}

// readExample reads a file of an example.
func (h *host) readExample(name string) string {
	h.Helper()
	text, err := os.ReadFile(filepath.Join(examples, name))
	h.must(err)
	return string(text)
}

// replaceOnce replaces a text of an example, which must have it once.
func (h *host) replaceOnce(text, from, to string) string {
	h.Helper()
	if strings.Count(text, from) != 1 {
		h.Fatalf("the example has %q %d times:\n%s", from, strings.Count(text, from), text)
	}
	return strings.Replace(text, from, to, 1)
}

// setExamplePolicy writes the example's policy. There is no systemd in the lab: the processes are matched by their arguments.
func (e *syslogExample) setExamplePolicy() {
	e.Helper()
	policy := e.readExample("syslog-ng/etc/sockeye/policy.yaml")
	policy = e.replaceOnce(policy, `{match: {systemd_unit: "syslog-collector@*.service"}, slot: instance}`, `{match: {command_line: 'syslog-ng .*/slot-(\d+)\.conf'}, slot: group}`)
	policy = e.replaceOnce(policy, "user: syslog-collector", "user: root")
	policy = e.replaceOnce(policy, "    slots: 4\n", fmt.Sprintf("    slots: 4\n    cgroup: /%s\n", e.lab.CgroupPath()))
	policy, _, _ = strings.Cut(policy, "metrics:")
	e.replaceFile(e.policyPath(), policy)
}

func (e *syslogExample) log(slot int) string {
	return filepath.Join(e.dir, fmt.Sprintf("slot-%d.log", slot))
}

// start starts a syslog-ng as the example's unit does.
func (e *syslogExample) start(slot int) {
	e.Helper()
	text := strings.ReplaceAll(e.readExample("syslog-ng/etc/syslog-ng/syslog-collector@.conf"), "@SLOT@", fmt.Sprint(slot))
	file := filepath.Join(e.dir, fmt.Sprintf("slot-%d.conf", slot))
	e.must(os.WriteFile(file, []byte(strings.ReplaceAll(text, "/var/log/syslog-collector", e.dir)), 0o644))
	base := filepath.Join(e.dir, fmt.Sprintf("syslog-%d", slot))
	p := e.collectors.Command(context.Background(), "/usr/sbin/syslog-ng", "--foreground", "--no-caps", "--cfgfile="+file,
		"--persist-file="+base+".persist", "--pidfile="+base+".pid", "--control="+base+".ctl")
	p.Name = fmt.Sprintf("syslog-ng-%d", slot)
	e.must(p.Start())
	e.members[slot] = &member{Process: p, slot: slot}
}

// listening waits until all processes have opened both sockets.
func (e *syslogExample) listening() {
	e.Helper()
	e.eventually("all sockets", func() error {
		return e.collectors.Do(func() error {
			for _, table := range []string{"tcp6", "udp6"} {
				text, err := os.ReadFile("/proc/thread-self/net/" + table)
				if err != nil {
					return err
				}
				if n := strings.Count(string(text), fmt.Sprintf(":%04X 00000000000000000000000000000000:0000 ", syslogPort)); n != 4 {
					return fmt.Errorf("%s: %d sockets", table, n)
				}
			}
			return nil
		})
	})
}

// send sends a message over TCP, and one over UDP, from each device. The connections stay open.
func (e *syslogExample) send(text string) {
	e.Helper()
	e.fromDevices(e.all, func(a netip.Addr) {
		tcp, err := (&net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(a, 0)), Timeout: answerTime}).Dial("tcp", target(a, syslogPort).String())
		if err != nil {
			e.Errorf("%v: %v", a, err)
			return
		}
		udp, err := net.DialUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(a, 0)), net.UDPAddrFromAddrPort(target(a, syslogPort)))
		if err != nil {
			e.Errorf("%v: %v", a, err)
			return
		}
		_, errTCP := fmt.Fprintf(tcp, "<14>Nov 26 08:00:00 device test: %s tcp\n", text)
		_, errUDP := fmt.Fprintf(udp, "<14>Nov 26 08:00:00 device test: %s udp", text)
		if err := errors.Join(errTCP, errUDP); err != nil {
			e.Errorf("%v: %v", a, err)
		}
		e.mu.Lock()
		defer e.mu.Unlock()
		e.conns = append(e.conns, tcp, udp)
	})
	e.Cleanup(func() {
		for _, c := range e.conns {
			c.Close()
		}
	})
}

// count waits for all messages with a text, and returns the number of devices whose two messages are at one process. With
// home, each must be at the device's home slot.
func (e *syslogExample) count(text string, home home) (together int) {
	e.Helper()
	e.eventually("the messages of all devices", func() error {
		slots := map[netip.Addr][]int{}
		for slot := range 4 {
			log, err := os.ReadFile(e.log(slot))
			if err != nil && !errors.Is(err, os.ErrNotExist) {
				return err
			}
			for line := range strings.Lines(string(log)) {
				source, _, _ := strings.Cut(line, " ")
				if a, err := netip.ParseAddr(source); err == nil && strings.Contains(line, "test: "+text+" ") {
					slots[a.Unmap()] = append(slots[a.Unmap()], slot)
				}
			}
		}
		together = 0
		for _, a := range e.all {
			at := slots[a]
			if len(at) != 2 {
				return fmt.Errorf("%v: messages at the slots %v", a, at)
			}
			if home != nil && slices.ContainsFunc(at, func(slot int) bool { return slot != home(a) }) {
				e.Fatalf("%v: messages at the slots %v, home %d", a, at, home(a))
			}
			if at[0] == at[1] {
				together++
			}
		}
		return nil
	})
	return together
}
