// SPDX-License-Identifier: Apache-2.0

//go:build !vm

package match_test

// How much the tests do.
const (
	twinRulesets  = 60
	twinQuestions = 250
	manyPrefixes  = 10_000
	manyQuestions = 3000
)
