// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"sockeye/internal/api"
	"sockeye/internal/config"
	"sockeye/internal/domain"
	"sockeye/internal/events"
	"sockeye/internal/fault"
	"sockeye/internal/fleet/lead"
	"sockeye/internal/fleet/store"
	"sockeye/internal/fleet/table"
	"sockeye/internal/peer"
)

// Routes adds GET /v1/fleet, GET /v1/fleet/where, GET /v1/health, and POST /v1/fleet/host.
func (d *Domain) Routes(r *domain.Router) {
	r.Get("/v1/fleet", func(*http.Request) (any, error) {
		p, err := d.current()
		if err != nil {
			return nil, err
		}
		return p.status()
	})
	r.Get("/v1/fleet/where", func(r *http.Request) (any, error) {
		addresses, err := api.ParseAddresses(r.URL.Query()["address"])
		if err != nil {
			return nil, err
		}
		p, err := d.current()
		if err != nil {
			return nil, err
		}
		caller := peer.From(r)
		return p.where(r.Context(), addresses, caller != nil && caller.Cred.Uid == 0)
	})
	r.Get("/v1/health", func(*http.Request) (any, error) { return d.Health(), nil })
	r.Post("/v1/fleet/host", func(r *http.Request) (any, error) {
		var change api.FleetHostChange
		if err := domain.Decode(r, &change); err != nil {
			return nil, err
		}
		p, err := d.current()
		if err != nil {
			return nil, err
		}
		return p.setHost(r.Context(), change)
	})
}

func everyService(*config.Service) bool { return true }

// setHost changes the state or the weight of a host.
func (p *participation) setHost(ctx context.Context, change api.FleetHostChange) (*api.Plan, error) {
	p.mu.Lock()
	snapshot, known := p.state.Snapshot, p.seen[change.Host]
	p.mu.Unlock()
	if snapshot == nil || !snapshot.Connected {
		return nil, fault.WithHint(errors.New("the store of the fleet does not answer"), "sockeye fleet shows the reason; the table in force stays")
	}
	names := make([]string, len(snapshot.Hosts))
	for i := range snapshot.Hosts {
		names[i] = snapshot.Hosts[i].Name
	}
	at := slices.Index(names, change.Host)
	if at < 0 && known && lead.State(change.State) == lead.Removed {
		// The host has died, and its devices have moved: it must not return.
		with := *snapshot
		with.Hosts = append(slices.Clone(snapshot.Hosts), lead.Host{Host: table.Host{Name: change.Host}, State: lead.Ready})
		snapshot, at = &with, len(names)
	}
	if at < 0 {
		hint := "sockeye fleet lists the hosts"
		if known {
			hint = "host " + change.Host + " is dead, and its devices have moved: only the state removed can be set"
		} else if near := config.Nearest(change.Host, names); near != "" {
			hint = "did you mean " + near + "?"
		}
		return nil, fault.Usage(fmt.Errorf("the fleet has no host %q", change.Host), hint)
	}
	h := &snapshot.Hosts[at]
	if change.Weight != nil && (*change.Weight < 0 || *change.Weight > table.MostWeight) {
		return nil, fault.Usage(fmt.Errorf("weight %d is out of range", *change.Weight), fmt.Sprintf("1 to %d, or 0 for the weight in the policy of the host", table.MostWeight))
	}
	plan := &api.Plan{Changes: []api.Change{}}
	done := ""
	set := func(present store.Setting) (store.Setting, error) {
		setting := present
		if change.State != "" {
			setting.State = lead.State(change.State)
		}
		if change.Weight != nil {
			setting.Weight = uint32(*change.Weight)
		}
		if setting.State == lead.Ready {
			setting.State = "" // the setting of a host without one
		}
		if err := setting.Check(); err != nil {
			return setting, fault.Usage(err, "ready, drain, maint or removed")
		}
		done, plan.Changes = "", []api.Change{}
		if setting == present {
			return setting, nil
		}
		done = describeChange(h, present, setting)
		plan.Changes = []api.Change{{Action: "change", What: "host " + h.Name + ": " + done, Effect: p.effectOf(snapshot, h.Name, setting, change.DryRun)}}
		return setting, lastHost(snapshot.Hosts, at, setting)
	}
	present := store.Setting{State: h.State, Weight: h.SetWeight}
	if present.State == lead.Ready {
		present.State = ""
	}
	if _, err := set(present); err != nil {
		return nil, err
	}
	if change.DryRun {
		return plan, nil
	}
	// The snapshot may be older than the last change.
	err := p.store.ChangeSetting(ctx, h.Name, set)
	switch {
	case errors.Is(err, store.ErrReadOnly) && len(plan.Changes) > 0:
		return nil, fault.Conflict(err, "edit "+p.settings.File)
	case err != nil && !errors.Is(err, store.ErrReadOnly):
		return nil, err
	}
	if done != "" {
		p.log.Info("host of the fleet set", events.HostRequested, "host", h.Name, "change", done)
	}
	return plan, nil
}

// lastHost returns an error if a change would leave no host for the devices.
func lastHost(hosts []lead.Host, at int, setting store.Setting) error {
	if setting.State == "" || setting.State == lead.Maint {
		return nil
	}
	for i := range hosts {
		if h := &hosts[i]; i != at && h.Alive && h.State == lead.Ready {
			return nil
		}
	}
	return fault.Conflict(fmt.Errorf("host %s is the last one that can serve devices", hosts[at].Name), "make another host ready first")
}

// describeChange returns the change of a host's setting as text.
func describeChange(h *lead.Host, from, to store.Setting) string {
	var parts []string
	if from.State != to.State {
		parts = append(parts, fmt.Sprintf("%s -> %s", cmp.Or(from.State, lead.Ready), cmp.Or(to.State, lead.Ready)))
	}
	if from.Weight != to.Weight {
		parts = append(parts, fmt.Sprintf("weight %s -> %s", weightText(h, from.Weight), weightText(h, to.Weight)))
	}
	return strings.Join(parts, ", ")
}

// weightText returns the weight that a setting gives a host as text. 0 stands for the host's own weight.
func weightText(h *lead.Host, set uint32) string {
	if set == 0 {
		return fmt.Sprintf("%d (its own)", cmp.Or(h.OwnWeight, h.Weight))
	}
	return strconv.FormatUint(uint64(set), 10)
}

// effectOf tells how many devices move, or would move, by a setting of a host.
func (p *participation) effectOf(s *store.Snapshot, host string, to store.Setting, dryRun bool) string {
	return effectOf(s, p.settings, dryRun, host, func(h *lead.Host) {
		h.State = lead.Ready
		if to.State != "" {
			h.State = to.State
		}
		switch {
		case to.Weight != 0:
			h.Weight = to.Weight
		case h.SetWeight != 0:
			h.Weight = h.OwnWeight
		}
	})
}

// weightEffect tells how many devices move by another weight of this host in the policy.
func (p *participation) weightEffect(to *settings) string {
	if to.Etcd == nil {
		return "no device moves: the weights are those of " + to.File
	}
	p.mu.Lock()
	s := p.state.Snapshot
	p.mu.Unlock()
	at := -1
	if s != nil && s.Connected {
		at = slices.IndexFunc(s.Hosts, func(h lead.Host) bool { return h.Name == to.host && h.Alive })
	}
	if at < 0 {
		return "how many devices move is not known: this host is not registered in the store of the fleet now"
	}
	if set := s.Hosts[at].SetWeight; set != 0 {
		return fmt.Sprintf("no device moves: sockeye host set has given this host the weight %d, which stays", set)
	}
	return effectOf(s, to, false, to.host, func(h *lead.Host) { h.Weight = uint32(to.Weight) })
}

// effectOf tells how many devices move, or would move, by a change of a host.
func effectOf(s *store.Snapshot, settings *settings, would bool, host string, change func(*lead.Host)) string {
	verbs := [2]string{"moves", "move"}
	if would {
		verbs = [2]string{"would move", "would move"}
	}
	if s.Table == nil {
		return "no device " + verbs[0] + ": the fleet has no table yet"
	}
	hosts := slices.Clone(s.Hosts)
	for i := range hosts {
		if hosts[i].Name == host {
			change(&hosts[i])
		}
	}
	if living := lead.Living(hosts); living < settings.MinHosts {
		return fmt.Sprintf("no device %s while %d of at least %d hosts (min_hosts) are alive", verbs[0], living, settings.MinHosts)
	}
	share := float64(lead.Moved(s.Table, s.Hosts, hosts, lead.OnDeath(settings.OnHostDeath))) / table.Buckets
	return fmt.Sprintf("%.1f %% of the devices %s", 100*share, verbs[1])
}
