// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/api"
	"sockeye/internal/steer/keeper"
)

// disguised is the environment variable that makes this binary a member with the sockets of its value, whatever its
// arguments are.
const disguised = "SOCKEYE_TEST_DISGUISED"

const peersPolicy = `services:
  telemetry:
    slots: 4
    listeners:
      - {protocol: tcp, address: "[::]:1795"}
      - {protocol: udp, address: "[::]:4745"}
    user: USER
    cgroup: CGROUP
    members: [{match: {user: nobody}, slot: free}]
`

func policyOf(user string) string { return strings.Replace(peersPolicy, "USER", user, 1) }

// becomeConnector connects the socket that it inherited, and waits for its end.
func becomeConnector(args []string) {
	if err := unix.Connect(3, &unix.SockaddrUnix{Name: args[0]}); err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	pause()
}

// TestPIDReused checks that the agent refuses a request if the process that opened the connection has exited. Its child
// requests a registration over the connection after another process has received the PID.
func TestPIDReused(t *testing.T) {
	h := newHost(t, policyOf("root"))
	h.start()
	var request func(method, path, body string) (int, string)
	victim := 0
	for attempt := 0; victim == 0; attempt++ {
		if attempt == 50 {
			t.Fatal("another process has got each PID")
		}
		first, conn, end := h.connector()
		defer conn.Close()
		answers := bufio.NewReader(conn)
		request = func(method, path, body string) (int, string) {
			t.Helper()
			fmt.Fprintf(conn, "%s %s HTTP/1.1\r\nHost: agent\r\nContent-Length: %d\r\n\r\n%s", method, path, len(body), body)
			answer, err := http.ReadResponse(answers, nil)
			if err != nil {
				t.Fatal(err)
			}
			defer answer.Body.Close()
			text, err := io.ReadAll(answer.Body)
			if err != nil {
				t.Fatal(err)
			}
			return answer.StatusCode, string(text)
		}
		if code, text := request("GET", "/v1/status", ""); code != http.StatusOK {
			t.Fatalf("while the process lives: %d %s", code, text)
		}
		end()
		victim = h.memberWith(first, "tcp [::]:1795", "udp [::]:4745")
	}
	code, text := request("POST", "/v1/run", `{"service": "telemetry", "slot": 0}`)
	if code != http.StatusForbidden {
		t.Errorf("process %d was registered by another process that had its PID before: %d %s", victim, code, text)
	}
	var failure api.Failure
	if err := json.Unmarshal([]byte(text), &failure); err != nil || failure.Error != "the process that connected to the agent has ended" {
		t.Errorf("%v: %s", err, text)
	}
	if code, text := request("GET", "/v1/status", ""); code != http.StatusForbidden {
		t.Errorf("a request after the process ended: %d %s", code, text)
	}
	for _, slot := range must[[]api.SlotStatus](h, "slots") {
		if slot.Ready {
			t.Errorf("slot %d: process %d by %s", slot.Slot, slot.PID, slot.Source)
		}
	}
}

func isZombie(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err == nil && strings.Contains(string(stat), ") Z ")
}

// connector starts a process that connects to the agent, and returns its PID, a descriptor of the connection, and a function that
// ends the process.
func (h *host) connector() (pid int, conn net.Conn, end func()) {
	h.t.Helper()
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		h.t.Fatal(err)
	}
	file := os.NewFile(uintptr(fd), "connection")
	defer file.Close()
	pid, end = h.as("connector", func(cmd *exec.Cmd) {
		cmd.ExtraFiles = []*os.File{file}
	}, api.SocketPath(h.run))
	if conn, err = net.FileConn(file); err != nil {
		h.t.Fatal(err)
	}
	return pid, conn, end
}

// memberWith starts a member with an unused process id, by setting the last id that the kernel has assigned. memberWith returns 0
// if another process or thread of the host gets the id first.
func (h *host) memberWith(pid int, specs ...string) int {
	h.t.Helper()
	for range 200 {
		if err := os.WriteFile("/proc/sys/kernel/ns_last_pid", []byte(strconv.Itoa(pid-1)), 0); err != nil {
			h.t.Fatal(err)
		}
		got, end := h.member(nil, specs...)
		if got == pid {
			return got
		}
		end()
		if _, err := os.Stat(fmt.Sprintf("/proc/%d", pid)); err == nil {
			break
		}
	}
	return 0
}

// TestFakeKeeper runs a process of an ordinary user with the capabilities and the arguments of a keeper: a set-user-ID
// program that waits, as sudo waits for a password. The agent must neither adopt nor kill it.
func TestFakeKeeper(t *testing.T) {
	h := newHost(t, policyOf("nobody"))
	program := filepath.Join(h.dir, "sudo")
	text, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(program, text, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(program, 0o755|os.ModeSetuid); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(program, keeper.Command, "--pins", h.pins, "--service", "telemetry")
	cmd.Args[0] = "sockeye"
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{}
	asNobody(cmd)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	defer cmd.Process.Kill()
	fake := cmd.Process.Pid
	h.eventually("the fake runs as root", func() bool {
		status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", fake))
		return err == nil && strings.Contains(string(status), "Uid:\t65534\t0\t0\t0") && strings.Contains(string(status), "State:\tS")
	})
	lives := func(after string) {
		t.Helper()
		select {
		case err := <-ended:
			t.Fatalf("%s killed a process of another user: %v", after, err)
		case <-time.After(100 * time.Millisecond):
		}
	}
	h.start()
	lives("the agent's start")
	status := must[api.Status](h, "status")
	keeper := status.Services[0].Keeper
	if keeper == fake || keeper == 0 || !status.Services[0].PortsSteered {
		t.Errorf("keeper %d, the fake is %d, held %v", keeper, fake, status.Services[0].PortsSteered)
	}
	log, err := os.ReadFile(h.log)
	if err != nil || strings.Contains(string(log), "keeper restored") {
		t.Errorf("%v: %s", err, log)
	}

	// The real keeper is adopted, also without the record of an earlier version's agent.
	for _, record := range []bool{true, false} {
		h.kill()
		if !record {
			path := filepath.Join(h.state, "telemetry.json")
			text, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			var state map[string]any
			if err := json.Unmarshal(text, &state); err != nil || state["keeper"] == nil {
				t.Fatalf("%v in %s", err, text)
			}
			delete(state, "keeper")
			if text, err = json.Marshal(state); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, text, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		h.start()
		lives("the next agent's start")
		if now := must[api.Status](h, "status").Services[0].Keeper; now != keeper {
			t.Errorf("record %v: keeper %d, was %d", record, now, keeper)
		}
	}
	h.kill()
	if r := h.sockeye("reset", "--state-dir", h.state, "--pins", h.pins); r.code != 0 {
		t.Errorf("reset: %+v", r)
	}
	lives("reset")
	h.eventually("reset ended the keeper", func() bool { return unix.Kill(keeper, 0) == unix.ESRCH || isZombie(keeper) })
}

// oldKeeperCommand is the command of the keeper in versions before 1.0.
const oldKeeperCommand = "hold"

// TestKeeperOfAnEarlierVersion checks that the agent adopts a keeper that was started with the command of a version
// before 1.0.
func TestKeeperOfAnEarlierVersion(t *testing.T) {
	h := newHost(t, policyOf("nobody"))
	h.start()
	status := must[api.Status](h, "status").Services[0]
	h.kill()
	pidfd, err := unix.PidfdOpen(status.Keeper, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(pidfd)
	cmd := process(oldKeeperCommand, "--pins", h.pins, "--service", "telemetry")
	cmd.Dir = "/"
	for i := range status.Listeners {
		fd, err := unix.PidfdGetfd(pidfd, 3+i, 0)
		if err != nil {
			t.Fatal(err)
		}
		file := os.NewFile(uintptr(fd), "keeper socket")
		defer file.Close()
		cmd.ExtraFiles = append(cmd.ExtraFiles, file)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	defer cmd.Process.Kill()
	if err := unix.PidfdSendSignal(pidfd, unix.SIGKILL, nil, 0); err != nil {
		t.Fatal(err)
	}
	for _, file := range cmd.ExtraFiles {
		file.Close()
	}
	h.start()
	if now := must[api.Status](h, "status").Services[0]; now.Keeper != cmd.Process.Pid || !now.PortsSteered {
		t.Errorf("%+v, want keeper %d", now, cmd.Process.Pid)
	}
	select {
	case err := <-ended:
		t.Errorf("the keeper has exited: %v", err)
	default:
	}
}

// TestMemberCalledKeeper checks that a process whose command line looks like a keeper's can be a member.
func TestMemberCalledKeeper(t *testing.T) {
	h := newHost(t, policyOf("nobody"))
	h.start()
	pid, _ := h.as(keeper.Command, func(cmd *exec.Cmd) {
		cmd.Env = append(os.Environ(), disguised+"=tcp [::]:1795,udp [::]:4745")
		asNobody(cmd)
	}, "--pins", h.pins, "--service", "telemetry")
	h.eventually("it is a member", func() bool {
		for _, slot := range must[[]api.SlotStatus](h, "slots") {
			if slot.PID == pid {
				return true
			}
		}
		return false
	})
}

// TestDirectoryOfAnotherUser lets an ordinary user create a directory that the agent will use, before the first agent
// starts: in a bpffs that is writable by all, in a sticky directory such as /tmp, or above either.
func TestDirectoryOfAnotherUser(t *testing.T) {
	for _, name := range []string{"--pins", "--state-dir", "--run-dir"} {
		for _, below := range []string{"", "/deeper"} {
			if name == "--pins" && below != "" {
				continue // the parent is the bpffs
			}
			t.Run(name+below, func(t *testing.T) {
				h := newHost(t, policyOf("root"))
				open := filepath.Join(h.dir, "open")
				if err := os.Mkdir(open, 0o755); err != nil {
					t.Fatal(err)
				}
				if name == "--pins" {
					open = filepath.Dir(h.pins)
					if err := os.Chmod(filepath.Dir(open), 0o755); err != nil {
						t.Fatal(err)
					}
				}
				if err := os.Chmod(open, 0o777|os.ModeSticky); err != nil {
					t.Fatal(err)
				}
				theirs := filepath.Join(open, "sockeye")
				mkdir := exec.Command("mkdir", "-m", "0755", theirs)
				mkdir.SysProcAttr = &syscall.SysProcAttr{}
				asNobody(mkdir)
				if out, err := mkdir.CombinedOutput(); err != nil {
					t.Fatalf("%v: %s", err, out)
				}
				args := append(h.agentArgs(), name, theirs+below, "-o", "json")
				cmd := process("sockeye", args...)
				log, err := os.Create(h.log)
				if err != nil {
					t.Fatal(err)
				}
				defer log.Close()
				cmd.Stdout, cmd.Stderr = log, log
				if err := cmd.Start(); err != nil {
					t.Fatal(err)
				}
				ended := make(chan struct{})
				go func() {
					cmd.Wait()
					close(ended)
				}()
				select {
				case <-ended:
				case <-time.After(10 * time.Second):
					cmd.Process.Kill()
					<-ended
					t.Error("the agent started")
				}
				text, err := os.ReadFile(h.log)
				if err != nil {
					t.Fatal(err)
				}
				if code := cmd.ProcessState.ExitCode(); code != 5 || !strings.Contains(string(text), "sockeye belongs to user 65534, not to root") {
					t.Errorf("exit code %d: %s", code, text)
				}
				if name == "--pins" {
					r := h.sockeye("reset", "--state-dir", h.state, "--pins", theirs)
					if r.code != 5 || !strings.Contains(r.err, "belongs to user 65534, not to root") {
						t.Errorf("reset: %+v", r)
					}
				}
				if _, err := os.Stat(theirs); err != nil {
					t.Error(err)
				}
				if r := h.sockeye("reset", "--state-dir", h.state, "--pins", h.pins); name != "--pins" && r.code != 0 {
					t.Errorf("reset: %+v", r)
				}
			})
		}
	}
}

// becomeBinder binds UDP sockets to a port, one after the other, for each command on standard input.
func becomeBinder(args []string) {
	port, err := strconv.Atoi(args[0])
	if err != nil {
		os.Exit(1)
	}
	fmt.Println("ready")
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		count, err := strconv.Atoi(in.Text())
		for range count {
			var fd int
			if fd, err = unix.Socket(unix.AF_INET6, unix.SOCK_DGRAM, 0); err != nil {
				break
			}
			err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1)
			if err == nil {
				err = unix.Bind(fd, &unix.SockaddrInet6{Port: port})
			}
			unix.Close(fd)
			if err != nil {
				break
			}
		}
		fmt.Println("done", err)
	}
	os.Exit(0)
}

// reads returns the number of read system calls of the agent. In these tests the agent reads only /proc.
func reads(t *testing.T, pid int) (n int) {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/io", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if value, ok := strings.CutPrefix(line, "syscr: "); ok {
			n, err = strconv.Atoi(strings.TrimSpace(value))
		}
	}
	if err != nil || n == 0 {
		t.Fatalf("%v in %s", err, text)
	}
	return n
}

// TestBindLoop runs a process that is not a member and binds to a member's port in a loop. In a private network
// namespace, which any user can create, the loop causes no work in the agent. In the namespace of the service, the work
// per second is limited.
func TestBindLoop(t *testing.T) {
	const binds = 5000
	for _, private := range []bool{true, false} {
		t.Run(map[bool]string{true: "private namespace", false: "the service's namespace"}[private], func(t *testing.T) {
			h := newHost(t, policyOf("65533"))
			h.start()
			var in io.WriteCloser
			var out *bufio.Reader
			cmd := process("binder", "4745")
			cmd.SysProcAttr.Credential = &syscall.Credential{Uid: 65533, Gid: 65533}
			if private {
				cmd.SysProcAttr.Cloneflags = unix.CLONE_NEWUSER | unix.CLONE_NEWNET
				cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: 65533, Size: 1}}
				cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: 65533, Size: 1}}
				cmd.SysProcAttr.Credential = &syscall.Credential{NoSetGroups: true}
			}
			in, err := cmd.StdinPipe()
			if err != nil {
				t.Fatal(err)
			}
			pipe, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			out = bufio.NewReader(pipe)
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			defer func() {
				cmd.Process.Kill()
				cmd.Wait()
			}()
			line, err := out.ReadString('\n')
			if line != "ready\n" {
				t.Fatalf("%q, %v", line, err)
			}
			before, began := reads(t, h.agent.Process.Pid), time.Now()
			fmt.Fprintln(in, binds)
			if line, err = out.ReadString('\n'); line != "done <nil>\n" {
				t.Fatalf("%q, %v", line, err)
			}
			// The agent answers after it has handled all earlier events.
			for range 3 {
				h.sockeye("status")
				_ = unix.Nanosleep(&unix.Timespec{Nsec: 5e8}, nil)
			}
			took := time.Since(began)
			got := reads(t, h.agent.Process.Pid) - before
			t.Logf("%d binds, %v: %d reads of the agent, including 3 requests", binds, took, got)
			// Examining a process takes 5 reads, answering a request about 15.
			most := 250
			if !private {
				most += int(took.Seconds()+2) * 300
			}
			if got > most {
				t.Errorf("%d reads, want at most %d", got, most)
			}
		})
	}
}
