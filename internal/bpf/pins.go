// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"fmt"
	"path/filepath"

	"github.com/cilium/ebpf"
)

// Names of pins besides the maps, which have their own names.
const (
	pinLookupLink  = "link_lookup"
	pinReleaseLink = "link_release"
	pinListeners   = "listeners"
	pinTable       = "table"
	pinDeviceMap   = "device_map"
	pinDevices     = "devices"
)

func programPin(lookup bool, row int) string {
	if lookup {
		return "prog_lookup"
	}
	return fmt.Sprintf("prog_reuseport_%d", row)
}

const pinTuneLink = "link_sockops"

// tunedConnections opens the map of the connections of a pinned tuning.
func tunedConnections(dir string) (*ebpf.Map, error) {
	dir, err := inLayout(dir, tuneLayout)
	if err != nil {
		return nil, err
	}
	path := filepath.Join(dir, "connections")
	m, err := ebpf.LoadPinnedMap(path, nil)
	if err != nil {
		return nil, fmt.Errorf("open pinned map %s: %w", path, err)
	}
	return m, nil
}

const (
	pinTraceLink = "link_sockops"
	pinSendLink  = "link_send"
)
