// SPDX-License-Identifier: Apache-2.0

package fleetcmd

import (
	"os"
	"testing"

	"sockeye/internal/testenv"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }
