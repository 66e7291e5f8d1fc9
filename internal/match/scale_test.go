// SPDX-License-Identifier: Apache-2.0

//go:build !vm

package match_test

// Sizes of the tests.
const (
	twinRulesets  = 60
	twinQuestions = 250
	manyPrefixes  = 10_000
	manyQuestions = 3000
)
