// SPDX-License-Identifier: Apache-2.0

//go:build vm

package e2e_test

import (
	"os"
	"path/filepath"
)

// emulated is set on the slow CPU of a virtual machine.
const emulated = true

// build makes a link to the test binary, which runs as the agent under that name: a virtual machine of lab/vm has no Go.
func build() error {
	dir, err := os.MkdirTemp("", "sockeye-e2e-")
	if err != nil {
		return err
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	binary := filepath.Join(dir, "sockeye")
	if err := os.Symlink(self, binary); err != nil {
		return err
	}
	return os.Setenv(binaryEnv, binary)
}
