// SPDX-License-Identifier: Apache-2.0

package forward

import (
	"time"

	"sockeye/internal/clsact"
)

// EndFormer ends the time of all former peers.
func (p *Path) EndFormer() {
	for key := range p.former {
		p.former[key] = time.Now().Add(-formerTime)
	}
}

// UseFilters lets Attach do what it does on kernels without TCX, in the namespace of the calling thread.
func (p *Path) UseFilters() (err error) {
	p.filters, err = clsact.Open()
	return err
}
