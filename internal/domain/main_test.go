// SPDX-License-Identifier: Apache-2.0

package domain

import (
	"testing"

	"sockeye/internal/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }
