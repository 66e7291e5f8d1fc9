// SPDX-License-Identifier: Apache-2.0

package forward

import (
	"time"

	"github.com/cilium/ebpf"

	"sockeye/internal/clsact"
)

// EndFormer ends the time of all former peers.
func (p *Path) EndFormer() {
	for key := range p.former {
		p.former[key] = time.Now().Add(-formerTime)
	}
}

// InForce returns the epoch of the table in force, and the device map that it names.
func (p *Path) InForce() (epoch uint64, named uint32, err error) {
	var id uint32
	if err := p.tables.Lookup(uint32(0), &id); err != nil {
		return 0, 0, err
	}
	m, err := ebpf.NewMapFromID(ebpf.MapID(id))
	if err != nil {
		return 0, 0, err
	}
	defer m.Close()
	var t fleetForwardFleetTable
	err = m.Lookup(uint32(0), &t)
	return t.Epoch, t.Named, err
}

// Named returns the device map that Open has found to be in force.
func (p *Path) Named() uint32 { return p.named }

// Leaving returns the number of connections of devices that leave.
func (p *Path) Leaving() (n int, err error) {
	var key uint32
	var value fleetForwardFleetConnection
	all := p.leaving.Iterate()
	for all.Next(&key, &value) {
		n++
	}
	return n, all.Err()
}

// Ingress returns the program of the interfaces.
func (p *Path) Ingress() *ebpf.Program { return p.ingress }

// UseFilters lets Attach do what it does on kernels without TCX, in the namespace of the calling thread.
func (p *Path) UseFilters() (err error) {
	p.filters, err = clsact.Open()
	return err
}
