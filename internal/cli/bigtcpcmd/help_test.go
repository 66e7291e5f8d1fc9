// SPDX-License-Identifier: Apache-2.0

package bigtcpcmd

import (
	"strings"
	"testing"

	"sockeye/internal/cli/command"
)

// TestBigTCPHelp checks that help texts fit a terminal of 80 columns.
func TestBigTCPHelp(t *testing.T) {
	root := (&commands{&command.Command{}}).bigtcpCommand()
	for _, cmd := range append(root.Commands(), root) {
		for line := range strings.Lines(cmd.Long) {
			if len(line) > 81 {
				t.Errorf("%s: a line of %d characters: %s", cmd.Name(), len(line), line)
			}
		}
	}
}
