// SPDX-License-Identifier: Apache-2.0

package domain

import "golang.org/x/sys/unix"

// ShareOfDescriptors returns 1/part of the descriptor limit of the agent, at least least and at most most.
func ShareOfDescriptors(part, least, most int) int {
	return min(max(descriptorLimit()/part, least), most)
}

// descriptorLimit returns RLIMIT_NOFILE. The Go runtime has raised the soft limit to the hard limit at start.
func descriptorLimit() int {
	var limit unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &limit) != nil {
		return 1024
	}
	return int(min(limit.Cur, 1<<20))
}
