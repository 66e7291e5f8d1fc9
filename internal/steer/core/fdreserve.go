// SPDX-License-Identifier: Apache-2.0

package core

import (
	"sync"

	"golang.org/x/sys/unix"
)

const (
	// reserveSize is the number of descriptors reserved for members: an inspection opens some for a moment, and a
	// member keeps one.
	reserveSize = 32
	// spareDescriptors is the number of free descriptors below which the reserve is used.
	spareDescriptors = 8
)

// fdReserve keeps descriptors open that members may use when the agent has no others left. The zero value is empty.
type fdReserve struct {
	mu  sync.Mutex
	fds []int
}

// Borrow closes the descriptors of the reserve if fewer than spareDescriptors are free. The caller calls the result to
// fill the reserve again.
func (r *fdReserve) Borrow() (back func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	others := openDescriptors(spareDescriptors)
	closeDescriptors(others)
	if len(others) == spareDescriptors {
		return func() {}
	}
	closeDescriptors(r.fds)
	r.fds = nil
	return r.Fill
}

// Fill opens the missing descriptors of the reserve if spareDescriptors others are free.
func (r *fdReserve) Fill() {
	r.mu.Lock()
	defer r.mu.Unlock()
	others := openDescriptors(spareDescriptors)
	if len(others) == spareDescriptors {
		r.fds = append(r.fds, openDescriptors(reserveSize-len(r.fds))...)
	}
	closeDescriptors(others)
}

// openDescriptors opens n descriptors, or fewer at the limit.
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
