// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/user"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/netns"
)

// attacker keeps connections open, and replaces each connection that is closed.
type attacker struct {
	dial    func() (net.Conn, error)
	stop    chan struct{}
	running sync.WaitGroup
	dialled atomic.Int64
}

// attack opens n connections and sends one of the texts on each.
func attack(t *testing.T, n int, dial func() (net.Conn, error), texts ...string) *attacker {
	t.Helper()
	a := &attacker{dial: dial, stop: make(chan struct{})}
	for i := range n {
		a.running.Go(func() { a.insist(texts[i%len(texts)]) })
	}
	t.Cleanup(func() {
		close(a.stop)
		a.running.Wait()
	})
	return a
}

// insist reopens one connection whenever it is closed, until the attack ends.
func (a *attacker) insist(text string) {
	for {
		c, err := a.dial()
		if err == nil {
			a.dialled.Add(1)
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				_, _ = io.WriteString(c, text)
				if text != unread {
					_, _ = io.Copy(io.Discard, c)
				} else {
					<-a.stop
				}
			}()
			select {
			case <-ended:
			case <-a.stop:
			}
			c.Close()
		}
		select {
		case <-a.stop:
			return
		case <-time.After(time.Second): // thousands of connections a second; more would slow the other tests
		}
	}
}

// unread is a request whose answer the attacker does not read.
const unread = "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"

// manyFiles raises the descriptor limit of the test for an attack.
func manyFiles(t *testing.T, n uint64) {
	t.Helper()
	var old unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &old); err != nil {
		t.Fatal(err)
	}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: max(n, old.Cur), Max: max(n, old.Max)}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &old); err != nil {
			t.Error(err)
		}
	})
}

// TestConnectionsLeaveDescriptors opens thousands of connections to the metrics port and to the web page, and as a member
// of the agent's group to the socket, of an agent with few descriptors. The agent still registers members, answers root,
// and answers the next scrape.
func TestConnectionsLeaveDescriptors(t *testing.T) {
	manyFiles(t, 8192)
	group, err := user.LookupGroupId("65534")
	if err != nil {
		t.Fatal(err)
	}
	h := newHost(t, oneService+"    members: [{match: {command_line: ^collector}, slot: free}]\nmetrics: {listen: \"127.0.0.1:9745\"}\nui: {listen: \"127.0.0.1:9746\"}\n")
	h.files = 256
	h.start("--group", group.Name)
	const attackers = 300 // each listener has room for less than 20
	anybody := attack(t, attackers, func() (net.Conn, error) { return net.DialTimeout("tcp", "127.0.0.1:9745", 5*time.Second) },
		"", "GET /metrics HTTP/1.1\r\n", unread)
	browsers := attack(t, attackers, func() (net.Conn, error) { return net.DialTimeout("tcp", "127.0.0.1:9746", 5*time.Second) },
		"", "GET / HTTP/1.1\r\n", "GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n", "GET /events?follow=1 HTTP/1.1\r\nHost: localhost\r\n\r\n")
	nobody := attack(t, attackers, func() (c net.Conn, err error) {
		failed := netns.Thread(func() error {
			for _, trap := range []uintptr{unix.SYS_SETRESGID, unix.SYS_SETRESUID} {
				if _, _, errno := unix.RawSyscall(trap, 65534, 65534, 65534); errno != 0 {
					return errno
				}
			}
			c, err = net.DialTimeout("unix", h.run+"/agent.sock", 5*time.Second)
			return err
		})
		return c, errors.Join(err, failed)
	}, "", "GET /v1/status HTTP/1.1\r\n", "POST /v1/run HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
	h.eventually("the attack has begun", func() bool {
		return anybody.dialled.Load() >= attackers && browsers.dialled.Load() >= attackers && nobody.dialled.Load() >= attackers
	})
	for round := range 4 {
		pid, end := h.member(nil, "tcp [::]:1790", "udp [::]:4739")
		start := time.Now()
		registered := func() bool {
			r := h.sockeye("slots", "-o", "json")
			return r.code == 0 && strings.Contains(r.out, fmt.Sprintf(`"pid": %d`, pid))
		}
		for !registered() {
			if time.Since(start) > patience {
				t.Fatalf("round %d: process %d is not registered: %+v", round, pid, h.sockeye("slots"))
			}
			time.Sleep(10 * time.Millisecond)
		}
		t.Logf("round %d: registered and logged after %v", round, time.Since(start))
		end()
		h.eventually("the slot is empty", func() bool { r := h.sockeye("slots"); return r.code == 0 && !strings.Contains(r.out, fmt.Sprint(pid)) })
	}
	// By a process of its own: between connect(2) and its request, a goroutine beside thousands of attackers waits for
	// seconds on a busy host.
	begin, attempts := time.Now(), 0
	h.eventually("a scrape is answered", func() bool {
		attempts++
		text, err := exec.Command("curl", "--silent", "--show-error", "--max-time", "10", "http://127.0.0.1:9745/metrics").CombinedOutput()
		if err != nil {
			t.Logf("scrape: %v: %s", err, text)
		}
		return err == nil && strings.Contains(string(text), "sockeye_slot_ready")
	})
	t.Logf("attempt %d of a scrape answered after %v", attempts, time.Since(begin))
	if list, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", h.agent.Process.Pid)); err != nil || len(list) > 200 {
		t.Errorf("the agent has %d descriptors, %v", len(list), err)
	}
	if text, err := os.ReadFile(h.log); err != nil || strings.Contains(string(text), "too many open files") {
		t.Errorf("%v\n%s", err, text)
	}
}

// TestMembersWithoutDescriptors checks that a restarted member gets its slot although all other descriptors of the
// agent are in use.
func TestMembersWithoutDescriptors(t *testing.T) {
	h := newHost(t, strings.Replace(oneService, "slots: 2", "slots: 1", 1)+"    members: [{match: {command_line: ^collector}, slot: free}]\n")
	h.start()
	holes := func(limit int) (free []int, last int) {
		taken := make(map[int]string)
		dir := fmt.Sprintf("/proc/%d/fd", h.agent.Process.Pid)
		list, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, entry := range list {
			fd, err := strconv.Atoi(entry.Name())
			if err != nil {
				t.Fatal(err)
			}
			if taken[fd], err = os.Readlink(dir + "/" + entry.Name()); err == nil && strings.Contains(taken[fd], "eventfd") {
				last = max(last, fd) // of the reserve
			}
		}
		for n := range limit {
			if taken[n] == "" {
				free = append(free, n)
			}
		}
		return free, last
	}
	_, last := holes(0)
	limit := last + 1
	// Connections that were answered keep the lower descriptor numbers for 30 s.
	h.eventually("no number is free", func() bool {
		free, _ := holes(limit)
		for range free {
			c, err := net.Dial("unix", h.run+"/agent.sock")
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { c.Close() })
			if _, err = io.WriteString(c, "GET /v1/status HTTP/1.1\r\nHost: x\r\n\r\n"); err == nil {
				_, err = c.Read(make([]byte, 1))
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		return len(free) == 0
	})
	if err := unix.Prlimit(h.agent.Process.Pid, unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: uint64(limit), Max: uint64(limit)}, nil); err != nil {
		t.Fatal(err)
	}
	for round := range 8 {
		pid, end := h.member(nil, "tcp [::]:1790", "udp [::]:4739")
		line := fmt.Sprintf(`msg="member registered" service=telemetry event=member_registered slot=0 pid=%d `, pid)
		h.eventually(fmt.Sprintf("member %d is registered", round), func() bool {
			text, err := os.ReadFile(h.log)
			return err == nil && strings.Contains(string(text), line)
		})
		if got := ask("tcp", "127.0.0.1"); got != fmt.Sprint(pid) {
			t.Errorf("round %d: %s answers, want %d", round, got, pid)
		}
		end()
		h.eventually("its slot is empty", func() bool {
			text, err := os.ReadFile(h.log)
			return err == nil && strings.Contains(string(text), fmt.Sprintf(`msg="slot cleared" service=telemetry event=slot_closed slot=0 pid=%d `, pid))
		})
	}
}
