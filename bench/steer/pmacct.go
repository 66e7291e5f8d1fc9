// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"sockeye/bench/harness"
)

// pmacctArm is pmacct's own eBPF option, built by tools/pmacct-ebpf. Each nfacctd loads the BPF program and attaches it to its
// sockets; the daemons share the pinned maps of the program, one set for TCP and one for UDP.
type pmacctArm struct {
	dir string // of tools/pmacct-ebpf
	// buckets is the number of hash buckets. The program's default is 128, of which each daemon serves one, and the program drops
	// the packets of the others. nfacctd has no option for it; an operator can write the pinned maps.
	buckets int
}

const (
	pmacctBuckets = 128 // default of the program
	pmacctPins    = "/sys/fs/bpf"
	// pmacctGap is the time between the starts of two daemons: pmacct's documentation (CONFIG-KEYS, nfacctd_rp_ebpf_prog) asks for "a
	// short time gap".
	pmacctGap = time.Second
)

func (p *pmacctArm) title() string {
	if p.buckets == pmacctBuckets {
		return "pmacct's eBPF option"
	}
	return fmt.Sprintf("pmacct's eBPF option, %d buckets", p.buckets)
}

func (*pmacctArm) ports(int) (tcp, udp uint16) { return bmpPort, ipfixPort }

// mountPins mounts a bpffs in the benchmark's mount namespace, which all daemons use: its path is part of nfacctd.
var mountPins = sync.OnceValue(func() error {
	if err := unix.Mount("bpf", pmacctPins, "bpf", 0, ""); err != nil {
		return fmt.Errorf("mount %s: %w", pmacctPins, err)
	}
	return nil
})

func (*pmacctArm) start(context.Context, *fleet) error { return mountPins() }

// lines are the additional lines of the configuration of a daemon.
func (p *pmacctArm) lines(slot int) string {
	program := filepath.Join(p.dir, "balancer.o")
	return fmt.Sprintf("cluster_name: %s\ncluster_id: %d\nnfacctd_rp_ebpf_prog: %s\nbmp_daemon_rp_ebpf_prog: %s\n", p.name(), slot, program, program)
}

// ready waits until the daemons have pinned the maps, and sets the number of buckets.
func (p *pmacctArm) ready(ctx context.Context, f *fleet) error {
	for _, set := range []string{"nfacctd", "bmp"} {
		path := filepath.Join(p.pins(), set, "size")
		err := harness.Await(ctx, "the pins of pmacct", f.members, func() bool {
			_, err := os.Stat(path)
			return err == nil
		})
		if err != nil || p.buckets == pmacctBuckets {
			return err
		}
		m, err := ebpf.LoadPinnedMap(path, nil)
		if err != nil {
			return fmt.Errorf("open %s: %w", path, err)
		}
		err = m.Put(uint32(0), uint32(p.buckets))
		m.Close()
		if err != nil {
			return fmt.Errorf("write %s: %w", path, err)
		}
	}
	return nil
}

func (p *pmacctArm) pins() string { return filepath.Join(pmacctPins, "pmacct", p.name()) }

// close removes the pinned maps, which outlive the daemons.
func (p *pmacctArm) close() { os.RemoveAll(p.pins()) }

func (p *pmacctArm) name() string {
	if p.buckets == pmacctBuckets {
		return "pmacct-ebpf"
	}
	return fmt.Sprintf("pmacct-ebpf-%d", p.buckets)
}

// nfacctd returns the program of the collectors and of the replicator: that of the flag -pmacct for all arms, or that of the host.
func (b *bench) nfacctd() string {
	if b.Pmacct != "" {
		return filepath.Join(b.Pmacct, "nfacctd")
	}
	return "nfacctd"
}

// pmacctVersion returns the revisions of tools/pmacct-ebpf.
func pmacctVersion(dir string) (string, error) {
	text, err := os.ReadFile(filepath.Join(dir, "version"))
	if err != nil {
		return "", fmt.Errorf("read the version of pmacct: %w", err)
	}
	return strings.TrimSpace(string(text)), nil
}
