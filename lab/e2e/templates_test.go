// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"sockeye/internal/config"
	"sockeye/internal/steer/templates"
)

// ipfixTemplate is an IPFIX message with template 256, whose field has a length that identifies the device.
func ipfixTemplate(sequence uint32, length uint16) []byte {
	b := binary.BigEndian.AppendUint16(nil, 10)
	b = binary.BigEndian.AppendUint16(b, 16+4+8)
	b = binary.BigEndian.AppendUint32(b, 1700000000)
	b = binary.BigEndian.AppendUint32(b, sequence)
	b = binary.BigEndian.AppendUint32(b, 7) // observation domain
	for _, v := range []uint16{2, 12, 256, 1, 210, length} {
		b = binary.BigEndian.AppendUint16(b, v)
	}
	return b
}

// TestTemplates checks that a member that newly serves a device receives the templates of the device before any other
// datagram: after a restart, without and with a standby slot or a waiting room, after a move, and with another agent.
func TestTemplates(t *testing.T) {
	inBothModes(t, func(t *testing.T, mode config.Steering) {
		for _, empty := range []string{"reject", "{standby: 1}", "{wait: 20s}"} {
			t.Run(empty, func(t *testing.T) { templatesFollow(t, mode, empty) })
		}
	})
}

func templatesFollow(t *testing.T, mode config.Steering, empty string) {
	h := newHost(t, mode)
	h.setPolicy(2, "when_empty: "+empty)
	h.startAgent()
	for slot := range 2 {
		h.recording(slot)
	}
	h.ready(0, 1)
	all := addresses(20)
	where := h.homes(2)
	send := func(a netip.Addr, message []byte) {
		h.Helper()
		h.must(h.devices.Do(func() error {
			c, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(a, 2055)))
			if err != nil {
				return err
			}
			defer c.Close()
			_, err = c.WriteToUDPAddrPort(message, target(a, ipfixPort))
			return err
		}))
	}
	received := func(a netip.Addr, slot int) []string {
		h.mu.Lock()
		defer h.mu.Unlock()
		return h.texts[arrival{slot, "udp", a}]
	}
	for i, a := range all {
		send(a, ipfixTemplate(100, uint16(i+1)))
	}
	known := func(replays uint64, of func(slot int) bool) {
		h.Helper()
		h.eventually(fmt.Sprintf("%d replays", replays), func() error {
			var list []struct {
				Source  string
				Slot    int
				Replays uint64
			}
			h.show(&list, "templates")
			if len(list) != len(all) {
				return fmt.Errorf("%d templates", len(list))
			}
			for _, one := range list {
				if of(one.Slot) && one.Replays < replays {
					return fmt.Errorf("%+v", one)
				}
			}
			return nil
		})
	}
	anywhere := func(int) bool { return true }
	known(0, anywhere)
	h.eventually("the templates to be saved", func() error {
		file, err := os.ReadFile(filepath.Join(h.dir, "state", "telemetry.templates"))
		if err != nil {
			return err
		}
		_, saved, _ := bytes.Cut(file, []byte("\n"))
		store := templates.NewStore(templates.Limits{}, nil)
		if err := store.Load(bytes.NewReader(saved), time.Now()); err != nil {
			h.Fatal(err)
		}
		if n := store.Stats().Sources; n != len(all) {
			return fmt.Errorf("%d sources", n)
		}
		return nil
	})
	// taught checks that the first datagram of each device at a new member was its template.
	taught := func(when string, from map[netip.Addr]int, slot func(netip.Addr) int) {
		h.Helper()
		for i, a := range all {
			at := slot(a)
			if at < 0 {
				continue
			}
			h.eventually(fmt.Sprintf("%s: the templates of %v", when, a), func() error {
				got := received(a, at)[from[a]:]
				if len(got) == 0 {
					return fmt.Errorf("nothing")
				}
				if got[0] != string(ipfixTemplate(100, uint16(i+1))) && (len(got[0]) < 20 || got[0][20:] != string(ipfixTemplate(100, uint16(i+1))[20:])) {
					h.Errorf("%s: %v: the first datagram is %x", when, a, got[0])
				}
				return nil
			})
		}
	}
	before := func(slot func(netip.Addr) int) map[netip.Addr]int {
		from := make(map[netip.Addr]int)
		for _, a := range all {
			if slot(a) >= 0 {
				from[a] = len(received(a, slot(a)))
			}
		}
		return from
	}
	at := func(slot int) func(netip.Addr) int {
		return func(a netip.Addr) int {
			if where(a) != slot {
				return -1
			}
			return slot
		}
	}
	// A restart.
	from := before(at(0))
	h.kill(0)
	if empty != "reject" {
		for _, a := range all {
			send(a, []byte("waits"))
		}
	}
	h.recording(0)
	h.ready(0, 1)
	taught("restart", from, at(0))
	// Another agent.
	h.killAgent()
	from = before(at(1))
	h.kill(1)
	h.startAgent()
	known(0, anywhere)
	h.recording(1)
	h.ready(0, 1)
	taught("another agent", from, at(1))
	// Another agent, which finds the next member when it starts.
	h.killAgent()
	from = before(at(1))
	h.kill(1)
	<-h.recording(1).open
	h.startAgent()
	h.ready(0, 1)
	taught("a member before the agent", from, at(1))
	// A move.
	moved := func(a netip.Addr) int {
		if where(a) != 1 {
			return -1
		}
		return 0
	}
	from = before(moved)
	h.show(new(any), "slot", "set", "1", "drain")
	taught("move", from, moved)
	// A policy without templates discards them: they may be outdated when it keeps templates again.
	for _, templates := range []string{"off", "keep"} {
		h.setPolicy(2, "when_empty: "+empty, "templates: "+templates)
		if templates == "off" {
			h.plans("templates: keep -> off", "the templates of 20 exporters are discarded")
		}
		h.show(new(any), "apply")
		var list []any
		if h.show(&list, "templates"); len(list) != 0 {
			h.Errorf("templates: %s: %v", templates, list)
		}
	}
	last := all[0]
	count := len(received(last, 0))
	send(last, ipfixTemplate(200, 1))
	h.eventually("a template after templates: keep", func() error {
		got := received(last, 0)
		if len(got) != count+1 || got[count] != string(ipfixTemplate(200, 1)) {
			return fmt.Errorf("%x after %d datagrams", got[count:], count)
		}
		return nil
	})
}

// TestTemplatesDecoded restarts a member while records of its devices wait. The records come when the member has read the templates, and
// has worked with them.
func TestTemplatesDecoded(t *testing.T) {
	inBothModes(t, func(t *testing.T, mode config.Steering) {
		h := newHost(t, mode)
		h.setPolicy(1, "when_empty: {wait: 20s}")
		h.startAgent()
		h.recording(0)
		h.ready(0)
		device := addresses(1)[0]
		send := func(message []byte) {
			h.Helper()
			h.must(h.devices.Do(func() error {
				c, err := net.DialUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(device, 2055)), net.UDPAddrFromAddrPort(target(device, ipfixPort)))
				if err != nil {
					return err
				}
				defer c.Close()
				_, err = c.Write(message)
				return err
			}))
		}
		send(ipfixTemplate(100, 4))
		h.eventually("the template to be known", func() error {
			var list []any
			if h.show(&list, "templates"); len(list) != 1 {
				return fmt.Errorf("%d templates", len(list))
			}
			return nil
		})
		h.kill(0)
		send([]byte("waits"))
		spec := h.spec(0)
		spec.Records, spec.Decodes = true, 100*time.Millisecond
		m := h.startReceiver("receiver-0", spec)
		h.eventually("the record", func() error {
			if err := m.Err(); err != nil {
				h.Fatal(err)
			}
			h.mu.Lock()
			defer h.mu.Unlock()
			if texts := h.texts[arrival{0, "udp", device}]; len(texts) == 0 || texts[len(texts)-1] != "waits" {
				return fmt.Errorf("%x", texts)
			}
			return nil
		})
	})
}
