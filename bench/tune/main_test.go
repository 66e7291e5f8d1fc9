// SPDX-License-Identifier: Apache-2.0

//go:build !vm

package tune

import (
	"os"
	"testing"

	"sockeye/internal/testenv"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }
