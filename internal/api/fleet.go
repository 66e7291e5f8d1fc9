// SPDX-License-Identifier: Apache-2.0

package api

// FleetStatus is the answer to GET /v1/fleet.
type FleetStatus struct {
	Fleet string `json:"fleet"`
	Host  string `json:"host"`  // name of this host
	Store string `json:"store"` // etcd or file
	// Connected is set while the store answers; otherwise the rest is of the time before.
	Connected bool   `json:"connected"`
	Leader    string `json:"leader,omitempty"` // name of the host that writes the table
	Epoch     uint64 `json:"epoch"`            // of the table in force on this host; 0: none
	// StoreEpoch is the epoch of the newest table of the store.
	StoreEpoch uint64      `json:"store_epoch"`
	Moving     int         `json:"moving"` // buckets that move now
	Copies     int         `json:"copies"` // devices of this host whose templates have copies in etcd
	Hosts      []FleetHost `json:"hosts"`
	// Packets are the packets to the services that arrived at this host, by outcome, since the creation of the pins.
	Packets map[string]uint64 `json:"packets"`
	// Healthy says whether this host can serve devices, and Reason why not.
	Healthy  bool     `json:"healthy"`
	Reason   string   `json:"reason,omitempty"`
	Problems []string `json:"problems"`
}

// FleetHost is one host of a FleetStatus.
type FleetHost struct {
	Name      string   `json:"name"`
	Addresses []string `json:"addresses"`
	// State is ready, drain, maint or removed, as the operator has set it; Alive and Healthy are what the host says.
	State   string  `json:"state"`
	Alive   bool    `json:"alive"`
	Healthy bool    `json:"healthy"`
	Weight  uint32  `json:"weight"`
	Buckets int     `json:"buckets"` // of 16384
	Share   float64 `json:"share"`   // of the buckets, 0 to 1
	Epoch   uint64  `json:"epoch"`   // that the host has applied
	Behind  bool    `json:"behind"`  // the host lives, and the newest table that this host knows has a higher epoch
	// Path is how this host reaches the other one: self, link, tunnel or none.
	Path string `json:"path"`
}

// FleetHostChange is the body of POST /v1/fleet/host.
type FleetHostChange struct {
	Host   string `json:"host"`
	State  string `json:"state,omitempty"`  // ready, drain, maint or removed
	Weight *int   `json:"weight,omitempty"` // 0: that of the policy of the host
	DryRun bool   `json:"dry_run,omitempty"`
}

// Health is the answer to GET /v1/health: whether this host shall receive packets to the addresses of the services.
type Health struct {
	Healthy bool   `json:"healthy"`
	Reason  string `json:"reason,omitempty"` // why it is not
}
