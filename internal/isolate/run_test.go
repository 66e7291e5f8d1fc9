// SPDX-License-Identifier: Apache-2.0

package isolate

import (
	"errors"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestKeyDuringStart checks the exit code if a terminal key ends the process inside before the gateway has received the signal.
func TestKeyDuringStart(t *testing.T) {
	late := make(chan os.Signal, 1)
	time.AfterFunc(50*time.Millisecond, func() { late <- unix.SIGINT })
	broken := errors.New("send the setup to the guest: broken pipe")
	if code, err := prepareFailed(broken, late); code != 130 || err != nil {
		t.Errorf("a late signal: %d, %v", code, err)
	}
	if code, err := prepareFailed(broken, make(chan os.Signal)); code != 0 || !errors.Is(err, broken) {
		t.Errorf("no signal: %d, %v", code, err)
	}
	early := make(chan os.Signal, 1)
	early <- unix.SIGTERM
	if code, err := prepareFailed(&StepError{StepRights, broken}, early); code != 143 || err != nil {
		t.Errorf("a signal and a step that failed: %d, %v", code, err)
	}
	if code, err := prepareFailed(&EndedError{unix.SIGQUIT}, make(chan os.Signal)); code != 131 || err != nil {
		t.Errorf("the process inside was terminated: %d, %v", code, err)
	}
}
