// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"net/http"
	"slices"

	"sockeye/internal/api"
	"sockeye/internal/domain"
	"sockeye/internal/events"
	"sockeye/internal/fault"
)

// mostWhyEvents is the number of events of an api.Why.
const mostWhyEvents = 10

// why answers GET /v1/why: the state of a device from the services, what the policy file would change, and the last events.
func (a *Agent) why(r *http.Request) (any, error) {
	device := r.URL.Query().Get("address")
	if device == "" {
		return nil, fault.Usage(errors.New("no address given"), "as in 192.0.2.1")
	}
	list := []api.Why{}
	for _, d := range domain.With[domain.Explainer](a.domains) {
		part, err := d.Why(r.Context(), r.URL.Query().Get("service"), device)
		if err != nil {
			return nil, err
		}
		a.planWhy(d, part)
		list = append(list, part...)
	}
	var selections []func(*api.Event) bool
	for i := range list {
		selections = append(selections, concerns(&list[i]))
	}
	last, err := a.lastEvents(r.Context(), mostWhyEvents, selections...)
	if err != nil {
		// The rest of the answer is useful, for example on a full disk.
		a.log.Warn("events not read", "error", err)
		return list, nil
	}
	for i := range list {
		list[i].Events = append(list[i].Events, last[i]...)
	}
	return list, nil
}

// planWhy sets what the policy file would change in the entries of a domain.
func (a *Agent) planWhy(d domain.Explainer, list []api.Why) {
	a.explaining.Lock()
	defer a.explaining.Unlock()
	if problem, _ := a.policyProblem(); problem == "" {
		// The device maps need not be read again.
		for i := range list {
			w := &list[i]
			slot := w.Slot
			if w.Target != nil {
				slot = *w.Target
			}
			w.Plan.Slot, w.Plan.Device = &slot, w.Device
		}
		return
	}
	file, err := readPolicy(a.options.Policy)
	for i := range list {
		if err != nil {
			list[i].Plan.Problem = "the policy file is invalid: " + firstLine(err)
			continue
		}
		list[i].Plan = d.PlanFor(file.policy, list[i].Service, list[i].Address)
	}
}

// concerns returns the selection of the events that explain the state of a device: those of the device, those of its slot
// that are not of another device, and those of the whole service that can move devices.
func concerns(w *api.Why) func(*api.Event) bool {
	address := w.Address.String()
	general := []string{events.SlotChanged.Value.String(), events.MovesBegun.Value.String(), events.MovesEnded.Value.String(), events.PolicyApplied.Value.String()}
	return func(e *api.Event) bool {
		switch {
		case e.Service != w.Service:
			return false
		case e.Device != "" || e.Address != "":
			return w.Device != "" && e.Device == w.Device || e.Device == address || e.Address == address
		case e.Slot != nil:
			return *e.Slot == w.Slot && w.Effect != "elsewhere" && w.Effect != "dropped" // otherwise the device has no slot here
		}
		return slices.Contains(general, e.Kind)
	}
}
