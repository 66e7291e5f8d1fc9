// SPDX-License-Identifier: Apache-2.0

package traffic

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"sockeye/internal/placement"
	"sockeye/internal/statedir"
)

// The table of devices in the kernel does not outlive a reboot, and forgets devices that are silent when it is full. The
// agent therefore learns the devices of a service: those of the device map that have sent, those with a connection, and
// those that have sent datagrams for learnTime. The sources of a flood are forged and change, so they are not learned.

const (
	// mostLearned is the number of learned devices of a service.
	mostLearned = 65536
	// learnTime is the time for which a device without a connection and without a name must send datagrams.
	learnTime = 10 * time.Minute
	// forgetTime is the time after which a silent device is forgotten.
	forgetTime = 30 * 24 * time.Hour
	// saveNewTime and saveTime are the minimum times between two saves: with new devices, and with new times only.
	saveNewTime, saveTime = time.Minute, time.Hour
)

// learnedDevice has the times of the last connection and of the last datagram of a device, in seconds since 1970; 0: never.
type learnedDevice struct{ tcp, udp uint32 }

// learned are the learned devices of a service. The zero value has none.
type learned struct {
	devices map[deviceKey]learnedDevice
	fresh   bool      // a device was added or forgotten since the last save
	saved   time.Time // or loaded
}

// update learns from the present streams. key names the device of an address.
func (l *learned) update(now *streams, key func(netip.Addr) deviceKey) {
	if l.devices == nil {
		l.devices = make(map[deviceKey]learnedDevice)
	}
	seconds := uint32(now.at.Unix())
	for device := range now.connected {
		one := l.devices[device]
		one.tcp = seconds
		l.note(device, one)
	}
	for address, last := range now.last {
		device := key(placement.Addr(address))
		one, known := l.devices[device]
		if !known && device.name == "" && (!last.recent(now.at) || seconds-last.since < uint32(learnTime.Seconds())) {
			continue
		}
		one.udp = max(one.udp, last.at)
		l.note(device, one)
	}
	for device, one := range l.devices {
		if now.at.Sub(unixTime(max(one.tcp, one.udp))) > forgetTime {
			delete(l.devices, device)
			l.fresh = true
		}
	}
}

// note records the times of a device. A new device is not recorded if there are too many.
func (l *learned) note(device deviceKey, times learnedDevice) {
	if _, known := l.devices[device]; !known {
		if len(l.devices) >= mostLearned {
			return
		}
		l.fresh = true
	}
	l.devices[device] = times
}

// sending returns the learned or named devices that send datagrams.
func (t *streams) sending(key func(netip.Addr) deviceKey, learned map[deviceKey]learnedDevice) map[deviceKey]bool {
	devices := make(map[deviceKey]bool)
	for address, last := range t.last {
		if !last.recent(t.at) {
			continue
		}
		device := key(placement.Addr(address))
		if _, known := learned[device]; known || device.name != "" {
			devices[device] = true
		}
	}
	return devices
}

// storedDevice is a learned device in the state directory.
type storedDevice struct {
	Name    string     `json:"name,omitempty"`
	Address netip.Addr `json:"address,omitzero"`
	TCP     uint32     `json:"tcp,omitempty"`
	UDP     uint32     `json:"udp,omitempty"`
}

// load reads the learned devices of an earlier agent. A file that does not exist has none.
func (l *learned) load(path string) error {
	data, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	var list []storedDevice
	if err := json.Unmarshal(data, &list); err != nil {
		return fmt.Errorf("read %s: %w", path, err)
	}
	l.devices, l.saved = make(map[deviceKey]learnedDevice), time.Now()
	for _, one := range list[:min(len(list), mostLearned)] {
		if one.Name != "" || one.Address.IsValid() {
			l.devices[deviceKey{one.Name, one.Address}] = learnedDevice{one.TCP, one.UDP}
		}
	}
	return nil
}

func (t *Traffic) learnedPath() string { return filepath.Join(t.Host.StateDir, t.Name+".devices") }

// saveLearned saves the learned devices if they are due.
func (t *Traffic) saveLearned() {
	if t.learned.due(time.Now()) {
		t.writeLearned()
	}
}

// due reports whether the devices should be saved.
func (l *learned) due(now time.Time) bool {
	past := now.Sub(l.saved)
	return l.fresh && past >= saveNewTime || len(l.devices) > 0 && past >= saveTime
}

func (t *Traffic) writeLearned() {
	if err := t.learned.save(t.learnedPath()); err != nil {
		t.Log.Warn("learned devices not saved", "error", err)
	}
}

// save writes the learned devices.
func (l *learned) save(path string) error {
	list := make([]storedDevice, 0, len(l.devices))
	for device, one := range l.devices {
		list = append(list, storedDevice{device.name, device.address, one.tcp, one.udp})
	}
	data, err := json.Marshal(list)
	if err != nil {
		return err
	}
	l.fresh, l.saved = false, time.Now() // also after a failure: a full disk must not be tried all the time
	return statedir.Write(path, data)
}

// Learn updates the learned devices and the drops of members, unless the last updates are recent. The caller holds the
// lock.
func (t *Traffic) Learn() error {
	if err := t.CheckOpen(); err != nil {
		return err
	}
	t.noteDrops(time.Now())
	return t.updateStreams(streamsInterval)
}
