// SPDX-License-Identifier: Apache-2.0

//go:build !vm

package procsock_test

// killings is how often processes are killed whose sockets are visited.
const killings = 5
