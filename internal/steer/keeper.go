// SPDX-License-Identifier: Apache-2.0

package steer

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

// KeeperCommand is the hidden command that a keeper runs. Its arguments tell
// the next agent whose sockets it holds.
const KeeperCommand = "hold"

// keeper is a running keeper, started by this agent or an earlier one.
type keeper struct {
	handle  *member.Handle
	pid     int
	self    member.ID
	service string
	sockets []*member.Socket
}

func keeperArgs(pins, service string) []string {
	return []string{KeeperCommand, "--pins", pins, "--service", service}
}

// keeperOf is the service whose keeper a process calls itself, of a pin
// directory. Any process can: genuine tells.
func keeperService(pins string, args []string) (service string, ok bool) {
	if len(args) != 6 || !slices.Equal(args[1:4], []string{KeeperCommand, "--pins", pins}) || args[4] != "--service" {
		return "", false
	}
	return args[5], true
}

// isKeeper tells a keeper from members: it holds sockets on their ports too.
func isKeeper(p *member.Process) bool {
	return len(p.Args) > 1 && p.Args[1] == KeeperCommand && isTrustedKeeper(member.ID{PID: p.PID, StartTime: p.StartTime})
}

// genuine tells whether a process can be a keeper that an agent started, of this
// version or another one: all its user ids are the agent's, it is in the agent's
// user namespace, and its program is one that only root can have written. What
// sudo(8) runs for a user, while it waits for a password, has that user's real
// id.
func isTrustedKeeper(self member.ID) bool {
	if !hasAgentUIDs(self.PID) || !sameFile(procFile(self.PID, "ns/user"), "/proc/self/ns/user") {
		return false
	}
	// Also of a program whose file was replaced since. DAC_READ_SEARCH and
	// SYS_PTRACE let the agent ask.
	var exe unix.Stat_t
	if err := unix.Stat(procFile(self.PID, "exe"), &exe); err != nil {
		return false
	}
	if exe.Uid != 0 && exe.Uid != uint32(os.Geteuid()) || exe.Mode&0o022 != 0 {
		return sameFile(procFile(self.PID, "exe"), "/proc/self/exe")
	}
	return member.Alive(self.PID, self.StartTime)
}

func procFile(pid int, name string) string { return fmt.Sprintf("/proc/%d/%s", pid, name) }

func sameFile(a, b string) bool {
	var sa, sb unix.Stat_t
	return unix.Stat(a, &sa) == nil && unix.Stat(b, &sb) == nil && sa.Dev == sb.Dev && sa.Ino == sb.Ino
}

// ownIDs tells whether the real, effective, saved and file system user ids of a
// process are the agent's.
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

// startKeeper starts a keeper that inherits the sockets.
func startKeeper(log *slog.Logger, pins, service string, fds []int) (*keeper, error) {
	cmd := exec.Command("/proc/self/exe", keeperArgs(pins, service)...)
	cmd.Args[0] = "sockeye"
	cmd.Dir = "/"
	cmd.Env = []string{"GOMAXPROCS=1"}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	for _, fd := range fds {
		copied, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			return nil, fmt.Errorf("copy anchor: %w", err)
		}
		f := os.NewFile(uintptr(copied), "anchor")
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
		// Not by waitid(2) alone, in which a thread would stay; see Events.Next.
		if child.Wait() != nil {
			return
		}
		if err := cmd.Wait(); err != nil {
			log.Debug("keeper ended", "pid", pid, "error", err)
		}
	}()
	return &keeper{handle: handle, pid: pid, self: member.ID{PID: pid, StartTime: p.StartTime}, service: service}, nil
}

// findKeepers returns the keepers of a service that run, with copies of their
// sockets. An empty service means all. record is the keeper that the state
// directory names, if any. Any other process must hold sockets of the service's
// listeners and no more; rows has these.
func findKeepers(pins, service string, record *member.ID, rows func(service string) []bpf.Listener) ([]*keeper, error) {
	processes, err := member.All()
	if err != nil {
		return nil, err
	}
	var keepers []*keeper
	for _, p := range processes {
		name, ok := keeperService(pins, p.Args)
		if !ok || service != "" && name != service {
			continue
		}
		if k := openKeeper(p, name, record, rows(name)); k != nil {
			keepers = append(keepers, k)
		}
	}
	return keepers, nil
}

// openKeeper returns nil for a process that is no keeper, or has ended.
func openKeeper(p *member.Process, service string, record *member.ID, rows []bpf.Listener) *keeper {
	handle, err := member.Open(p.PID)
	if err != nil {
		return nil
	}
	k := &keeper{handle: handle, pid: p.PID, self: member.ID{PID: p.PID, StartTime: p.StartTime}, service: service}
	if k.sockets, err = handle.Sockets(func(*member.Socket) bool { return true }); err != nil {
		handle.Close()
		return nil
	}
	recorded := record != nil && *record == k.self
	// The handle is of the process that was read only if that lives now.
	if !isTrustedKeeper(k.self) || handle.Ended() || !recorded && !hasOnlyKeeperSockets(k.sockets, rows) {
		k.close()
		return nil
	}
	return k
}

// holdsOnly tells whether sockets are anchors of listeners. Without listeners,
// as of pins that another version made, they need not be.
func hasOnlyKeeperSockets(sockets []*member.Socket, rows []bpf.Listener) bool {
	if len(rows) == 0 {
		return true
	}
	foreign := func(s *member.Socket) bool {
		return !slices.ContainsFunc(rows, func(l bpf.Listener) bool { return isKeeperSocket(s, l) })
	}
	return len(sockets) > 0 && !slices.ContainsFunc(sockets, foreign)
}

// anchors tells whether a socket is an anchor of a listener.
func isKeeperSocket(s *member.Socket, l bpf.Listener) bool {
	return s.Protocol == int(l.Protocol) && s.Local == l.Address && s.V6Only == l.V6Only && s.Listening && s.ReusePort
}

// pinnedRows reads the listeners of a service from its pins; none, if that
// cannot be done.
func pinnedRows(pins string) func(service string) []bpf.Listener {
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

// end kills a keeper; when it returns, the keeper's sockets are closed.
func (k *keeper) kill() error {
	defer k.close()
	if err := k.handle.Kill(); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("end keeper %d: %w", k.pid, err)
	}
	return k.handle.Wait()
}

func (k *keeper) close() {
	member.CloseAll(k.sockets)
	k.handle.Close()
}

// Hold is the keeper's whole life: it gives up all rights and waits until ctx
// ends, at SIGTERM: systemd would wait 90 s at shutdown for one that ignores it. The
// sockets that it inherited need nothing done.
func RunKeeper(ctx context.Context) error {
	if err := rights.DropAll(); err != nil {
		return err
	}
	<-ctx.Done()
	return nil
}

// EndKeepers ends the keepers of a service whose sockets are in a pin directory, and takes the programs off the
// sockets, which go back to the kernel's hash. An empty service means all.
func RetireKeepers(pins, service string) error {
	keepers, err := findKeepers(pins, service, nil, pinnedRows(pins))
	if err != nil {
		return err
	}
	var errs []error
	for _, k := range keepers {
		for _, socket := range k.sockets {
			errs = append(errs, bpf.Detach(socket.FD()))
		}
		errs = append(errs, k.kill())
	}
	return fault.Join(errs...)
}
