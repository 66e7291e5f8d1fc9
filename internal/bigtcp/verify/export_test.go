// SPDX-License-Identifier: Apache-2.0

package verify

import (
	"context"
	"time"

	"sockeye/internal/bigtcp/netif"
)

// Options are additional options of tests.
type Options struct {
	Clsact, NoDriver bool
	Attached         func()
}

// RunWith is Run with additional options.
func RunWith(ctx context.Context, n *netif.Namespace, name string, during time.Duration, o Options) (*Report, error) {
	return run(ctx, n, name, during, options{clsact: o.Clsact, noDriver: o.NoDriver, attached: o.Attached})
}
