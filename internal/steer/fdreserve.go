// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"sync"

	"golang.org/x/sys/unix"
)

const (
	// reserved is how many descriptors are kept for members: to look at a process takes some
	// at a time, and a member keeps one.
	reserveSize = 32
	// spare is how many others are to be free, or the reserve is used.
	spareDescriptors = 8
)

// reserve keeps descriptors for members, whatever takes all the others. The zero value has
// none yet.
type fdReserve struct {
	mu  sync.Mutex
	fds []int
}

// fill takes what is missing, and leaves some to others.
func (r *fdReserve) fill() {
	r.mu.Lock()
	defer r.mu.Unlock()
	others := openDescriptors(spareDescriptors)
	if len(others) == spareDescriptors {
		r.fds = append(r.fds, openDescriptors(reserveSize-len(r.fds))...)
	}
	closeDescriptors(others)
}

// lend frees the reserve if the agent has hardly any descriptors left, until the result is
// called.
func (r *fdReserve) borrow() (back func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	others := openDescriptors(spareDescriptors)
	closeDescriptors(others)
	if len(others) == spareDescriptors {
		return func() {}
	}
	closeDescriptors(r.fds)
	r.fds = nil
	return r.fill
}

// openSome opens so many descriptors, or as many as there are.
func openDescriptors(n int) (list []int) {
	for range n {
		fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
		if err != nil {
			break
		}
		list = append(list, fd)
	}
	return list
}

func closeDescriptors(list []int) {
	for _, fd := range list {
		unix.Close(fd)
	}
}
