// SPDX-License-Identifier: Apache-2.0

package member

import (
	"strings"
	"testing"
)

func TestUnit(t *testing.T) {
	long := strings.Repeat("a", maxUnitName-len(".service"))
	for _, test := range []struct{ cgroup, unit, instance string }{
		{"/", "", ""},
		{"", "", ""},
		{"/docker/0123", "", ""},
		{"/init.scope", "init.scope", ""},
		{"/system.slice", "", ""},
		{"/system.slice/nfacctd.service", "nfacctd.service", ""},
		{"/system.slice/nfacctd@3.service", "nfacctd@3.service", "3"},
		{"/system.slice/system-nfacctd.slice/nfacctd@3.service", "nfacctd@3.service", "3"},
		{"/system.slice/nfacctd@3.service/plugins", "nfacctd@3.service", "3"},
		{"/system.slice/a@b@c.service", "a@b@c.service", "b@c"},
		{`/system.slice/a@x\x2dy.service`, `a@x\x2dy.service`, `x\x2dy`},
		{"/system.slice/a@1.2.service", "a@1.2.service", "1.2"},
		{"/nfacctd@3.service", "nfacctd@3.service", "3"},
		{"/system.slice/srv.mount", "srv.mount", ""},
		{"/user.slice/user-1000.slice/session-2.scope", "session-2.scope", ""},
		{"/system.slice/docker.service/a.slice", "docker.service", ""},

		// Users choose the names of their own units, and create cgroups below delegated ones. An earlier version
		// took these for system units.
		{"/user.slice/user-1000.slice/user@1000.service/app.slice/nfacctd@0.service", "user@1000.service", "1000"},
		{"/user.slice/user-1000.slice/user@1000.service/nfacctd@0.service", "user@1000.service", "1000"},
		{"/user.slice/user-1000.slice/user@1000.service/app.slice/app-x.service", "user@1000.service", "1000"},
		{"/user.slice/user-1000.slice/session-2.scope/nfacctd@0.service", "session-2.scope", ""},
		{"/system.slice/web.service/nfacctd@0.service", "web.service", ""},
		{"/system.slice/web.service/system.slice/nfacctd@0.service", "web.service", ""},
		{"/docker/0123/system.slice/nfacctd@0.service", "", ""},
		{"/../nfacctd@0.service", "", ""},
		{"/machine/nfacctd@0.service", "", ""},

		// Invalid names.
		{"/system.slice/a@.service", "", ""}, // a template
		{"/system.slice/@3.service", "", ""},
		{"/system.slice/.service", "", ""},
		{"/system.slice/service", "", ""},
		{"/system.slice/a.services", "", ""},
		{"/system.slice/a b.service", "", ""},
		{"/system.slice/ä.service", "", ""},
		{"/system.slice/nfacctd@3.service (deleted)", "", ""},
		{"/a@b.slice/x.service", "", ""},
		{"/.slice/x.service", "", ""},
		{"/not a.slice/x.service", "", ""},
		{"/system.slice/" + long + ".service", "", ""},
		{"/system.slice/" + long[1:] + ".service", long[1:] + ".service", ""},

		// Names that systemd escapes.
		{"/system.slice/_cgroup.service", "cgroup.service", ""},
		{"/_system.slice/_a@1.service/x", "a@1.service", "1"},
		{"//system.slice//a.service/", "a.service", ""},
	} {
		p := &Process{Cgroup: test.cgroup}
		if unit, instance := p.Unit(); unit != test.unit || instance != test.instance {
			t.Errorf("%s: unit %q, instance %q, want %q, %q", test.cgroup, unit, instance, test.unit, test.instance)
		}
	}
}

func TestUsersOwn(t *testing.T) {
	for cgroup, want := range map[string]bool{
		"/user.slice": true, "/user.slice/user-1.slice/session-1.scope": true, "/user.slice/user-1.slice/user@1.service/a.service": true,
		"/": false, "/system.slice/user.slice": false, "/user.slices/a.service": false, "/system.slice/a.service": false,
	} {
		if got := isUserControlled(cgroup); got != want {
			t.Errorf("%s: %v, want %v", cgroup, got, want)
		}
	}
}

// A unit has a valid name and follows only slices in the path, and cgroups below a unit do not change the result.
func FuzzUnit(f *testing.F) {
	for _, seed := range []string{
		"/", "/system.slice/nfacctd@3.service/x", "/user.slice/user-1000.slice/user@1000.service/app.slice/nfacctd@0.service",
		"/_a.slice/_b@1.service", "/a@.service", "//..//x.scope", "/\x00.service", "/a.slice/b.slice/c", `/a\x2d@\x2d.service`,
	} {
		f.Add(seed, "nfacctd@0.service")
	}
	f.Fuzz(func(t *testing.T, cgroup, below string) {
		unit, instance := UnitOf(cgroup)
		if unit == "" {
			if instance != "" {
				t.Fatalf("%q: no unit, instance %q", cgroup, instance)
			}
			return
		}
		base, kind, ok := cutUnit(unit)
		if !ok || kind == "slice" {
			t.Fatalf("%q: unit %q is no name", cgroup, unit)
		}
		if _, want, _ := strings.Cut(base, "@"); instance != want {
			t.Fatalf("%q: instance %q of %q", cgroup, instance, unit)
		}
		for part := range strings.SplitSeq(cgroup, "/") {
			if part == unit || part == "_"+unit {
				break
			}
			if part != "" && !strings.HasSuffix(part, ".slice") {
				t.Fatalf("%q: unit %q comes after %q", cgroup, unit, part)
			}
		}
		if again, _ := UnitOf(cgroup + "/" + below); again != unit {
			t.Fatalf("%q: unit %q, and with %q below it %q", cgroup, unit, below, again)
		}
		if again, _ := UnitOf("/system.slice" + "/" + cgroup); again != unit {
			t.Fatalf("%q: unit %q, and in a slice %q", cgroup, unit, again)
		}
	})
}
