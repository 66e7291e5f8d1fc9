// SPDX-License-Identifier: Apache-2.0

package firstpolicy

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"sockeye/internal/config"
)

func port(text string) Port {
	protocol, address, _ := strings.Cut(text, " ")
	return Port{Protocol: protocol, Address: netip.MustParseAddrPort(address)}
}

func program(pid int, uid uint32, exe, unit string, ports ...string) *Program {
	_, instance, _ := strings.Cut(strings.TrimSuffix(unit, ".service"), "@")
	p := &Program{PID: pid, UID: uid, Exe: exe, Unit: unit, Instance: instance, Ports: make(map[Port]bool)}
	for _, text := range ports {
		p.Ports[port(text)] = true
	}
	return p
}

// TestServices checks the groups of programs, their rules, and that the agent accepts the policy.
func TestServices(t *testing.T) {
	const bmp, ipfix, syslog = "tcp [::]:1790", "udp [::]:4739", "udp [::]:514"
	const exe = "/usr/sbin/nfacctd"
	for _, test := range []struct {
		name     string
		programs []*Program
		want     []string // name, slots, ports, rules, problem
		alone    int
	}{
		{"nothing", nil, nil, 0},
		{"instances", []*Program{
			program(10, 0, exe, "nfacctd@1.service", bmp, ipfix), program(11, 0, exe, "nfacctd@0.service", bmp, ipfix),
		}, []string{"nfacctd 2 [tcp [::]:1790 udp [::]:4739] [{nfacctd@*.service  instance}] "}, 0},
		{"an instance is missing", []*Program{
			program(10, 0, exe, "nfacctd@3.service", bmp), program(11, 0, exe, "nfacctd@0.service", bmp),
		}, []string{"nfacctd 4 [tcp [::]:1790] [{nfacctd@*.service  instance}] "}, 0},
		{"instances are ports", []*Program{
			program(10, 0, exe, "nfacctd@1790.service", bmp), program(11, 0, exe, "nfacctd@1791.service", bmp),
		}, []string{"nfacctd 2 [tcp [::]:1790] [{nfacctd@1790.service  0} {nfacctd@1791.service  1}] "}, 0},
		{"instances with leading zeros", []*Program{
			program(10, 0, exe, "nfacctd@00.service", bmp), program(11, 0, exe, "nfacctd@01.service", bmp),
		}, []string{"nfacctd 2 [tcp [::]:1790] [{nfacctd@00.service  0} {nfacctd@01.service  1}] "}, 0},
		{"two templates", []*Program{
			program(10, 0, exe, "a@0.service", bmp), program(11, 0, exe, "b@0.service", bmp),
		}, []string{"nfacctd 2 [tcp [::]:1790] [{a@0.service  0} {b@0.service  1}] "}, 0},
		{"one unit", []*Program{
			program(10, 0, exe, "nfacctd.service", bmp), program(11, 0, exe, "nfacctd.service", bmp), program(12, 0, exe, "nfacctd.service", bmp),
		}, []string{"nfacctd 3 [tcp [::]:1790] [{ /usr/sbin/nfacctd free}] "}, 0},
		{"no units, two programs", []*Program{
			program(10, 0, exe, "", bmp), program(11, 0, "/opt/bmpd", "", bmp),
		}, []string{"telemetry 2 [tcp [::]:1790] [{ /usr/sbin/nfacctd free} { /opt/bmpd free}] "}, 0},
		{"users", []*Program{
			program(10, 0, exe, "", bmp), program(11, 65534, exe, "", bmp), program(12, 65534, exe, "", bmp),
		}, []string{"nfacctd 2 [tcp [::]:1790] [{ /usr/sbin/nfacctd free}] "}, 1},
		{"two services of a program", []*Program{
			program(10, 0, exe, "", bmp), program(11, 0, exe, "", bmp), program(12, 0, exe, "", syslog), program(13, 0, exe, "", syslog),
		}, []string{"nfacctd 2 [tcp [::]:1790] [{ /usr/sbin/nfacctd free}] ", "nfacctd_2 2 [udp [::]:514] [{ /usr/sbin/nfacctd free}] "}, 0},
		{"a chain without a common port", []*Program{
			program(10, 0, exe, "", bmp), program(11, 0, exe, "", bmp, ipfix), program(12, 0, exe, "", ipfix),
		}, []string{"nfacctd 3 [] [{ /usr/sbin/nfacctd free}] no port that all of them have"}, 0},
		{"unknown executables", []*Program{
			program(10, 0, "", "", bmp), program(11, 0, "", "", bmp),
		}, []string{"unknown 2 [tcp [::]:1790] [] their executables are not files of this host"}, 0},
		{"a pattern", []*Program{
			program(10, 0, "/tmp/[a]", "", bmp), program(11, 0, "/tmp/[a]", "", bmp),
		}, []string{"a 2 [tcp [::]:1790] [{ /tmp/[a] free}] the path of an executable is a pattern"}, 0},
		{"control characters leave the other service alone", []*Program{
			program(10, 1000, "/tmp/a\x7f", "", syslog), program(11, 1000, "/tmp/a\x7f", "", syslog), program(12, 0, exe, "", bmp), program(13, 0, exe, "", bmp),
		}, []string{
			`a_x7f 2 [udp [::]:514] [{ /tmp/a` + "\x7f" + ` free}] the path of an executable, or a unit, has control characters or is not UTF-8`,
			"nfacctd 2 [tcp [::]:1790] [{ /usr/sbin/nfacctd free}] ",
		}, 0},
		{"a service that the policy refuses leaves the other one alone", []*Program{
			program(10, 1000, "/tmp/"+strings.Repeat("a", 1<<20), "", syslog), program(11, 1000, "/tmp/"+strings.Repeat("a", 1<<20), "", syslog),
			program(12, 0, exe, "", bmp), program(13, 0, exe, "", bmp),
		}, []string{
			"aaaaaaaaaaaaaaaaaaaa 2 [udp [::]:514] [{ /tmp/" + strings.Repeat("a", 1<<20) + " free}] policy.yaml:1:1: is larger than 1048576 bytes",
			"nfacctd 2 [tcp [::]:1790] [{ /usr/sbin/nfacctd free}] ",
		}, 0},
	} {
		t.Run(test.name, func(t *testing.T) {
			services, alone := (&Host{test.programs}).Services()
			text, ok := Policy(services)
			var got []string
			good := 0
			for _, s := range services {
				got = append(got, fmt.Sprintf("%s %d %v %v %s", s.Name, s.Slots, s.Ports, s.Members, s.Problem()))
				if s.Problem() == "" {
					good++
				}
			}
			if !slices.Equal(got, test.want) || len(alone) != test.alone {
				t.Errorf("got  %q, %d alone\nwant %q, %d", got, len(alone), test.want, test.alone)
			}
			if ok != (good > 0) {
				t.Fatalf("%v:\n%s", ok, text)
			}
			if !ok {
				return
			}
			if p, err := config.Parse([]byte(text), "policy.yaml"); err != nil || len(p.Services) != good {
				t.Errorf("%v in\n%s", err, text)
			}
		})
	}
}

// FuzzPolicy checks that no name of an executable, which other users choose, makes a policy with other contents.
func FuzzPolicy(f *testing.F) {
	for _, exe := range []string{"/usr/sbin/nfacctd", "/tmp/a\n  b: c", `/tmp/"}, slot: 0}`, "/tmp/'#", "/\xff", "/tmp/no", "/tmp/ä/", "/9"} {
		f.Add(exe)
	}
	f.Fuzz(func(t *testing.T, exe string) {
		if !strings.HasPrefix(exe, "/") {
			exe = "/" + exe
		}
		const bmp = "tcp [::]:1790"
		services, _ := (&Host{[]*Program{program(10, 0, exe, "", bmp), program(11, 0, exe, "", bmp)}}).Services()
		text, ok := Policy(services)
		if !ok {
			return // the executable has a name that no rule can have, such as a pattern
		}
		p, err := config.Parse([]byte(text), "policy.yaml")
		if err != nil || len(p.Services) != 1 || len(p.Services[0].Members) != 1 || p.Services[0].Members[0].Match.Executable != exe || p.Services[0].Slots != 2 {
			t.Errorf("%q: %v\n%s", exe, err, text)
		}
	})
}
