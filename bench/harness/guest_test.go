// SPDX-License-Identifier: Apache-2.0

package harness

import "testing"

// TestGuestFigures reads figures from the output of a machine, as lab/vm prints it.
func TestGuestFigures(t *testing.T) {
	const figures = `{"text":"a\nb\n"}`
	got, err := guestFigures("downloading\n7.3.4 | === RUN   TestPeersInGuest\n7.3.4 | " + guestMark + figures + "\n7.3.4 | --- PASS\n")
	if err != nil || string(got) != figures {
		t.Errorf("%s, %v", got, err)
	}
	if _, err := guestFigures("7.3.4 | --- SKIP: TestPeersInGuest\n"); err == nil {
		t.Error("no error without figures")
	}
	if err := PrintFigures([]byte("{")); err == nil {
		t.Error("no error for figures that are not JSON")
	}
}
