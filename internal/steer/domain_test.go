// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"testing"

	"sockeye/internal/fault"
	"sockeye/internal/steer/core"
)

func TestSelected(t *testing.T) {
	d := &Domain{services: make(map[string]*service)}
	if _, err := d.findService(""); err == nil || err.Error() != "the policy has no services" {
		t.Error(err)
	}
	one := &service{Service: core.Service{Name: "one"}}
	d.services["one"] = one
	if s, err := d.findService(""); err != nil || s != one {
		t.Error(err)
	}
	if _, err := d.findService("onee"); fault.Code(err) != fault.CodeUsage || fault.Hint(err) != "did you mean one?" {
		t.Error(err, fault.Hint(err))
	}
}

func TestInheritedSockets(t *testing.T) {
	if code, hint := fault.Code(errInherited), fault.Hint(errInherited); code != fault.CodeConflict || hint != "name the process that opened them" {
		t.Errorf("code %d, hint %q", code, hint)
	}
}
