// SPDX-License-Identifier: Apache-2.0

package probe_test

import (
	"testing"

	"sockeye/internal/testenv"
)

func TestMain(m *testing.M) { testenv.MainWithMaps(m) }
