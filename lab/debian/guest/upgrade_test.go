// SPDX-License-Identifier: Apache-2.0

//go:build debian

package guest

import (
	"path/filepath"
	"testing"
)

// tuneOnly is what versions before trace and bigtcp know of domains.
const tuneOnly = `
tune:
  - {name: slice, cgroup: telemetry.slice, match: {local_port: 1790}, set: {rcvbuf: 150KB, notsent_lowat: 128KB}}
`

// upgrade runs an earlier version, upgrades it to the installed one and goes back, under
// traffic. No connection is lost, and every domain works with every version. It leaves no agent.
func upgrade(t *testing.T, w *world, name, policy string) {
	from := filepath.Join(payload, name)
	if !exists(from) {
		t.Skipf("not supported: this clone does not have the commit of %s to upgrade from", name)
	}
	earlier := func() {
		t.Helper()
		install(t, filepath.Join(from, "sockeye"))
		must(t, "install", "-m", "644", filepath.Join(from, "sockeye.service"), "/etc/systemd/system/sockeye.service")
		must(t, "systemctl", "daemon-reload")
	}
	clean := func() {
		t.Helper()
		must(t, "systemctl", "stop", "sockeye")
		must(t, binary, "reset")
	}
	// Unsteered, IPFIX also goes to members that have only just started.
	w.whenever(t, never)
	clean()
	defer func() {
		clean()
		installCurrent(t)
		w.last = nil
	}()
	earlier()
	write(t, policyPath, policy)
	forMembers(t, "start", "sockeye")
	waitReady(t, 0, 1, 2, 3)
	waitDomains(t, w)
	w.whenever(t, withSession)
	before := w.places(t)
	for _, step := range []struct {
		name    string
		install func()
	}{
		{"upgrade", func() { installCurrent(t) }},
		{"return", earlier},
	} {
		t.Run(step.name, func(t *testing.T) {
			sessions := w.sessions()
			step.install()
			must(t, "systemctl", "restart", "sockeye")
			waitReady(t, 0, 1, 2, 3)
			same(t, before, w.places(t))
			w.unchanged(t, sessions)
			waitDomains(t, w)
			noProblem(t)
		})
	}
}
