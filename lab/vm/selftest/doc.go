// SPDX-License-Identifier: Apache-2.0

// Package selftest tests that the machine of lab/vm meets the requirements of the other
// tests. Its tests have the build tag "vm".
package selftest
