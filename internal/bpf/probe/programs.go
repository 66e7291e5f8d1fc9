// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// Foreign is a program of another owner that may decide about the same packets or sockets.
type Foreign struct {
	ID   uint32
	Name string
	Kind string
	// Here is set if the program is attached to the network namespace. The kernel does not tell the sockets of an sk_reuseport program,
	// nor their network namespace.
	Here bool
}

// ForeignPrograms lists the sk_reuseport programs of the host and the sk_lookup programs of a network namespace that
// are not Sockeye's. It needs CAP_SYS_ADMIN.
func ForeignPrograms(netns int) ([]Foreign, error) {
	var foreign []Foreign
	attached, err := QueryPrograms(link.QueryOptions{Target: netns, Attach: ebpf.AttachSkLookup})
	if err != nil {
		return nil, fmt.Errorf("list sk_lookup programs: %w", err)
	}
	here := make(map[ebpf.ProgramID]bool)
	for _, p := range attached.Programs {
		here[p.ID] = true
	}
	err = EachProgram(func(id ebpf.ProgramID, p *ebpf.Program) (keep bool, err error) {
		info, err := p.Info()
		if err != nil {
			return false, fmt.Errorf("read program %d: %w", id, err)
		}
		own := info.Name == "steer_reuseport" || info.Name == "steer_migrate" || info.Name == "steer_lookup"
		if !own && (info.Type == ebpf.SkReuseport || info.Type == ebpf.SkLookup && here[id]) {
			foreign = append(foreign, Foreign{uint32(id), info.Name, info.Type.String(), here[id]})
		}
		return false, nil
	})
	return foreign, err
}

// QueryPrograms is link.QueryPrograms, which first asks for the number of programs and returns ENOSPC if a program is
// attached in between. QueryPrograms then asks again.
func QueryPrograms(opts link.QueryOptions) (*link.QueryResult, error) {
	const attempts = 10
	for i := 1; ; i++ {
		attached, err := link.QueryPrograms(opts)
		if !errors.Is(err, unix.ENOSPC) || i == attempts {
			return attached, err
		}
	}
}

// EachProgram calls f for each program of the host, until f returns an error. f returns whether the caller keeps the program; else EachProgram closes it. It
// needs CAP_SYS_ADMIN.
func EachProgram(f func(id ebpf.ProgramID, p *ebpf.Program) (keep bool, err error)) error {
	for id := ebpf.ProgramID(0); ; {
		var err error
		if id, err = ebpf.ProgramGetNextID(id); errors.Is(err, unix.ENOENT) {
			return nil
		} else if err != nil {
			return fmt.Errorf("list programs: %w", err)
		}
		p, err := ebpf.NewProgramFromID(id)
		if errors.Is(err, unix.ENOENT) {
			continue // it has ended
		}
		if err != nil {
			return fmt.Errorf("open program %d: %w", id, err)
		}
		keep, err := f(id, p)
		if !keep {
			p.Close()
		}
		if err != nil {
			return err
		}
	}
}
