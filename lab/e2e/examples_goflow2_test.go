// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"sockeye/internal/config"
	devices "sockeye/lab/traffic"
)

const (
	goflow2Unit = "goflow2/etc/systemd/system/goflow2@.service"
	goflow2User = "7001"
)

// TestExampleGoflow2 runs four goflow2 with the unit's command and the policy of examples/goflow2, and restarts one of them.
// Exporters send their templates once, before the restart. Without Sockeye, the kernel's hash sends the records of most
// exporters to a process that has no templates for them. With Sockeye, all records are decoded.
func TestExampleGoflow2(t *testing.T) {
	binary := os.Getenv(goflow2Env)
	if !filepath.IsAbs(binary) {
		t.Fatal(binary)
	}
	h := newHost(t, config.Reuseport)
	e := &goflow2Example{host: h, binary: binary, all: addresses(32)}
	if install := "goflow2/v2/cmd/goflow2@" + goflow2Version + "\n"; !strings.Contains(e.readExample("goflow2/README.md"), install) {
		t.Errorf("README.md does not install %s, which this test runs", install)
	}
	for slot := range 4 {
		e.start(slot)
		e.listening(slot + 1) // the kernel numbers the sockets in this order
	}
	sent := len(e.all) * restartRecords
	without := e.restart(1, nil)
	t.Logf("without Sockeye, %d of %d records are decoded", without, sent)
	// Half of the exporters are sent to a process without their templates: 427 records are decoded on average, with a standard
	// deviation of 34.
	if without > sent*9/10 {
		t.Errorf("without Sockeye, %d of %d records are decoded", without, sent)
	}
	e.setExamplePolicy("goflow2", "goflow2", goflow2User, `{match: {command_line: '^\S+/goflow2 .*/slot-(\d+)\.json'}, slot: group}`)
	h.startAgent()
	h.ready(0, 1, 2, 3)
	if with := e.restart(2, h.homes(4)); with != sent {
		t.Errorf("with Sockeye, %d of %d records are decoded", with, sent)
	}
}

// restartRecords is the number of records of each exporter: a quarter before a restart, a quarter while no process has the
// slot, and a half afterwards.
const restartRecords = 20

// goflow2Example are four goflow2 processes and the exporters that send to them.
type goflow2Example struct {
	*host
	binary string
	all    []netip.Addr
}

func (e *goflow2Example) file(slot int) string {
	return filepath.Join(e.dir, fmt.Sprintf("slot-%d.json", slot))
}

// start starts a goflow2 as the example's unit does.
func (e *goflow2Example) start(slot int) {
	e.Helper()
	// The user of the process cannot create files in the directory.
	f, err := os.OpenFile(e.file(slot), os.O_CREATE|os.O_APPEND, 0o666)
	e.must(err)
	e.must(errors.Join(f.Chmod(0o666), f.Close()))
	command := e.exampleUnit(goflow2Unit, "ExecStart", slot)[0]
	command = e.replaceOnce(e.replaceOnce(command, "/usr/local/bin/goflow2 ", e.binary+" "), "/var/log/goflow2", e.dir)
	p := e.collectors.Command(context.Background(), strings.Fields(command)...)
	p.Name, p.User = fmt.Sprintf("goflow2-%d", slot), goflow2User
	e.must(p.Start())
	e.members[slot] = &member{Process: p, slot: slot}
}

// listening waits until a number of processes have opened their sockets.
func (e *goflow2Example) listening(processes int) {
	e.Helper()
	e.bound("udp6", ipfixPort, processes)
}

// decodedRecord is a record that goflow2 has decoded.
type decodedRecord struct {
	Sampler netip.Addr `json:"sampler_address"`
	Domain  uint32     `json:"observation_domain_id"`
	Number  uint16     `json:"src_port"`
}

// restart lets the exporters of an observation domain send while a process is restarted, and returns the number of records
// that were decoded. With home, each must be decoded at the exporter's home slot.
func (e *goflow2Example) restart(domain uint32, home home) (decoded int) {
	e.Helper()
	// The number of each record is its source port. One more record is sent after another template message: when it is
	// decoded, all others are, or will not be.
	var messages [][]devices.Flow
	for i := range restartRecords + 1 {
		flow := loadFlow
		flow.SrcPort = uint16(i)
		messages = append(messages, []devices.Flow{flow})
	}
	exporters := make([]*devices.Exporter, len(e.all))
	e.must(e.devices.Do(func() (err error) {
		for i, a := range e.all {
			config := devices.ExporterConfig{Source: a, Target: target(a, ipfixPort), Domain: domain, Messages: messages, TemplateRefresh: time.Hour}
			if exporters[i], err = devices.NewExporter(config); err != nil {
				return err
			}
		}
		return nil
	}))
	send := func(n int) {
		e.Helper()
		for i, x := range exporters {
			if _, err := x.Send(n); err != nil {
				e.Fatalf("%v: %v", e.all[i], err)
			}
		}
	}
	defer func() {
		for _, x := range exporters {
			x.Close()
		}
	}()
	send(restartRecords / 4)
	e.eventually("all records before the restart", func() error {
		if n := len(e.records(domain, home)); n != len(e.all)*restartRecords/4 {
			return fmt.Errorf("%d", n)
		}
		return nil
	})
	e.kill(2)
	send(restartRecords / 4)
	e.start(2)
	if home == nil {
		e.listening(4)
	} else {
		e.ready(0, 1, 2, 3)
	}
	send(restartRecords / 2)
	for _, x := range exporters {
		e.must(x.SendTemplates())
	}
	send(1)
	e.eventually("the last record of each exporter", func() error {
		all, last := e.records(domain, home), 0
		for r := range all {
			if r.Number == restartRecords {
				last++
			}
		}
		decoded = len(all) - last
		if last != len(e.all) {
			return fmt.Errorf("%d", last)
		}
		return nil
	})
	return decoded
}

// records returns the records of a domain that the processes have decoded.
func (e *goflow2Example) records(domain uint32, home home) map[decodedRecord]int {
	e.Helper()
	all := map[decodedRecord]int{}
	for slot := range 4 {
		f, err := os.Open(e.file(slot))
		e.must(err)
		defer f.Close()
		for records := json.NewDecoder(f); ; {
			var r decodedRecord
			err := records.Decode(&r)
			if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) { // the process may be writing
				break
			}
			e.must(err)
			if r.Domain != domain {
				continue
			}
			r.Sampler = r.Sampler.Unmap()
			if all[r]++; all[r] > 1 {
				e.Fatalf("record %d of %v is decoded %d times", r.Number, r.Sampler, all[r])
			}
			if home != nil && slot != home(r.Sampler) {
				e.Fatalf("slot %d has a record of %v, home %d", slot, r.Sampler, home(r.Sampler))
			}
		}
	}
	return all
}
