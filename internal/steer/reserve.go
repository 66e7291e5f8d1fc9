// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"sync"

	"golang.org/x/sys/unix"
)

const (
	// reserved is how many descriptors are kept for members: to look at a process takes some
	// at a time, and a member keeps one.
	reserved = 32
	// spare is how many others are to be free, or the reserve is used.
	spare = 8
)

// reserve keeps descriptors for members, whatever takes all the others. The zero value has
// none yet.
type reserve struct {
	mu   sync.Mutex
	held []int
}

// fill takes what is missing, and leaves some to others.
func (r *reserve) fill() {
	r.mu.Lock()
	defer r.mu.Unlock()
	others := openSome(spare)
	if len(others) == spare {
		r.held = append(r.held, openSome(reserved-len(r.held))...)
	}
	closeAll(others)
}

// lend frees the reserve if the agent has hardly any descriptors left, until the result is
// called.
func (r *reserve) lend() (back func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	others := openSome(spare)
	closeAll(others)
	if len(others) == spare {
		return func() {}
	}
	closeAll(r.held)
	r.held = nil
	return r.fill
}

// openSome opens so many descriptors, or as many as there are.
func openSome(n int) (list []int) {
	for range n {
		fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
		if err != nil {
			break
		}
		list = append(list, fd)
	}
	return list
}

func closeAll(list []int) {
	for _, fd := range list {
		unix.Close(fd)
	}
}
