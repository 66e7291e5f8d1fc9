// SPDX-License-Identifier: Apache-2.0

//go:build debian

package guest

import (
	"fmt"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"
)

// commands runs every command against the agent of the installed unit, with a
// policy that uses every domain.
func commands(t *testing.T, w *world) {
	defer restore(t)
	policy := firstPolicy(t) + strings.Replace(domains, "rcvbuf: 150KB", "initial_cwnd: {explore: [10, 20]}, rcvbuf: 150KB", 1)
	policy = strings.Replace(policy, "notsent_lowat: 128KB}}", "notsent_lowat: 128KB}, trial: {control: 10%}}", 1)
	apply(t, policy)
	waitDomains(t, w)
	dir := t.TempDir()
	router := w.routers[2].address
	local, remote := target(router, bmpPort).String(), netip.AddrPortFrom(router, w.routers[2].port()).String()

	// Read-only commands, with and without JSON.
	for _, c := range []string{
		"--version", "version", "help agent", "completion bash", "check --schema", "check " + policyPath,
		"status", "slots", "devices", "where " + router.String(), "plan", "plan " + policyPath, "doctor",
		"tune", "tune trial slice", "tune learned", "tune learned slice", "tune explain " + local + " " + remote + " --role accept",
		"tune explain --socket " + local + "," + remote,
		"trace", "trace --since 1m", "trace slow", "trace samples --count 1 --for 20s",
		"trace packets --local " + local + " --remote " + remote + " --for 2s",
		"bigtcp", "bigtcp plan --force " + link, "bigtcp verify " + link + " --for 1s",
		"sockets", "sockets --cgroup telemetry.slice --processes",
	} {
		t.Run(c, func(t *testing.T) {
			r := run(t, append([]string{binary}, strings.Fields(c)...)...)
			// Exit code 3: sent TCP messages are traced since Linux 6.15.
			if r.code != 0 && (r.code != 3 || !strings.HasPrefix(c, "trace ") || !strings.Contains(r.stderr, "this kernel cannot trace")) {
				t.Error(r)
			}
		})
	}
	// Commands that change the host, each with the command that reverts it.
	for _, c := range [][]string{
		{"trace report " + filepath.Join(dir, "report.html")},
		{"trace packets --local " + local + " --remote " + remote + " --for 2s -w " + filepath.Join(dir, "packets.pcapng")},
		{"apply", "apply --previous", "apply --live", "tune revert"},
		{"isolate --no-outbound --user nobody -- /bin/true"},
	} {
		t.Run(strings.Join(c, ", then "), func(t *testing.T) {
			for _, one := range c {
				if r := run(t, append([]string{binary}, strings.Fields(one)...)...); r.code != 0 {
					t.Error(r)
				}
			}
		})
	}
	t.Run("unregister, then register", func(t *testing.T) {
		slot := 3
		pid := mainPID(t, fmt.Sprintf("nfacctd@%d", slot))
		must(t, binary, "unregister", "--slot", fmt.Sprint(slot))
		waitReady(t, 0, 1, 2)
		must(t, binary, "register", "--slot", fmt.Sprint(slot), "--pid", fmt.Sprint(pid))
		waitReady(t, 0, 1, 2, 3)
	})
	t.Run("run starts a member", func(t *testing.T) {
		must(t, "systemctl", "stop", "nfacctd@3")
		defer must(t, "systemctl", "start", "nfacctd@3")
		must(t, "systemd-run", "--unit=by-run.service", binary, "run", "--service", "telemetry", "--slot", "3", "--",
			"setpriv", "--reuid="+memberUser, "--regid="+memberUser, "--init-groups", "--", "/usr/sbin/nfacctd", "-f", "/etc/pmacct/nfacctd-3.conf")
		defer must(t, "systemctl", "stop", "by-run.service")
		wait(t, "slot 3 has the member", func() string {
			r := run(t, binary, "slots")
			for line := range strings.Lines(r.stdout) {
				if f := strings.Fields(line); len(f) > 3 && f[1] == "3" && f[2] == "yes" {
					return ""
				}
			}
			return r.String() + run(t, binary, "status").String()
		})
	})
	// compare runs last, because it needs a history.
	t.Run("trace compare", func(t *testing.T) {
		// The history has complete intervals of 10 s of the current rules.
		wait(t, "there is a slice of each period", func() string {
			if r := run(t, binary, "trace", "compare", "--period-a", "-40s..-20s", "--period-b", "-20s.."); r.code != 0 {
				return r.String()
			}
			return ""
		})
	})
}
