// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"context"
	"os"
	"os/signal"
	"testing"

	"golang.org/x/sys/unix"

	"sockeye/internal/steer/keeper"
	"sockeye/internal/testenv"
)

// memberRole is the argument of a process that listens on the ports of startService.
const memberRole = "member"

// TestMain also runs the keeper process, which a service starts from its own executable, and members.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == memberRole {
		beMember(len(os.Args) > 2)
	}
	if len(os.Args) > 1 && os.Args[1] == keeper.Command {
		ctx, _ := signal.NotifyContext(context.Background(), unix.SIGTERM)
		if keeper.Run(ctx) != nil {
			os.Exit(1)
		}
		os.Exit(0)
	}
	testenv.Main(m)
}
