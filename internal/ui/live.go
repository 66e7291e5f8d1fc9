// SPDX-License-Identifier: Apache-2.0

package ui

import (
	"bytes"
	"encoding/json"
	"math"
	"net/http"
	"strconv"
	"sync"
	"time"

	"sockeye/internal/api"
	"sockeye/internal/chart"
	"sockeye/internal/fault"
)

const (
	// sparkFrames is the number of frames of a sparkline.
	sparkFrames = 120
	// sparkGap is the time between two frames after which the sparklines begin anew.
	sparkGap = 5 * time.Second
	// tileColumns is the number of devices in a row of the devices of a slot.
	tileColumns = 48
	// tileLevels is the number of colours of devices: by their rate, and the last one for devices with a problem.
	tileLevels = 8
)

// hub encodes the frames for all browsers.
type hub struct {
	source Source

	mu       sync.Mutex
	watchers int
	stop     func()
	frame    *api.Frame // that message encodes
	message  []byte
	sparks   map[sparkKey][]float64 // datagrams and kilobytes per second
}

type sparkKey struct {
	service string
	slot    int
}

// live streams the frames as server-sent events. A slow browser skips frames.
func (s *Server) live(w http.ResponseWriter, r *http.Request) {
	release, ok := s.admit(w, r)
	if !ok {
		return
	}
	defer release()
	if err := s.hub.join(); err != nil {
		http.Error(w, fault.Message(err), http.StatusServiceUnavailable)
		return
	}
	defer s.hub.removeWatcher()
	out := &deadlineWriter{w, http.NewResponseController(w)}
	if out.SetReadDeadline(time.Time{}) != nil {
		return
	}
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("X-Accel-Buffering", "no") // a proxy that buffers would delay the frames
	if _, err := out.Write([]byte("retry: 2000\n\n")); err != nil || out.FlushError() != nil {
		return
	}
	for {
		frame, changed := s.source.Frame()
		if frame != nil {
			if _, err := out.Write(s.hub.encoded(frame)); err != nil || out.FlushError() != nil {
				return // the browser has disconnected, or does not read
			}
		}
		select {
		case <-r.Context().Done():
			return
		case <-changed:
		}
	}
}

// join counts a browser until leave. The hub is one watcher of the source.
func (h *hub) join() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.watchers == 0 {
		stop, err := h.source.Watch()
		if err != nil {
			return err
		}
		h.stop = stop
	}
	h.watchers++
	return nil
}

func (h *hub) removeWatcher() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.watchers--; h.watchers == 0 {
		h.stop()
	}
}

// message is a frame as the page gets it.
type message struct {
	Time     time.Time        `json:"time"`
	Problem  string           `json:"problem,omitempty"`
	Services []service        `json:"services"`
	Groups   []api.LiveGroup  `json:"groups"`
	Stuck    []api.LiveSocket `json:"stuck"`
	Fleet    *api.FleetStatus `json:"fleet,omitempty"`
}

type service struct {
	Name        string              `json:"name"`
	Problem     string              `json:"problem,omitempty"`
	Split       int                 `json:"split"`
	Refused     float64             `json:"refused_per_second"`
	Omitted     int                 `json:"omitted"`
	Waiting     []api.WaitingStatus `json:"waiting,omitempty"`
	NotAdmitted []api.RefusedStatus `json:"refused,omitempty"`
	Slots       []slot              `json:"slots"`
	Devices     json.RawMessage     `json:"devices"` // see encodeDevices
}

type slot struct {
	api.LiveSlot
	Spark string   `json:"spark"` // path, see chart.Spark
	Tiles []string `json:"tiles"` // paths, see chart.Cells: the devices of the slot in their order, tileColumns in a row
	Rows  int      `json:"rows"`  // of the tiles
}

// encoded returns the message with a frame.
func (h *hub) encoded(frame *api.Frame) []byte {
	h.mu.Lock()
	defer h.mu.Unlock()
	if frame == h.frame {
		return h.message
	}
	if h.frame != nil && frame.Time.Before(h.frame.Time) {
		return h.message // another browser was faster
	}
	if h.frame == nil || frame.Time.Sub(h.frame.Time) > sparkGap {
		h.sparks = make(map[sparkKey][]float64)
	}
	h.frame, h.message = frame, h.encode(frame)
	return h.message
}

// encode returns the message of server-sent events with a frame. The caller holds h.mu.
func (h *hub) encode(frame *api.Frame) []byte {
	m := message{Time: frame.Time, Problem: frame.Problem, Groups: frame.Groups, Stuck: frame.Stuck, Fleet: frame.Fleet, Services: []service{}}
	sparks := make(map[sparkKey][]float64)
	for i := range frame.Services {
		s := &frame.Services[i]
		one := service{Name: s.Name, Problem: s.Problem, Split: s.Split, Refused: s.Refused, Omitted: s.Omitted,
			Waiting: s.Waiting, NotAdmitted: s.NotAdmitted, Slots: []slot{}, Devices: encodeDevices(s.Devices)}
		tiles := newTiles(s)
		for _, v := range s.Slots {
			key := sparkKey{s.Name, v.Slot}
			values := append(h.sparks[key], v.Datagrams+v.Bytes/1000)
			values = values[max(0, len(values)-sparkFrames):]
			sparks[key] = values
			rows := tiles[v.Slot]
			one.Slots = append(one.Slots, slot{v, chart.Spark(values), chart.Cells(rows, tileLevels), len(rows)})
		}
		m.Services = append(m.Services, one)
	}
	h.sparks = sparks // without those of slots that no longer exist
	text, err := json.Marshal(&m)
	if err != nil {
		return nil // no field can fail
	}
	return bytes.Join([][]byte{[]byte("data: "), text, []byte("\n\n")}, nil)
}

// newTiles returns the rows of tiles of each slot: a tile is a device, and its level is the logarithm of its rate.
func newTiles(s *api.LiveService) map[int][][]uint8 {
	most := 1.0
	for i := range s.Devices {
		most = max(most, s.Devices[i].Total())
	}
	tiles := make(map[int][][]uint8)
	for i := range s.Devices {
		d := &s.Devices[i]
		level := 1 + uint8(math.Log1p(d.Total())/math.Log1p(most)*(tileLevels-1.001))
		if d.Split || d.Refused > 0 {
			level = tileLevels
		}
		rows := tiles[d.Slot]
		if len(rows) == 0 || len(rows[len(rows)-1]) == tileColumns {
			rows = append(rows, make([]uint8, 0, tileColumns))
		}
		rows[len(rows)-1] = append(rows[len(rows)-1], level)
		tiles[d.Slot] = rows
	}
	return tiles
}

// Bits of the flags of a device.
const (
	devicePinned = 1 << iota
	deviceSplit
)

// encodeDevices encodes devices as arrays, because the names of the fields would be most of a message: address, device,
// slot, datagrams, bytes and refused packets per second, sessions, the time at which it was last seen in seconds, flags,
// and, if the kernel counts them, the datagrams dropped per second and since the start of the agent.
func encodeDevices(devices []api.LiveDevice) json.RawMessage {
	out := make([]byte, 0, 2+64*len(devices))
	out = append(out, '[')
	for i := range devices {
		d := &devices[i]
		if i > 0 {
			out = append(out, ',')
		}
		name := []byte(`""`)
		if d.Device != "" {
			name, _ = json.Marshal(d.Device) // text cannot fail
		}
		flags := 0
		if d.Pinned {
			flags |= devicePinned
		}
		if d.Split {
			flags |= deviceSplit
		}
		out = append(out, `["`...)
		out = d.Address.AppendTo(out)
		out = append(out, `",`...)
		out = append(out, name...)
		out = append(out, ',')
		out = strconv.AppendInt(out, int64(d.Slot), 10)
		for _, rate := range []float64{d.Datagrams, d.Bytes, d.Refused} {
			out = append(out, ',')
			out = strconv.AppendFloat(out, math.Round(rate*10)/10, 'f', -1, 64)
		}
		out = append(out, ',')
		out = strconv.AppendInt(out, int64(d.Sessions), 10)
		out = append(out, ',')
		out = strconv.AppendInt(out, d.LastSeen.Unix(), 10)
		out = append(out, ',')
		out = strconv.AppendInt(out, int64(flags), 10)
		if d.Dropped != nil {
			out = append(out, ',')
			out = strconv.AppendFloat(out, math.Round(d.Drops*10)/10, 'f', -1, 64)
			out = append(out, ',')
			out = strconv.AppendUint(out, *d.Dropped, 10)
		}
		out = append(out, ']')
	}
	return append(out, ']')
}
