// SPDX-License-Identifier: Apache-2.0

package scope

import (
	"testing"

	"sockeye/internal/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }
