// SPDX-License-Identifier: Apache-2.0

package harness

import "slices"

// Turn returns the arms in the order in which a round runs them. From round to round the order rotates, and every second
// turn is reversed, so that each arm is equally often the first one, and behind each other one.
func Turn[T any](arms []T, round int) []T {
	n := round % len(arms)
	turn := slices.Concat(arms[n:], arms[:n])
	if round/len(arms)%2 == 1 {
		slices.Reverse(turn)
	}
	return turn
}
