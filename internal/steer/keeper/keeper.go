// SPDX-License-Identifier: Apache-2.0

// Package keeper runs the process that keeps the sockets of a service open while no agent runs, and opens these sockets.
package keeper

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"sockeye/internal/bpf"
	"sockeye/internal/fault"
	"sockeye/internal/member"
	"sockeye/internal/rights"
)

// Command is the hidden command of the keeper process. Its arguments name the pin directory and the service, so
// that the next agent finds the keeper.
const Command = "keeper"

// isCommand returns whether a command is the command of a keeper of any version. Keepers started by agents before
// the first release have the command hold, and survive the upgrade.
func isCommand(command string) bool { return command == Command || command == "hold" }

// Run is the main function of the keeper process: Run drops all capabilities and waits for the end of ctx.
// The command ends ctx at SIGTERM: systemd would wait 90 s at shutdown for a process that ignores SIGTERM. The inherited
// sockets stay open until the process exits.
func Run(ctx context.Context) error {
	_ = os.WriteFile("/proc/self/comm", []byte("sockeye"), 0) // ss(8) shows this name; from /proc/self/exe, it is exe
	if err := rights.DropAll(); err != nil {
		return err
	}
	<-ctx.Done()
	return nil
}

// Retire detaches the programs from the sockets of the keepers of a service, or of all services of the pin
// directory for "", and kills these keepers. The kernel's hash selects afterwards.
func Retire(pins, service string) error {
	keepers, err := Find(pins, service, nil, PinnedRows(pins))
	if err != nil {
		return err
	}
	var errs []error
	for _, k := range keepers {
		for _, socket := range k.Sockets {
			errs = append(errs, bpf.Detach(socket.FD()))
		}
		errs = append(errs, k.Kill())
	}
	return fault.Join(errs...)
}

func arguments(pins, service string) []string {
	return []string{Command, "--pins", pins, "--service", service}
}

// Process is a running keeper process, started by this agent or an earlier one.
type Process struct {
	Handle  *member.Handle
	Self    member.ID
	Service string
	Sockets []*member.Socket
}

// IsKeeper reports whether a process is a keeper, which has sockets on the members' ports and is not a member.
func IsKeeper(p *member.Process) bool {
	return len(p.Args) > 1 && isCommand(p.Args[1]) && isTrusted(member.ID{PID: p.PID, StartTime: p.StartTime})
}

// hasPins reports whether dir, as a keeper names its pin directory, is the pin directory pins of this process. In
// another mount namespace the same path may be another bpffs.
func hasPins(pid int, dir, pins string) bool {
	return dir == pins && sameFile(procFile(pid, "root")+dir, pins)
}

func procFile(pid int, name string) string { return fmt.Sprintf("/proc/%d/%s", pid, name) }

// Start starts a keeper process that inherits the sockets.
func Start(log *slog.Logger, pins, service string, fds []int) (*Process, error) {
	cmd := exec.Command("/proc/self/exe", arguments(pins, service)...)
	cmd.Args[0] = "sockeye"
	cmd.Dir = "/"
	cmd.Env = []string{"GOMAXPROCS=1"}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	for _, fd := range fds {
		copied, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			return nil, fmt.Errorf("copy keeper socket: %w", err)
		}
		f := os.NewFile(uintptr(copied), "keeper socket")
		defer f.Close()
		cmd.ExtraFiles = append(cmd.ExtraFiles, f)
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start keeper: %w", err)
	}
	pid := cmd.Process.Pid
	p, err := member.Read(pid)
	var handle, child *member.Handle
	if err == nil {
		handle, err = member.Open(pid)
	}
	if err == nil {
		child, err = member.Open(pid)
	}
	if err != nil {
		cmd.Process.Kill()
		cmd.Wait()
		return nil, fmt.Errorf("start keeper: %w", err)
	}
	go func() {
		defer child.Close()
		// cmd.Wait alone would block a thread in waitid(2); see Events.Next.
		if child.Wait() != nil {
			return
		}
		if err := cmd.Wait(); err != nil {
			log.Debug("keeper exited", "pid", pid, "error", err)
		}
	}()
	return &Process{Handle: handle, Self: member.ID{PID: pid, StartTime: p.StartTime}, Service: service}, nil
}

// Find returns the running keepers of a service, or of all services for "", with copies of their sockets. record
// is the keeper in the state file, or nil. A process that is not recorded must have sockets of the service's listeners,
// which rows returns, and no other sockets.
func Find(pins, service string, record *member.ID, rows func(service string) []bpf.Listener) ([]*Process, error) {
	processes, err := member.All()
	if err != nil {
		return nil, err
	}
	var keepers []*Process
	for _, p := range processes {
		dir, name, ok := parseArguments(p.Args)
		if !ok || service != "" && name != service || !isTrusted(member.ID{PID: p.PID, StartTime: p.StartTime}) || !hasPins(p.PID, dir, pins) {
			continue
		}
		if k := open(p, name, record, rows(name), pinnedRooms(pins, name)); k != nil {
			keepers = append(keepers, k)
		}
	}
	return keepers, nil
}

// parseArguments returns the pin directory and the service in the arguments of a keeper. Any process can have these
// arguments; isTrusted checks the process itself.
func parseArguments(args []string) (pins, service string, ok bool) {
	if len(args) != 6 || !isCommand(args[1]) || args[2] != "--pins" || args[4] != "--service" {
		return "", "", false
	}
	return args[3], args[5], true
}

// open returns nil if the process is not a keeper or has exited.
func open(p *member.Process, service string, record *member.ID, rows []bpf.Listener, rooms map[uint64]bool) *Process {
	handle, err := member.Open(p.PID)
	if err != nil {
		return nil
	}
	k := &Process{Handle: handle, Self: member.ID{PID: p.PID, StartTime: p.StartTime}, Service: service}
	if k.Sockets, err = handle.Sockets(func(*member.Socket) bool { return true }); err != nil {
		handle.Close()
		return nil
	}
	recorded := record != nil && *record == k.Self
	// The handle belongs to the process in p only if that process still runs.
	if !isTrusted(k.Self) || handle.Ended() || !recorded && !hasOnlySocketsOf(k.Sockets, rows, rooms) {
		k.Close()
		return nil
	}
	return k
}

// isTrusted reports whether an agent of any version can have started a process: all user ids of the process are
// those of the agent, the process is in the agent's user namespace, and only root can have written its executable. A
// process that a user starts by sudo(8) has the real id of that user until sudo has the password.
func isTrusted(self member.ID) bool {
	if !hasAgentUIDs(self.PID) || !sameFile(procFile(self.PID, "ns/user"), "/proc/self/ns/user") {
		return false
	}
	// The link also works for an executable that was replaced since. The agent needs CAP_DAC_READ_SEARCH and
	// CAP_SYS_PTRACE.
	exe, err := member.Stat(procFile(self.PID, "exe"))
	if err != nil {
		return false
	}
	if exe.Uid != 0 && exe.Uid != uint32(os.Geteuid()) || exe.Mode&0o022 != 0 {
		return sameFile(procFile(self.PID, "exe"), "/proc/self/exe")
	}
	return member.Alive(self.PID, self.StartTime)
}

func sameFile(a, b string) bool {
	sa, errA := member.Stat(a)
	sb, errB := member.Stat(b)
	return errA == nil && errB == nil && sa.Dev_major == sb.Dev_major && sa.Dev_minor == sb.Dev_minor && sa.Ino == sb.Ino
}

// hasAgentUIDs reports whether the real, effective, saved and file system user ids of a process are those of the agent.
func hasAgentUIDs(pid int) bool {
	status, err := os.ReadFile(procFile(pid, "status"))
	if err != nil {
		return false
	}
	want := fmt.Sprint(os.Geteuid())
	for line := range bytes.Lines(status) {
		if ids, ok := bytes.CutPrefix(line, []byte("Uid:")); ok {
			fields := strings.Fields(string(ids))
			return len(fields) == 4 && !slices.ContainsFunc(fields, func(id string) bool { return id != want })
		}
	}
	return false
}

// pinnedRooms returns the cookies of the waiting rooms of a service. With sk_lookup they have ports of their own.
func pinnedRooms(pins, service string) map[uint64]bool {
	rooms, err := bpf.ReadRooms(filepath.Join(pins, bpf.ServicePrefix+service))
	if err != nil {
		return nil
	}
	return rooms
}

// hasOnlySocketsOf reports whether all sockets are keeper sockets of listeners, or waiting rooms. If the listeners are unknown, as
// with the pins of another version, any sockets are accepted.
func hasOnlySocketsOf(sockets []*member.Socket, rows []bpf.Listener, rooms map[uint64]bool) bool {
	if len(rows) == 0 {
		return true
	}
	foreign := func(s *member.Socket) bool {
		return !rooms[s.Cookie] && !slices.ContainsFunc(rows, func(l bpf.Listener) bool { return IsSocket(s, l) })
	}
	return len(sockets) > 0 && !slices.ContainsFunc(sockets, foreign)
}

// IsSocket reports whether a socket can be a keeper socket of a listener.
func IsSocket(s *member.Socket, l bpf.Listener) bool {
	return s.Protocol == int(l.Protocol) && s.Local == l.Address && s.V6Only == l.V6Only && s.Listening && s.ReusePort
}

// PinnedRows returns a function that reads the listeners of a service from its pins. The function returns nil if the
// pins cannot be read.
func PinnedRows(pins string) func(service string) []bpf.Listener {
	return func(service string) (rows []bpf.Listener) {
		listeners, err := bpf.ReadListeners(filepath.Join(pins, bpf.ServicePrefix+service))
		if err != nil {
			return nil
		}
		for _, l := range listeners {
			if l != (bpf.Listener{}) {
				rows = append(rows, l)
			}
		}
		return rows
	}
}

// Kill kills a keeper and waits for its exit, which closes its sockets.
func (k *Process) Kill() error {
	defer k.Close()
	if err := k.Handle.Kill(); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("kill keeper %d: %w", k.Self.PID, err)
	}
	return k.Handle.Wait()
}

// Close closes the descriptors of this process; the keeper goes on.
func (k *Process) Close() {
	member.CloseAll(k.Sockets)
	k.Handle.Close()
}
