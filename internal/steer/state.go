// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"bytes"
	"crypto/rand"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"sockeye/internal/bpf"
	"sockeye/internal/fault"
	"sockeye/internal/member"
	"sockeye/internal/statedir"
	"sockeye/internal/steer/placement"
)

// state is the contents of a service's file in the state directory, which outlives restarts and reboots. Everything
// else is pinned, or read from the host.
type state struct {
	// Nonce is the key of the hash. Devices keep their slots over a reboot because the nonce is saved.
	Nonce uint64 `json:"nonce,string"`
	// ClaimedUID is the owner of the members' sockets if the policy names no user and has no rules: the user of the
	// first member that run or register added. Earlier versions wrote uid, which could come from any process.
	ClaimedUID *uint32 `json:"claimed_uid,omitempty"`
	// BootID is the boot that the process ids below belong to.
	BootID string `json:"boot_id"`
	// Members contains the processes that match rules, with the attributes of their first inspection.
	Members []firstSight `json:"members,omitempty"`
	// Sockets contains the registered sockets of members, also of members that have exited: a child of such a member
	// may still have them open and is not a member.
	Sockets []openedSockets `json:"sockets,omitempty"`
	// Claims contains the processes that run or register added.
	Claims []claim `json:"claims,omitempty"`
	// Released contains the processes that unregister removed from their slot.
	Released []member.ID `json:"released,omitempty"`
	// Keeper is the keeper process.
	Keeper *member.ID `json:"keeper,omitempty"`
	// Slots contains the settings of slots by number, without those with the default setting.
	Slots map[int]slotSetting `json:"slots,omitempty"`
	// Pins contains the devices that the operator assigned to a slot.
	Pins []pin `json:"pins,omitempty"`
	// MovesStopped is set by sockeye moves --cancel until the next change.
	MovesStopped bool `json:"moves_stopped,omitempty"`
	// Adopted contains the devices that on_start: adopt assigned to a member.
	Adopted []adoptedDevice `json:"adopted,omitempty"`
}

// firstSight contains the attributes of a process at its first inspection. Some programs overwrite their arguments
// and their environment, and upgrades replace executables.
type firstSight struct {
	member.ID
	Args         []string `json:"args"`
	SlotVariable string   `json:"slot_variable,omitempty"`
	// Exe is the verified path of the executable File on the host; "" if no rule matches on the executable.
	Exe  string        `json:"exe,omitempty"`
	File member.FileID `json:"file,omitzero"`
}

// openedSockets contains the cookies of the registered sockets of a member.
type openedSockets struct {
	member.ID
	Cookies []uint64 `json:"cookies"`
}

// claim is a process that run or register added.
type claim struct {
	member.ID
	Slot   int    `json:"slot"`
	Source string `json:"source"` // run or register
}

// loadState reads the state of a service. known is false if there is no state file. The processes of an earlier boot
// are discarded.
func loadState(path string) (s state, known bool, err error) {
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
func (s *state) check() error {
	for slot, set := range s.Slots {
		if slot < 0 || slot >= bpf.MaxSlots || !slices.Contains(slotStates, string(set.State)) || set.Weight < 0 || set.Weight > placement.MaxWeight {
			return fmt.Errorf("slot %d: state %q, weight %d", slot, set.State, set.Weight)
		}
	}
	seen := make(map[pin]bool)
	for _, p := range s.Pins {
		key := pin{Device: p.Device, Prefix: p.Prefix}
		valid := p.Device != "" || p.Prefix.IsValid() && p.Prefix == p.Prefix.Masked() && !p.Prefix.Addr().Is4In6()
		if p.Slot < 0 || p.Slot >= bpf.MaxSlots || !valid || p.Device != "" && p.Prefix.IsValid() || seen[key] {
			return fmt.Errorf("pin of %q to slot %d", p.name(), p.Slot)
		}
		seen[key] = true
	}
	if len(s.Pins) > maxPins {
		return fmt.Errorf("%d pins, at most %d", len(s.Pins), maxPins)
	}
	return nil
}

func (s *state) save(path string) error {
	data, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		return fmt.Errorf("save state: %w", err)
	}
	return statedir.Write(path, append(data, '\n'))
}

func newNonce() uint64 {
	var b [8]byte
	rand.Read(b[:])
	return binary.LittleEndian.Uint64(b[:])
}

// startedAt converts a start time in clock ticks since boot. USER_HZ is 100 on all architectures.
func startedAt(startTime uint64, boot time.Time) time.Time {
	return boot.Add(time.Duration(startTime) * 10 * time.Millisecond)
}
