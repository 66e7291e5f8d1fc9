// SPDX-License-Identifier: Apache-2.0

package harness

import "slices"

// Turn returns the arms in the order in which a round runs them. The order rotates from round to round, and every
// second rotation is reversed, so that each arm is first equally often and follows each other arm equally often.
func Turn[T any](arms []T, round int) []T {
	n := round % len(arms)
	turn := slices.Concat(arms[n:], arms[:n])
	if round/len(arms)%2 == 1 {
		slices.Reverse(turn)
	}
	return turn
}
