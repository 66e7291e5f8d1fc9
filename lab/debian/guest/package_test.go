// SPDX-License-Identifier: Apache-2.0

//go:build debian

package guest

import (
	"fmt"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"sockeye/internal/api"
)

// TestPackage installs, upgrades, removes and purges the Debian package, with the commands of the README.
func TestPackage(t *testing.T) {
	before := leftovers(t)
	packages := filepath.Join(payload, "packages")
	debs, err := filepath.Glob(filepath.Join(packages, "*.deb"))
	if err != nil || len(debs) != 2 {
		t.Fatalf("packages %q, %v", debs, err)
	}
	slices.SortFunc(debs, func(a, b string) int { return len(a) - len(b) }) // the later version has a suffix
	t.Run("from an empty host to a steered nfacctd in five commands", func(t *testing.T) {
		must(t, "install", "-D", "-t", "/root/out", debs[0])
		commands := readmeCommands(t)
		if len(commands) != 5 {
			t.Fatalf("README.md has %d commands: %q", len(commands), commands)
		}
		for _, command := range commands {
			if r := runFor(t, aptTimeout, "bash", "-c", "cd /root && export DEBIAN_FRONTEND=noninteractive && "+strings.Replace(command, "apt-get install", "apt-get -y install", 1)); r.code != 0 {
				t.Fatal(r)
			}
		}
		waitReady(t, 0, 1, 2, 3)
		if r := run(t, "sockeye", "status"); r.code != 0 {
			t.Error(r)
		}
	})
	if _, err := ask[api.Status]("/v1/status", nil); err != nil {
		return // the first test has failed, or was not selected
	}
	traffic := sendDatagrams(t)
	t.Run("steering continues during an upgrade", func(t *testing.T) {
		agent, was := mainPID(t, "sockeye"), memberPIDs(t)
		apt(t, "install", debs[1])
		waitAgent(t)
		if now := mainPID(t, "sockeye"); now == agent {
			t.Errorf("the agent %d was not restarted", agent)
		}
		waitReady(t, 0, 1, 2, 3)
		if now := memberPIDs(t); !slices.Equal(now, was) {
			t.Errorf("members %v before and %v after the upgrade", was, now)
		}
	})
	t.Run("no datagram was lost or refused", func(t *testing.T) {
		sent := traffic()
		wait(t, "all datagrams arrive", func() string {
			slots, err := ask[[]api.SlotStatus]("/v1/slots", nil)
			if err != nil {
				return err.Error()
			}
			served := uint64(0)
			for _, s := range slots {
				served += s.Datagrams
				for reason, n := range s.Refused {
					if n > 0 {
						t.Errorf("slot %d has refused %d: %v", s.Slot, n, reason)
					}
				}
			}
			if served != sent {
				return fmt.Sprintf("%d of %d", served, sent)
			}
			return ""
		})
	})
	traffic() // if -run has left out the test above
	t.Run("a policy that the new version refuses leaves the agent alone", func(t *testing.T) {
		agent, good := mainPID(t, "sockeye"), read(t, policyPath)
		write(t, policyPath, "services: {telemetry: {sluts: 4}}\n")
		r := apt(t, "install", "--reinstall", debs[1])
		if !strings.Contains(r.stdout+r.stderr, "the agent was not restarted") || !strings.Contains(r.stdout+r.stderr, "sluts") {
			t.Error(r)
		}
		if now := mainPID(t, "sockeye"); now != agent {
			t.Errorf("agent %d before and %d after", agent, now)
		}
		write(t, policyPath, good)
		waitReady(t, 0, 1, 2, 3)
	})
	t.Run("an installation from source is named", func(t *testing.T) {
		write(t, binary, "")
		if r := apt(t, "install", "--reinstall", debs[1]); !strings.Contains(r.stdout+r.stderr, binary+" takes precedence") {
			t.Error(r)
		}
		must(t, "rm", binary)
	})
	t.Run("a removal ends steering and keeps the members", func(t *testing.T) {
		was := memberPIDs(t)
		// The mount namespace of a tool is not a reason to leave the host steered.
		if r := runFor(t, aptTimeout, "unshare", "--mount", "apt-get", "-y", "remove", "sockeye"); r.code != 0 {
			t.Fatal(r)
		}
		if exists("/sys/fs/bpf/sockeye") {
			t.Error("/sys/fs/bpf/sockeye exists")
		}
		if r := run(t, "pgrep", "-a", "sockeye"); r.stdout != "" {
			t.Error(r)
		}
		for _, pid := range was {
			if !exists(fmt.Sprintf("/proc/%d", pid)) {
				t.Errorf("member %d has exited", pid)
			}
		}
		for _, path := range []string{policyPath, "/var/lib/sockeye"} {
			if !exists(path) {
				t.Errorf("%s does not exist: only a purge removes it", path)
			}
		}
	})
	t.Run("a purge leaves nothing", func(t *testing.T) {
		forMembers(t, "disable", "--now")
		apt(t, "purge", "sockeye")
		must(t, "rm", "/etc/systemd/system/nfacctd@.service", "/etc/sysusers.d/nfacctd.conf", "/etc/pmacct/nfacctd@.conf")
		must(t, "systemctl", "daemon-reload")
		if after := leftovers(t); after != before {
			t.Errorf("files:\n%s\nbefore the installation:\n%s", after, before)
		}
	})
}

// apt runs apt-get, which must succeed.
func apt(t *testing.T, args ...string) result {
	t.Helper()
	r := runFor(t, aptTimeout, append([]string{"apt-get", "-y"}, args...)...)
	if r.code != 0 {
		t.Fatal(r)
	}
	return r
}

// readmeCommands returns the commands of the first example in the README's section "Install".
func readmeCommands(t *testing.T) (commands []string) {
	t.Helper()
	_, rest, _ := strings.Cut(read(t, filepath.Join(payload, "README.md")), "\n## Install\n")
	_, rest, _ = strings.Cut(rest, "```console\n")
	example, _, _ := strings.Cut(rest, "```")
	for line := range strings.Lines(example) {
		if command, ok := strings.CutPrefix(line, "# "); ok {
			commands = append(commands, strings.TrimSpace(command))
		}
	}
	return commands
}

// leftovers lists the files of this host whose names contain sockeye, without those of the tests.
func leftovers(t *testing.T) string {
	t.Helper()
	return must(t, "bash", "-c", "find / /run /sys/fs/bpf -xdev -path /payload -prune -o -path /var/log -prune -o -path '/var/cache/*' -prune"+
		" -o -path /root -prune -o -path '*sockeye-lab*' -prune -o -name '*sockeye*' -print | sort -u")
}

// memberPIDs returns the processes of the members.
func memberPIDs(t *testing.T) (pids []int) {
	t.Helper()
	for slot := range members {
		pids = append(pids, mainPID(t, fmt.Sprintf("nfacctd@%d", slot)))
	}
	return pids
}

// sendDatagrams sends empty IPFIX messages from 40 addresses, until the result is called, which returns their number.
func sendDatagrams(t *testing.T) (end func() uint64) {
	t.Helper()
	var exporters []net.Conn
	for i := range 40 {
		c, err := net.DialUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 1, 0, byte(i+1))}, &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 4739})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		exporters = append(exporters, c)
	}
	message := []byte{0, 10, 0, 16, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0} // RFC 7011, section 3.1
	stop, sent := make(chan struct{}), make(chan uint64, 1)
	end = sync.OnceValue(func() uint64 {
		close(stop)
		return <-sent
	})
	t.Cleanup(func() { end() }) // before the sockets are closed
	go func() {
		n := uint64(0)
		for {
			for _, c := range exporters {
				if _, err := c.Write(message); err != nil {
					t.Errorf("datagram %d: %v", n, err)
				}
				n++
				select {
				case <-stop:
					sent <- n
					return
				case <-time.After(2 * time.Millisecond):
				}
			}
		}
	}()
	return end
}
