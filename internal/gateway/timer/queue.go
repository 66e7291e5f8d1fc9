// SPDX-License-Identifier: Apache-2.0

// Package timer provides a queue of timers that are cheap to postpone.
package timer

import (
	"container/heap"
	"time"
)

// Timer calls Expired of its owner at a given time. The zero value is not set.
type Timer struct {
	due   time.Time
	wake  time.Time              // key in the heap, at most due
	index int                    // in the heap, from 1 on; 0: not set
	Owner interface{ Expired() } // may set the timer again
}

// IsSet returns whether the timer is set.
func (t *Timer) IsSet() bool { return t.index != 0 }

// Queue is a priority queue of the timers that are set.
type Queue struct{ list timerHeap }

// Len returns the number of timers that are set.
func (t *Queue) Len() int { return len(t.list) }

// Next returns the time at which Run must be called; false if no timer is set.
func (t *Queue) Next() (time.Time, bool) {
	if len(t.list) == 0 {
		return time.Time{}, false
	}
	return t.list[0].wake, true
}

// Run calls Expired of the owners of timers that are due.
func (t *Queue) Run(now time.Time) {
	for len(t.list) > 0 && !t.list[0].wake.After(now) {
		x := t.list[0]
		if x.due.After(now) {
			x.wake = x.due
			heap.Fix(&t.list, 0)
			continue
		}
		heap.Pop(&t.list)
		x.Owner.Expired()
	}
}

// Set sets or moves a timer. A timer that is postponed, as by each acknowledgement, keeps its position in the heap until the earlier
// time: the common case costs one assignment.
func (t *Queue) Set(x *Timer, due time.Time) {
	x.due = due
	switch {
	case x.index == 0:
		x.wake = due
		heap.Push(&t.list, x)
	case due.Before(x.wake):
		x.wake = due
		heap.Fix(&t.list, x.index-1)
	}
}

// Stop removes a timer from the queue. A timer that is not in the queue is left alone.
func (t *Queue) Stop(x *Timer) {
	if x.index > 0 {
		heap.Remove(&t.list, x.index-1)
	}
}

type timerHeap []*Timer

func (h timerHeap) Len() int           { return len(h) }
func (h timerHeap) Less(i, j int) bool { return h[i].wake.Before(h[j].wake) }
func (h timerHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].index, h[j].index = i+1, j+1
}

// Push adds a timer, for container/heap.
func (h *timerHeap) Push(x any) {
	t := x.(*Timer)
	*h = append(*h, t)
	t.index = len(*h)
}

// Pop removes the last timer, for container/heap.
func (h *timerHeap) Pop() any {
	last := len(*h) - 1
	t := (*h)[last]
	(*h)[last] = nil
	*h = (*h)[:last]
	t.index = 0
	return t
}
