// SPDX-License-Identifier: Apache-2.0

package api

import (
	"net/netip"
	"time"
)

// DefaultMissing is the number of devices that GET /v1/missing lists without the parameter limit, and MostMissing the
// maximum of the parameter.
const (
	DefaultMissing = 1000
	MostMissing    = 100_000
)

// Missing is one entry of the answer to GET /v1/missing: the expected devices of a service that do not send, or that send
// only some of the streams.
type Missing struct {
	Service  string   `json:"service"`
	Streams  []string `json:"streams"`  // that devices are expected to send: tcp, udp
	Expected int      `json:"expected"` // devices: those of the device map, and learned ones
	Missing  int      `json:"missing"`  // of these, devices without at least one stream
	Omitted  int      `json:"omitted"`  // of these, not in Devices because of the limit
	// Devices has the devices that were seen last first, and those that were never seen last.
	Devices []MissingDevice `json:"devices"`
	// Problem says which stream is not judged, and why.
	Problem string `json:"problem,omitempty"`
}

// MissingDevice is an expected device that does not send all streams.
type MissingDevice struct {
	Device  string      `json:"device,omitempty"`  // name in the device map
	Prefix  string      `json:"prefix,omitempty"`  // first prefix of the device in the device map
	Address *netip.Addr `json:"address,omitempty"` // of a device without a name
	Slot    int         `json:"slot"`
	Missing []string    `json:"missing"` // tcp, udp
	// Since is when the device was last known to send what is missing now; absent: it has never sent that.
	Since *time.Time `json:"since,omitempty"`
	// LastConnection and LastDatagram are when the device last had a connection, and sent a datagram; absent: never.
	LastConnection *time.Time `json:"last_connection,omitempty"`
	LastDatagram   *time.Time `json:"last_datagram,omitempty"`
}
