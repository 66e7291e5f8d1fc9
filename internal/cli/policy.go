// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"errors"
	"os"
	"sockeye/internal/config"
	"sockeye/internal/fault"
)

// loadPolicy reads a policy file that the caller named.
func loadPolicy(file string) (*config.Policy, error) {
	policy, err := config.Load(file)
	if _, ok := errors.AsType[*os.PathError](err); ok {
		err = fault.Unreadable(err, "name a policy file")
	}
	return policy, err
}
