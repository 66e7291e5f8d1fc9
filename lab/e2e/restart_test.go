// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/config"
	"sockeye/lab"
	devices "sockeye/lab/traffic"
)

// TestRestartNfacctd kills an nfacctd, and starts it again, under 2,000 IPFIX datagrams a second from exporters that have
// sent their templates once, while their BMP sessions connect again. nfacctd needs 5 s until its sockets are open. It
// decodes every datagram that was sent since, and no connection is refused.
func TestRestartNfacctd(t *testing.T) {
	inBothModes(t, func(t *testing.T, mode config.Steering) { newHost(t, mode).restartsNfacctd() })
}

// TestUpgradeNfacctd starts a second nfacctd for an occupied slot under traffic, and kills the first one afterwards. The two
// decode every datagram.
func TestUpgradeNfacctd(t *testing.T) {
	inBothModes(t, func(t *testing.T, mode config.Steering) { newHost(t, mode).upgradesNfacctd() })
}

func (h *host) upgradesNfacctd() {
	h.Helper()
	f := h.newFlows("takeover: true")
	f.drive(time.Second)
	f.complete("before the upgrade")
	former := h.members[0]
	f.former = h.lab.Collectors()[:1]
	var sending sync.WaitGroup
	sending.Go(func() { f.drive(12 * time.Second) })
	h.ports += 10
	f.startCollector(0, 20)
	f.ready(0, 1)
	if s := h.service(); len(s.Formers) != 1 || s.Formers[0].PID != former.Pid() {
		h.Errorf("formers: %+v", s.Formers)
	}
	sending.Wait()
	f.complete("after the upgrade")
	h.must(former.Signal(unix.SIGKILL))
	<-former.Done()
	h.eventually("no former member", func() error {
		if s := h.service(); len(s.Formers) != 0 {
			return fmt.Errorf("%+v", s.Formers)
		}
		return nil
	})
	f.drive(time.Second)
	f.complete("after the exit of the former member")
	f.checkExporters()
}

// flows are exporters that send their templates once, and two nfacctd.
type flows struct {
	*network
	all       []netip.Addr
	exporters []*devices.Exporter
	decoded   map[netip.Addr]uint64
	offsets   map[string]int64 // by records file
	former    []*lab.Collector // whose slot another nfacctd has taken over
	bare      uint64           // decoded records without routes
	others    int              // records of other exporters
}

func (h *host) newFlows(policy string) *flows {
	h.Helper()
	h.setPolicy(2, policy)
	h.startAgent()
	f := &flows{network: &network{h, h.homes(2)}, all: addresses(40), decoded: map[netip.Addr]uint64{}, offsets: map[string]int64{}}
	for slot := range 2 {
		f.startCollector(slot, 20)
	}
	f.ready(0, 1)
	h.must(h.devices.Do(func() error {
		for _, a := range f.all {
			e, err := devices.NewExporter(devices.ExporterConfig{Source: a, Target: target(a, ipfixPort), Messages: [][]devices.Flow{{loadFlow}}, TemplateRefresh: time.Hour})
			if err != nil {
				return err
			}
			f.exporters = append(f.exporters, e)
		}
		return nil
	}))
	h.Cleanup(func() {
		for _, e := range f.exporters {
			e.Close()
		}
		if h.Failed() {
			for _, c := range h.lab.Collectors() {
				h.Logf("%s", state(c))
			}
		}
	})
	return f
}

// state describes a collector that does not do what it should: where its processes wait, its records, and its log without the lines of each write.
func state(c *lab.Collector) string {
	text := c.Name
	pids, err := c.PIDs()
	if err != nil {
		text += ": " + err.Error()
	}
	for _, pid := range pids {
		read := func(name string) string {
			b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, name))
			return strings.TrimSpace(strings.ReplaceAll(string(b), "\x00", " "))
		}
		tasks, _ := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
		text += fmt.Sprintf("\n  pid %d, %d threads: %s: %s", pid, len(tasks), read("cmdline"), read("syscall"))
	}
	file, err := os.Stat(c.RecordsPath)
	if err == nil {
		text += fmt.Sprintf("\n  %d bytes of records, written %v ago", file.Size(), time.Since(file.ModTime()).Round(time.Second))
	}
	for line := range strings.Lines(c.LogTail(1000)) {
		if !strings.Contains(line, "Purging cache") {
			text += "\n  " + strings.TrimSpace(line)
		}
	}
	return text
}

// restartRateVariable is the number of datagrams a second in the tests of nfacctd. Default: 2,000, because a loaded machine
// loses more inside of nfacctd.
const restartRateVariable = "SOCKEYE_RESTART_RATE"

// drive sends datagrams.
func (f *flows) drive(d time.Duration) {
	f.Helper()
	rate := 2000.0
	if text := os.Getenv(restartRateVariable); text != "" {
		var err error
		if rate, err = strconv.ParseFloat(text, 64); err != nil {
			f.Fatalf("%s: %v", restartRateVariable, err)
		}
	}
	ctx, cancel := context.WithTimeout(f.Context(), d)
	defer cancel()
	if _, err := devices.Drive(ctx, devices.Limit{Rate: rate, Batch: 1}, len(f.all), func(i, n int) (int, error) { return f.exporters[i].Send(n) }); err != nil {
		f.Error(err)
	}
}

// misread is the number of records that nfacctd may count twice or not at all. If its print plugin is woken up when it has
// already read the buffer of its core process, it looks for a later one. If it finds none, it reads the last committed
// buffer: the same one again, or the second one of two that were committed meanwhile, without the first (pmacct 1.7.7,
// print_plugin.c: rg->ptr = rg->base + status->last_buf_off). This happens on a busy machine. That no datagram is lost or
// arrives twice is tested by TestTakeover, TestMembersReplaced and TestWaitingRoom, whose members are not nfacctd.
const misread = 3

// misreadTime is the time without a new record after which the missing ones count as misread.
const misreadTime = 5 * time.Second

// complete waits until all records that were sent are decoded, except for those that nfacctd may misread.
func (f *flows) complete(when string) {
	f.Helper()
	progress := time.Now()
	f.eventually(when+": all records to be decoded", func() error {
		for _, c := range append(f.lab.Collectors(), f.former...) {
			records, to, err := c.Records(f.offsets[c.RecordsPath])
			f.must(err)
			f.offsets[c.RecordsPath] = to
			for _, r := range records {
				if c.Slot != f.home(r.Peer) {
					f.Errorf("collector %d has a record of %v", c.Slot, r.Peer)
				}
				if r.Src != loadFlow.Src {
					f.others++
					continue
				}
				progress = time.Now()
				f.decoded[r.Peer] += r.Packets
				if !r.Correlated() {
					f.bare += r.Packets
				}
			}
		}
		var differ []string
		more, fewer := uint64(0), uint64(0)
		for i, a := range f.all {
			sent := f.exporters[i].Stats().Records
			if f.decoded[a] == sent {
				continue
			}
			differ = append(differ, fmt.Sprintf("%v: %d of %d", a, f.decoded[a], sent))
			if f.decoded[a] > sent {
				more += f.decoded[a] - sent
			} else {
				fewer += sent - f.decoded[a]
			}
		}
		if more+fewer <= misread && (fewer == 0 || time.Since(progress) > misreadTime && f.overflows() == 0) {
			return nil
		}
		var served []string
		for _, s := range f.slots() {
			served = append(served, fmt.Sprintf("slot %d: %d datagrams, room %+v", s.Slot, s.Datagrams, s.Room))
		}
		return fmt.Errorf("decoded: %s\n%s\n%d datagrams dropped at full receive buffers", strings.Join(differ, ", "), strings.Join(served, "\n"), f.overflows())
	})
}

// checkExporters checks that no datagram was refused, and that the templates were sent once.
func (f *flows) checkExporters() {
	f.Helper()
	for i, e := range f.exporters {
		if s := e.Stats(); s.Templates != 1 || s.Refused > 0 {
			f.Errorf("%v: %d template messages, %d refused", f.all[i], s.Templates, s.Refused)
		}
	}
}

func (h *host) restartsNfacctd() {
	h.Helper()
	f := h.newFlows("when_empty: {wait: 60s}")
	f.drive(time.Second)
	f.complete("before the restart")
	h.kill(0)
	var sending sync.WaitGroup
	sending.Go(func() { f.drive(10 * time.Second) })
	f.startCollector(0, 20)
	// The routers connect again at once, and none is refused.
	greetings := map[netip.Addr][]byte{}
	var routers []netip.Addr
	for i, a := range f.all {
		if f.home(a) == 0 && len(routers) < 8 {
			routers = append(routers, a)
			greetings[a] = h.routerGreeting(i)
		}
	}
	_, failed := h.rush(routers, func(a netip.Addr) []byte { return greetings[a] })
	for a, l := range failed {
		if l == refused || l == broken {
			h.Errorf("connection of %v: %v", a, landing{tcp: l})
		}
	}
	f.ready(0, 1)
	sending.Wait()
	f.complete("after the restart")
	f.checkExporters()
}
