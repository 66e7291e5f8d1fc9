// SPDX-License-Identifier: Apache-2.0

package member

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"sockeye/internal/config"
)

func rule(t testing.TB, m config.Member) Rule {
	t.Helper()
	rules, err := Rules([]config.Member{m})
	check(t, err)
	return rules[0]
}

func nfacctd() *Process {
	return &Process{
		PID: 1, Exe: "/usr/sbin/nfacctd", Args: []string{"nfacctd", "-f", "/etc/pmacct/telemetry-3.conf"},
		Cgroup: "/telemetry.slice/nfacctd@3.service",
	}
}

func TestMatches(t *testing.T) {
	re := regexp.MustCompile
	for name, test := range map[string]struct {
		match config.MemberMatch
		want  bool
	}{
		"nothing":                   {config.MemberMatch{}, true},
		"unit":                      {config.MemberMatch{SystemdUnit: "nfacctd@*.service"}, true},
		"unit, another":             {config.MemberMatch{SystemdUnit: "nfacctd@4.service"}, false},
		"unit, part of it":          {config.MemberMatch{SystemdUnit: "nfacctd"}, false},
		"cgroup":                    {config.MemberMatch{Cgroup: "/telemetry.slice/*"}, true},
		"cgroup, * and /":           {config.MemberMatch{Cgroup: "/*"}, false},
		"cgroup, above":             {config.MemberMatch{Cgroup: "/telemetry.slice"}, false},
		"executable":                {config.MemberMatch{Executable: "/usr/sbin/nfacctd"}, true},
		"executable, glob":          {config.MemberMatch{Executable: "/usr/*/nfacct?"}, true},
		"executable, another":       {config.MemberMatch{Executable: "/usr/sbin/sfacctd"}, false},
		"command line":              {config.MemberMatch{CommandLine: re(`nfacctd -f \S+-(\d+)\.conf`)}, true},
		"command line, part":        {config.MemberMatch{CommandLine: re(`telemetry`)}, true},
		"command line, anchored":    {config.MemberMatch{CommandLine: re(`^-f`)}, false},
		"all":                       {config.MemberMatch{SystemdUnit: "*", Cgroup: "/*/*", Executable: "/*/*/*", CommandLine: re(""), User: "root"}, true},
		"all but the executable":    {config.MemberMatch{SystemdUnit: "*", Executable: "/bin/*", User: "root"}, false},
		"a glob that is not a glob": {config.MemberMatch{SystemdUnit: "["}, false},
		"command line, all of it":   {config.MemberMatch{CommandLine: re(`^nfacctd -f /etc/pmacct/telemetry-3\.conf$`)}, true},
	} {
		r := rule(t, config.Member{Match: test.match})
		if got := r.Matches(nfacctd()); got != test.want {
			t.Errorf("%s: %v, want %v", name, got, test.want)
		}
	}
	// A process without a unit, with an unreadable executable.
	bare := &Process{Cgroup: "/"}
	for _, m := range []config.MemberMatch{{SystemdUnit: "?*"}, {Executable: "/*"}} {
		r := rule(t, config.Member{Match: m})
		if r.Matches(bare) {
			t.Errorf("%+v matches a process without it", m)
		}
	}
}

func TestUnknownUser(t *testing.T) {
	_, err := Rules([]config.Member{{}, {Match: config.MemberMatch{User: "no-such-user"}}})
	if err == nil || !strings.Contains(err.Error(), "members[1]") || !strings.Contains(err.Error(), "no-such-user") {
		t.Errorf("%v, want an error that names the rule and the user", err)
	}
	for name, want := range map[string]uint32{"root": 0, "0": 0, "4294967294": 4294967294, "65534": 65534} {
		if got, err := LookupUser(name); err != nil || got != want {
			t.Errorf("%s: %d, %v", name, got, err)
		}
	}
	if uid, err := LookupUser("4294967296"); err == nil {
		t.Errorf("a number of 33 bits is user %d", uid)
	}
}

func TestSlot(t *testing.T) {
	command := config.MemberMatch{CommandLine: regexp.MustCompile(`-f [a-z/]+-(-?\w*)\.conf`)}
	for name, test := range map[string]struct {
		member config.Member
		change func(p *Process)
		want   int
		err    string // or what the error says
	}{
		"free":                  {config.Member{Slot: config.SlotRule{Kind: config.SlotFree}}, nil, AnySlot, ""},
		"number":                {config.Member{Slot: config.SlotRule{Kind: config.SlotNumber, Number: 2}}, nil, 2, ""},
		"instance":              {config.Member{Slot: config.SlotRule{Kind: config.SlotInstance}}, nil, 3, ""},
		"instance too high":     {config.Member{Slot: config.SlotRule{Kind: config.SlotInstance}}, func(p *Process) { p.Cgroup = "/nfacctd@4.service" }, 0, "4, want 0 to 3"},
		"instance no number":    {config.Member{Slot: config.SlotRule{Kind: config.SlotInstance}}, func(p *Process) { p.Cgroup = "/nfacctd@a.service" }, 0, `unit nfacctd@a.service is "a"`},
		"no instance":           {config.Member{Slot: config.SlotRule{Kind: config.SlotInstance}}, func(p *Process) { p.Cgroup = "/nfacctd.service" }, 0, `is ""`},
		"group":                 {config.Member{Match: command, Slot: config.SlotRule{Kind: config.SlotGroup}}, nil, 3, ""},
		"group 0":               {config.Member{Match: command, Slot: config.SlotRule{Kind: config.SlotGroup}}, func(p *Process) { p.Args[2] = "x-0.conf" }, 0, ""},
		"group below 0":         {config.Member{Match: command, Slot: config.SlotRule{Kind: config.SlotGroup}}, func(p *Process) { p.Args[2] = "x--1.conf" }, 0, "-1, want 0 to 3"},
		"group too long":        {config.Member{Match: command, Slot: config.SlotRule{Kind: config.SlotGroup}}, func(p *Process) { p.Args[2] = "x-99999999999999999999.conf" }, 0, "99999999999999999999"},
		"group empty":           {config.Member{Match: command, Slot: config.SlotRule{Kind: config.SlotGroup}}, func(p *Process) { p.Args[2] = "x-.conf" }, 0, `""`},
		"group without a match": {config.Member{Match: command, Slot: config.SlotRule{Kind: config.SlotGroup}}, func(p *Process) { p.Args = nil }, 0, "no slot number"},
		"environment":           {config.Member{Slot: config.SlotRule{Kind: config.SlotEnvironment}}, func(p *Process) { p.RecallFirstSeen(FromRecord(1, 1, nil, "1", "", FileID{})) }, 1, ""},
		"environment, bad":      {config.Member{Slot: config.SlotRule{Kind: config.SlotEnvironment}}, func(p *Process) { p.RecallFirstSeen(FromRecord(1, 1, nil, "one", "", FileID{})) }, 0, `SOCKEYE_SLOT is "one"`},
		"environment, none":     {config.Member{Slot: config.SlotRule{Kind: config.SlotEnvironment}}, func(p *Process) { p.RecallFirstSeen(FromRecord(1, 1, nil, "", "", FileID{})) }, 0, "no SOCKEYE_SLOT"},
	} {
		p := nfacctd()
		if test.change != nil {
			test.change(p)
		}
		r := rule(t, test.member)
		got, err := r.Slot(p, 4)
		if test.err == "" && (err != nil || got != test.want) {
			t.Errorf("%s: %d, %v, want %d", name, got, err, test.want)
		}
		if test.err != "" && (err == nil || !strings.Contains(err.Error(), test.err)) {
			t.Errorf("%s: %d, %v, want an error that says %s", name, got, err, test.err)
		}
	}
}

// TestRuleOfAChild applies rules to a real process.
func TestRuleOfAChild(t *testing.T) {
	c := start(t, "sleep", nil, nil)
	p, err := Read(c.pid())
	check(t, err)
	exe, err := os.Readlink("/proc/self/exe")
	check(t, err)
	r := rule(t, config.Member{Match: config.MemberMatch{
		Executable: exe, User: "root", Cgroup: "/sockeye-test-*", CommandLine: regexp.MustCompile(`^/proc/self/exe$`),
	}})
	if !r.Matches(p) {
		t.Errorf("no match of %+v", p)
	}
}
