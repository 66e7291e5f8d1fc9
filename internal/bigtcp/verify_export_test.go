// SPDX-License-Identifier: Apache-2.0

package bigtcp

import (
	"context"
	"time"
)

// VerifyOptions are what a test can ask for beside.
type VerifyOptions struct {
	Clsact, NoDriver bool
	Attached         func()
}

// VerifyWith is Verify with options.
func VerifyWith(ctx context.Context, n *Network, name string, during time.Duration, o VerifyOptions) (*Proof, error) {
	return verify(ctx, n, name, during, verifyOptions{clsact: o.Clsact, noDriver: o.NoDriver, attached: o.Attached})
}
