// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"fmt"
	"path/filepath"

	"sockeye/internal/bpf/pin"

	"github.com/cilium/ebpf"
)

// Names of pins. A map whose name is not here is pinned under its own name, as in
// bpf/*.c. The directory of a pin belongs to one service, one tuning or one tracing:
// see Root.
const (
	pinListeners = "listeners"  // the listener of each row, for the next agent and bpftool
	pinTable     = "table"      // the bucket table in force
	pinDeviceMap = "device_map" // the device map in force; absent without one
	pinDevices   = "devices"    // the devices seen
	pinSockets   = "sockets"    // the registered sockets, by row and slot

	pinLookupLink  = linkPin + "lookup"
	pinReleaseLink = linkPin + "release"
	pinTuneLink    = linkPin + "sockops"
	pinTraceLink   = linkPin + "sockops"
	pinSendLink    = linkPin + "send"

	// linkPin begins the name of each link's pin. The rest is the hook, or the name of
	// a trace program without its domain.
	linkPin = "link_"
)

// The map in which tune keeps the rule and the arm of each connection (sk_storage of
// struct tune_connection) is the only one that two domains share: tune writes it, trace
// reads it to group connections by rule and arm (group_by: rule, arm). In the trace
// programs the map is called "tuned", as "connections" is the map of trace's own.
//
// Without a tuning of the cgroup (TraceConfig.Tuning is "") the trace programs get an
// empty map that is not pinned: connections have no rule and no arm then. The map is
// part of the layouts of both domains: if the folder has no tuning of this version's
// layout, OpenTrace fails with os.ErrNotExist. A tuning that ends leaves the map to the trace programs, which
// hold it; TuningID tells whether a tuning that was made later has another.
const (
	pinTuneConnections = "connections"
	tunedMap           = "tuned"
)

// openTuneConnections opens the pinned map of the tuning whose folder is base, in this
// version's layout. The error wraps os.ErrNotExist if there is none.
func openTuneConnections(base string) (*ebpf.Map, error) {
	dir, err := pin.InLayout(base, tuneLayout)
	if err != nil {
		return nil, err
	}
	path := filepath.Join(dir, pinTuneConnections)
	m, err := ebpf.LoadPinnedMap(path, nil)
	if err != nil {
		return nil, fmt.Errorf("open pinned map %s: %w", path, err)
	}
	return m, nil
}

// programPin is the pin of the program that selects sockets: one for all rows with
// sk_lookup, else one for each.
func programPin(lookup bool, row int) string {
	if lookup {
		return "prog_lookup"
	}
	return fmt.Sprintf("prog_reuseport_%d", row)
}
