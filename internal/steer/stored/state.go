// SPDX-License-Identifier: Apache-2.0

// Package stored defines the state file of a service: the nonce, the settings of the slots, the pins of devices, and the
// processes of the present boot that an agent must know after a restart.
package stored

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"

	"sockeye/internal/bpf"
	"sockeye/internal/fault"
	"sockeye/internal/member"
	"sockeye/internal/placement"
	"sockeye/internal/statedir"
)

// State is the contents of a service's file in the state directory, which outlives restarts and reboots. Everything
// else is pinned, or read from the host.
type State struct {
	// Nonce is the key of the hash. Devices keep their slots over a reboot because the nonce is saved.
	Nonce uint64 `json:"nonce,string"`
	// ClaimedUID is the owner of the members' sockets if the policy names no user and has no rules: the user of the
	// first member that run or register added. Earlier versions wrote uid, which could come from any process.
	ClaimedUID *uint32 `json:"claimed_uid,omitempty"`
	// BootID is the boot that the process ids below belong to.
	BootID string `json:"boot_id"`
	// Members contains the processes that match rules, with the attributes of their first inspection.
	Members []FirstSight `json:"members,omitempty"`
	// Sockets contains the registered sockets of members, also of members that have exited: a child of such a member
	// may still have them open and is not a member.
	Sockets []OpenedSockets `json:"sockets,omitempty"`
	// Claims contains the processes that run or register added.
	Claims []Claim `json:"claims,omitempty"`
	// Released contains the processes that unregister removed from their slot.
	Released []member.ID `json:"released,omitempty"`
	// Keeper is the keeper process.
	Keeper *member.ID `json:"keeper,omitempty"`
	// Slots contains the settings of slots by number, without those with the default setting.
	Slots map[int]Setting `json:"slots,omitempty"`
	// Pins contains the devices that the operator assigned to a slot.
	Pins []Pin `json:"pins,omitempty"`
	// MovesStopped is set by sockeye moves --cancel until the next change.
	MovesStopped bool `json:"moves_stopped,omitempty"`
	// Adopted contains the devices that on_start: adopt assigned to a member.
	Adopted []AdoptedDevice `json:"adopted,omitempty"`
}

// FirstSight contains the attributes of a process at its first inspection. Some programs overwrite their arguments
// and their environment, and upgrades replace executables.
type FirstSight struct {
	member.ID
	Args         []string `json:"args"`
	SlotVariable string   `json:"slot_variable,omitempty"`
	// Exe is the verified path of the executable File on the host; "" if no rule matches on the executable.
	Exe  string        `json:"exe,omitempty"`
	File member.FileID `json:"file,omitzero"`
}

// OpenedSockets contains the cookies of the registered sockets of a member.
type OpenedSockets struct {
	member.ID
	Cookies []uint64 `json:"cookies"`
}

// Claim is a process that run or register added.
type Claim struct {
	member.ID
	Slot   int    `json:"slot"`
	Source string `json:"source"` // run or register
}

// AdoptedDevice is a device that is assigned to another member than that of its slot by the hash, until that member
// exits.
type AdoptedDevice struct {
	member.ID
	Device  string     `json:"device,omitempty"` // name in the device map
	Address netip.Addr `json:"address"`          // address of a device without a name
	Slot    int        `json:"slot"`
}

// Load reads the state of a service. known is false if there is no state file. The processes of an earlier boot
// are discarded.
func Load(path string) (s State, known bool, err error) {
	data, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		s.BootID = statedir.BootID()
		return s, false, nil
	}
	if err != nil {
		return s, false, fmt.Errorf("read state: %w", err)
	}
	if bytes.Equal(bytes.TrimSpace(data), []byte("null")) {
		return s, false, damaged(path, errors.New("no object"))
	}
	if err := json.Unmarshal(data, &s); err != nil {
		return s, false, damaged(path, err)
	}
	if err := s.check(); err != nil {
		return s, false, damaged(path, err)
	}
	if id := statedir.BootID(); s.BootID != id {
		s.BootID, s.Members, s.Sockets, s.Claims, s.Released, s.Keeper, s.Adopted = id, nil, nil, nil, nil, nil, nil
	}
	return s, true, nil
}

func damaged(path string, err error) error {
	return fault.WithHint(fmt.Errorf("read state %s: %w", path, err),
		"remove the file: the nonce is also pinned, and members are found again; states and weights of slots and pins of devices are lost")
}

// check returns an error for settings and pins that no command makes.
func (s *State) check() error {
	for slot, set := range s.Slots {
		if slot < 0 || slot >= bpf.MaxSlots || !slices.Contains(States, string(set.State)) || set.Weight < 0 || set.Weight > placement.MaxWeight {
			return fmt.Errorf("slot %d: state %q, weight %d", slot, set.State, set.Weight)
		}
	}
	seen := make(map[Pin]bool)
	for _, p := range s.Pins {
		key := Pin{Device: p.Device, Prefix: p.Prefix}
		valid := p.Device != "" || p.Prefix.IsValid() && p.Prefix == p.Prefix.Masked() && !p.Prefix.Addr().Is4In6()
		if p.Slot < 0 || p.Slot >= bpf.MaxSlots || !valid || p.Device != "" && p.Prefix.IsValid() || seen[key] {
			return fmt.Errorf("pin of %q to slot %d", p.Name(), p.Slot)
		}
		seen[key] = true
	}
	if len(s.Pins) > MaxPins {
		return fmt.Errorf("%d pins, at most %d", len(s.Pins), MaxPins)
	}
	return nil
}

// Save writes the state to its file.
func (s *State) Save(path string) error {
	data, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		return fmt.Errorf("save state: %w", err)
	}
	return statedir.Write(path, append(data, '\n'))
}
