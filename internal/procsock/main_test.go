// SPDX-License-Identifier: Apache-2.0

package procsock_test

import (
	"testing"

	"sockeye/internal/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

// TestServer is the main function of server processes that tests start.
func TestServer(t *testing.T) { testenv.Serve(t) }
