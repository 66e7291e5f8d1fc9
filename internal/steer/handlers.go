// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"errors"
	"fmt"
	"net/http"
	"strconv"

	"sockeye/internal/api"
	"sockeye/internal/config"
	"sockeye/internal/domain"
	"sockeye/internal/fault"
	"sockeye/internal/peer"
)

// Routes adds the routes for services, slots and devices.
func (d *Domain) Routes(r *domain.Router) {
	r.Get("/v1/slots", func(r *http.Request) (any, error) {
		return collectFrom(d, r, (*service).slots)
	})
	r.Get("/v1/devices", func(r *http.Request) (any, error) {
		return collectFrom(d, r, (*service).devices)
	})
	r.Get("/v1/missing", func(r *http.Request) (any, error) {
		limit, err := missingLimit(r.URL.Query().Get("limit"))
		if err != nil {
			return nil, err
		}
		return collectFrom(d, r, func(s *service) ([]api.Missing, error) { return s.traffic.Missing(limit) })
	})
	r.Get("/v1/templates", func(r *http.Request) (any, error) {
		return collectFrom(d, r, func(s *service) ([]api.TemplateStatus, error) {
			return s.rooms.TemplatesOf(r.URL.Query().Get("device"))
		})
	})
	r.Get("/v1/where", func(r *http.Request) (any, error) {
		addresses, err := api.ParseAddresses(r.URL.Query()["address"])
		if err != nil {
			return nil, err
		}
		return collectFrom(d, r, func(s *service) ([]api.WhereStatus, error) { return s.where(addresses), nil })
	})
	r.Post("/v1/register", func(r *http.Request) (any, error) {
		m, s, err := d.decodeMembership(r)
		if err != nil {
			return nil, err
		}
		if m.PID == 0 {
			return nil, fault.Usage(errors.New("no process given"), "name one with --pid")
		}
		slot, err := s.addClaim(m.PID, m.Slot, "register", nil)
		return api.Membership{Service: s.Name, Slot: &slot, PID: m.PID}, err
	})
	r.Post("/v1/unregister", func(r *http.Request) (any, error) {
		m, s, err := d.decodeMembership(r)
		if err != nil {
			return nil, err
		}
		if m.Slot == nil {
			return nil, fault.Usage(errors.New("no slot given"), "name one with --slot")
		}
		return api.Membership{Service: s.Name, Slot: m.Slot}, s.unregister(*m.Slot)
	})
	d.changeRoutes(r)
	r.PostOfAny("/v1/run", func(r *http.Request) (any, error) {
		// The request adds the calling process and no other.
		k := peer.From(r)
		if k == nil {
			return nil, &fault.Error{Err: errors.New("the caller is not known"), Code: fault.CodeNotPermitted}
		}
		m, s, err := d.decodeMembership(r)
		if err != nil {
			return nil, err
		}
		slot, err := s.addClaim(k.ID.PID, m.Slot, "run", k)
		return api.ClaimedSlot{Membership: api.Membership{Service: s.Name, Slot: &slot, PID: k.ID.PID}, Listeners: s.memberListeners(), User: s.soleUser()}, err
	})
}

// soleUser returns the user of the members if the policy names exactly one, or "".
func (s *service) soleUser() string {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	if len(s.Config.Users) != 1 {
		return ""
	}
	return s.Config.Users[0]
}

// memberListeners returns the addresses and ports that members listen on.
func (s *service) memberListeners() []api.MemberListener {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	var list []api.MemberListener
	for _, l := range s.Config.Listeners {
		m := api.MemberListener{Protocol: string(l.Protocol), Address: l.Address, V6Only: l.V6Only, First: l.Address.Port(), Last: l.Address.Port()}
		if l.MemberPorts != (config.PortRange{}) {
			m.First, m.Last = l.MemberPorts.First, l.MemberPorts.Last
		}
		list = append(list, m)
	}
	return list
}

// decodeMembership decodes the body of a request and finds the service.
func (d *Domain) decodeMembership(r *http.Request) (m api.Membership, s *service, err error) {
	if err := domain.Decode(r, &m); err != nil {
		return m, nil, err
	}
	s, err = d.findService(m.Service)
	return m, s, err
}

// collectFrom concatenates the results of ask for the service that a request names, or for all services.
func collectFrom[T any](d *Domain, r *http.Request, ask func(*service) ([]T, error)) ([]T, error) {
	services, err := d.selectServices(r.URL.Query().Get("service"))
	if err != nil {
		return nil, err
	}
	all := []T{}
	for _, s := range services {
		part, err := ask(s)
		if err != nil && r.URL.Query().Get("service") == "" && s.isRemoved() {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("service %s: %w", s.Name, err)
		}
		all = append(all, part...)
	}
	return all, nil
}

// missingLimit parses the number of devices that an answer lists.
func missingLimit(text string) (int, error) {
	if text == "" {
		return api.DefaultMissing, nil
	}
	limit, err := strconv.Atoi(text)
	if err != nil || limit < 1 || limit > api.MostMissing {
		return 0, fault.Usage(fmt.Errorf("limit is %q", text), fmt.Sprintf("1 to %d", api.MostMissing))
	}
	return limit, nil
}
