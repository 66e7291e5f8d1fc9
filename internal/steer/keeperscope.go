// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path"
	"strings"
	"time"

	"github.com/godbus/dbus/v5"

	"sockeye/internal/member"
)

// A keeper outlives the agent. Started in the cgroup of the agent's unit it
// would be a left-over process there whenever systemd starts that unit again, so
// that the agent asks systemd for a scope unit of its own for it. Where that
// fails the keeper stays where it is, and works as well.

const (
	// scopeTimeout bounds the whole conversation with systemd.
	scopeTimeout = 10 * time.Second
	// stopTimeout is how long systemd waits for a keeper that it ends.
	stopTimeout = 5 * time.Second

	systemdName    = "org.freedesktop.systemd1"
	systemdPath    = dbus.ObjectPath("/org/freedesktop/systemd1")
	systemdManager = systemdName + ".Manager"
	// systemdSocket is systemd's own, for root, which needs no message bus.
	systemdSocket = "/run/systemd/private"
)

// serviceManager is how systemd is reached; nil where the agent is no unit's.
type serviceManager struct {
	dial func(context.Context) (*dbus.Conn, error)
	unit string // cgroup of the agent's unit
}

// findServiceManager tells whether this process is one of a systemd service.
func findServiceManager() *serviceManager {
	self, err := member.Read(os.Getpid())
	if err != nil || os.Getenv("INVOCATION_ID") == "" || !strings.HasSuffix(path.Base(self.Cgroup), ".service") {
		return nil
	}
	if _, err := os.Stat("/run/systemd/system"); err != nil { // sd_booted(3)
		return nil
	}
	return &serviceManager{dialSystemd, self.Cgroup}
}

// dialSystemd connects to systemd itself, or by the system's message bus.
func dialSystemd(ctx context.Context) (*dbus.Conn, error) {
	conn, err := dbus.Dial("unix:path="+systemdSocket, dbus.WithContext(ctx))
	if err == nil {
		if err = conn.Auth(nil); err == nil {
			return conn, nil
		}
		conn.Close()
	}
	conn, onBus := dbus.ConnectSystemBus(dbus.WithContext(ctx))
	if onBus != nil {
		return nil, errors.Join(err, onBus)
	}
	return conn, nil
}

type unitProperty struct {
	Name  string
	Value dbus.Variant
}

type auxiliaryUnit struct {
	Name       string
	Properties []unitProperty
}

// moveOut gives a keeper a scope unit of its own, if it is in the unit of the
// agent. It returns the unit's name, or "".
func (m *serviceManager) startScope(ctx context.Context, k *keeper) (string, error) {
	p, err := member.Read(k.pid)
	if err != nil || p.StartTime != k.self.StartTime {
		return "", nil // ended
	}
	if p.Cgroup != m.unit {
		return "", nil
	}
	ctx, cancel := context.WithTimeout(ctx, scopeTimeout)
	defer cancel()
	conn, err := m.dial(ctx)
	if err != nil {
		return "", fmt.Errorf("connect to systemd: %w", err)
	}
	defer conn.Close()
	// A keeper is replaced by one that starts before it ends: each has a unit.
	unit := fmt.Sprintf("sockeye-keeper-%s-%d.scope", k.service, k.pid)
	properties := []unitProperty{
		{"Description", dbus.MakeVariant("Sockeye keeper of service " + k.service)},
		{"PIDs", dbus.MakeVariant([]uint32{uint32(k.pid)})},
		// At shutdown the keeper ends after the agent, which would replace it.
		{"Before", dbus.MakeVariant([]string{path.Base(m.unit)})},
		// The keeper of an earlier version, which this agent took over, ignores SIGTERM.
		{"TimeoutStopUSec", dbus.MakeVariant(uint64(stopTimeout / time.Microsecond))},
		// Not kept when the keeper is killed, which is how each one ends.
		{"CollectMode", dbus.MakeVariant("inactive-or-failed")},
	}
	call := conn.Object(systemdName, systemdPath).CallWithContext(ctx, systemdManager+".StartTransientUnit", 0,
		unit, "fail", properties, []auxiliaryUnit{})
	if call.Err != nil {
		return "", fmt.Errorf("start unit %s: %w", unit, call.Err)
	}
	return unit, nil
}

// moveKeeper moves a keeper out of the agent's unit. Nothing waits for it.
func (s *service) moveKeeperToScope(k *keeper) {
	m := s.host.systemd
	if m == nil {
		return
	}
	go func() {
		unit, err := m.startScope(context.Background(), k)
		switch {
		case err != nil:
			s.log.Info("keeper stays in the agent's unit", "pid", k.pid, "error", err)
		case unit != "":
			s.log.Info("keeper has a unit of its own", "pid", k.pid, "unit", unit)
		}
	}()
}
