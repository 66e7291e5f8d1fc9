// SPDX-License-Identifier: Apache-2.0

package core

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"sockeye/internal/config"
	"sockeye/internal/fault"
	"sockeye/internal/netns"
)

// OpenNetns opens the network namespace of the service. The caller closes s.Netns.
func (s *Service) OpenNetns() error {
	file, err := FindNetns(s.Config)
	if err != nil {
		return err
	}
	var stat unix.Stat_t
	if err := unix.Fstat(int(file.Fd()), &stat); err != nil {
		file.Close()
		return fmt.Errorf("open network namespace %s: %w", file.Name(), err)
	}
	s.Netns, s.NetnsInode = file, stat.Ino
	return nil
}

// FindNetns opens the network namespace that the configuration of a service names, or that of the agent.
func FindNetns(c config.Service) (*os.File, error) {
	if c.Netns == "" {
		return netns.Current()
	}
	file, err := netns.Open(c.Netns)
	if errors.Is(err, netns.ErrNotNamespace) {
		return nil, fault.Usage(err, "correct netns, as in /run/netns/NAME")
	}
	if err != nil {
		return nil, fault.Unreadable(err, "create it, or correct netns")
	}
	return file, nil
}
