// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"sockeye/bench/harness"
	"sockeye/internal/config"
)

// Versions of Sockeye that replace each other.
const (
	thisVersion = "this version"
	// earlierVersion is the last commit before two versions shared the maps of sockets.
	earlierVersion = "ba58678f3e230003b74146f0f45e0f2a412ba70b"
	// firstVersion has other programs, and no map next_devices.
	firstVersion = "9d484f16c12fee465ef1f01853781b3f6661289c"
	// otherMaps has another layout of all maps of a service except sockets.
	otherMaps = "slots,cookies,listeners,counters,tables,device_maps,next_devices,host_maps,next_hosts,devices,pending,admission,unlisted,events,lost_events"
	// otherSockets has another layout of the map of sockets.
	otherSockets = "sockets"
)

var built struct {
	sync.Mutex
	binaries map[string]string
}

// version returns the binary of a version: of a commit, or of the current source with another layout of some maps.
func version(t *testing.T, name string) string {
	t.Helper()
	this := os.Getenv(binaryEnv)
	if name == thisVersion {
		return this
	}
	built.Lock()
	defer built.Unlock()
	if built.binaries[name] != "" {
		return built.binaries[name]
	}
	run := func(dir string, command ...string) (string, error) {
		cmd := exec.CommandContext(t.Context(), command[0], command[1:]...)
		cmd.Dir, cmd.Env = dir, append(os.Environ(), "CGO_ENABLED=0")
		out, err := cmd.CombinedOutput()
		if err != nil {
			err = fmt.Errorf("%s: %w\n%s", strings.Join(command, " "), err, out)
		}
		return strings.TrimSpace(string(out)), err
	}
	must := func(out string, err error) string {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	tree := must(run("", "go", "list", "-m", "-f", "{{.Dir}}"))
	binary := filepath.Join(filepath.Dir(this), fmt.Sprintf("sockeye-%d", len(built.binaries)))
	if name == otherMaps || name == otherSockets {
		must(run(tree, "go", "build", "-o", binary, "-ldflags=-s -w -X=sockeye/internal/bpf.doubledMaps="+name, "./cmd/sockeye"))
	} else {
		if _, err := run(tree, "git", "cat-file", "-e", name+"^{commit}"); err != nil {
			t.Skipf("clone: it does not have commit %s (hint: git fetch --unshallow)", name)
		}
		source := t.TempDir()
		must(run(tree, "git", "archive", "-o", filepath.Join(source, "tar"), name))
		must(run(source, "tar", "-xf", "tar"))
		must(run(source, "go", "build", "-trimpath", "-ldflags=-s -w", "-o", binary, "./cmd/sockeye")) // with -trimpath, the build cache does not depend on the directory
	}
	if built.binaries == nil {
		built.binaries = make(map[string]string)
	}
	built.binaries[name] = binary
	return binary
}

// pulse sends datagrams at a steady rate from each device, which has one socket.
type pulse struct {
	*host
	sent    map[netip.Addr]int
	refused map[netip.Addr]int
	stop    chan struct{}
	done    sync.WaitGroup
}

const pulseRate = 400 // datagrams in a second

func (h *host) startPulse(all []netip.Addr) *pulse {
	h.Helper()
	p := &pulse{host: h, sent: map[netip.Addr]int{}, refused: map[netip.Addr]int{}, stop: make(chan struct{})}
	open := make([]net.Conn, len(all))
	h.must(h.devices.Do(func() (err error) {
		for i, a := range all {
			d := net.Dialer{LocalAddr: net.UDPAddrFromAddrPort(netip.AddrPortFrom(a, 0))}
			if open[i], err = d.Dial("udp", target(a, ipfixPort).String()); err != nil {
				return err
			}
		}
		return nil
	}))
	p.done.Go(func() {
		defer func() {
			for _, c := range open {
				c.Close()
			}
		}()
		tick := time.NewTicker(time.Second / pulseRate)
		defer tick.Stop()
		for n := 0; ; n++ {
			select {
			case <-p.stop:
				return
			case <-tick.C:
			}
			i := n % len(all)
			// An error is that of an earlier datagram.
			for range 2 {
				_, err := open[i].Write(fmt.Append(nil, n))
				if err == nil {
					p.sent[all[i]]++
					break
				}
				if !errors.Is(err, unix.ECONNREFUSED) {
					h.Errorf("datagram of %v: %v", all[i], err)
					break
				}
				p.refused[all[i]]++
			}
		}
	})
	h.Cleanup(p.end)
	return p
}

func (p *pulse) end() {
	select {
	case <-p.stop:
	default:
		close(p.stop)
		p.done.Wait()
	}
}

// underTraffic replaces agents while devices send datagrams, open connections and have open ones. It fails the test if a
// packet reached another member than that of its device, or if an open connection was closed; and, unless the change may
// refuse, if a datagram was lost or a connection refused. It returns the number of refused datagrams.
func (h *host) underTraffic(home home, mayRefuse bool, replace func()) (lost int) {
	h.Helper()
	steady, probing := addresses(80)[:40], addresses(80)[40:]
	open := h.connectAll(steady)
	h.forget()
	overflows := h.overflows()
	p, t := h.startPulse(steady), h.startTraffic(probing)
	h.more(t, 40)
	replace()
	h.more(t, 40)
	p.end()
	for a, landed := range t.end() {
		for l, n := range landed {
			for _, slot := range []int{l.tcp, l.udp} {
				if slot != home(a) && (!mayRefuse || slot >= 0) {
					h.Errorf("%v: %v, %d times; home slot %d", a, l, n, home(a))
				}
			}
		}
	}
	received := map[netip.Addr]int{}
	wait := time.Now().Add(5 * time.Second)
	for {
		h.mu.Lock()
		clear(received)
		for a, n := range h.got {
			if a.slot != home(a.from) {
				h.Errorf("%s of %v at slot %d, %d times; home slot %d", a.protocol, a.from, a.slot, n, home(a.from))
			}
			if a.protocol == "udp" {
				received[a.from] += n
			}
		}
		h.mu.Unlock()
		lost = 0
		for a, n := range p.sent {
			lost += n - received[a]
		}
		if lost == 0 || mayRefuse || time.Now().After(wait) {
			break
		}
		time.Sleep(10 * time.Millisecond) // the output of members is read with a delay
	}
	overflows = h.overflows() - overflows
	if !mayRefuse && (lost != 0 || len(p.refused) > 0) {
		h.Errorf("%d datagrams lost, %d of them in full queues of members; refused: %v", lost, overflows, p.refused)
	}
	broken := 0
	for _, alive := range open.alive() {
		if !alive {
			broken++
		}
	}
	if broken > 0 {
		h.Errorf("%d of %d connections are closed", broken, len(open))
	}
	for _, c := range open {
		c.Close()
	}
	return lost
}

// overflows returns the number of datagrams that did not fit into the queues of members.
func (h *host) overflows() (sum int) {
	h.Helper()
	h.must(h.collectors.Do(func() error {
		text, err := os.ReadFile("/proc/thread-self/net/snmp") // IPv4, also of sockets for both families
		if err != nil {
			return err
		}
		sum += int(harness.SNMP(string(text), "Udp", "RcvbufErrors"))
		if text, err = os.ReadFile("/proc/thread-self/net/snmp6"); err != nil {
			return err
		}
		for line := range strings.Lines(string(text)) {
			var n int
			if _, err := fmt.Sscanf(line, "Udp6RcvbufErrors %d", &n); err == nil {
				sum += n
			}
		}
		return nil
	}))
	return sum
}

// stopAgent ends the agent in order.
func (h *host) stopAgent() {
	h.Helper()
	h.must(h.agent.Signal(unix.SIGTERM))
	<-h.agent.Done()
}

// startVersion starts the agent of a version and waits until it has adopted the members.
func (h *host) startVersion(name string) {
	h.Helper()
	h.binary = version(h.T, name)
	h.startAgent()
	h.ready(0, 1, 2, 3)
}

// TestUpgrade replaces the agent by other versions, and those by this one. Where both versions have the same layout of the
// sockets, nothing is lost and no connection is closed.
func TestUpgrade(t *testing.T) {
	for _, test := range []struct {
		name     string
		versions []string
		refuses  map[int]bool // steps that refuse while members are registered again
	}{
		{"earlier", []string{earlierVersion, thisVersion, earlierVersion, thisVersion}, nil},
		{"first", []string{firstVersion, thisVersion, firstVersion, thisVersion}, nil},
		{"maps", []string{thisVersion, otherMaps, thisVersion}, nil},
		// An earlier version takes the sockets out of the maps of another layout.
		{"earlier maps", []string{earlierVersion, otherMaps, earlierVersion, otherMaps}, map[int]bool{2: true}},
		{"sockets", []string{earlierVersion, otherSockets, thisVersion}, map[int]bool{1: true, 2: true}},
	} {
		t.Run(test.name, func(t *testing.T) {
			inBothModes(t, func(t *testing.T, mode config.Steering) {
				for _, name := range test.versions {
					version(t, name) // builds are not part of the upgrade
				}
				h := newHost(t, mode)
				h.binary = version(t, test.versions[0])
				h.up(4)
				home := h.homes(4)
				for i, next := range test.versions[1:] {
					i++
					begin := time.Now()
					lost := h.underTraffic(home, test.refuses[i], func() {
						h.stopAgent()
						h.startVersion(next)
					})
					t.Logf("to %.12s: %d datagrams lost, in %v", next, lost, time.Since(begin).Round(time.Millisecond))
					if said := strings.Contains(h.agent.LogTail(1000), "members were registered again"); said != (test.refuses[i] && next != earlierVersion) {
						t.Errorf("to %.12s: reported members that were registered again: %v\n%s", next, said, h.agent.LogTail(40))
					}
					dirs, err := filepath.Glob(filepath.Join(h.pins, "steer_telemetry*"))
					h.must(err)
					if len(dirs) != 1 {
						t.Errorf("to %.12s: pins %q", next, dirs)
					}
				}
			})
		})
	}
}

// TestUpgradeKilled kills agents of two versions at random instants of their start.
func TestUpgradeKilled(t *testing.T) {
	inBothModes(t, func(t *testing.T, mode config.Steering) {
		for _, name := range []string{otherMaps, earlierVersion} {
			version(t, name) // builds are not part of the upgrade
		}
		h := newHost(t, mode)
		h.up(4)
		home := h.homes(4)
		h.underTraffic(home, false, func() {
			h.stopAgent()
			start := func(name string) time.Duration {
				begin := time.Now()
				h.startVersion(name)
				return time.Since(begin)
			}
			took := start(thisVersion)
			states := map[int]int{}
			killed := func(between ...string) {
				for i := range 16 {
					h.binary = version(t, between[i%len(between)])
					h.launchAgent()
					time.Sleep(rand.N(min(took, 2*time.Second)))
					h.killAgent()
					dirs, err := filepath.Glob(filepath.Join(h.pins, "steer_telemetry*"))
					h.must(err)
					states[len(dirs)]++
				}
			}
			h.stopAgent()
			killed(otherMaps, thisVersion)
			took = start(thisVersion)
			h.stopAgent()
			// An earlier version does not share maps of another layout.
			killed(earlierVersion, thisVersion)
			start(otherMaps)
			t.Logf("starts take %v; directories after kills: %v", took, states)
		})
	})
}

// TestUpgradeRefused has a pin that this version cannot adopt. The agent prints one line with a hint, and steering continues
// as before.
func TestUpgradeRefused(t *testing.T) {
	inBothModes(t, func(t *testing.T, mode config.Steering) {
		h := up(t, mode, 4)
		home := h.homes(4)
		h.underTraffic(home, false, func() {
			h.stopAgent()
			path := filepath.Join(h.pins, "steer_telemetry", "slots")
			h.must(os.Rename(path, path+"_kept"))
			other, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 24, MaxEntries: 1024})
			h.must(err)
			h.must(errors.Join(other.Pin(path), other.Close()))
			h.launchAgent()
			<-h.agent.Done()
			if code := h.agent.Cmd.ProcessState.ExitCode(); code != 5 {
				t.Errorf("exit code %d", code)
			}
			for _, line := range []string{
				"service telemetry: adopt pin " + path + ": ValueSize: 24 changed to 16: map spec is incompatible with existing map\n",
				"hint: sockeye reset removes the pins of another version; steering stops until the agent starts again\n",
			} {
				if log := h.agent.LogTail(3); !strings.Contains(log+"\n", line) {
					t.Errorf("the log lacks %q:\n%s", line, log)
				}
			}
			h.lands("refused pins", addresses(120)[80:], home)
			h.must(os.Rename(path+"_kept", path))
			h.startVersion(thisVersion)
		})
	})
}
