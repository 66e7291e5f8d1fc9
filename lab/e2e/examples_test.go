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
	"regexp"
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
	e.setExamplePolicy("syslog-ng", "syslog-collector", "root", `{match: {command_line: 'syslog-ng .*/slot-(\d+)\.persist'}, slot: group}`)
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

// setExamplePolicy writes the policy of an example, whose members are instances of a unit. There is no systemd in the lab:
// the rule describes the processes in its place. The user of the members is that of the lab's processes.
func (h *host) setExamplePolicy(example, unit, user, rule string) {
	h.Helper()
	policy := h.readExample(example + "/etc/sockeye/policy.yaml")
	policy = h.replaceOnce(policy, fmt.Sprintf(`{match: {systemd_unit: "%s@*.service"}, slot: instance}`, unit), rule)
	policy = regexp.MustCompile(`(?m)^    user: \S+`).ReplaceAllLiteralString(policy, "    user: "+user)
	policy = h.replaceOnce(policy, "    slots: 4\n", fmt.Sprintf("    slots: 4\n    cgroup: /%s\n", h.lab.CgroupPath()))
	policy, _, _ = strings.Cut(policy, "metrics:")
	h.replaceFile(h.policyPath(), policy)
}

// exampleUnit returns the values of a setting in the unit of an example, for the instance of a slot.
func (h *host) exampleUnit(file, setting string, slot int) (values []string) {
	h.Helper()
	for line := range strings.Lines(h.readExample(file)) {
		if value, ok := strings.CutPrefix(strings.TrimSpace(line), setting+"="); ok {
			values = append(values, strings.ReplaceAll(value, "%i", fmt.Sprint(slot)))
		}
	}
	if len(values) == 0 {
		h.Fatalf("%s has no %s", file, setting)
	}
	return values
}

// bound waits until a number of sockets is bound to a port of [::]. The table is tcp6 or udp6 (proc_net(5)).
func (h *host) bound(table string, port, sockets int) {
	h.Helper()
	h.eventually("all sockets", func() error {
		return h.collectors.Do(func() error {
			text, err := os.ReadFile("/proc/thread-self/net/" + table)
			if err != nil {
				return err
			}
			if n := strings.Count(string(text), fmt.Sprintf(":%04X 00000000000000000000000000000000:0000 ", port)); n != sockets {
				return fmt.Errorf("%s: %d sockets", table, n)
			}
			return nil
		})
	})
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

func (e *syslogExample) log(slot int) string {
	return filepath.Join(e.dir, fmt.Sprintf("slot-%d.log", slot))
}

// start starts a syslog-ng as the example's unit does.
func (e *syslogExample) start(slot int) {
	e.Helper()
	run := filepath.Join(e.dir, fmt.Sprintf("run-%d", slot))
	e.must(os.MkdirAll(run, 0o755))
	text := e.replaceOnce(e.readExample("syslog-ng/etc/syslog-ng/syslog-collector@.conf"), "/var/log/syslog-collector", e.dir)
	e.must(os.WriteFile(filepath.Join(run, "syslog-ng.conf"), []byte(text), 0o644))
	const unit = "syslog-ng/etc/systemd/system/syslog-collector@.service"
	command := e.replaceOnce(e.exampleUnit(unit, "ExecStart", slot)[0], "${CREDENTIALS_DIRECTORY}", run)
	command = strings.ReplaceAll(command, fmt.Sprintf("/run/syslog-collector-%d", slot), run)
	p := e.collectors.Command(context.Background(), strings.Fields(e.replaceOnce(command, "/var/lib/syslog-collector", e.dir))...)
	p.Cmd.Env = append(os.Environ(), e.exampleUnit(unit, "Environment", slot)...)
	p.Name = fmt.Sprintf("syslog-ng-%d", slot)
	e.must(p.Start())
	e.members[slot] = &member{Process: p, slot: slot}
}

// listening waits until all processes have opened both sockets.
func (e *syslogExample) listening() {
	e.Helper()
	e.bound("tcp6", syslogPort, 4)
	e.bound("udp6", syslogPort, 4)
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
