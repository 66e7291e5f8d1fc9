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

// state is what a service keeps over restarts and reboots, in a file of the
// state directory. All else is in the pins or found on the host.
type state struct {
	// Nonce keys the hash, so that a reboot moves no device.
	Nonce uint64 `json:"nonce,string"`
	// ClaimedUID owns the members' sockets where the policy names no user and has no rules: whose the
	// first member by run or register was. Agents that learned it from any process wrote it as uid.
	ClaimedUID *uint32 `json:"claimed_uid,omitempty"`
	// BootID tells whether what follows is about processes of now.
	BootID string `json:"boot_id"`
	// Members are processes that rules named, as they were then.
	Members []firstSight `json:"members,omitempty"`
	// Sockets are those of members, and of members that have ended: a process that such a member forked may
	// hold them on, and is none.
	Sockets []openedSockets `json:"sockets,omitempty"`
	// Claims are processes that were made members by run or register.
	Claims []claim `json:"claims,omitempty"`
	// Released are processes that unregister took out of their slot.
	Released []member.ID `json:"released,omitempty"`
	// Keeper is the process that holds the anchors.
	Keeper *member.ID `json:"keeper,omitempty"`
	// Adopted are devices that stay with a member by on_start.
	Adopted []adoptedDevice `json:"adopted,omitempty"`
}

// seen is what a process was when it was first seen. Some programs write over
// their arguments and their environment, and upgrades replace executables.
type firstSight struct {
	member.ID
	Args         []string `json:"args"`
	SlotVariable string   `json:"slot_variable,omitempty"`
	// Exe is the path at which the host had the executable, which is File; "" where no rule asked.
	Exe  string        `json:"exe,omitempty"`
	File member.FileID `json:"file,omitzero"`
}

// openedSockets are the registered sockets of a member, by cookie.
type openedSockets struct {
	member.ID
	Cookies []uint64 `json:"cookies"`
}

type claim struct {
	member.ID
	Slot   int    `json:"slot"`
	Source string `json:"source"` // run or register
}

// loadState reads the state of a service. known says whether there was one.
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

// startedAt converts a start time, in USER_HZ, which is 100 everywhere.
func startedAt(startTime uint64, boot time.Time) time.Time {
	return boot.Add(time.Duration(startTime) * 10 * time.Millisecond)
}
