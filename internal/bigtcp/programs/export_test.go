// SPDX-License-Identifier: Apache-2.0

package programs

import "github.com/cilium/ebpf"

// Driver returns the program of AttachDriver.
func (b *Counter) Driver() *ebpf.Program { return b.driver.Programs["bigtcp_driver"] }
