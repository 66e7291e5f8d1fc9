// SPDX-License-Identifier: Apache-2.0

package tune_test

import (
	"strings"
	"testing"

	"sockeye/internal/config"
	"sockeye/internal/tune"
)

// TestMostOptions uses a rule that sets every option, and sets them again in its reaction, which fits into the map;
// and a rule with more settings than a policy can have.
func TestMostOptions(t *testing.T) {
	rule := config.TuneRule{Name: "all", React: &config.React{Retransmits: 0.01, RTOs: -1, Sample: 1}}
	for _, o := range config.TuneOptions {
		s := config.Setting{Option: o.Name, Value: o.Min}
		rule.Set = append(rule.Set, s)
		if o.React {
			rule.React.Set = append(rule.React.Set, s)
		}
	}
	if _, err := tune.Compile([]config.TuneRule{rule}, nil, nil); err != nil {
		t.Errorf("all options: got %v", err)
	}
	rule.React.Set = append(rule.React.Set, rule.Set...)
	_, err := tune.Compile([]config.TuneRule{rule}, nil, nil)
	if err == nil || !strings.Contains(err.Error(), "compile rule all: it has") {
		t.Errorf("got %v", err)
	}
	none := func(config.TuneRule, string) bool { return true }
	if _, err := tune.Compile([]config.TuneRule{rule}, nil, none); err != nil {
		t.Errorf("kernel that supports no option: got %v", err)
	}
}
