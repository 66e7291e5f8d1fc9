// SPDX-License-Identifier: Apache-2.0

package rights_test

import (
	"testing"

	"sockeye/internal/rights"
	"sockeye/internal/testenv"
)

func TestMain(m *testing.M) { rights.RunTests(func() int { return testenv.Run(m) }) }
