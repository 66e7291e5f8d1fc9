// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"

	"sockeye/bench/harness"
)

// If the host's kernel has no IPVS, its figures come from a virtual machine with Debian's newest kernel. qemu emulates the
// CPU, which takes ten times and more as long: only the ratios to other arms in the same machine say something, and the
// properties, which do not depend on speed.

const guestModules = "ip_vs,ip_vs_sh,ip_vs_mh,nf_tables,nft_hash,nft_nat,nft_chain_nat"

// A guest contains the figures that were measured in a virtual machine.
type guest struct {
	Run struct {
		Kernel string `json:"kernel"`
		CPUs   int    `json:"cpus"`
	} `json:"run"`
	Peers map[string]json.RawMessage `json:"peers"`
	Text  string                     `json:"text"`
}

// measureGuest measures the balancers in the kernel in a virtual machine.
func measureGuest(ctx context.Context) (*guest, error) {
	figures, err := harness.InGuest(ctx, "-kernels=newest", "-timeout=20m", "-memory=2048", "-modules="+guestModules,
		"-programs=nft,ipvsadm", "-run=^TestPeersInGuest$", "./bench/steer")
	if err != nil {
		return nil, err
	}
	return readGuest(figures)
}

func readGuest(figures []byte) (*guest, error) {
	g := &guest{}
	if err := json.Unmarshal(figures, g); err != nil {
		return nil, fmt.Errorf("read the figures of the virtual machine: %w", err)
	}
	return g, nil
}

// print prints the report of the machine.
func (g *guest) print(p harness.Printf) {
	if g == nil {
		return
	}
	p("\nIn a virtual machine with emulated CPUs: compare only its arms with each other.\n")
	for line := range strings.Lines(g.Text) {
		p("%s", line)
	}
}
