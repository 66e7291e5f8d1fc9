// SPDX-License-Identifier: Apache-2.0

//go:build debian

package guest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"sockeye/internal/api"
)

const (
	payload    = "/payload"
	policyPath = "/etc/sockeye/policy.yaml"
	binary     = "/usr/local/bin/sockeye"
	shared     = "/usr/local/share/sockeye"
	members    = 4
	memberUser = "pmacct"

	// patience is the timeout, under emulation on a busy machine, for actions
	// that take milliseconds.
	patience = 120 * time.Second
	// commandTimeout is the timeout of a command.
	commandTimeout = 90 * time.Second
	// aptTimeout is the timeout of a command that unpacks a package and restarts the agent.
	aptTimeout = 4 * time.Minute
)

// result is the result of a command.
type result struct {
	args           []string
	stdout, stderr string
	code           int
}

func (r result) String() string {
	return fmt.Sprintf("%s: exit code %d\n%s%s", strings.Join(r.args, " "), r.code, r.stdout, r.stderr)
}

// run runs a command and waits for it, also during cleanup.
func run(t *testing.T, args ...string) result {
	t.Helper()
	return runFor(t, commandTimeout, args...)
}

// runFor is run with another timeout.
func runFor(t *testing.T, limit time.Duration, args ...string) result {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	c := exec.CommandContext(ctx, args[0], args[1:]...)
	var stdout, stderr bytes.Buffer
	c.Stdout, c.Stderr, c.WaitDelay = &stdout, &stderr, 2*time.Second
	err := c.Run()
	if ctx.Err() != nil {
		t.Fatalf("%s: not done within %v\n%s%s", strings.Join(args, " "), limit, stdout.Bytes(), stderr.Bytes())
	}
	if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
		t.Fatalf("%s: %v", strings.Join(args, " "), err)
	}
	return result{args, stdout.String(), stderr.String(), c.ProcessState.ExitCode()}
}

// must runs a command that must succeed.
func must(t *testing.T, args ...string) string {
	t.Helper()
	r := run(t, args...)
	if r.code != 0 {
		t.Fatal(r)
	}
	return r.stdout
}

// ask sends a request to the agent directly, because starting commands is slow
// under emulation.
func ask[V any](path string, query url.Values) (v V, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), commandTimeout)
	defer cancel()
	err = api.NewClient(api.SocketPath("/run/sockeye")).Get(ctx, path, query, &v)
	return v, err
}

// query sends a request to the agent, which must succeed.
func query[V any](t *testing.T, path string, query url.Values) V {
	t.Helper()
	v, err := ask[V](path, query)
	if err != nil {
		t.Fatalf("GET %s: %v", path, err)
	}
	return v
}

// wait waits until done returns "", and fails with its last result.
func wait(t *testing.T, what string, done func() string) {
	t.Helper()
	waitFor(t, patience, what, done)
}

func waitFor(t *testing.T, limit time.Duration, what string, done func() string) {
	t.Helper()
	begin := time.Now()
	for {
		why := done()
		if why == "" {
			return
		}
		if time.Since(begin) > limit {
			t.Fatalf("%s: not within %v: %s", what, limit, why)
		}
		time.Sleep(200 * time.Millisecond)
	}
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

func read(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// firstPolicy returns the policy in the README's section "First policy".
func firstPolicy(t *testing.T) string {
	t.Helper()
	_, rest, _ := strings.Cut(read(t, filepath.Join(payload, "README.md")), "## First policy")
	_, rest, _ = strings.Cut(rest, "```yaml\n")
	text, _, found := strings.Cut(rest, "```")
	if !found {
		t.Fatal("README.md has no first policy")
	}
	return text
}

// install replaces the sockeye binary by another version, as install(1) does.
func install(t *testing.T, from string) {
	t.Helper()
	must(t, "install", "-m", "755", from, binary)
}

// apply writes a policy and applies it.
func apply(t *testing.T, policy string) {
	t.Helper()
	write(t, policyPath, policy)
	if r := run(t, binary, "apply"); r.code != 0 {
		t.Fatalf("%s\nof the policy\n%s", r, policy)
	}
}

// property returns a unit's property.
func property(t *testing.T, unit, name string) string {
	t.Helper()
	return strings.TrimSpace(must(t, "systemctl", "show", "--value", "-p", name, unit))
}

func mainPID(t *testing.T, unit string) int {
	t.Helper()
	pid, err := strconv.Atoi(property(t, unit, "MainPID"))
	if err != nil {
		t.Fatal(err)
	}
	return pid
}

// waitAgent waits until the agent answers, and returns its status.
func waitAgent(t *testing.T) api.Status {
	t.Helper()
	var s api.Status
	wait(t, "the agent answers", func() string {
		var err error
		if s, err = ask[api.Status]("/v1/status", nil); err != nil {
			return err.Error()
		}
		return ""
	})
	return s
}

// waitReady waits until exactly these slots of the service telemetry are ready,
// each with a process of the unit with its number.
func waitReady(t *testing.T, slots ...int) {
	t.Helper()
	want := map[int]bool{}
	for _, s := range slots {
		want[s] = true
	}
	wait(t, fmt.Sprintf("slots %v are ready", slots), func() string {
		all, err := ask[[]api.SlotStatus]("/v1/slots", nil)
		if err != nil {
			return err.Error()
		}
		for _, s := range all {
			if s.Ready != want[s.Slot] {
				return fmt.Sprintf("slot %d is ready: %v, pid %d; %s", s.Slot, s.Ready, s.PID, run(t, "sockeye", "status"))
			}
			if unit := fmt.Sprintf("nfacctd@%d.service", s.Slot); s.Ready && systemUnit(s.PID) != unit {
				return fmt.Sprintf("slot %d has process %d of %q", s.Slot, s.PID, systemUnit(s.PID))
			}
		}
		return ""
	})
}

// systemUnit returns the system unit of a process: the first .service in the
// path of its cgroup.
func systemUnit(pid int) string {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		return ""
	}
	for part := range strings.SplitSeq(strings.TrimSpace(string(text)), "/") {
		if strings.HasSuffix(part, ".service") {
			return part
		}
	}
	return ""
}

// entry is a line of the journal.
type entry struct {
	Message  string `json:"MESSAGE"`
	Priority string `json:"PRIORITY"`
	Unit     string `json:"_SYSTEMD_UNIT"`
	PID      string `json:"_PID"`
	Comm     string `json:"_COMM"`
}

// journal returns the journal of the agent's unit since a time: lines of the
// agent, and lines of systemd about the unit.
func journal(t *testing.T, since time.Time) []entry {
	t.Helper()
	text := must(t, "journalctl", "-u", "sockeye.service", "-o", "json", "--no-pager", fmt.Sprintf("--since=@%d", since.Unix()))
	var all []entry
	for line := range strings.Lines(text) {
		var e entry
		if err := json.Unmarshal([]byte(line), &e); err == nil { // messages that are not text are arrays of bytes
			all = append(all, e)
		}
	}
	return all
}

// nfacctdConfig returns the configuration of a member. Port 0 stands for the
// shared port.
func nfacctdConfig(slot int, bmp, ipfix int) string {
	if bmp == 0 {
		bmp, ipfix = bmpPort, ipfixPort
	}
	return fmt.Sprintf(`daemonize: false
core_proc_name: nfacctd-%[1]d
logfile: /var/lib/nfacctd/nfacctd-%[1]d.log
nfacctd_port: %[3]d
bmp_daemon: true
bmp_daemon_port: %[2]d
bmp_daemon_max_peers: 16
nfacctd_as: bmp
nfacctd_net: bmp
aggregate: peer_src_ip
plugins: print
print_output: json
print_cache_entries: 127
print_output_file: %[4]s
print_output_file_append: true
print_refresh_time: 2
`, slot, bmp, ipfix, recordsPath(slot))
}

// forMembers runs systemctl once for the units of all members, and others.
func forMembers(t *testing.T, command string, more ...string) {
	t.Helper()
	args := append([]string{"systemctl", command}, more...)
	for slot := range members {
		args = append(args, fmt.Sprintf("nfacctd@%d", slot))
	}
	must(t, args...)
}

func logPath(slot int) string { return fmt.Sprintf("/var/lib/nfacctd/nfacctd-%d.log", slot) }

func recordsPath(slot int) string { return fmt.Sprintf("/var/lib/nfacctd/nfacctd-%d.json", slot) }

var exposure = regexp.MustCompile(`exposure level for sockeye\.service: ([0-9.]+)`)

func exists(path string) bool {
	_, err := os.Lstat(path)
	return !errors.Is(err, fs.ErrNotExist)
}
