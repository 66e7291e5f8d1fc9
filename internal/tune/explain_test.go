// SPDX-License-Identifier: Apache-2.0

package tune_test

import (
	"encoding/json"
	"net/netip"
	"testing"

	"sockeye/internal/config"
	"sockeye/internal/match"
	"sockeye/internal/tune"
)

// TestExplainEnds checks that explain has a step for each rule up to the rule that matches.
func TestExplainEnds(t *testing.T) {
	p := parse(t, `tune:
  - {name: a, cgroup: CGROUP, set: {nodelay: true}, match: {port: 80}}
  - {name: b, cgroup: CGROUP, set: {nodelay: true}, match: {port: 81}}
  - {name: c, cgroup: CGROUP, set: {nodelay: true}, match: {port: [81, 82]}}
`)
	for port, want := range map[uint16]string{
		80: `[{"rule":"a","matches":true,"why":"port is 80"}]`,
		81: `[{"rule":"a","matches":false,"why":"port 81 is not 80"},{"rule":"b","matches":true,"why":"port is 81"}]`,
		83: `[{"rule":"a","matches":false,"why":"port 83 is not 80"},{"rule":"b","matches":false,"why":"port 83 is not 81"},` +
			`{"rule":"c","matches":false,"why":"port 83 is not in any of 2 ranges"}]`,
	} {
		local := netip.MustParseAddr("10.0.0.1")
		got, err := json.Marshal(tune.Explain(p.Tune, nil, match.Question{
			Local: netip.AddrPortFrom(local, port), Remote: netip.AddrPortFrom(local, 1), Role: config.RoleAccept}))
		if err != nil || string(got) != want {
			t.Errorf("port %d: got %s, %v, want %s", port, got, err, want)
		}
	}
}
