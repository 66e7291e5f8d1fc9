// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/member"
)

// beMember listens with SO_REUSEPORT, says so, and waits. With a worker, it also starts a child that does the same, and
// prints the process id of the child.
func beMember(worker bool) {
	share := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) (err error) {
		_ = c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEPORT, 1) })
		return err
	}}
	share.SetMultipathTCP(false)
	_, err := share.Listen(context.Background(), "tcp", "[::]:1790")
	if err == nil {
		_, err = share.ListenPacket(context.Background(), "udp", "[::]:4739")
	}
	fmt.Println(err)
	if worker {
		child := exec.Command("/proc/self/exe", memberRole)
		err := child.Start()
		fmt.Println(child.Process.Pid, err)
	}
	for {
		_ = unix.Pause()
	}
}

// startMember starts a process and makes it the member of a slot.
func startMember(t *testing.T, s *service, slot int) *exec.Cmd {
	t.Helper()
	cmd := exec.Command("/proc/self/exe", memberRole)
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	if line, _ := bufio.NewReader(out).ReadString('\n'); line != "<nil>\n" {
		t.Fatalf("member: %s", line)
	}
	if _, err := s.addClaim(cmd.Process.Pid, &slot, "register", nil); err != nil {
		t.Fatal(err)
	}
	return cmd
}

// In the time between the exit of a member, at which the kernel closes its slot, and the moment at which the agent notices
// the exit, the standby slot serves the devices: no check may close their connections there, and no command may open the
// slot again.
func TestExitNotNoticedYet(t *testing.T) {
	for _, steering := range []string{"reuseport", "lookup"} {
		t.Run(steering, func(t *testing.T) {
			_, s, _ := startService(t, steering, "    when_empty: {standby: 1}")
			dies, standby := startMember(t, s, 0), startMember(t, s, 1)
			s.Mu.Lock() // the agent notices nothing
			defer s.Mu.Unlock()
			ready := func(slot int) bool {
				t.Helper()
				value, err := s.Path.Slot(slot)
				if err != nil {
					t.Fatal(err)
				}
				return value.Ready > 0
			}
			if !ready(0) || !ready(1) || s.Serving().Members[0].PID != dies.Process.Pid {
				t.Fatalf("serving %+v", s.Serving())
			}
			dies.Process.Kill()
			for begin := time.Now(); ready(0); time.Sleep(time.Millisecond) {
				if time.Since(begin) > 10*time.Second {
					t.Fatal("the kernel has not closed the slot")
				}
			}
			now := s.Serving()
			if slot, ok := now.Slot(0); !ok || slot != 1 || now.Members[1].PID != standby.Process.Pid {
				t.Errorf("devices of slot 0: slot %d, %v; serving %+v", slot, ok, now)
			}
			if err := s.moves.ApplySettings(); err != nil {
				t.Errorf("settings: %v", err)
			}
			if ready(0) || !ready(1) {
				t.Errorf("ready after a command: %v, %v", ready(0), ready(1))
			}
		})
	}
}

// A supervisor starts the next member of a slot before the agent notices the exit of the last one.
func TestNextMemberBeforeExitIsNoticed(t *testing.T) {
	for _, steering := range []string{"reuseport", "lookup"} {
		t.Run(steering, func(t *testing.T) {
			_, s, _ := startService(t, steering)
			last := startMember(t, s, 0)
			next := member.ID{PID: os.Getpid(), StartTime: 1}
			s.Mu.Lock() // the agent notices nothing
			defer s.Mu.Unlock()
			slot := 0
			if _, err := s.assignSlot(next, &slot); err == nil || !strings.Contains(err.Error(), "slot 0 is claimed by process") {
				t.Errorf("with a member: %v", err)
			}
			last.Process.Kill()
			last.Wait()
			if got, err := s.assignSlot(next, &slot); got != 0 || err != nil {
				t.Errorf("after the exit: slot %d, %v", got, err)
			}
			if s.Seats[0] != nil {
				t.Error("the slot has a member that has exited")
			}
		})
	}
}

// A worker that a member has started, with sockets of its own, gets the slot when the member exits.
func TestForkedWorker(t *testing.T) {
	executable, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for _, steering := range []string{"reuseport", "lookup"} {
		t.Run(steering, func(t *testing.T) {
			_, s, _ := startService(t, steering, fmt.Sprintf("    members: [{match: {executable: %q}, slot: 0}]", executable))
			seated := func(pid int) {
				t.Helper()
				for begin := time.Now(); ; time.Sleep(time.Millisecond) {
					s.Mu.Lock()
					seat := s.Seats[0]
					s.Mu.Unlock()
					if seat != nil && seat.Process.PID == pid {
						return
					}
					if time.Since(begin) > 30*time.Second {
						s.Mu.Lock()
						w := s.waiting[pid]
						s.Mu.Unlock()
						t.Fatalf("slot 0 has the member %+v, want process %d, which waits: %+v", seat, pid, w)
					}
				}
			}
			cmd := exec.Command("/proc/self/exe", memberRole, "worker")
			out, err := cmd.StdoutPipe()
			if err == nil {
				err = cmd.Start()
			}
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
			seated(cmd.Process.Pid)
			var worker int
			if _, err := fmt.Fscanf(out, "<nil>\n%d <nil>\n", &worker); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = unix.Kill(worker, unix.SIGKILL) })
			sockets := func() int {
				links, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", worker))
				return len(slices.DeleteFunc(links, func(path string) bool {
					to, _ := os.Readlink(path)
					return !strings.HasPrefix(to, "socket:")
				}))
			}
			for begin := time.Now(); sockets() < 2; time.Sleep(time.Millisecond) {
				if time.Since(begin) > 30*time.Second {
					t.Fatal("the worker has no sockets")
				}
			}
			time.Sleep(2 * inspectionPeriod) // the agent has inspected the worker, which is not a member yet
			s.Mu.Lock()
			_, waits := s.waiting[worker]
			s.Mu.Unlock()
			if waits {
				t.Error("the worker waits for the slot")
			}
			cmd.Process.Kill()
			seated(worker)
		})
	}
}
