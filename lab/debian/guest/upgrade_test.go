// SPDX-License-Identifier: Apache-2.0

//go:build debian

package guest

import (
	"path/filepath"
	"testing"
)

// tuneOnly is the part of domains that versions before trace and bigtcp support.
const tuneOnly = `
tune:
  - {name: slice, cgroup: telemetry.slice, match: {local_port: 1790}, set: {rcvbuf: 150KB, notsent_lowat: 128KB}}
`

// upgrades changes from a version with another layout of the tune maps to the installed one, back to an earlier one
// with every domain in use, and to the installed one again, under traffic. No connection is lost, and every domain
// works with every version.
func upgrades(t *testing.T, w *world) {
	earlier := func(name string) func() {
		from := filepath.Join(payload, name)
		if !exists(from) {
			t.Skipf("clone: it does not have the commit of %s to upgrade from (hint: git fetch --unshallow)", name)
		}
		return func() {
			t.Helper()
			install(t, filepath.Join(from, "sockeye"))
			must(t, "install", "-m", "644", filepath.Join(from, "sockeye.service"), "/etc/systemd/system/sockeye.service")
			must(t, "systemctl", "daemon-reload")
		}
	}
	otherLayout, allDomains := earlier("tune-layout"), earlier("all-domains")
	clean := func() {
		t.Helper()
		must(t, "systemctl", "stop", "sockeye")
		must(t, binary, "reset")
	}
	defer func() {
		w.last = nil
		clean() // keepers of earlier versions exit late
		if t.Failed() {
			installCurrent(t)
		}
	}()
	// Without steering, members that have just started also receive IPFIX.
	w.whenever(t, never)
	clean()
	otherLayout()
	write(t, policyPath, services+tuneOnly)
	forMembers(t, "start", "sockeye")
	waitReady(t, 0, 1, 2, 3)
	w.whenever(t, withSession)
	before := w.places(t)
	for _, step := range []struct {
		name    string
		install func()
		policy  string // to go on with
	}{
		{"upgrade over a change of tune's layout", func() { installCurrent(t) }, services + domains},
		{"return with every domain in use", allDomains, ""},
		{"upgrade with every domain in use", func() { installCurrent(t) }, ""},
	} {
		t.Run(step.name, func(t *testing.T) {
			sessions := w.sessions()
			step.install()
			must(t, "systemctl", "restart", "sockeye")
			waitReady(t, 0, 1, 2, 3)
			same(t, before, w.places(t))
			w.unchanged(t, sessions)
			if v := tuned(t, "telemetry.slice"); !v.Attached || v.Problem != "" {
				t.Errorf("tune: %+v", v)
			}
			if step.policy != "" {
				apply(t, step.policy)
			}
			waitDomains(t, w)
			noProblem(t)
		})
	}
}
