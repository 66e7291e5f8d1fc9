// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"sockeye/internal/api"
	"sockeye/internal/fault"
	"sockeye/internal/scope"
	"sockeye/internal/statedir"
)

func (t *tuner) applyLive(all *api.TuneLive) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.tune == nil {
		return nil
	}
	saved, err := t.loadLive()
	if err != nil {
		return err
	}
	journal, err := t.openJournal()
	if err != nil {
		return err
	}
	report, err := Apply(t.tune, t.scope.Path, nil, journal.record)
	journal.Close()
	saved.Merge(report.Saved)
	if err := fault.Join(err, t.saveLive(saved)); err != nil {
		return err
	}
	for rule, n := range report.ByRule {
		all.Rules[rule] += n
	}
	all.Options += report.Options
	all.Already += report.AlreadyTuned
	all.NoRule += report.NoRule
	all.Failures = append(all.Failures, report.Failures...)
	all.Problems = append(all.Problems, report.Problems...)
	return nil
}

// Revert reverts the changes of apply --live.
func (d *Domain) Revert(which api.TuneRevert) (*api.TuneLive, error) {
	for _, name := range which.Rules {
		if _, _, err := d.findRule(name); err != nil {
			return nil, err
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	all := newTuneLive()
	for _, t := range d.tuners {
		if err := t.revertLive(which.Rules, all); err != nil {
			return nil, tuneError(t.name, err)
		}
	}
	return all, nil
}

func (t *tuner) revertLive(rules []string, all *api.TuneLive) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	saved, err := t.loadLive()
	if err != nil || t.tune == nil || len(saved) == 0 {
		return err
	}
	wanted, others := make(Saved), make(Saved)
	for cookie, c := range saved {
		if len(rules) == 0 || slices.Contains(rules, c.Rule) {
			wanted[cookie] = c
		} else {
			others[cookie] = c
		}
	}
	reverted, err := Revert(t.tune, t.scope.Path, wanted)
	if err != nil {
		if len(reverted.Remaining) == 0 && reverted.Connections == 0 {
			return err // nothing was changed
		}
		others.Merge(reverted.Remaining)
		return fault.Join(err, t.saveLive(others))
	}
	all.Reverted += reverted.Connections
	all.Options += reverted.Options
	all.Gone += reverted.Gone
	all.NotReverted = append(all.NotReverted, reverted.Left...)
	all.Problems = append(all.Problems, reverted.Problems...)
	others.Merge(reverted.Remaining)
	return t.saveLive(others)
}

func newTuneLive() *api.TuneLive {
	return &api.TuneLive{Rules: make(map[string]int), Failures: []api.TuneLiveFailure{}, NotReverted: []api.TuneNotReverted{}, Problems: []string{}}
}

// liveState is the state file for revert, which outlives the agent. A reboot ends all connections.
type liveState struct {
	BootID string `json:"boot_id"`
	Saved  Saved  `json:"saved"`
}

// liveEntry is a line of the journal: a connection that apply --live changes next. The agent may be killed at any instant.
type liveEntry struct {
	BootID string `json:"boot_id"`
	Cookie uint64 `json:"cookie"`
	SavedConnection
}

// liveJournal is the open journal.
type liveJournal struct {
	*os.File
	boot string
}

func (t *tuner) openJournal() (liveJournal, error) {
	f, err := os.OpenFile(t.journalPath(), os.O_WRONLY|os.O_CREATE|os.O_APPEND|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return liveJournal{}, fmt.Errorf("record previous values: %w", err)
	}
	return liveJournal{f, statedir.BootID()}, nil
}

// record records a connection that is changed next. The line begins with a line feed: the one before may be incomplete.
func (j liveJournal) record(cookie uint64, c SavedConnection) error {
	data, err := json.Marshal(liveEntry{j.boot, cookie, c})
	if err == nil {
		_, err = j.Write(append([]byte{'\n'}, data...))
	}
	if err != nil {
		return fmt.Errorf("record previous values: %w", err)
	}
	return nil
}

func (t *tuner) journalPath() string { return strings.TrimSuffix(t.livePath(), ".json") + ".journal" }

func (t *tuner) livePath() string {
	return filepath.Join(t.host.StateDir, "."+filepath.Base(t.host.Root.Tuning(scope.PinName(t.name)))+".live.json")
}

// loadLive returns the state file with what an interrupted apply --live has left in the journal.
func (t *tuner) loadLive() (Saved, error) {
	saved, err := t.loadSaved()
	if err != nil {
		return nil, err
	}
	journal, err := os.ReadFile(t.journalPath())
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("read previous values: %w", err)
	}
	boot := statedir.BootID()
	for line := range bytes.Lines(journal) {
		var e liveEntry
		// A line is incomplete if the file system was full: its connection was not changed.
		if json.Unmarshal(line, &e) == nil && e.BootID == boot {
			saved.Merge(Saved{e.Cookie: e.SavedConnection})
		}
	}
	return saved, nil
}

func (t *tuner) loadSaved() (Saved, error) {
	data, err := os.ReadFile(t.livePath())
	if errors.Is(err, fs.ErrNotExist) {
		return make(Saved), nil
	}
	if err != nil {
		return nil, fmt.Errorf("read previous values: %w", err)
	}
	var stored liveState
	if err := json.Unmarshal(data, &stored); err != nil {
		return nil, fault.WithHint(fmt.Errorf("read previous values, %s: %w", t.livePath(), err), "remove the file; the values that were applied live then remain")
	}
	if stored.BootID != statedir.BootID() || stored.Saved == nil {
		return make(Saved), nil
	}
	return stored.Saved, nil
}

// saveLive writes the state file, and then removes the journal, whose entries it contains.
func (t *tuner) saveLive(saved Saved) error {
	if len(saved) > 0 {
		data, err := json.Marshal(liveState{statedir.BootID(), saved})
		if err != nil {
			return err
		}
		if err := statedir.Write(t.livePath(), append(data, '\n')); err != nil {
			return err
		}
	} else if err := os.Remove(t.livePath()); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove previous values: %w", err)
	}
	if err := os.Remove(t.journalPath()); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove previous values: %w", err)
	}
	return nil
}
