// SPDX-License-Identifier: Apache-2.0

package forward

import "sockeye/internal/clsact"

// UseFilters lets Attach do what it does on kernels without TCX, in the namespace of the calling thread.
func (p *Path) UseFilters() (err error) {
	p.filters, err = clsact.Open()
	return err
}
