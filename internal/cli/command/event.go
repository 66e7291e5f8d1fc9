// SPDX-License-Identifier: Apache-2.0

package command

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"sockeye/internal/api"
)

// EventLine returns an event as a line without its end: the time in the zone of now, the level unless it is info, where,
// what, and the details.
func EventLine(e *api.Event, now time.Time) string {
	layout, at := time.DateTime, e.Time.In(now.Location())
	if at.Format(time.DateOnly) == now.Format(time.DateOnly) {
		layout = "15:04:05.000"
	}
	words := []string{at.Format(layout)}
	if e.Level != "info" {
		words = append(words, strings.ToUpper(e.Level))
	}
	var where []string
	for _, text := range []string{e.Service, e.Cgroup, e.Netns, e.Interface, e.Device} {
		if text != "" {
			where = append(where, text)
		}
	}
	if e.Address != "" && e.Address != e.Device {
		where = append(where, e.Address)
	}
	if e.Slot != nil {
		where = append(where, fmt.Sprintf("slot %d", *e.Slot))
	}
	text := e.Text
	if len(where) > 0 {
		text = strings.Join(where, " ") + ": " + text
	}
	words = append(words, text)
	var details []string
	if e.PID > 0 {
		details = append(details, fmt.Sprintf("pid %d", e.PID))
	}
	for _, key := range slices.Sorted(maps.Keys(e.Details)) {
		details = append(details, key+" "+e.Details[key])
	}
	if len(details) > 0 {
		words = append(words, "("+strings.Join(details, ", ")+")")
	}
	return Printable(strings.Join(words, "  "))
}
