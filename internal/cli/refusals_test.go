// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestRefusals checks that a wrong command prints one line and a hint, and changes nothing.
func TestRefusals(t *testing.T) {
	h, pids := running(t)
	h.write("empty.yaml", "")
	h.write("typo.yaml", "services:\n  telemetry:\n    slots: 4\n    slotz: 4\n")
	h.write("bad.csv", "127.0.0.0/33,edge\n")
	h.write("bad-map.yaml", strings.Replace(twoServices, "devices.csv", "bad.csv", 1))
	h.write("no-map.yaml", strings.Replace(twoServices, "devices.csv", "none.csv", 1))
	h.write("no-user.yaml", strings.Replace(twoServices, "user: root", "user: nosuch", 1))
	h.write("no-netns.yaml", strings.Replace(twoServices, "user: root", "netns: /run/netns/nosuch", 1))
	h.write("not-netns.yaml", strings.Replace(twoServices, "user: root", "netns: /etc/passwd", 1))
	if err := unix.Mkfifo(filepath.Join(h.dir, "fifo"), 0o600); err != nil {
		t.Fatal(err)
	}
	h.write("fifo-netns.yaml", strings.Replace(twoServices, "user: root", "netns: DIR/fifo", 1))
	h.write("other-netns.yaml", strings.Replace(twoServices, "user: root", "netns: /proc/self/ns/net", 1))
	h.write("no-cgroup.yaml", strings.Replace(twoServices, "user: root\n    cgroup: CGROUP", "user: root\n    cgroup: /nosuch", 1))
	h.write("other.yaml", strings.Replace(twoServices, "spare:", "third:", 1))
	before := h.standing()
	for _, c := range []struct {
		args          string
		code          int
		message, hint string
	}{
		{"statsu", 2, `unknown command "statsu"`, "did you mean sockeye status?"},
		{"frobnicate", 2, `unknown command "frobnicate"`, "sockeye --help lists the commands"},
		{"help frobnicate", 2, `unknown command "frobnicate"`, "sockeye --help lists the commands"},
		{"completion ksh93", 2, `unknown command "ksh93"`, "sockeye completion --help lists the commands"},
		{"completion fish x", 2, `unexpected argument "x"`, "usage: sockeye completion fish [flags]"},
		{"status --sevrice x", 2, "unknown flag: --sevrice", "sockeye status --help lists the flags"},
		{"slots --sevrice x", 2, "unknown flag: --sevrice", "did you mean --service?"},
		{"slots -z", 2, "unknown shorthand flag: 'z' in -z", "sockeye slots --help lists the flags"},
		{"slots --service", 2, "flag needs an argument: --service", "sockeye slots --help lists the flags"},
		{"status now", 2, `unexpected argument "now"`, "usage: sockeye status [flags]"},
		{"version 2", 2, `unexpected argument "2"`, "usage: sockeye version [flags]"},
		{"slots --service telemetri", 2, `there is no service "telemetri"`, "did you mean telemetry?"},
		{"devices --service qqqqqqqqqq", 2, `there is no service "qqqqqqqqqq"`, "the policy has spare, telemetry"},
		{"slots --service ../../x", 2, `there is no service "../../x"`, "the policy has spare, telemetry"},

		{"where", 2, "ADDRESS is missing", "usage: sockeye where ADDRESS... [flags]"},
		{"where router-1", 2, `"router-1" is not an IP address`, "as in 192.0.2.1 or 2001:db8::1"},
		{"where 192.0.2.1/24", 2, `"192.0.2.1/24" is not an IP address`, "as in 192.0.2.1 or 2001:db8::1"},
		{"where --slots 4 192.0.2.1", 2, "--slots and --nonce must be used together", "sockeye status -o json shows a service's nonce"},
		{"where --nonce 4 192.0.2.1", 2, "--slots and --nonce must be used together", "sockeye status -o json shows a service's nonce"},
		{"where --slots 0 --nonce 1 192.0.2.1", 2, "--slots is 0", "1 to 1024"},
		{"where --slots 1025 --nonce 1 192.0.2.1", 2, "--slots is 1025", "1 to 1024"},
		{"where --slots many --nonce 1 192.0.2.1", 2, `--slots is "many"`, "a whole number"},
		{"where --slots 4 --nonce salt 192.0.2.1", 2, `--nonce is "salt"`, "a 64-bit number, as in 0x5eed"},
		{"where --slots 4 --nonce 0x10000000000000000 192.0.2.1", 2, `--nonce is "0x10000000000000000"`, "a 64-bit number, as in 0x5eed"},
		{"where --slots 4 --nonce 1 --offline 192.0.2.1", 2, "--slots, --plan and --offline are mutually exclusive", "each option selects another table"},
		{"where --slots 4 --nonce 1 --service spare 192.0.2.1", 2, "--slots and --service are mutually exclusive", "a table of --slots does not belong to a service"},
		{"where --device-map DIR/devices.csv 192.0.2.1", 2, "--device-map requires --slots", "without --slots the device map of the service is used"},
		{"where --pins DIR 192.0.2.1", 2, "--pins requires --offline", "without --offline the agent is asked"},
		{"where --slots 4 --nonce 1 --device-map DIR/none.csv 192.0.2.1", 2, "read device map: open DIR/none.csv: no such file or directory", ""},
		{"where --slots 4 --nonce 1 --device-map DIR/bad.csv 192.0.2.1", 2, "DIR/bad.csv:1: \"127.0.0.0/33\" is not an address or prefix\n  hint: as in 192.0.2.1 or 2001:db8:1::/48", ""},
		{"where --plan DIR/none.yaml 192.0.2.1", 2, "read policy file: open DIR/none.yaml: no such file or directory", "name a policy file"},
		{"where --plan DIR/policy.yaml --service nosuch 192.0.2.1", 2, `DIR/policy.yaml has no service "nosuch"`, "name a service of the file, or omit --service"},
		{"where --plan DIR/other.yaml 192.0.2.1", 2, "service third is not in force, its nonce is unknown", "use --slots and --nonce, or --service with a service in force"},
		{"where --offline --pins DIR/none 192.0.2.1", 2, "DIR/none has no pins of a service", "name the agent's directory with --pins"},
		{"where --offline --pins PINS --service nosuch 192.0.2.1", 2, "PINS has no pins of service nosuch", "name the agent's directory with --pins"},

		{"check", 2, "FILE is missing", "usage: sockeye check FILE [flags]"},
		{"check a b", 2, `unexpected argument "b"`, "usage: sockeye check FILE [flags]"},
		{"check DIR/none.yaml", 2, "read policy file: open DIR/none.yaml: no such file or directory", "name a policy file"},
		{"check DIR/bad-map.yaml", 2, "service telemetry: device_map: DIR/bad.csv:1: \"127.0.0.0/33\" is not an address or prefix\n  hint: as in 192.0.2.1 or 2001:db8:1::/48", ""},
		{"check DIR/no-map.yaml", 2, "service telemetry: device_map: read device map: open DIR/none.csv: no such file or directory", ""},

		{"plan DIR/none.yaml", 2, "read policy file: open DIR/none.yaml: no such file or directory", "name a policy file"},
		{"plan DIR/empty.yaml", 2, "DIR/empty.yaml: is empty", ""},
		{"plan DIR/typo.yaml", 2, "DIR/typo.yaml:2:3: services.telemetry.listeners: is missing\nDIR/typo.yaml:4:5: services.telemetry.slotz: unknown key\n  hint: did you mean slots?", ""},
		{"plan DIR/bad-map.yaml", 2, "service telemetry: device_map: DIR/bad.csv:1: \"127.0.0.0/33\" is not an address or prefix\n  hint: as in 192.0.2.1 or 2001:db8:1::/48", ""},
		{"plan DIR/no-user.yaml", 2, "DIR/no-user.yaml:7:11: services.telemetry.user: there is no user \"nosuch\"\n  hint: create it, or name another", ""},
		{"plan DIR/no-netns.yaml", 2, "service telemetry: open network namespace: open /run/netns/nosuch: no such file or directory", "create it, or correct netns"},
		{"plan DIR/not-netns.yaml", 2, "service telemetry: open network namespace: /etc/passwd is not a network namespace", "correct netns, as in /run/netns/NAME"},
		{"plan DIR/fifo-netns.yaml", 2, "service telemetry: open network namespace: DIR/fifo is not a network namespace", "correct netns, as in /run/netns/NAME"},
		{"plan DIR/other-netns.yaml", 4, "service telemetry: the agent has no right to enter network namespaces", "restart the agent; it keeps that right if a service names a netns then"},
		{"plan DIR/no-cgroup.yaml", 2, "service telemetry: find cgroup: stat CGROUPS/nosuch: no such file or directory", "create it, or correct cgroup"},
		{"plan DIR/policy.yaml --previous", 2, "--previous and FILE are mutually exclusive", "usage: sockeye plan [FILE] [flags]"},
		{"plan --previous", 2, "there is no previous policy", "apply keeps the policy that it replaces"},
		{"apply --previous", 2, "there is no previous policy", "apply keeps the policy that it replaces"},
		{"apply DIR/policy.yaml more", 2, `unexpected argument "more"`, "usage: sockeye apply [FILE] [flags]"},
		{"apply DIR/nosuch.yaml", 2, "read policy file: open DIR/nosuch.yaml: no such file or directory", "name a policy file"},

		{"run", 2, "PROGRAM is missing", "usage: sockeye run [--service S] [--slot N] [--isolated] -- PROGRAM [ARGUMENT...] [flags]"},
		{"run -- nosuchprogram", 2, "find program nosuchprogram: executable file not found in $PATH", "name a program in PATH, or a path"},
		{"run -- /nosuch/program", 2, "find program /nosuch/program: no such file or directory", "name a program in PATH, or a path"},
		{"run --service spare -- DIR/policy.yaml", 2, "find program DIR/policy.yaml: permission denied", "name a program in PATH, or a path"},
		{"run -- true", 2, "no service given", "name one with --service; the policy has spare, telemetry"},
		{"run --service nosuch -- true", 2, `there is no service "nosuch"`, "the policy has spare, telemetry"},
		{"run --service telemetry --slot 4 -- true", 2, "slot 4 is out of range", "service telemetry has slots 0 to 3"},
		{"run --service telemetry --slot -1 -- true", 2, "slot -1 is out of range", "service telemetry has slots 0 to 3"},
		{"run --service telemetry --slot 1 -- true", 5, "slot 1 is claimed by process PID", "end that process, or give this one another slot"},

		{"register --service spare", 2, "no process given", "name one with --pid"},
		{"register --service spare --pid 4194304", 2, "there is no process 4194304", "it may have ended; name another with --pid"},
		{"register --service spare --pid -1", 2, "there is no process -1", "it may have ended; name another with --pid"},
		{"register --service spare --pid nfacctd", 2, `--pid is "nfacctd"`, "a whole number"},
		{"register --pid 1", 2, "no service given", "name one with --service; the policy has spare, telemetry"},
		{"unregister --service telemetry", 2, "no slot given", "name one with --slot"},
		{"unregister --service telemetry --slot 3", 5, "slot 3 is empty", "sockeye slots lists the members"},
		{"unregister --service telemetry --slot 4", 2, "slot 4 is out of range", "service telemetry has slots 0 to 3"},
		{"unregister --slot 0", 2, "no service given", "name one with --service; the policy has spare, telemetry"},

		{"reset --pins PINS", 5, "lock PINS: another agent holds the pin directory", "stop the agent first"},
		{"reset --pins DIR", 2, "DIR is not the pin directory of an agent", "name the agent's directory with --pins"},
		{"agent --log-level loud", 2, `--log-level is "loud"`, "debug, info, warn or error"},
		{"agent --log-format xml", 2, `--log-format is "xml"`, "text or json"},
		{"doctor --policy DIR/none.yaml", 2, "read policy file: open DIR/none.yaml: no such file or directory", "name a policy file with --policy"},
	} {
		name := strings.ReplaceAll(c.args, "/", "_")
		t.Run(name, func(t *testing.T) {
			h := *h
			h.t = t
			replace := strings.NewReplacer("DIR", h.dir, "PINS", h.pins)
			args := strings.Fields(c.args)
			for i := range args {
				args[i] = replace.Replace(args[i])
			}
			cgroups := filepath.Dir(testCgroup())
			h.refused(c.code, strings.ReplaceAll(c.message, "CGROUPS", cgroups), c.hint, pids, args...)
			h.unchanged(before)
		})
	}
}

// TestMisfits checks that a process that cannot be a member is refused with the exact reason.
func TestMisfits(t *testing.T) {
	h, members := running(t)
	before := h.standing()
	udp := "udp [::]:4740"
	newNetns := func(cmd *exec.Cmd) { cmd.SysProcAttr.Cloneflags = unix.CLONE_NEWNET }
	for _, c := range []struct {
		name          string
		change        func(*exec.Cmd)
		sockets       []string
		code          int
		message, hint string
	}{
		{"no sockets", nil, nil, 1, "it has not opened tcp [::]:1791 yet", "register it once it listens, or start it with sockeye run, which waits for that"},
		{"one listener missing", nil, []string{"tcp [::]:1791"}, 1, "it has not opened udp [::]:4740 yet", "register it once it listens, or start it with sockeye run, which waits for that"},
		{"not listening", nil, []string{"tcp [::]:1791 deaf", udp}, 1, "its socket tcp [::]:1791 does not listen yet", "register it once it listens, or start it with sockeye run, which waits for that"},
		{"MPTCP", nil, []string{"tcp [::]:1791 mptcp", udp}, 5, "its socket mptcp [::]:1791 is MPTCP, which the kernel does not steer", "programs in Go: GODEBUG=multipathtcp=0, or ListenConfig.SetMultipathTCP(false)"},
		{"connected UDP", nil, []string{"tcp [::]:1791", "udp [::1]:4740 connected"}, 5, "its socket udp [::1]:4740 is connected to one peer, and receives nothing from others", "make the program receive on a socket that is not connected"},
		{"no SO_REUSEPORT", nil, []string{"tcp [::]:1791 alone", udp}, 5, "its socket tcp [::]:1791 lacks SO_REUSEPORT", "make the program set SO_REUSEPORT before bind, or use steering: lookup"},
		{"late SO_REUSEPORT", nil, []string{"tcp [::]:1791", "udp [::]:4740 late"}, 5, "its socket udp [::]:4740 is refused: update: invalid argument", "it was bound before it set SO_REUSEPORT; the program must set it first"},
		{"another address", nil, []string{"tcp [::1]:1791", udp}, 5, "its socket tcp [::1]:1791 is not bound to the listener's address ::", "make the listener's address what the member binds, or use steering: lookup"},
		{"IPv4 only", nil, []string{"tcp 0.0.0.0:1791", udp}, 5, "its socket tcp 0.0.0.0:1791 is not bound to the listener's address ::", "make the listener's address what the member binds, or use steering: lookup"},
		{"IPv6 only", nil, []string{"tcp [::]:1791 v6only", udp}, 5, "its socket tcp [::]:1791 has IPV6_V6ONLY true, the listener false", "set v6only of the listener to what the member does"},
		{"another network namespace", newNetns, []string{"tcp [::]:1791", udp}, 5, "it is in another network namespace than the service", "set netns of the service to the members' namespace"},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := *h
			h.t = t
			pid, end := h.member(c.change, c.sockets...)
			h.refused(c.code, "register process PID in slot 0: "+c.message, c.hint, []int{pid},
				"register", "--service", "spare", "--slot", "0", "--pid", strconv.Itoa(pid))
			h.unchanged(before)
			end()
		})
	}

	pid, _ := h.member(nil, "tcp [::]:1790", "udp [::]:4739")
	all := append([]int{pid}, members...)
	register := []string{"register", "--service", "telemetry", "--pid", strconv.Itoa(pid), "--slot"}
	h.refused(5, "slot 1 is claimed by process PID", "end that process, or give this one another slot", all, append(register, "1")...)
	h.refused(2, "slot 4 is out of range", "service telemetry has slots 0 to 3", all, append(register, "4")...)
	h.refused(5, "process PID is in slot 0 already", "sockeye unregister --service telemetry --slot 0 first", all,
		"register", "--service", "telemetry", "--slot", "3", "--pid", strconv.Itoa(members[0]))
	h.unchanged(before)
	if r := h.sockeye(append(register, "3")...); r.code != 0 || h.plain(r.out, pid) != "process PID registered in slot 3 of telemetry\n" {
		t.Errorf("the free slot: %+v", r)
	}
	// A refused process reserves no slot.
	idle, _ := h.member(nil)
	if r := h.sockeye("register", "--service", "spare", "--slot", "0", "--pid", strconv.Itoa(idle)); r.code != 1 {
		t.Errorf("a process without sockets: %+v", r)
	}
	other, _ := h.member(nil, "tcp [::]:1791", udp)
	if r := h.sockeye("register", "--service", "spare", "--slot", "0", "--pid", strconv.Itoa(other)); r.code != 0 {
		t.Errorf("slot after a refused registration: %+v", r)
	}
	another, _ := h.member(nil, "tcp [::]:1790", "udp [::]:4739")
	h.refused(5, "all 4 slots are taken", "raise slots in the policy", nil, "register", "--service", "telemetry", "--pid", strconv.Itoa(another))
}

// TestMisfitsOfLookup checks that in lookup mode a socket of one family only is refused: in a ready slot it would
// separate the TCP and UDP traffic of a device.
func TestMisfitsOfLookup(t *testing.T) {
	h := newHost(t, theft("steering: lookup", ownPorts, "user: root", "cgroup: CGROUP"))
	h.start()
	const clear = "make the program clear IPV6_V6ONLY, or set v6only of the listener and give the service another one for IPv4"
	for _, c := range []struct {
		name          string
		sockets       []string
		message, hint string
	}{
		{"no UDP", []string{"tcp [::]:20001 alone"}, "it has not opened udp port 21000-21009 yet", "register it once it listens, or start it with sockeye run, which waits for that"},
		{"IPV6_V6ONLY", []string{"tcp [::]:20001 v6only alone", "udp [::]:21001 alone"}, "its socket tcp [::]:20001 receives only IPv6, the listener tcp [::]:1790 also IPv4", clear},
		{"an IPv6 address", []string{"tcp [::]:20001 alone", "udp [::1]:21001 alone"}, "its socket udp [::1]:21001 receives only IPv6, the listener udp [::]:4739 also IPv4", clear},
		{"an IPv4 address beside both", []string{"tcp 127.0.0.1:20001 alone", "udp [::]:21001 alone"}, "its socket tcp 127.0.0.1:20001 receives only IPv4, its socket udp [::]:21001 also IPv6",
			"make the program listen on addresses of the same family with all sockets"},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := *h
			h.t = t
			pid, end := h.member(nil, c.sockets...)
			code := 5
			if c.name == "no UDP" {
				code = 1
			}
			h.refused(code, "register process PID in slot 0: "+c.message, c.hint, []int{pid}, "register", "--slot", "0", "--pid", strconv.Itoa(pid))
			end()
		})
	}
	for _, sockets := range [][]string{{"tcp [::]:20001 alone", "udp [::]:21001 alone"}, {"tcp 127.0.0.1:20001 alone", "udp 127.0.0.1:21001 alone"}} {
		pid, end := h.member(nil, sockets...)
		if r := h.sockeye("register", "--slot", "0", "--pid", strconv.Itoa(pid)); r.code != 0 {
			t.Errorf("%q: %+v", sockets, r)
		}
		end()
		h.eventually("the slot is empty", func() bool { return h.slotPIDs()[0] == 0 })
	}
}

// TestNoServices checks that a command for a service says that the policy of a new installation has none.
func TestNoServices(t *testing.T) {
	h := newHost(t, "services: {}\n")
	h.start()
	const hint = "sockeye init prints services for the collectors of this host"
	h.refused(2, "the policy has no services", hint, nil, "run", "--", "true")
	h.refused(2, "the policy has no services", hint, nil, "register", "--pid", "1")
	h.refused(2, `there is no service "telemetry"`, "the policy has no services; "+hint, nil, "slots", "--service", "telemetry")
}
