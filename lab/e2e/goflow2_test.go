// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"sockeye/internal/config"
	devices "sockeye/lab/traffic"
)

const (
	// goflow2Version is that of go.mod, whose decoder other tests use.
	goflow2Version = "v2.2.6"
	// goflow2Env is the path of goflow2, or the error of its installation.
	goflow2Env = "SOCKEYE_E2E_GOFLOW2"
)

// installGoflow2 compiles goflow2, before the tests enter a network namespace. The command has many dependencies, which are
// not those of this module.
func installGoflow2(dir string) error {
	cmd := exec.Command("go", "install", "github.com/netsampler/goflow2/v2/cmd/goflow2@"+goflow2Version)
	cmd.Env = append(os.Environ(), "GOBIN="+dir, "GOFLAGS=-mod=mod", "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return os.Setenv(goflow2Env, fmt.Sprintf("install goflow2: %v\n%s", err, out))
	}
	return os.Setenv(goflow2Env, filepath.Join(dir, "goflow2"))
}

// TestGoflow2 restarts a goflow2, and moves a device to another one, under 500 datagrams a second from exporters that send
// their templates once, with and without the template keeper.
func TestGoflow2(t *testing.T) {
	binary := os.Getenv(goflow2Env)
	if !filepath.IsAbs(binary) {
		t.Fatal(binary)
	}
	inBothModes(t, func(t *testing.T, mode config.Steering) {
		for _, templates := range []string{"keep", "off"} {
			t.Run(templates, func(t *testing.T) {
				g := &goflows{host: newHost(t, mode), binary: binary, read: map[string]int64{}, decoded: map[netip.Addr]map[string]*decodedRecords{}}
				g.run(templates == "keep")
			})
		}
	})
}

// goflows are exporters, and two goflow2.
type goflows struct {
	*host
	binary    string
	starts    int
	files     []string
	read      map[string]int64 // bytes by file
	all       []netip.Addr
	exporters []*devices.Exporter
	decoded   map[netip.Addr]map[string]*decodedRecords // by device and file
}

// decodedRecords are the records of a device that a process has decoded.
type decodedRecords struct {
	n     uint64
	first time.Time // received
}

func (g *goflows) start(slot int) (file string) {
	g.Helper()
	g.starts++
	file = filepath.Join(g.dir, fmt.Sprintf("goflow2-%d-%d.json", slot, g.starts))
	port := g.spec(slot).Sockets[1].Address.Port()
	p := g.collectors.Command(context.Background(), g.binary, "-addr=", "-transport.file="+file,
		fmt.Sprintf("-listen=netflow://[::]:%d?workers=1&queue_size=100000", port))
	p.Name = fmt.Sprintf("goflow2-%d", slot)
	g.must(p.Start())
	g.members[slot] = &member{Process: p, slot: slot}
	g.files = append(g.files, file)
	return file
}

// drive sends datagrams.
func (g *goflows) drive(d time.Duration) {
	g.Helper()
	ctx, cancel := context.WithTimeout(g.Context(), d)
	defer cancel()
	if _, err := devices.Drive(ctx, devices.Limit{Rate: 500, Batch: 1}, len(g.all), func(i, n int) (int, error) { return g.exporters[i].Send(n) }); err != nil {
		g.Error(err)
	}
}

// readRecords reads the new records of all processes.
func (g *goflows) readRecords() {
	g.Helper()
	for _, file := range g.files {
		f, err := os.Open(file)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		g.must(err)
		b, err := io.ReadAll(io.NewSectionReader(f, g.read[file], 1<<40))
		g.must(errors.Join(err, f.Close()))
		// The last record may be incomplete.
		from := g.read[file]
		for records := json.NewDecoder(bytes.NewReader(b)); ; g.read[file] = from + records.InputOffset() {
			var r struct {
				Sampler  netip.Addr `json:"sampler_address"`
				Received int64      `json:"time_received_ns"`
				Packets  uint64     `json:"packets"`
			}
			err := records.Decode(&r)
			if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
				break
			}
			g.must(err)
			a := r.Sampler.Unmap()
			if g.decoded[a] == nil {
				g.decoded[a] = map[string]*decodedRecords{}
			}
			if g.decoded[a][file] == nil {
				g.decoded[a][file] = &decodedRecords{first: time.Unix(0, r.Received)}
			}
			g.decoded[a][file].n += r.Packets
		}
	}
}

// missing returns the number of records of a device that were sent and not decoded.
func (g *goflows) missing(i int) int {
	n := int(g.exporters[i].Stats().Records)
	for _, d := range g.decoded[g.all[i]] {
		n -= int(d.n)
	}
	return n
}

func (g *goflows) run(keep bool) {
	g.Helper()
	templates, udp := "off", ""
	if keep {
		templates = "keep"
	}
	if g.mode == config.Lookup {
		udp = ", member_ports: 21000-21099"
	}
	g.setPolicy(2, "user: root", "when_empty: {wait: 60s}", "templates: "+templates,
		`listeners: [{protocol: udp, address: "[::]:4739"`+udp+`}]`, `members: [{match: {command_line: 'goflow2-(\d+)-\d+\.json'}, slot: group}]`)
	g.startAgent()
	g.start(0)
	other := g.start(1)
	g.ready(0, 1)
	home := g.homes(2)
	g.all = addresses(24)
	g.must(g.devices.Do(func() error {
		for _, a := range g.all {
			e, err := devices.NewExporter(devices.ExporterConfig{Source: a, Target: target(a, ipfixPort), Messages: [][]devices.Flow{{loadFlow}}, TemplateRefresh: time.Hour})
			if err != nil {
				return err
			}
			g.exporters = append(g.exporters, e)
			if err := e.SendTemplates(); err != nil {
				return err
			}
		}
		return nil
	}))
	defer func() {
		for _, e := range g.exporters {
			e.Close()
		}
	}()
	g.drive(time.Second)
	g.complete("before the restart", func(netip.Addr) bool { return true })

	killed := time.Now()
	g.kill(0)
	var sending sync.WaitGroup
	sending.Go(func() { g.drive(4 * time.Second) })
	time.Sleep(500 * time.Millisecond)
	file := g.start(0)
	g.ready(0, 1)
	sending.Wait()
	g.complete("after the restart", func(a netip.Addr) bool { return keep || home(a) == 1 })
	g.reportFirst("the restart", file, killed, keep, func(a netip.Addr) bool { return home(a) == 0 })

	// One device moves to slot 1.
	var one netip.Addr
	for _, a := range g.all {
		if home(a) == 0 {
			one = a
		}
	}
	moved := time.Now()
	if _, stderr, code := g.cli("move", one.String(), "1"); code != 0 {
		g.Fatal(stderr)
	}
	g.drive(3 * time.Second)
	g.complete("after the move", func(a netip.Addr) bool { return keep || home(a) == 1 })
	g.reportFirst("the move", other, moved, keep, func(a netip.Addr) bool { return a == one })
	for i, e := range g.exporters {
		if s := e.Stats(); s.Templates != 1 || s.Refused > 0 {
			g.Errorf("%v: %d template messages, %d refused", g.all[i], s.Templates, s.Refused)
		}
	}
}

// complete waits until all records of some devices are decoded.
func (g *goflows) complete(when string, of func(netip.Addr) bool) {
	g.Helper()
	g.eventually(when+": all records to be decoded", func() error {
		g.readRecords()
		var differ []string
		for i, a := range g.all {
			if n := g.missing(i); of(a) && n != 0 {
				differ = append(differ, fmt.Sprintf("%v: %d of %d missing", a, n, g.exporters[i].Stats().Records))
			}
		}
		if len(differ) > 0 {
			return errors.New(strings.Join(differ, ", "))
		}
		return nil
	})
}

// reportFirst logs the time to the first decoded record of some devices, and checks that there are none without the keeper.
func (g *goflows) reportFirst(event, file string, since time.Time, keep bool, of func(netip.Addr) bool) {
	g.Helper()
	var longest time.Duration
	devices, decoded := 0, 0
	for _, a := range g.all {
		if !of(a) {
			continue
		}
		devices++
		if d := g.decoded[a][file]; d != nil {
			decoded++
			longest = max(longest, d.first.Sub(since))
		}
	}
	switch {
	case keep && decoded == devices && devices > 0:
		g.Logf("%s: the last of %d devices has its first decoded record after %v", event, devices, longest.Round(time.Millisecond))
	case !keep && decoded == 0 && devices > 0:
		g.Logf("%s, templates: off: no record of %d devices is decoded", event, devices)
	default:
		g.Errorf("%s: records of %d of %d devices are decoded", event, decoded, devices)
	}
}
