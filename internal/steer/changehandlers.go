// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"time"

	"sockeye/internal/api"
	"sockeye/internal/domain"
	"sockeye/internal/fault"
	"sockeye/internal/placement"
	"sockeye/internal/steer/core"
	"sockeye/internal/steer/stored"
)

// changeRoutes adds the routes that move devices between slots.
func (d *Domain) changeRoutes(r *domain.Router) {
	r.Get("/v1/moves", func(r *http.Request) (any, error) {
		return collectFrom(d, r, func(s *service) ([]api.MovesStatus, error) { return []api.MovesStatus{s.moves.Status()}, nil })
	})
	r.Post("/v1/moves", func(r *http.Request) (any, error) {
		var m api.MovesRequest
		if err := domain.Decode(r, &m); err != nil {
			return nil, err
		}
		s, err := d.findService(m.Service)
		if err != nil {
			return nil, err
		}
		if err := s.moves.Stop(m.Stop); err != nil {
			return nil, err
		}
		return s.moves.Status(), nil
	})
	r.Post("/v1/rebalance", func(r *http.Request) (any, error) {
		var request api.RebalanceRequest
		if err := domain.Decode(r, &request); err != nil {
			return nil, err
		}
		return d.rebalance(r.Context(), &request)
	})
	r.Post("/v1/slot", func(r *http.Request) (any, error) {
		var c api.SlotChange
		if err := domain.Decode(r, &c); err != nil {
			return nil, err
		}
		return d.changeSlots(&c)
	})
	r.Post("/v1/move", func(r *http.Request) (any, error) {
		var m api.DeviceMove
		if err := domain.Decode(r, &m); err != nil {
			return nil, err
		}
		return d.moveDevice(&m)
	})
}

// maxMeasure is the maximum time of a measurement in seconds: clients wait a minute for an answer.
const maxMeasure = 45

func (d *Domain) rebalance(ctx context.Context, r *api.RebalanceRequest) ([]*api.Rebalance, error) {
	if !(r.Seconds >= 1 && r.Seconds <= maxMeasure) {
		return nil, fault.Usage(fmt.Errorf("a measurement of %v s", r.Seconds), fmt.Sprintf("1 to %d seconds", maxMeasure))
	}
	s, err := d.findService(r.Service)
	if err != nil {
		return nil, err
	}
	result, err := s.moves.Rebalance(ctx, time.Duration(r.Seconds*float64(time.Second)), r.Apply)
	if err != nil {
		return nil, core.OfService(s.Name, err)
	}
	return []*api.Rebalance{result}, nil
}

func (d *Domain) changeSlots(c *api.SlotChange) (*api.Plan, error) {
	if c.Slot == nil {
		return nil, fault.Usage(errors.New("no slot given"), "as in sockeye slot set 2 drain")
	}
	state, err := stored.ParseState(c.State)
	if err != nil {
		return nil, err
	}
	to := stored.Setting{State: state, Weight: -1}
	if c.Weight != nil {
		if to.Weight = *c.Weight; to.Weight < 0 || to.Weight > placement.MaxWeight {
			return nil, fault.Usage(fmt.Errorf("weight %d is out of range", to.Weight), fmt.Sprintf("0 to %d; the default is %d", placement.MaxWeight, placement.DefaultWeight))
		}
	}
	if state == "" && c.Weight == nil {
		return nil, fault.Usage(errors.New("no state and no weight given"), "as in sockeye slot set 2 drain, or sockeye slot set 2 --weight 50")
	}
	return d.inGroup(c.Service, c.DryRun, func(s *service, dryRun bool) (string, string, error) {
		changes, effect, err := s.moves.ChangeSlot(*c.Slot, to, dryRun)
		if err != nil || len(changes) == 0 {
			return "", "", err
		}
		return fmt.Sprintf("slot %d: %s", *c.Slot, strings.Join(changes, ", ")), effect, nil
	})
}

func (d *Domain) moveDevice(m *api.DeviceMove) (*api.Plan, error) {
	slot := -1
	if m.Slot != nil {
		if slot = *m.Slot; slot < 0 {
			return nil, fault.Usage(fmt.Errorf("slot %d is out of range", slot), "slots are numbered from 0")
		}
	}
	var until *time.Time
	if m.For < 0 || m.For > 0 && m.Slot == nil {
		return nil, fault.Usage(errors.New("--for needs a slot and a positive duration"), "as in --for 2h")
	}
	if m.For > 0 {
		end := time.Now().Add(time.Duration(m.For) * time.Second).Truncate(time.Second)
		until = &end
	}
	if m.All && (m.Device != "" || m.Slot != nil) {
		return nil, fault.Usage(errors.New("all requires home"), "as in sockeye move --all home")
	}
	return d.inGroup(m.Service, m.DryRun, func(s *service, dryRun bool) (string, string, error) {
		if m.All {
			return s.moves.RemovePins(dryRun)
		}
		return s.moves.MovePin(m.Device, slot, until, dryRun)
	})
}

// inGroup changes a service and the services that share slots with it: first as a dry run of all, so that an error
// changes none.
func (d *Domain) inGroup(name string, dryRun bool, change func(s *service, dryRun bool) (what, effect string, err error)) (*api.Plan, error) {
	d.changing.Lock()
	defer d.changing.Unlock()
	group, err := d.slotGroup(name)
	if err != nil {
		return nil, err
	}
	plan := &api.Plan{Changes: []api.Change{}}
	for _, dry := range []bool{true, false} {
		if !dry && dryRun {
			break
		}
		plan.Changes = plan.Changes[:0]
		for _, s := range group {
			what, effect, err := change(s, dry)
			if err != nil {
				return nil, core.OfService(s.Name, err)
			}
			if what != "" {
				plan.Changes = append(plan.Changes, api.Change{Service: s.Name, Action: "change", What: what, Effect: effect})
			}
		}
	}
	return plan, nil
}

// slotGroup returns a service, and the services that share slots with it.
func (d *Domain) slotGroup(name string) ([]*service, error) {
	s, err := d.findService(name)
	if err != nil {
		return nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	leader, group := s.slotsOf(), []*service{s}
	for _, name := range slices.Sorted(maps.Keys(d.services)) {
		if o := d.services[name]; o != s && o.slotsOf() == leader {
			group = append(group, o)
		}
	}
	return group, nil
}

// slotsOf returns the name of the service whose slots the service has: its own, or that of slots_as.
func (s *service) slotsOf() string {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	return cmp.Or(s.Config.SlotsAs, s.Name)
}
