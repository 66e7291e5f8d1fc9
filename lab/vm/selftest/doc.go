// SPDX-License-Identifier: Apache-2.0

// Package selftest tests that the machine which lab/vm boots has what tests of
// Sockeye rely on. It has tests only with the build tag "vm".
package selftest
