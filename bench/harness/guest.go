// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"strings"
)

// guestMark precedes the figures in the output of a test in a virtual machine.
const guestMark = "FIGURES "

// InGuest runs a test in virtual machines by lab/vm, with further arguments, and returns the figures that the test prints by
// PrintFigures. qemu emulates the CPUs, which takes ten times and more as long: compare only figures of such machines with each other.
func InGuest(ctx context.Context, arguments ...string) (figures []byte, err error) {
	cmd := exec.CommandContext(ctx, "go", slices.Concat([]string{"run", "./lab/vm"}, arguments)...)
	out, err := cmd.CombinedOutput()
	if err != nil {
		return nil, fmt.Errorf("measure in a virtual machine: %w\n%s", err, out)
	}
	return guestFigures(string(out))
}

// guestFigures returns the figures in the output of lab/vm.
func guestFigures(output string) ([]byte, error) {
	for line := range strings.Lines(output) {
		if _, figures, ok := strings.Cut(line, "| "+guestMark); ok {
			return []byte(strings.TrimSpace(figures)), nil
		}
	}
	return nil, errors.New("the virtual machine printed no figures")
}

// PrintFigures prints figures, which are JSON, for InGuest.
func PrintFigures(figures []byte) error {
	var line bytes.Buffer
	if err := json.Compact(&line, figures); err != nil {
		return fmt.Errorf("print figures: %w", err)
	}
	fmt.Println(guestMark + line.String())
	return nil
}
