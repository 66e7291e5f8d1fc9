// SPDX-License-Identifier: Apache-2.0

package forward

import "github.com/cilium/ebpf"

// Ingress returns the program of the interfaces.
func (p *Path) Ingress() *ebpf.Program { return p.ingress }
