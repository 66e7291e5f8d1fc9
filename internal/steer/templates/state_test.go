// SPDX-License-Identifier: Apache-2.0

package templates

import (
	"bytes"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"net/netip"
	"reflect"
	"strings"
	"testing"
	"time"
)

func saved(t testing.TB, s *Store) []byte {
	t.Helper()
	var b bytes.Buffer
	if err := s.Save(&b); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// example returns a Store with proven and unproven devices.
func example(t testing.TB) *Store {
	s := NewStore(Limits{}, func(addr netip.Addr) bool { return addr.Is4() })
	learn(t, s, another, ipfix(1, 5, setOf(2, flow(256, 3), flow(700, 1)), setOf(3, ipfixOptions)), start)
	learn(t, s, another, v9(1, 5, 77, setOf(0, flow(256, 3)), setOf(1, v9Options, padding)), start.Add(time.Minute))
	learn(t, s, router, ipfix(1, 5, setOf(2, flow(256, 3))), start.Add(2*time.Minute))
	learn(t, s, forged(1), ipfix(1, 5, setOf(2, flow(256, 3))), start.Add(3*time.Minute))
	learn(t, s, another, ipfix(1, 5, setOf(2, flow(256, 3))), start.Add(time.Hour))
	s.Replayed(router.Addr(), 0, start.Add(time.Hour))
	return s
}

func TestSaveAndLoad(t *testing.T) {
	s := example(t)
	state := saved(t, s)
	loaded := NewStore(Limits{}, nil)
	learn(t, loaded, forged(2), ipfix(1, 5, setOf(2, flow(256, 3))), start) // goes
	now := start.Add(2 * time.Hour)
	if err := loaded.Load(bytes.NewReader(state), now); err != nil {
		t.Fatal(err)
	}
	check(t, loaded)
	if got, want := listed(loaded), listed(s); !reflect.DeepEqual(got, want) {
		t.Fatalf("loaded\n%+v, want\n%+v", got, want)
	}
	if !bytes.Equal(saved(t, loaded), state) {
		t.Fatal("the second state differs from the first")
	}
	for _, addr := range []netip.Addr{router.Addr(), another.Addr()} {
		if !reflect.DeepEqual(loaded.Replay(addr, now, 0, nil), s.Replay(addr, now, 0, nil)) {
			t.Fatalf("the replays of %s differ", addr)
		}
	}
	if loaded.Stats().ProvenSources != 1 {
		t.Fatalf("%+v", loaded.Stats())
	}

	// Four templates were not refreshed when the lifetime of the others began.
	if err := loaded.Load(bytes.NewReader(state), start.Add(DefaultLifetime+30*time.Minute)); err != nil {
		t.Fatal(err)
	}
	check(t, loaded)
	expect(t, loaded, "[2001:db8::1]:50000/1 256")

	// A clock that was ahead when the state was saved.
	before := start.Add(-time.Hour)
	if err := loaded.Load(bytes.NewReader(state), before); err != nil {
		t.Fatal(err)
	}
	for _, template := range listed(loaded) {
		if template.Refreshed.After(before) || template.Learned.After(before) || template.Replayed.After(before) {
			t.Fatalf("%+v", template)
		}
	}
	if err := loaded.Load(bytes.NewReader(saved(t, NewStore(Limits{}, nil))), now); err != nil || len(listed(loaded)) != 0 {
		t.Fatalf("an empty state: %v", err)
	}
}

func TestLoadObeysLimits(t *testing.T) {
	s := NewStore(Limits{}, nil)
	for i := range 50 {
		learn(t, s, forged(i), ipfix(1, 5, setOf(2, flow(256, 3), flow(257, 20))), start)
	}
	state := saved(t, s)
	for _, limits := range []Limits{{TotalBytes: 20000}, {DeviceBytes: 600}, {TotalBytes: 20000, ReservedBytes: 1}} {
		loaded := NewStore(limits, nil)
		if err := loaded.Load(bytes.NewReader(state), start); err != nil {
			t.Fatal(err)
		}
		check(t, loaded)
		if stats := loaded.Stats(); stats.RefusedDevice+stats.RefusedTotal == 0 || stats.Templates == 0 {
			t.Fatalf("%+v", stats)
		}
	}
	err := NewStore(Limits{TotalBytes: 1000}, nil).Load(bytes.NewReader(state), start)
	if err == nil || !strings.Contains(err.Error(), "more than") {
		t.Fatalf("error %v", err)
	}
}

func TestLoadDamaged(t *testing.T) {
	s := example(t)
	state := saved(t, s)
	refused := func(what string, damaged []byte, at int) {
		t.Helper()
		revision := s.Revision()
		if err := s.Load(bytes.NewReader(damaged), start); err == nil {
			t.Errorf("%s %d was loaded", what, at)
		}
		if s.Revision() != revision || !bytes.Equal(saved(t, s), state) {
			t.Fatalf("%s %d has changed the Store", what, at)
		}
	}
	whole := map[int]bool{} // ends of devices
	end := len(stateHeader)
	for element := s.unprovenOrder.Front(); element != nil; element = element.Next() {
		end += len(element.Value.(*device).append(nil))
		whole[end] = true
	}
	for i := range state {
		refused("cut at byte", state[:i], i)
		damaged := bytes.Clone(state)
		damaged[i] ^= 1
		refused("a flipped bit in byte", damaged, i)
		if i > len(stateHeader) && i < len(state)-stateSum && !whole[i] {
			refused("with a right checksum, cut at byte", summed(state[len(stateHeader):i]), i)
		}
	}
	body := state[len(stateHeader) : len(state)-stateSum]
	refused("a device twice", summed(join(body, body)), 0)
	for _, test := range []struct {
		at    int // in the first device
		value byte
	}{{18, 0}, {18, 200}, {26, 5}} { // no session, too many sessions, the version
		damaged := bytes.Clone(body)
		damaged[test.at] = test.value
		refused("a changed byte", summed(damaged), test.at)
	}
	if err := s.Load(failing{}, start); !errors.Is(err, errFailing) {
		t.Errorf("error %v", err)
	}
	if err := s.Save(failing{}); !errors.Is(err, errFailing) {
		t.Errorf("error %v", err)
	}
}

// summed returns a state with a body and the right checksum.
func summed(body []byte) []byte {
	state := join([]byte(stateHeader), body)
	return binary.BigEndian.AppendUint32(state, crc32.Checksum(state, castagnoli))
}

var errFailing = errors.New("failing")

type failing struct{}

func (failing) Read([]byte) (int, error)  { return 0, errFailing }
func (failing) Write([]byte) (int, error) { return 0, errFailing }
