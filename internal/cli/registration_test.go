// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"sockeye/internal/api"
)

// TestRegistrationReads checks that the cost of a registration does not depend on the number of members: the agent
// reads /proc for the new process only.
func TestRegistrationReads(t *testing.T) {
	const members, part = 160, 32
	h := newHost(t, strings.Replace(oneService, "slots: 2", fmt.Sprintf("slots: %d", members), 1)+
		"    members: [{match: {command_line: ^collector}, slot: free}]\n")
	h.start()
	// reads waits until the agent is idle and returns the number of its read system calls.
	reads := func(ready int) (n int) {
		t.Helper()
		h.eventually("they are members", func() bool { return must[api.Status](h, "status").Services[0].Ready == ready })
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/io", h.agent.Process.Pid))
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(text)) {
			if _, err := fmt.Sscanf(line, "syscr: %d", &n); err == nil {
				return n
			}
		}
		t.Fatalf("no syscr in %s", text)
		return 0
	}
	var counts []int
	for n := range members + 1 {
		if n%part == 0 {
			counts = append(counts, reads(n))
		}
		if n < members {
			h.member(collector, "tcp [::]:1790", "udp [::]:4739")
		}
	}
	first, last := counts[1]-counts[0], counts[len(counts)-1]-counts[len(counts)-2]
	t.Logf("%d reads for the first %d members, %d for the last", first, part, last)
	// The number of requests of status varies. A cost for each member would make the factor 9.
	if last > first*3 {
		t.Errorf("%d reads for the first %d members, %d for the last", first, part, last)
	}
}
