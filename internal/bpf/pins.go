// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"fmt"
	"path/filepath"

	"github.com/cilium/ebpf"

	"sockeye/internal/bpf/pin"
)

// Names of pins. Other maps are pinned under their names in bpf/*.c. A pin directory belongs to one service, one
// tuning or one tracing (see Root).
const (
	pinListeners     = "listeners"      // listener of each row, for the next agent and bpftool
	pinTable         = "table"          // bucket table in force
	pinDeviceMap     = "device_map"     // device map in force; absent without one
	pinDevices       = "devices"        // seen devices
	pinSockets       = "sockets"        // registered sockets by row and slot
	pinGates         = "gates"          // sockets of closed gates by row
	pinPasses        = "passes"         // SYNs that closed gates let pass by slot
	pinSuccessors    = "successors"     // registered sockets of members that took a slot over
	pinRooms         = "rooms"          // sockets of waiting rooms by row
	pinWaits         = "waits"          // waiting room of each slot
	pinTemplateSets  = "template_sets"  // datagrams with template sets, for the agent
	pinLostTemplates = "lost_templates" // number of those that did not fit
	pinStored        = "stored"         // packets that each waiting room has received
	pinSlots         = "slots"          // member of each slot
	pinCookies       = "cookies"        // slot of each registered socket

	pinLookupLink  = linkPin + "lookup"
	pinReleaseLink = linkPin + "release"
	pinTuneLink    = linkPin + "sockops"
	pinTraceLink   = linkPin + "sockops"
	pinSendLink    = linkPin + "send"

	// linkPin is the prefix of links' pins. The suffix is the hook, or the name of a trace program without its
	// domain.
	linkPin = "link_"
)

// The sk_storage map with the rule and the arm of each connection (struct tune_connection) is the only map that two
// domains share: tune writes it, and trace reads it to group connections by rule and arm. The trace programs call the
// map "tuned", because "connections" is a map of trace.
//
// Without a tuning of the cgroup (TraceConfig.Tuning is ""), the trace programs get an empty unpinned map, and
// connections have no rule and no arm. The map is part of the layouts of both domains: OpenTrace returns
// os.ErrNotExist if the tuning has another layout. When a tuning ends, the trace programs keep the map; TuningID
// distinguishes the map of a later tuning.
const (
	pinTuneConnections = "connections"
	tunedMap           = "tuned"
)

// openTuneConnections opens the pinned map of a tuning in the layout of this version. The error wraps os.ErrNotExist
// if there is none.
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

// programPin returns the name of the pin of the selecting program: one for all rows with sk_lookup, otherwise one per
// row.
func programPin(lookup bool, row int) string {
	if lookup {
		return "prog_lookup"
	}
	return fmt.Sprintf("prog_reuseport_%d", row)
}
