// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"sockeye/internal/api"
	"sockeye/internal/bpf"
	"sockeye/internal/fault"
	"sockeye/internal/scope"
)

// resetPins removes the pins under a pin directory, the attached programs and the keepers of all agents. Afterwards the
// kernel selects members' sockets by its own hash. removed is false if there was nothing to remove, and socket reports whether the socket
// of a killed agent was removed.
func resetPins(pins, runDir string) (removed, socket bool, err error) {
	if pins, err = filepath.Abs(pins); err != nil {
		return false, false, err
	}
	if removed, err = isPinDirectory(pins); err != nil {
		return false, false, err
	}
	if !removed {
		socket, err = api.RemoveDeadSocket(runDir)
		return false, socket, err
	}
	var scopes []scope.Scope
	var left error
	err = bpf.RemoveRoot(pins, func() error {
		for _, d := range domains() {
			if d.retire != nil {
				if err := d.retire(pins); err != nil {
					return err
				}
			}
		}
		scopes = scope.Scopes(pins)
		socket, left = api.RemoveDeadSocket(runDir) // no agent with these pins starts while their directory is locked
		return nil
	})
	if err == nil {
		err = fault.Join(scope.RemoveCreated(scopes), left)
	}
	if errors.Is(err, bpf.ErrLocked) {
		err = fault.Conflict(err, "stop the agent first")
	}
	return err == nil, socket, err
}

// isPinDirectory reports whether a directory is the pin directory of an agent.
func isPinDirectory(pins string) (bool, error) {
	entries, err := os.ReadDir(pins)
	if errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("read pin directory: %w", err)
	}
	foreign := func(e os.DirEntry) bool {
		return e.Name() != "schema" && !slices.ContainsFunc(domains(),
			func(d offline) bool { return d.pins != "" && strings.HasPrefix(e.Name(), d.pins) })
	}
	if !bpf.IsBPFFS(pins) || slices.ContainsFunc(entries, foreign) {
		return false, fault.Usage(fmt.Errorf("%s is not the pin directory of an agent", pins), "name the agent's directory with --pins")
	}
	return true, nil
}
