// SPDX-License-Identifier: Apache-2.0

package rights

import (
	"strings"
	"testing"
)

// TestHintInPod checks that the hint for a missing capability names no unit in a pod of Kubernetes.
func TestHintInPod(t *testing.T) {
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	if hint := NetBindService.DropInHint(); !strings.Contains(hint, "ports.conf /etc/systemd/system/") {
		t.Errorf("on a host: %s", hint)
	}
	t.Setenv("KUBERNETES_SERVICE_HOST", "192.0.2.1")
	for right, want := range map[Right]string{
		NetBindService: "add NET_BIND_SERVICE to extraCapabilities in the values of the chart",
		DACOverride:    "add DAC_OVERRIDE to extraCapabilities in the values of the chart",
		SysAdmin:       "the chart does not give this capability: run the agent as a service of the node",
	} {
		if hint := right.DropInHint(); hint != want {
			t.Errorf("%s: %s, want %s", right.Name, hint, want)
		}
	}
}
