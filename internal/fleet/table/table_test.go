// SPDX-License-Identifier: Apache-2.0

package table

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// example is a table with hosts of the given names and weights, and one bucket in each phase of a move.
func example(t testing.TB, weights map[string]uint32) *Table {
	t.Helper()
	table := &Table{Epoch: 7, Nonce: math.MaxUint64}
	var r Ranking
	for name, weight := range weights {
		r.Set(name, weight)
		table.Hosts = append(table.Hosts, Host{Name: name, Weight: weight, Addresses: []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")}, MACs: []string{"02:00:00:00:00:01"}})
	}
	slices.SortFunc(table.Hosts, func(a, b Host) int { return strings.Compare(a.Name, b.Name) })
	table.Owner = *r.Column(table.Index)
	for b := range Buckets {
		table.Previous[b], table.Next[b] = None, None
	}
	table.Previous[1] = (table.Owner[1] + 1) % uint16(len(table.Hosts))
	table.Next[2] = (table.Owner[2] + 1) % uint16(len(table.Hosts))
	table.Owner[3] = None
	return table
}

func TestCodec(t *testing.T) {
	table := example(t, map[string]uint32{"a": 1, "b.example": 10, "c-1": 1000})
	data, err := table.Encode()
	if err != nil {
		t.Fatal(err)
	}
	got, err := Decode(data)
	if err != nil {
		t.Fatal(err)
	}
	again, err := got.Encode()
	if err != nil || !bytes.Equal(again, data) || got.Owner != table.Owner || got.Previous != table.Previous || got.Next != table.Next || got.Nonce != table.Nonce || !slices.EqualFunc(got.Hosts, table.Hosts, func(a, b Host) bool {
		return a.Name == b.Name && a.Weight == b.Weight && slices.Equal(a.Addresses, b.Addresses) && slices.Equal(a.MACs, b.MACs)
	}) {
		t.Errorf("decoded: %+v, %v", got.Hosts, err)
	}
	if got.Moving() != 2 {
		t.Errorf("%d buckets move, want 2", got.Moving())
	}
	total := 0
	for _, n := range got.Shares() {
		total += n
	}
	if total != Buckets-1 {
		t.Errorf("the shares are %v", got.Shares())
	}
}

// TestLargest checks that the largest table fits in a request of etcd.
func TestLargest(t *testing.T) {
	table := &Table{Epoch: MostEpoch, Nonce: math.MaxUint64}
	for i := range MostHosts {
		table.Hosts = append(table.Hosts, Host{Name: fmt.Sprintf("collector-%05d.pop.example.net", i), Weight: MostWeight,
			Addresses: []netip.Addr{netip.AddrFrom4([4]byte{203, 0, byte(i >> 8), byte(i)}), netip.MustParseAddr(fmt.Sprintf("2001:db8:1234:5678:9abc:def0:1234:%x", i))},
			MACs:      []string{"02:00:00:00:00:01", "02:00:00:00:00:02"}})
	}
	for b := range Buckets {
		table.Owner[b], table.Previous[b], table.Next[b] = uint16(b*7919%MostHosts), uint16((b*7919+1+b%977)%MostHosts), None
		if table.Previous[b] == table.Owner[b] {
			table.Previous[b] = None
		}
	}
	if err := table.Check(); err != nil {
		t.Fatal(err)
	}
	data, err := table.Encode()
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%d bytes", len(data))
}

func TestDecodeRefuses(t *testing.T) {
	valid := func(change func(*Table)) []byte {
		table := example(t, map[string]uint32{"a": 1, "b": 1, "c": 1})
		change(table)
		data, err := table.Encode()
		if err != nil {
			t.Fatal(err)
		}
		return data
	}
	raw := func(change func(*encoded)) []byte {
		var e encoded
		if err := json.Unmarshal(valid(func(*Table) {}), &e); err != nil {
			t.Fatal(err)
		}
		change(&e)
		data, err := json.Marshal(e)
		if err != nil {
			t.Fatal(err)
		}
		return data
	}
	addresses := func(list ...string) []byte {
		return valid(func(t *Table) {
			t.Hosts[0].Addresses = nil
			for _, a := range list {
				t.Hosts[0].Addresses = append(t.Hosts[0].Addresses, netip.MustParseAddr(a))
			}
		})
	}
	for name, c := range map[string]struct {
		data []byte
		want string
	}{
		"nothing":          {nil, "decode table"},
		"rubbish":          {[]byte("\x00\x01rubbish"), "decode table"},
		"another document": {[]byte(`{"format":2}`), "its format is 2"},
		"too long":         {bytes.Repeat([]byte(" "), MostEncoded+1), "at most"},
		"no columns":       {raw(func(e *encoded) { e.Columns = nil }), "columns"},
		"cut columns":      {raw(func(e *encoded) { e.Columns = e.Columns[:len(e.Columns)/2] }), "columns"},
		"damaged columns":  {raw(func(e *encoded) { e.Columns = bytes.Repeat([]byte{0xff}, 100) }), "columns"},
		"epoch 0":          {valid(func(t *Table) { t.Epoch = 0 }), "the epoch is 0"},
		"epoch":            {valid(func(t *Table) { t.Epoch = math.MaxUint64 }), "not 1 to"},
		"no hosts":         {valid(func(t *Table) { t.Hosts = nil }), "0 hosts"},
		"unknown host":     {valid(func(t *Table) { t.Owner[5] = 3 }), "host 3 of 3"},
		"unknown next":     {valid(func(t *Table) { t.Next[5] = 9 }), "host 9 of 3"},
		"same name":        {valid(func(t *Table) { t.Hosts[1].Name = "a" }), "occurs twice"},
		"order":            {valid(func(t *Table) { t.Hosts[0], t.Hosts[1] = t.Hosts[1], t.Hosts[0] }), "are not sorted"},
		"no name":          {valid(func(t *Table) { t.Hosts[0].Name = "" }), "a name of 0 bytes"},
		"terminal":         {valid(func(t *Table) { t.Hosts[0].Name = "a\x1b[2J" }), "may contain only letters"},
		"weight 0":         {valid(func(t *Table) { t.Hosts[0].Weight = 0 }), "weight 0"},
		"weight":           {valid(func(t *Table) { t.Hosts[0].Weight = MostWeight + 1 }), "weight 1001"},
		"moves twice":      {valid(func(t *Table) { t.Next[1] = (t.Owner[1] + 2) % 3 }), "moves twice"},
		"to itself":        {valid(func(t *Table) { t.Next[5] = t.Owner[5] }), "to the same host"},
		"without an owner": {valid(func(t *Table) { t.Next[3] = 0 }), "has no owner"},
		"loopback":         {addresses("127.0.0.1"), "cannot be reached"},
		"mapped":           {addresses("::ffff:192.0.2.1"), "cannot be reached"},
		"any":              {addresses("::"), "cannot be reached"},
		"multicast":        {addresses("ff02::1"), "cannot be reached"},
		"zone":             {addresses("fe80::1%eth0"), "cannot be reached"},
		"two of a family":  {addresses("192.0.2.1", "192.0.2.2"), "two addresses"},
	} {
		if _, err := Decode(c.data); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
	}
}

// TestRanking changes hosts at random, and compares each result with a ranking of the same hosts from the beginning. A
// change moves no bucket but those of the host.
func TestRanking(t *testing.T) {
	var r Ranking
	weights := map[string]uint32{}
	before := r.Column(func(string) uint16 { return 0 })
	index := func(name string) uint16 {
		n, err := strconv.Atoi(strings.TrimPrefix(name, "host-"))
		if err != nil {
			t.Fatal(err)
		}
		return uint16(n)
	}
	for i := range 70 {
		host := (i*i + i/3) % 7
		name, weight := fmt.Sprintf("host-%d", host), uint32(i%4)*uint32(1+i%7)
		raised := weight > weights[name]
		if changed := r.Set(name, weight); changed != (weights[name] != weight) {
			t.Fatalf("change %d of %s from %d to %d: %t", i, name, weights[name], weight, changed)
		}
		if weights[name] = weight; weight == 0 {
			delete(weights, name)
		}
		var fresh Ranking
		for name, weight := range weights {
			fresh.Set(name, weight)
		}
		now := r.Column(index)
		if *now != *fresh.Column(index) || r.Hosts() != len(weights) {
			t.Fatalf("after change %d, %s with weight %d: another result than from the beginning", i, name, weight)
		}
		for b := range Buckets {
			if now[b] == before[b] || before[b] == None || now[b] == None {
				continue
			}
			if raised && now[b] != uint16(host) || !raised && before[b] != uint16(host) {
				t.Fatalf("change %d of %s: bucket %d moved from %d to %d", i, name, b, before[b], now[b])
			}
			if b%97 == 0 && r.Preferred(b) != fmt.Sprintf("host-%d", now[b]) {
				t.Fatalf("bucket %d: %s, want %d", b, r.Preferred(b), now[b])
			}
		}
		before = now
	}
}

// TestProportional checks that the shares are proportional to the weights.
func TestProportional(t *testing.T) {
	var r Ranking
	sum := 0.0
	for i := range 50 {
		r.Set(fmt.Sprintf("collector-%d", i), uint32(1+i%5))
		sum += float64(1 + i%5)
	}
	shares := map[string]int{}
	for b := range Buckets {
		shares[r.Preferred(b)]++
	}
	for i := range 50 {
		name, want := fmt.Sprintf("collector-%d", i), Buckets*float64(1+i%5)/sum
		if got := float64(shares[name]); math.Abs(got-want) > 4.5*math.Sqrt(want) {
			t.Errorf("%s has %v buckets, want %.0f", name, got, want)
		}
	}
}

func FuzzDecode(f *testing.F) {
	data, err := example(f, map[string]uint32{"a": 1, "b": 1, "c": 1}).Encode()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(data)
	f.Add([]byte(`{"format":1,"epoch":1,"hosts":[{"name":"a","weight":1}],"columns":""}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		table, err := Decode(data)
		if err != nil {
			return
		}
		if err := table.Check(); err != nil {
			t.Errorf("decoded, but %v", err)
		}
	})
}
