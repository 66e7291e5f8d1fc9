// SPDX-License-Identifier: Apache-2.0

package fleetcmd

import (
	"bytes"
	"errors"
	"net"
	"strings"
	"testing"

	"sockeye/internal/api"
	"sockeye/internal/cli/command"
)

// TestHealthOfSilentAgent is that health does not wait for an agent that accepts connections and does not answer, as one that is stopped.
func TestHealthOfSilentAgent(t *testing.T) {
	dir := t.TempDir()
	l, err := net.Listen("unix", api.SocketPath(dir))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	cmd := (&commands{&command.Command{RunDir: dir}}).healthCommand()
	cmd.SetContext(t.Context())
	if err := cmd.RunE(cmd, nil); !errors.Is(err, api.ErrSilent) {
		t.Errorf("%v, want %v", err, api.ErrSilent)
	}
}

// TestBehind is that the text marks the hosts that have not applied the newest table, and no dead ones.
func TestBehind(t *testing.T) {
	s := &api.FleetStatus{Fleet: "main", Host: "a", Store: "etcd", Connected: true, Epoch: 7, Healthy: true, Hosts: []api.FleetHost{
		{Name: "a", State: "ready", Alive: true, Healthy: true, Weight: 100, Share: 0.5, Epoch: 7, Path: "self"},
		{Name: "b", State: "ready", Alive: true, Healthy: true, Weight: 100, Share: 0.5, Epoch: 6, Behind: true, Path: "link"},
		{Name: "c", State: "ready", Weight: 100, Epoch: 5, Path: "link"},
	}}
	var text bytes.Buffer
	writeFleet(&text, s)
	for _, want := range []string{"\t7\tself\t", "\t6 (behind)\tlink\t", "\t-\tlink\t"} {
		if !strings.Contains(text.String(), want) {
			t.Errorf("%q is missing in\n%s", want, text.String())
		}
	}
}
