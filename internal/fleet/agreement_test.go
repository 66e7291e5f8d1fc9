// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"sockeye/internal/config"
	"sockeye/internal/fleet/lead"
	"sockeye/internal/fleet/table"
)

// TestDifferences compares the policies of hosts: what differs by its notation alone is not a difference.
func TestDifferences(t *testing.T) {
	dir := t.TempDir()
	settingsOf := func(replaced, by, devices string) *settings {
		t.Helper()
		text := strings.Replace(strings.Replace(policyText, "[192.0.2.53]", `[192.0.2.53, "2001:db8::53"]`, 1), replaced, by, 1)
		if devices != "" {
			file := filepath.Join(dir, "devices.csv")
			check(t, os.WriteFile(file, []byte(devices), 0o600))
			text = strings.Replace(text, "slots: 2", "slots: 2\n    device_map: "+file, 1)
		}
		policy, err := config.Parse([]byte(text), "policy.yaml")
		check(t, err)
		s, err := newSettings(policy)
		check(t, err)
		return s
	}
	const map1 = "192.0.2.0/24,one\n198.51.100.0/24,two\n"
	own, mapped := settingsOf("", "", ""), settingsOf("", "", map1)
	const listeners = "host b has other listeners at the addresses of the fleet than this host: compare the key addresses, and the listeners of the services"
	const devices = "host b has another device map than this host, and disagrees about the devices that differ: apply the same device map to both"
	// Hosts with different versions of Sockeye compare these.
	if want := (lead.Digests{Listeners: "c05227dc5c5f0df4", Devices: "012d24e69b8626ac"}); mapped.digests != want {
		t.Errorf("digests %+v, want %+v", mapped.digests, want)
	}
	for name, c := range map[string]struct {
		own, other *settings
		want       []string
	}{
		"same":               {own, settingsOf("host: a", "host: b", ""), nil},
		"slots":              {own, settingsOf("slots: 2", "slots: 5", ""), nil},
		"order of listeners": {own, settingsOf(`{protocol: tcp, address: "[::]:1790"}, {protocol: udp, address: "0.0.0.0:4739"}`, `{protocol: udp, address: "0.0.0.0:4739"}, {protocol: tcp, address: "[::]:1790"}`, ""), nil},
		"order of devices":   {mapped, settingsOf("", "", "198.51.100.0/24,two\n192.0.2.0/24,one\n"), nil},
		"port":               {own, settingsOf(":4739", ":4740", ""), []string{listeners}},
		"address":            {own, settingsOf("192.0.2.53, ", "", ""), []string{listeners}},
		"no device map":      {mapped, own, []string{devices}},
		"device":             {mapped, settingsOf("", "", strings.Replace(map1, "two", "three", 1)), []string{devices}},
		"prefix":             {mapped, settingsOf("", "", strings.Replace(map1, "/24", "/25", 1)), []string{devices}},
		"both":               {mapped, settingsOf(":4739", ":4740", ""), []string{listeners, devices}},
	} {
		host := func(name string, alive bool, d lead.Digests) lead.Host {
			return lead.Host{Host: table.Host{Name: name}, Alive: alive, Digests: d}
		}
		hosts := []lead.Host{host("a", true, c.other.digests), host("b", true, c.other.digests), host("dead", false, c.other.digests), host("earlier", true, lead.Digests{})}
		if got := c.own.differences(hosts); !slices.Equal(got, c.want) {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
}
