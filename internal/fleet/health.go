// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"fmt"
	"slices"
	"time"

	"sockeye/internal/api"
	"sockeye/internal/fleet/lead"
)

// Health reports whether routers should send packets to this host to the addresses of the services. Without a fleet, it does while its
// services can serve.
func (d *Domain) Health() api.Health {
	p, err := d.current()
	if d.broken.Load() {
		return api.Health{Reason: "the fleet does not run: its last change runs or has failed"}
	}
	if err != nil {
		if err := d.services.CanServe(everyService); err != nil {
			return api.Health{Reason: err.Error()}
		}
		return api.Health{Healthy: true}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	ok, reason := p.health()
	return api.Health{Healthy: ok, Reason: reason}
}

// health reports whether routers should send packets to this host, or why not. A host that drains does so until its last
// bucket has moved, and a host that gets no answer from etcd serves what it has. The caller holds mu.
func (p *participation) health() (ok bool, reason string) {
	switch {
	case p.missing != nil:
		return false, "an interface of the fleet is missing"
	case p.absent != nil:
		return false, p.absent.Error()
	case p.self() == "":
		return false, "another host has the name " + p.settings.host
	case p.misnamed() != "":
		return false, p.misnamed()
	case p.healthy != nil:
		return false, p.healthy.Error()
	case p.table == nil:
		return false, "this host has no table of the fleet yet"
	case p.state.Foreign:
		return false, "the table of this host is one of another fleet"
	case p.owns() == 0:
		return false, "this host has no devices: " + p.whyNoDevices()
	}
	return true, ""
}

// whyNoDevices returns why this host has no devices. The caller holds mu.
func (p *participation) whyNoDevices() string {
	if p.state.Snapshot != nil {
		if at := slices.IndexFunc(p.state.Hosts, func(h lead.Host) bool { return h.Name == p.settings.host }); at >= 0 {
			switch state := p.state.Hosts[at].State; {
			case state == lead.Drain || state == lead.Removed || state == lead.Maint:
				return "its state is " + string(state)
			case !p.state.Connected:
				return "etcd does not answer"
			case lead.Living(p.state.Hosts) < p.settings.MinHosts:
				return "fewer hosts than min_hosts are alive"
			case p.settings.Etcd != nil:
				return fmt.Sprintf("it gets its share when it has been alive for settle (%v)", time.Duration(p.settings.Settle)*time.Microsecond)
			}
		} else if p.settings.Etcd == nil {
			return fmt.Sprintf("%s has no host %s", p.settings.File, p.settings.host)
		}
	}
	return "the others serve all of them"
}
