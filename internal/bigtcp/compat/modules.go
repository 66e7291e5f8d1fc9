// SPDX-License-Identifier: Apache-2.0

package compat

import (
	"bytes"
	"os"
	"path/filepath"

	"sockeye/internal/linux"
)

// moduleLoaded returns false for a kernel module that is not loaded, which a request
// would load. It returns true if the code is built into the kernel.
func moduleLoaded(module string) (bool, error) {
	if _, err := os.Stat("/sys/module/" + module); err == nil {
		return true, nil
	}
	release, _, err := linux.Uname()
	if err != nil {
		return false, err
	}
	modules, err := os.ReadFile(filepath.Join("/lib/modules", release, "modules.dep"))
	if err != nil {
		// The list of modules may be invisible, as in a container.
		return true, nil
	}
	return !bytes.Contains(modules, []byte("/"+module+".ko")), nil
}
