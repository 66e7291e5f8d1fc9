// SPDX-License-Identifier: Apache-2.0

package domain

import "golang.org/x/sys/unix"

// descriptors is how many the agent may have. Go has raised the soft limit to the hard
// one when it started.
func descriptorLimit() int {
	var limit unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &limit) != nil {
		return 1024
	}
	return int(min(limit.Cur, 1<<20))
}

// ShareOfDescriptors is a part of the descriptors that the agent may have: 1 of so many, within bounds.
func ShareOfDescriptors(part, least, most int) int {
	return min(max(descriptorLimit()/part, least), most)
}
