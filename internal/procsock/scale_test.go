// SPDX-License-Identifier: Apache-2.0

//go:build !vm

package procsock_test

// killings is the number of times that processes are killed while their sockets are visited.
const killings = 5
