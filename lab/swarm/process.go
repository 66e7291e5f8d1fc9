// SPDX-License-Identifier: Apache-2.0

package swarm

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"

	"sockeye/lab"
)

// Swarm starts members and devices in a lab, and reads their records. It is safe for concurrent use, except Read.
type Swarm struct {
	lab                 *lab.Lab
	collectors, senders *lab.Namespace
	args                []string

	mu        sync.Mutex
	processes []*Process // members
	devices   *Process
}

// New returns a swarm with members in the namespace "collector" of a lab, and devices in a namespace of Attach. This
// program must call Run in processes that are started with these arguments, or for which HasRole returns true.
func New(l *lab.Lab, devices *lab.Namespace, args ...string) (*Swarm, error) {
	collectors, err := l.Namespace("collector")
	if err != nil {
		return nil, err
	}
	s := &Swarm{lab: l, collectors: collectors, senders: devices, args: args}
	l.AtClose(s.closeRecords)
	return s, nil
}

// Process is a member, or the devices.
type Process struct {
	*lab.Process
	// ID identifies a member in an Analysis, and Slot its slot. Both are Devices for the devices.
	ID, Slot int

	stdin   io.Writer
	asking  sync.Mutex
	answers *json.Decoder
	output  *os.File
	up      chan struct{} // closed when the process answers
	records *os.File
	offset  int64 // of the next record to read; -1: the file is removed
}

// StartMember starts a member with this name as the first word of its command line. It returns before the member
// listens.
func (s *Swarm) StartMember(m Member, name, user string) (*Process, error) {
	return s.start(role{Member: &m}, name, user, s.collectors)
}

// StartMemberIn is StartMember in another namespace.
func (s *Swarm) StartMemberIn(n *lab.Namespace, m Member, name, user string) (*Process, error) {
	return s.start(role{Member: &m}, name, user, n)
}

// StartDevices starts the devices, which connect at once, and waits until all of them have a connection.
func (s *Swarm) StartDevices(ctx context.Context, l Load) error {
	if l.Devices < 1 || l.Devices > MaxDevices {
		return fmt.Errorf("start devices: %d, not 1 to %d", l.Devices, MaxDevices)
	}
	p, err := s.start(role{Load: &l}, "devices", "", s.senders)
	if err != nil {
		return err
	}
	s.mu.Lock()
	s.devices = p
	s.mu.Unlock()
	return s.lab.WaitFor(ctx, "connections of devices", func() (bool, error) {
		state, err := s.State()
		return state.Open == l.Devices, err
	})
}

// State returns the state of the devices.
func (s *Swarm) State() (state DevicesState, err error) {
	return state, s.devices.ask(cmdState, &state)
}

// Send starts the datagrams. Call it once.
func (s *Swarm) Send() (state DevicesState, err error) { return state, s.devices.ask(cmdSend, &state) }

// Stop stops the datagrams for good. Call it once, after Send.
func (s *Swarm) Stop() (state DevicesState, err error) { return state, s.devices.ask(cmdStop, &state) }

// FromDevices is the ID of the devices.
const FromDevices = -1

func (s *Swarm) start(r role, name, user string, n *lab.Namespace) (_ *Process, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	spec, err := json.Marshal(r)
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	// Other users cannot access the original path.
	p := &Process{Process: n.Command(context.Background(), append([]string{"/proc/self/exe"}, s.args...)...), ID: FromDevices, Slot: FromDevices, up: make(chan struct{})}
	p.Cmd.Args[0] = filepath.Base(name)
	p.Name, p.User = name, user
	p.Cmd.Env = append(os.Environ(), roleVariable+"="+string(spec))
	if r.Member != nil {
		p.ID, p.Slot = len(s.processes), r.Member.Slot
	}
	if p.records, err = os.OpenFile(filepath.Join(s.lab.Dir(), fmt.Sprintf("%s-%d.records", strings.ReplaceAll(name, "/", "-"), len(s.processes))), os.O_CREATE|os.O_RDWR|os.O_APPEND, 0o600); err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	p.Cmd.ExtraFiles = []*os.File{p.records}
	if p.stdin, err = p.Cmd.StdinPipe(); err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	out, in, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	defer in.Close()
	p.Cmd.Stdout, p.output, p.answers = in, out, json.NewDecoder(bufio.NewReader(out))
	if err := p.Start(); err != nil {
		return nil, errors.Join(err, out.Close(), p.records.Close())
	}
	go func() {
		<-p.Done()
		p.asking.Lock()
		defer p.asking.Unlock()
		out.Close()
	}()
	if r.Member != nil {
		s.processes = append(s.processes, p)
		p.asking.Lock()
		go func() {
			defer p.asking.Unlock()
			if p.answers.Decode(&MemberState{}) == nil {
				close(p.up)
			}
		}()
	}
	return p, nil
}

// Listening waits until a member listens.
func (p *Process) Listening() error {
	select {
	case <-p.up:
		return nil
	case <-p.Done():
		return p.Err()
	}
}

// State returns the state of a member.
func (p *Process) State() (state MemberState, err error) { return state, p.ask(cmdState, &state) }

func (p *Process) ask(question string, answer any) error {
	p.asking.Lock()
	defer p.asking.Unlock()
	_, err := fmt.Fprintln(p.stdin, question)
	if err == nil {
		err = p.answers.Decode(answer)
	}
	if err != nil {
		_ = p.Kill()
		return fmt.Errorf("ask %s: %w: %w", p.Name, err, p.Err())
	}
	return nil
}

// Kill kills all processes and removes their records.
func (s *Swarm) Kill() (err error) {
	for _, p := range s.all() {
		err = errors.Join(err, p.Kill())
	}
	return errors.Join(err, s.closeRecords())
}

// closeRecords closes the records that were not read to the end.
func (s *Swarm) closeRecords() (err error) {
	for _, p := range s.all() {
		if p.offset >= 0 {
			p.offset = -1
			err = errors.Join(err, p.records.Close(), os.Remove(p.records.Name()))
		}
	}
	return err
}

// PeakMemory returns the peak resident set size of a running process in bytes.
func (p *Process) PeakMemory() (int, error) { return PeakMemory(p.Pid()) }

// PeakMemory returns the peak resident set size of a running process in bytes.
func PeakMemory(pid int) (int, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, fmt.Errorf("read peak memory of pid %d: %w", pid, err)
	}
	_, text, _ := strings.Cut(string(b), "VmHWM:")
	fields := strings.Fields(text)
	if len(fields) < 2 || fields[1] != "kB" {
		return 0, fmt.Errorf("read peak memory of pid %d: no VmHWM", pid)
	}
	n, err := strconv.Atoi(fields[0])
	return n << 10, err
}

// Read adds the records that were written since the last call to an analysis.
func (s *Swarm) Read(a *Analysis) error {
	for _, p := range s.all() {
		if p.offset < 0 {
			continue
		}
		ended := !p.Running()
		records, next, err := readRecords(p.records, p.offset)
		if err != nil {
			return fmt.Errorf("%s: %w", p.Name, err)
		}
		p.offset = next
		a.Add(p.ID, records)
		if ended { // all of its records are read
			p.offset = -1
			if err := errors.Join(p.records.Close(), os.Remove(p.records.Name())); err != nil {
				return fmt.Errorf("remove records of %s: %w", p.Name, err)
			}
		}
	}
	return nil
}

func (s *Swarm) all() []*Process {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := slices.Clone(s.processes)
	if s.devices != nil {
		all = append(all, s.devices)
	}
	return all
}
