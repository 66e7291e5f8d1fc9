// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"crypto/rand"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"time"

	"sockeye/internal/fault"
	"sockeye/internal/member"
	"sockeye/internal/statedir"
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
	if err := json.Unmarshal(data, &s); err != nil {
		return s, false, fault.WithHint(fmt.Errorf("read state %s: %w", path, err),
			"remove the file: the nonce is also pinned, and members are found again")
	}
	if id := statedir.BootID(); s.BootID != id {
		s.BootID, s.Members, s.Sockets, s.Claims, s.Released, s.Keeper, s.Adopted = id, nil, nil, nil, nil, nil, nil
	}
	return s, true, nil
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
