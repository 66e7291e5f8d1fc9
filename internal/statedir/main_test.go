// SPDX-License-Identifier: Apache-2.0

package statedir

import (
	"testing"

	"sockeye/internal/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }
