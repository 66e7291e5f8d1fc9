// SPDX-License-Identifier: Apache-2.0

//go:build vm

package packets_test

// slower is larger under software emulation, see scale_test.go.
const slower = 10
