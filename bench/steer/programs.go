// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"golang.org/x/sys/unix"
)

// programTime contains the mean run time of a program in nanoseconds, from the kernel's BPF statistics. It includes two
// clock reads by the statistics, whose cost emptyProgram shows.
type programTime struct {
	Datagram float64 `json:"datagram"`
	SYN      float64 `json:"syn"`
}

const emptyProgram = "empty program"

// programTimes measures the run times of the steering programs, first with datagrams only, then with connections only.
func (b *bench) programTimes(ctx context.Context, arms []arm) (map[string]programTime, error) {
	if len(arms) == 0 {
		return nil, nil
	}
	stats, err := ebpf.EnableStats(unix.BPF_STATS_RUN_TIME)
	if err != nil {
		return nil, fmt.Errorf("enable BPF statistics: %w", err)
	}
	defer stats.Close()
	fmt.Fprint(os.Stderr, "programs: ")
	defer fmt.Fprintln(os.Stderr)
	out := map[string]programTime{}
	for _, a := range append([]arm{emptyArm{}}, arms...) {
		t, err := b.programTime(ctx, a)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", a.name(), err)
		}
		out[a.name()] = t
		fmt.Fprint(os.Stderr, ".")
	}
	return out, nil
}

func (b *bench) programTime(ctx context.Context, a arm) (t programTime, err error) {
	f, err := b.launch(ctx, a, kindPlain)
	if f != nil {
		defer f.close()
	}
	if err != nil {
		return t, err
	}
	if err := f.ready(ctx); err != nil {
		return t, err
	}
	var programs []*ebpf.Program
	if _, ok := a.(emptyArm); ok {
		if programs, err = f.attachEmpty(); err != nil {
			return t, err
		}
	} else if programs, err = pinnedPrograms(f.pins()); err != nil {
		return t, err
	}
	defer func() {
		for _, p := range programs {
			p.Close()
		}
	}()
	for _, pass := range []struct {
		to *float64
		l  load
	}{
		{&t.Datagram, load{Routers: b.Routers, Records: b.Records, Prefixes: 1, IPFIX: collector(ipfixPort), Datagrams: 20000, Duration: time.Second}},
		{&t.SYN, load{Routers: 1000, Prefixes: 1, BMP: collector(bmpPort)}},
	} {
		before, runs, err := runTime(programs)
		if err != nil {
			return t, err
		}
		if _, err := f.measure(ctx, pass.l); err != nil {
			return t, err
		}
		after, more, err := runTime(programs)
		if err != nil {
			return t, err
		}
		if more == runs {
			return t, errors.New("the program did not run")
		}
		*pass.to = float64(after-before) / float64(more-runs)
	}
	return t, nil
}

func runTime(programs []*ebpf.Program) (total time.Duration, runs uint64, err error) {
	for _, p := range programs {
		s, err := p.Stats()
		if err != nil {
			return 0, 0, fmt.Errorf("read statistics of program: %w", err)
		}
		total += s.Runtime
		runs += s.RunCount
	}
	return total, runs, nil
}

// pinnedPrograms opens the socket selecting programs pinned below a directory.
func pinnedPrograms(dir string) (programs []*ebpf.Program, err error) {
	err = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		p, err := ebpf.LoadPinnedProgram(path, nil)
		if err != nil {
			return nil // a map or a link
		}
		if p.Type() == ebpf.SkReuseport || p.Type() == ebpf.SkLookup {
			programs = append(programs, p)
		} else {
			p.Close()
		}
		return nil
	})
	if err == nil && len(programs) == 0 {
		err = errors.New("no pinned programs found")
	}
	if err != nil {
		return nil, fmt.Errorf("find programs in %s: %w", dir, err)
	}
	return programs, nil
}

// emptyArm is the plain arm with a program without effect in its SO_REUSEPORT groups.
type emptyArm struct{ plainArm }

func (emptyArm) name() string  { return emptyProgram }
func (emptyArm) title() string { return emptyProgram }

// attachEmpty attaches the empty program to the members' SO_REUSEPORT groups. It adds a socket to each group for this
// purpose only, because the program belongs to the group.
func (f *fleet) attachEmpty() (programs []*ebpf.Program, err error) {
	for kind, port := range map[int]uint16{unix.SOCK_STREAM: bmpPort, unix.SOCK_DGRAM: ipfixPort} {
		p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
			Type: ebpf.SkReuseport, License: "GPL",
			Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 1), asm.Return()}, // SK_PASS
		})
		if err != nil {
			return programs, fmt.Errorf("load empty program: %w", err)
		}
		programs = append(programs, p)
		fd, err := listen(kind, port)
		if err != nil {
			return programs, err
		}
		err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ATTACH_REUSEPORT_EBPF, p.FD())
		unix.Close(fd)
		if err != nil {
			return programs, fmt.Errorf("attach empty program to port %d: %w", port, err)
		}
	}
	return programs, nil
}
