// SPDX-License-Identifier: Apache-2.0

//go:build vm

package match_test

// Sizes of the tests under software emulation.
const (
	twinRulesets  = 24
	twinQuestions = 60
	manyPrefixes  = 1000
	manyQuestions = 600
)
