// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"context"
	"crypto/md5"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"sockeye/internal/config"
	"sockeye/lab"
)

const (
	radiusPort     = 1812
	accountingPort = 1813
	radiusSecret   = "replace this secret" // of the example
	radiusUnit     = "freeradius/etc/systemd/system/freeradius@.service"
	radiusUser     = 7001
)

// TestExampleFreeRADIUS runs four FreeRADIUS with the configuration and the policy of examples/freeradius, and a PEAP
// conversation of each of 32 access servers, which send their requests from eight ports in turn. Nftables by flow separates
// the requests of each conversation. By source address, it does not, but it also sends requests to a process that does not run.
func TestExampleFreeRADIUS(t *testing.T) {
	h := newHost(t, config.Lookup)
	t.Cleanup(func() {
		for _, m := range h.members {
			if t.Failed() {
				t.Logf("end of the log of %s:\n%s", m.Name, m.LogTail(20))
			}
		}
	})
	e := &radiusExample{host: h, port: 20000}
	for i := range 32 {
		e.all = append(e.all, netip.AddrFrom4([4]byte{10, 80, 1, byte(i)}))
	}
	e.prepare()
	for slot := range 4 {
		e.start(slot)
	}
	e.listening()
	e.balance("jhash ip saddr . udp sport mod 4")
	byFlow := e.authenticate(3 * time.Second)
	e.balance("jhash ip saddr mod 4")
	bySource := e.authenticate(patience)
	h.kill(0)
	oneLost := e.authenticate(3 * time.Second)
	t.Logf("nftables: by flow %d, by source address %d, without one process %d of %d conversations succeed", byFlow, bySource, oneLost, len(e.all))
	if byFlow > 2 {
		t.Errorf("by flow, %d conversations succeed", byFlow)
	}
	if bySource != len(e.all) {
		t.Errorf("by source address, %d conversations succeed", bySource)
	}
	if oneLost == len(e.all) {
		t.Error("by source address, all conversations succeed without one process")
	}
	e.nft("delete table ip balance")

	e.setExamplePolicy("freeradius", "freeradius", strconv.Itoa(radiusUser), `{match: {command_line: '^/usr/sbin/freeradius -f '}, slot: environment}`)
	h.startAgent()
	h.ready(1, 2, 3)
	if n := e.authenticate(patience); n != len(e.all) {
		t.Errorf("with Sockeye, without one process: %d of %d conversations succeed", n, len(e.all))
	}
	e.start(0)
	h.ready(0, 1, 2, 3)
	if n := e.authenticate(patience); n != len(e.all) {
		t.Errorf("with Sockeye, %d of %d conversations succeed", n, len(e.all))
	}
	e.account()
}

// radiusExample are four FreeRADIUS processes and the access servers that ask them.
type radiusExample struct {
	*host
	all         []netip.Addr
	credentials string
	supplicant  string // configuration of eapol_test
	port        int    // the last one that an access server has used
}

// prepare writes the files that systemd gives to the unit, with the access servers and a user of the network.
func (e *radiusExample) prepare() {
	e.Helper()
	write := func(path, text string, mode fs.FileMode) string {
		e.must(os.WriteFile(path, []byte(text), mode))
		e.must(os.Chown(path, radiusUser, radiusUser))
		return path
	}
	e.credentials = filepath.Join(e.dir, "credentials")
	e.must(errors.Join(os.Mkdir(e.credentials, 0o755), os.Mkdir(e.logs(), 0o755), os.Chown(e.logs(), radiusUser, radiusUser)))
	for _, load := range e.exampleUnit(radiusUnit, "LoadCredential", 0) {
		name, path, _ := strings.Cut(load, ":")
		var text string
		if strings.HasPrefix(path, "/etc/radius/") {
			text = e.readExample("freeradius" + path)
		} else {
			b, err := os.ReadFile(path)
			e.must(err)
			text = string(b)
		}
		switch name {
		case "clients.conf":
			text = e.replaceOnce(text, "192.0.2.0/24", "10.80.1.0/24")
		case "users":
			text = e.replaceOnce(text, "# alice", "alice")
		}
		write(filepath.Join(e.credentials, name), text, 0o400)
	}
	write(filepath.Join(e.dir, "slot.conf"), e.readExample("freeradius/etc/radius/slot.conf"), 0o444)
	e.supplicant = write(filepath.Join(e.dir, "supplicant.conf"), `network={
	key_mgmt=IEEE8021X
	eap=PEAP
	identity="alice"
	password="replace this password"
	phase2="auth=MSCHAPV2"
}
`, 0o444)
	e.must(e.collectors.Sysctl("ipv4.conf.all.route_localnet", "1")) // for nftables: addresses of 127.0.0.0/8 as destination
}

func (e *radiusExample) logs() string { return filepath.Join(e.dir, "accounting") }

// start starts a FreeRADIUS as the example's unit does.
func (e *radiusExample) start(slot int) {
	e.Helper()
	command := e.exampleUnit(radiusUnit, "ExecStart", slot)[0]
	p := e.collectors.Command(context.Background(), strings.Fields(e.replaceOnce(command, "/etc/radius", e.dir))...)
	p.Name, p.User = fmt.Sprintf("freeradius-%d", slot), strconv.Itoa(radiusUser)
	p.Cmd.Env = append(e.exampleUnit(radiusUnit, "Environment", slot), fmt.Sprintf("SOCKEYE_SLOT=%d", slot),
		"CREDENTIALS_DIRECTORY="+e.credentials, "LOGS_DIRECTORY="+e.logs())
	e.must(p.Start())
	e.members[slot] = &member{Process: p, slot: slot}
}

// listening waits until all processes have opened their sockets.
func (e *radiusExample) listening() {
	e.Helper()
	for _, m := range e.members {
		e.eventually(m.Name, func() error {
			if err := m.Err(); err != nil {
				e.Fatal(err)
			}
			if log := m.LogTail(5); !strings.Contains(log, "Ready to process requests") {
				return errors.New(log)
			}
			return nil
		})
	}
}

// nft runs nft(8) in the namespace of the processes.
func (e *radiusExample) nft(rules string) {
	e.Helper()
	p := e.collectors.Command(e.Context(), "/usr/sbin/nft", rules)
	e.must(p.Start())
	if p.Wait() != nil {
		e.Fatal(p.Err())
	}
}

// balance distributes the requests to the processes by nftables, without Sockeye.
func (e *radiusExample) balance(slot string) {
	e.Helper()
	e.nft(fmt.Sprintf(`table ip balance
delete table ip balance
table ip balance {
	chain prerouting {
		type nat hook prerouting priority dstnat
		udp dport { %d, %d } dnat to %s map { 0 : 127.0.1.0, 1 : 127.0.1.1, 2 : 127.0.1.2, 3 : 127.0.1.3 }
	}
}`, radiusPort, accountingPort, slot))
}

// authenticate runs a conversation of each access server at the same time, and returns the number of those that succeed.
func (e *radiusExample) authenticate(limit time.Duration) (succeeded int) {
	e.Helper()
	// Each port is used once: the kernel passes the packets of a known flow to the process that earlier rules have chosen.
	firstPort := e.port + 1
	e.port += len(nas{}.ports)
	conversations := make([]*lab.Process, len(e.all))
	var relays sync.WaitGroup
	defer relays.Wait()
	for i, a := range e.all {
		n, err := e.openNAS(a, firstPort)
		e.must(err)
		relays.Go(n.relay)
		defer n.Close()
		conversations[i] = e.devices.Command(e.Context(), "/usr/bin/eapol_test", "-c", e.supplicant, "-s", radiusSecret, "-A", "127.0.0.1", "-a", "127.0.0.1",
			"-p", fmt.Sprint(n.local.LocalAddr().(*net.UDPAddr).Port), "-t", fmt.Sprint(int(limit/time.Second)))
		e.must(conversations[i].Start())
	}
	for _, c := range conversations {
		if c.Wait() == nil {
			succeeded++
		} else if limit == patience {
			e.Log(c.Err())
		}
	}
	return succeeded
}

// nas is an access server, which sends the requests of eapol_test from eight ports in turn.
type nas struct {
	local *net.UDPConn // eapol_test sends here
	ports [8]*net.UDPConn
	peer  atomic.Pointer[netip.AddrPort] // of local
}

func (e *radiusExample) openNAS(a netip.Addr, firstPort int) (*nas, error) {
	n := new(nas)
	err := e.devices.Do(func() (err error) {
		if n.local, err = net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)}); err != nil {
			return err
		}
		for i := range n.ports {
			if n.ports[i], err = dialRADIUS(netip.AddrPortFrom(a, uint16(firstPort+i)), radiusPort); err != nil {
				return err
			}
		}
		return nil
	})
	return n, err
}

func dialRADIUS(from netip.AddrPort, port uint16) (*net.UDPConn, error) {
	return net.DialUDP("udp4", net.UDPAddrFromAddrPort(from), net.UDPAddrFromAddrPort(target(from.Addr(), port)))
}

// relay passes requests and replies on until Close.
func (n *nas) relay() {
	var replies sync.WaitGroup
	defer replies.Wait()
	for _, c := range n.ports {
		replies.Go(func() {
			reply := make([]byte, 4096)
			for {
				size, err := c.Read(reply)
				if errors.Is(err, net.ErrClosed) {
					return
				}
				if peer := n.peer.Load(); err == nil && peer != nil { // otherwise a process does not run
					_, _ = n.local.WriteToUDPAddrPort(reply[:size], *peer)
				}
			}
		})
	}
	request := make([]byte, 4096)
	for i := 0; ; i++ {
		size, peer, err := n.local.ReadFromUDPAddrPort(request)
		if err != nil {
			return
		}
		n.peer.Store(&peer)
		_, _ = n.ports[i%len(n.ports)].Write(request[:size])
	}
}

func (n *nas) Close() {
	n.local.Close()
	for _, c := range n.ports {
		c.Close()
	}
}

// account sends an accounting request from each access server, and checks that it reaches the process of the server's slot.
func (e *radiusExample) account() {
	e.Helper()
	home := e.homes(4)
	e.fromDevices(e.all, func(a netip.Addr) {
		c, err := dialRADIUS(netip.AddrPortFrom(a, 0), accountingPort)
		if err != nil {
			e.Error(err)
			return
		}
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(patience))
		if _, err := c.Write(accountingStart(a)); err != nil {
			e.Errorf("%v: %v", a, err)
		}
		reply := make([]byte, 4096)
		if size, err := c.Read(reply); err != nil || size < 20 || reply[0] != 5 {
			e.Errorf("%v: accounting response %x, %v", a, reply[:size], err)
		}
	})
	for _, a := range e.all {
		text, err := os.ReadFile(filepath.Join(e.logs(), fmt.Sprintf("accounting-%d", home(a))))
		if err != nil || !strings.Contains(string(text), fmt.Sprintf("NAS-IP-Address = %v\n", a)) {
			e.Errorf("%v: no record at slot %d, %v", a, home(a), err)
		}
	}
}

// accountingStart returns an Accounting-Request (RFC 2866) of an access server.
func accountingStart(a netip.Addr) []byte {
	request := append([]byte{4, 1, 0, 0}, make([]byte, md5.Size)...)
	request = append(append(request, 4, 6), a.AsSlice()...) // NAS-IP-Address
	request = append(request, 40, 6, 0, 0, 0, 1)            // Acct-Status-Type = Start
	request = append(append(request, 44, 2+4), "0001"...)   // Acct-Session-Id
	binary.BigEndian.PutUint16(request[2:], uint16(len(request)))
	sum := md5.Sum(append(request, radiusSecret...))
	copy(request[4:], sum[:])
	return request
}
