// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/cilium/ebpf"

	"sockeye/internal/bpf/pin"
)

// Layouts of this version.
var (
	tuneLayout = sync.OnceValues(func() (string, error) {
		return pin.ObjectsLayout([]string{"tune_", "match_"}, loadTuneSockops)
	})
	traceLayout = sync.OnceValues(func() (string, error) {
		return pin.ObjectsLayout([]string{"trace_", "tune_", "match_"}, loadTraceSockops, loadTraceRX, loadTraceUDP)
	})
)

// Maps of a service by their role in a change of the layout.
var (
	// steerCore are the maps that earlier versions cannot be without while members are registered. If the layout of one
	// changes, the directory's name has a hash: versions that do not share maps then register all members again, instead
	// of adopting a part.
	steerCore = []string{pinSlots, pinCookies, pinListeners, pinSockets}
	// steerMapping are the maps of the mapping. Versions with different programs do not share them.
	steerMapping = []string{"tables", "device_maps", "next_devices", "host_maps", "next_hosts", pinTable, pinDeviceMap}
)

// steerUnhashed contains the layouts of the maps whose pins have no hash in their names: those of the first versions, and
// later ones for which their contents are valid. A map of another layout, and a map that is not listed, is pinned as
// NAME@HASH, so that the same name is the same layout in all versions.
//
// The map of sockets, of sk_reuseport or of sk_lookup, has the same name in all layouts, because earlier versions look
// for it; its keys and values have no fields.
var steerUnhashed = map[string][]string{
	"admission":      {"d7cf7b561da5"},
	pinCookies:       {"78a89c4f8937"},
	"counters":       {"201acef71a95"},
	pinDeviceMap:     {"d1158b9c4ced"},
	"device_maps":    {"e52365422dee"},
	pinDevices:       {"5a61c2ad47bd", "1d4d639f650e"}, // held was padding
	"events":         {"6d5be20a4dfb"},
	"host_maps":      {"ac0612f8bda3"},
	pinGates:         {"a406ebeabaaf", "c0b427b226a6"}, // sk_reuseport and sk_lookup
	pinListeners:     {"5788aa8d0be1"},
	pinLostTemplates: {"3359a4f4afcf"},
	"lost_events":    {"531ca0855f3a"},
	"next_devices":   {"78f01b514980"},
	"next_hosts":     {"3506e68f5c46"},
	pinPasses:        {"db9a659d43e2"},
	"pending":        {"82bec0883f99"},
	pinOwners:        {"8998f141a09e"},
	"refusals":       {"e0d4a7b6f98a"},
	"reports":        {"8d05d1207c93"},
	pinRooms:         {"68093856b2a1", "ed9d4612c68f"}, // sk_reuseport and sk_lookup
	"room_ports":     {"4b9b6b354e8b"},
	pinSlots:         {"6051a4e5cfce"},
	pinSockets:       {"b90a6568ad5e", "e12df5468c29"},
	pinSuccessors:    {"b722c2d038b3", "8aa211d808d4"},
	pinStored:        {"138c206825c9"},
	pinTable:         {"2c05e207f81a"},
	"tables":         {"a7c46297254b"},
	"unlisted":       {"474470f08a4f"},
	pinWaits:         {"4b15fdd71eb4"},
	pinTemplateSets:  {"73d85109a1f1"},
}

// doubledMaps is a list of maps, separated by commas, whose number of entries is doubled. It is set by the linker, for
// tests of upgrades: such a binary is another version with another layout.
var doubledMaps string

// steerMaps contains the maps and the programs of a service, and the names of its pins.
type steerMaps struct {
	steering, members *ebpf.CollectionSpec
	templates         *ebpf.CollectionSpec
	listeners, owners *ebpf.MapSpec
	names             map[string]string // pins by the names of the maps
	hash              string            // of steerCore; "" without a hash in the name of the directory
}

// steerLayout loads the maps of a service.
func steerLayout(lookup bool) (l *steerMaps, err error) {
	load := loadSteerReuseport
	if lookup {
		load = loadSteerLookup
	}
	l = &steerMaps{owners: ownersSpec(), names: make(map[string]string)}
	if l.steering, err = load(); err != nil {
		return nil, err
	}
	if l.members, err = loadSteerMembers(); err != nil {
		return nil, err
	}
	if l.templates, err = loadSteerTemplates(); err != nil {
		return nil, err
	}
	if l.listeners, err = listenersSpec(); err != nil {
		return nil, err
	}
	all := map[string]*ebpf.MapSpec{
		pinListeners: l.listeners,
		pinTable:     l.steering.Maps["tables"].InnerMap,
		pinDeviceMap: l.steering.Maps["device_maps"].InnerMap,
	}
	for _, specs := range []map[string]*ebpf.MapSpec{l.members.Maps, l.steering.Maps, l.templates.Maps, {pinListeners: l.listeners, pinOwners: l.owners}} {
		for name, m := range specs {
			if slices.Contains(strings.Split(doubledMaps, ","), name) {
				m.MaxEntries *= 2
			}
			if !pin.IsVariables(name) {
				all[name] = m
			}
		}
	}
	core := make(map[string]*ebpf.MapSpec)
	unhashed := true
	for name, m := range all {
		hash := pin.LayoutHash(map[string]*ebpf.MapSpec{name: m}, nil)
		same := slices.Contains(steerUnhashed[name], hash)
		l.names[name] = name
		if !same && name != pinSockets {
			l.names[name] += pin.LayoutMark + hash
		}
		if slices.Contains(steerCore, name) {
			core[name] = m
			unhashed = unhashed && same
		}
	}
	if !unhashed {
		l.hash = pin.LayoutHash(core, nil)
	}
	return l, nil
}

// dir returns the pin directory of a service in this layout.
func (l *steerMaps) dir(base string) string {
	if l.hash == "" {
		return base
	}
	return base + pin.LayoutMark + l.hash
}

// newestOwn returns the path of a pin of a service in the layout of this version, in the newest directory that has it.
// The error wraps os.ErrNotExist if none has.
func newestOwn(base, name string) (string, error) {
	names, err := ownNames()
	if err != nil {
		return "", err
	}
	return pin.Newest(base, names[name])
}

// ownNames returns the names of the pins in the layout of this version, which differ between the modes for maps of
// sockets only.
var ownNames = sync.OnceValues(func() (map[string]string, error) {
	l, err := steerLayout(false)
	if err != nil {
		return nil, err
	}
	return l.names, nil
})

// newestOf returns the path of a pin of a service in any layout, in the newest directory that has it. The error wraps
// os.ErrNotExist if none has.
func newestOf(base, name string) (string, error) {
	dirs, err := pin.Layouts(base)
	if err != nil {
		return "", err
	}
	for _, dir := range slices.Backward(dirs) {
		paths, err := pinsOf(dir, name)
		if err != nil {
			return "", err
		}
		if len(paths) > 0 {
			return paths[len(paths)-1], nil
		}
	}
	return "", fmt.Errorf("open pinned map %s: %w", filepath.Join(base, name), os.ErrNotExist)
}

// pinsOf returns the paths of the pins of a map in a directory, in all layouts.
func pinsOf(dir, name string) (paths []string, err error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("read pin directory: %w", err)
	}
	for _, e := range entries {
		if of, _, _ := strings.Cut(e.Name(), pin.LayoutMark); of == name && !pin.IsBeside(e.Name()) {
			paths = append(paths, filepath.Join(dir, e.Name()))
		}
	}
	return paths, nil
}
