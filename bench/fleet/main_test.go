// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"testing"

	"sockeye/internal/testenv"
)

func TestMain(m *testing.M) { testenv.MainWithMaps(m) }
