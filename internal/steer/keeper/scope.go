// SPDX-License-Identifier: Apache-2.0

package keeper

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

// A keeper outlives the agent. In the cgroup of the agent's unit, systemd would report the keeper as a left-over process
// at each start of the unit. Therefore the agent requests a scope unit for the keeper from systemd. If the request fails,
// the keeper stays in the agent's unit and works there, too.

const (
	// ScopeTimeout limits the exchange with systemd.
	ScopeTimeout = 10 * time.Second
	// stopTimeout is the time between SIGTERM and SIGKILL when systemd stops a keeper.
	stopTimeout = 5 * time.Second

	systemdName    = "org.freedesktop.systemd1"
	systemdPath    = dbus.ObjectPath("/org/freedesktop/systemd1")
	systemdManager = systemdName + ".Manager"
	// systemdSocket is the private socket of systemd for root, which works without a message bus.
	systemdSocket = "/run/systemd/private"
)

// Manager is a connection to systemd for an agent that is a systemd service.
type Manager struct {
	Dial func(context.Context) (*dbus.Conn, error)
	Unit string // cgroup of the agent's unit
}

// FindManager returns nil if this process is not part of a systemd service.
func FindManager() *Manager {
	self, err := member.Read(os.Getpid())
	if err != nil || os.Getenv("INVOCATION_ID") == "" || !strings.HasSuffix(path.Base(self.Cgroup), ".service") {
		return nil
	}
	if _, err := os.Stat("/run/systemd/system"); err != nil { // sd_booted(3)
		return nil
	}
	return &Manager{dialSystemd, self.Cgroup}
}

// dialSystemd connects to the private socket of systemd, or to the system message bus.
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

// StartScope moves a keeper from the agent's unit to a new scope unit, and returns the name of the scope. The name is ""
// if the keeper has exited or is not in the agent's unit.
func (m *Manager) StartScope(ctx context.Context, k *Process) (string, error) {
	p, err := member.Read(k.Self.PID)
	if err != nil || p.StartTime != k.Self.StartTime {
		return "", nil // exited
	}
	if p.Cgroup != m.Unit {
		return "", nil
	}
	ctx, cancel := context.WithTimeout(ctx, ScopeTimeout)
	defer cancel()
	conn, err := m.Dial(ctx)
	if err != nil {
		return "", fmt.Errorf("connect to systemd: %w", err)
	}
	defer conn.Close()
	// A new keeper starts before the old one is killed, so the name has the process id.
	unit := fmt.Sprintf("sockeye-keeper-%s-%d.scope", k.Service, k.Self.PID)
	properties := []unitProperty{
		{"Description", dbus.MakeVariant("Sockeye keeper of service " + k.Service)},
		{"PIDs", dbus.MakeVariant([]uint32{uint32(k.Self.PID)})},
		// At shutdown the agent stops first; a running agent would replace the keeper.
		{"Before", dbus.MakeVariant([]string{path.Base(m.Unit)})},
		// The keepers of earlier versions ignore SIGTERM.
		{"TimeoutStopUSec", dbus.MakeVariant(uint64(stopTimeout / time.Microsecond))},
		// The unit of a killed keeper fails; systemd removes it then, too.
		{"CollectMode", dbus.MakeVariant("inactive-or-failed")},
	}
	call := conn.Object(systemdName, systemdPath).CallWithContext(ctx, systemdManager+".StartTransientUnit", 0,
		unit, "fail", properties, []auxiliaryUnit{})
	if call.Err != nil {
		return "", fmt.Errorf("start unit %s: %w", unit, call.Err)
	}
	return unit, nil
}
