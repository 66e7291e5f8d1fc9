// SPDX-License-Identifier: Apache-2.0

package core

import (
	"fmt"
	"os"
	"path/filepath"

	"sockeye/internal/config"
	"sockeye/internal/fault"
	"sockeye/internal/member"
	"sockeye/internal/placement"
)

// ResolveMembers looks up the users that a service and its rules name.
func ResolveMembers(c config.Service) ([]member.Rule, []uint32, error) {
	rules, err := member.Rules(c.Members)
	var users []uint32
	if err == nil {
		users, err = member.Users(c.Users, rules)
	}
	if err != nil {
		return nil, nil, fault.Usage(err, "create it, or correct user")
	}
	return rules, users, nil
}

// CheckExists returns an error if the cgroup, below the mount, or the network namespace of a service does not exist.
func CheckExists(mount string, c config.Service) error {
	if _, err := os.Stat(filepath.Join(mount, c.Cgroup)); err != nil {
		return fault.Unreadable(fmt.Errorf("find cgroup: %w", err), "create it, or correct cgroup")
	}
	file, err := FindNetns(c)
	if err != nil {
		return err
	}
	return file.Close()
}

// ReadDevices reads the device map of a service, or returns nil without one. A million lines take about 1 s.
func ReadDevices(c config.Service) (*placement.DeviceMap, error) {
	if c.DeviceMap == "" {
		return nil, nil
	}
	devices, err := placement.LoadDeviceMap(c.DeviceMap)
	if err != nil {
		return nil, fault.Unreadable(fmt.Errorf("device_map: %w", err), "")
	}
	return devices, nil
}

// OfService names a service in an error.
func OfService(name string, err error) error {
	return fault.In("service "+name, err)
}
