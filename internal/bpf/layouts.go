// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"maps"
	"slices"
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

// steerUnhashed contains the layouts of sk_reuseport and sk_lookup whose pins have no hash in their name: moving the
// sockets to another directory would cost refusals.
var steerUnhashed = map[bool]string{false: "260fd5cd21e0", true: "ed22a42a0fbb"}

// steerFree are the maps that can be created again at any time. Such a map gets another name when its layout changes.
var steerFree = []string{pinDevices, "pending", "admission", "unlisted", "next_devices"}

// steerLayouts returns the hashes of the maps of a service, and of the maps of steerFree.
func steerLayouts(lookup bool) (set, free string, err error) {
	load := loadSteerReuseport
	if lookup {
		load = loadSteerLookup
	}
	steering, err := load()
	if err != nil {
		return "", "", err
	}
	members, err := loadSteerMembers()
	if err != nil {
		return "", "", err
	}
	listeners, err := listenersSpec()
	if err != nil {
		return "", "", err
	}
	all := map[string]*ebpf.MapSpec{pinListeners: listeners}
	maps.Copy(all, steering.Maps)
	maps.Copy(all, members.Maps)
	rest := make(map[string]*ebpf.MapSpec)
	for name, m := range all {
		if pin.IsVariables(name) {
			delete(all, name)
		} else if slices.Contains(steerFree, name) {
			rest[name] = m
			delete(all, name)
		}
	}
	return pin.LayoutHash(all, nil), pin.LayoutHash(rest, nil), nil
}

// steerDir returns the pin directory of a service in the layout of this version.
func steerDir(base string, lookup bool) (string, error) {
	hash, _, err := steerLayouts(lookup)
	if err != nil || hash == steerUnhashed[lookup] {
		return base, err
	}
	return base + pin.LayoutMark + hash, nil
}
