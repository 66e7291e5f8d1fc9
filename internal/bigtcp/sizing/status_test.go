// SPDX-License-Identifier: Apache-2.0

package sizing

import (
	"slices"

	"sockeye/internal/bigtcp/netif"
)

// The states of applied sizes.
const (
	StatusOK         = "ok"
	StatusChanged    = "changed"    // changed externally
	StatusGone       = "gone"       // the interface has vanished
	StatusUnfinished = "unfinished" // who was setting it was killed
)

// Status reports the present state of applied sizes.
type Status struct {
	Record
	State string      `json:"state"`
	Now   netif.Sizes `json:"now,omitzero"` // none if the interface is gone
}

// Check compares the records of a namespace with its interfaces by their present names.
func (s *Store) Check(n *netif.Namespace) ([]Status, error) {
	records, err := s.Records()
	if err != nil {
		return nil, err
	}
	records = slices.DeleteFunc(records, func(r Record) bool { return r.NetnsID != n.ID() })
	if len(records) == 0 {
		return nil, nil
	}
	interfaces, err := n.Interfaces()
	if err != nil {
		return nil, err
	}
	list := make([]Status, len(records))
	for i, r := range records {
		list[i] = r.status(byIndex(interfaces, r.Index))
	}
	return list, nil
}

func (r *Record) status(now *netif.Interface) Status {
	if now == nil {
		return Status{Record: *r, State: StatusGone}
	}
	s := Status{Record: *r, State: StatusChanged, Now: now.Sizes}
	s.Interface = now.Name
	switch {
	case now.Sizes == r.Applied:
		s.State = StatusOK
	case r.From != (netif.Sizes{}) && r.isOurs(now.Sizes):
		s.State = StatusUnfinished
	}
	return s
}
