// SPDX-License-Identifier: Apache-2.0

package cgroup_test

import (
	"testing"

	"sockeye/internal/cgroup"
	"sockeye/internal/testenv"
)

func TestMain(m *testing.M) { cgroup.RunTests(func() int { return testenv.Run(m) }) }
