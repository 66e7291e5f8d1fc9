// SPDX-License-Identifier: Apache-2.0

package command

import (
	"errors"
	"os"

	"sockeye/internal/config"
	"sockeye/internal/fault"
)

// LoadPolicy reads a policy file named on the command line. The error has a hint.
func LoadPolicy(file string) (*config.Policy, error) {
	policy, err := config.Load(file)
	if _, ok := errors.AsType[*os.PathError](err); ok {
		err = fault.Unreadable(err, "name a policy file")
	}
	return policy, err
}
