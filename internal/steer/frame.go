// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"cmp"
	"slices"

	"sockeye/internal/api"
)

const (
	// mostStuck is the number of connections without progress in a frame.
	mostStuck = 100
	// mostWaitingLive is the number of processes of a frame that wait to be members of a service.
	mostWaitingLive = 32
)

// Frame adds the services to a frame. The caller makes one frame at a time, because a frame has the rates since the one
// before.
func (d *Domain) Frame(frame *api.Frame) error {
	services, err := d.selectServices("")
	if err != nil {
		return err
	}
	for _, s := range services {
		one, stuck, err := s.frame(frame.Seconds)
		if err != nil {
			one.Problem = err.Error()
		}
		frame.Services = append(frame.Services, one)
		frame.Stuck = append(frame.Stuck, stuck...)
	}
	slices.SortStableFunc(frame.Stuck, func(a, b api.LiveSocket) int { return cmp.Compare(b.Since, a.Since) })
	frame.Stuck = frame.Stuck[:min(len(frame.Stuck), mostStuck)]
	return nil
}

// frame returns the service of a frame, with rates since the frame before, seconds ago, and updates the learned devices and the drops of members.
func (s *service) frame(seconds float64) (one api.LiveService, stuck []api.LiveSocket, err error) {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	if one, stuck, err = s.traffic.Frame(seconds); err != nil {
		return one, nil, err
	}
	one.Split = s.checks.SplitDevices()
	one.Waiting, one.NotAdmitted = s.waitingStatus(), s.notAdmitted.List()
	one.Waiting = one.Waiting[:min(len(one.Waiting), mostWaitingLive)]
	return one, stuck, s.traffic.Learn()
}
