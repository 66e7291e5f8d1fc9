// SPDX-License-Identifier: Apache-2.0

package swarm

import (
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/lab/traffic"
)

// ms is a time in milliseconds.
func ms(n int) time.Duration { return time.Duration(n) * time.Millisecond }

// observed is a record and who wrote it.
type observed struct {
	from int
	Record
}

func at(from, n int, kind Kind, port uint16) observed {
	return observed{from, Record{At: ms(n), Device: 7, Port: port, Kind: kind}}
}

// sent are the datagrams that a member received every 10 ms, from one instant to before another.
func sent(to, from, end int) (all []observed) {
	for n := from; n < end; n += 10 {
		all = append(all, at(to, n, Datagram, 40000))
	}
	return all
}

// moved returns the records of a device that moves from member 0 to member 1 at 100 ms: its datagrams reach member 1
// from then on, and its connection is closed after a delay, if at all.
func moved(delay int) []observed {
	all := []observed{at(FromDevices, 0, Connected, 10000), at(0, 1, Accepted, 10000), at(0, 3, Dumped, 10000)}
	all = append(all, sent(0, 10, 100)...)
	all = append(all, sent(1, 100, 500)...)
	if delay > 0 {
		all = append(all, at(FromDevices, 100+delay, Closed, 10000), at(0, 100+delay+30, Closed, 10000),
			at(FromDevices, 100+delay+1, Connected, 10001), at(1, 100+delay+2, Accepted, 10001), at(1, 100+delay+5, Dumped, 10001))
	}
	return all
}

func analyse(t *testing.T, records []observed, options ...func(*Analysis)) *Analysis {
	t.Helper()
	a := &Analysis{}
	for _, o := range options {
		o(a)
	}
	// The order of records does not matter, nor in how many steps they are judged.
	rand.Shuffle(len(records), func(i, j int) { records[i], records[j] = records[j], records[i] })
	for _, r := range records {
		a.Add(r.from, []Record{r.Record})
	}
	for n := 0; n < 600; n += 1 + rand.IntN(200) {
		a.Judge(ms(n))
	}
	a.Finish()
	return a
}

func TestAnalysis(t *testing.T) {
	split := func(from, to, count int) []Split {
		return []Split{{Device: 7, Interval: Interval{ms(from), ms(to)}, Datagrams: 1, Connection: 0, Count: count}}
	}
	returned := append(moved(0), sent(0, 500, 600)...)
	returned = append(returned, at(FromDevices, 650, Closed, 10000))
	restarted := []observed{at(FromDevices, 0, Connected, 10000), at(0, 1, Accepted, 10000), at(0, 3, Dumped, 10000)}
	restarted = append(restarted, sent(0, 10, 100)...)
	refused, reset := at(FromDevices, 101, Refused, 10001), at(FromDevices, 102, Refused, 10001)
	refused.Value, reset.Value = uint32(unix.ECONNREFUSED), uint32(unix.ECONNRESET)
	restarted = append(restarted, at(FromDevices, 100, Closed, 10000), refused, reset)
	closed := slices.Clone(restarted)
	restarted = append(restarted, at(FromDevices, 160, Connected, 10002), at(2, 161, Accepted, 10002), at(2, 163, Dumped, 10002))
	restarted = append(restarted, sent(2, 170, 200)...)
	closed = append(closed, at(FromDevices, 120, Connected, 10002), at(0, 121, Accepted, 10002), at(0, 128, Dumped, 10002))
	closed = append(closed, sent(0, 121, 150)...) // the first one precedes the dump
	for name, c := range map[string]struct {
		records []observed
		want    Result
	}{
		"the connection is closed at once": {moved(4), Result{
			Received: 49, WithoutRoutes: 1, Opened: 2, Closed: 1, Splits: split(100, 104, 1), Gaps: []Gap{{7, Interval{ms(104), ms(105)}}}}},
		"the connection is closed late": {moved(225), Result{
			Received: 49, WithoutRoutes: 23, Opened: 2, Closed: 1, Splits: split(100, 325, 23), Gaps: []Gap{{7, Interval{ms(325), ms(326)}}}}},
		"the connection is never closed": {moved(0), Result{
			Received: 49, WithoutRoutes: 40, Opened: 1, Splits: split(100, 490, 40)}},
		"the datagrams return": {returned, Result{
			Received: 59, WithoutRoutes: 40, Opened: 1, Closed: 1, Splits: split(100, 490, 40), Gaps: nil}},
		"the member restarts": {restarted, Result{
			Received: 12, Opened: 2, Closed: 1, Refused: 1, Gaps: []Gap{{7, Interval{ms(100), ms(160)}}}}},
		"the connection is closed needlessly": {closed, Result{
			Received: 12, WithoutRoutes: 1, Opened: 2, Closed: 1, Refused: 1,
			Needless: []Closing{{7, ms(100), 0}}, Gaps: []Gap{{7, Interval{ms(100), ms(120)}}}}},
	} {
		a := analyse(t, c.records)
		if !reflect.DeepEqual(a.Result, c.want) {
			t.Errorf("%s:\n%+v, want\n%+v", name, a.Result, c.want)
		}
		explained := 0
		for _, u := range a.Unrouted() {
			explained += u.Count
		}
		if uint64(explained) != c.want.WithoutRoutes {
			t.Errorf("%s: %v explains %d datagrams without routes, want %d", name, a.Unrouted(), explained, c.want.WithoutRoutes)
		}
	}
}

// TestMovedTwice checks that a connection is not closed needlessly if the device was elsewhere in between.
func TestMovedTwice(t *testing.T) {
	records := append(moved(4), at(FromDevices, 500, Closed, 10001), at(FromDevices, 520, Connected, 10002), at(1, 521, Accepted, 10002))
	if got := analyse(t, slices.Clone(records)); len(got.Needless) != 1 {
		t.Errorf("%+v", got.Needless)
	}
	if got := analyse(t, append(records, sent(0, 510, 511)...)); len(got.Needless) != 0 {
		t.Errorf("%+v", got.Needless)
	}
}

// TestClosedEarlier checks that a connection is closed when one end has noticed, and finds the datagrams that reach the other member before the
// device has noticed.
func TestClosedEarlier(t *testing.T) {
	for first, overtook := range map[int]int{FromDevices: 0, 0: 38} {
		records := moved(0)
		for _, end := range []int{FromDevices, 0} {
			n := 490
			if end == first {
				n = 102
			}
			records = append(records, at(end, n, Closed, 10000))
		}
		got := analyse(t, records)
		if devices, longest := got.SplitDevices(0); devices != 1 || longest != ms(2) {
			t.Errorf("%d devices, %v", devices, longest)
		}
		if len(got.Overtook) != overtook || overtook > 0 && got.Overtook[0].Length() != ms(380) {
			t.Errorf("first %d: overtook %+v", first, got.Overtook)
		}
	}
}

// TestCountedTime checks that events before Begin and after End are not counted.
func TestCountedTime(t *testing.T) {
	between := func(from, to int) func(*Analysis) {
		return func(a *Analysis) { a.Begin, a.End = ms(from), ms(to) }
	}
	a := analyse(t, moved(225), between(200, 300))
	if want := (Split{Device: 7, Interval: Interval{ms(200), ms(300)}, Datagrams: 1, Count: 11}); !reflect.DeepEqual(a.Splits, []Split{want}) {
		t.Errorf("%v", a.Splits)
	}
	if a.Received != 11 || a.WithoutRoutes != 11 || a.Opened != 0 || a.Closed != 0 || len(a.Gaps) != 0 {
		t.Errorf("%+v", a.Result)
	}
	if a := analyse(t, moved(225), between(400, 450)); len(a.Splits) != 0 || a.Received != 6 || a.WithoutRoutes != 0 {
		t.Errorf("%+v", a.Result)
	}
	if a := analyse(t, []observed{at(FromDevices, 0, Connected, 10000), at(0, 1, Accepted, 10000), at(0, 30, Closed, 10000)}, between(10, 50)); a.LongestGap() != ms(20) {
		t.Errorf("%+v", a.Gaps)
	}
}

// TestOpen checks the splits that have not ended.
func TestOpen(t *testing.T) {
	a := &Analysis{}
	for _, r := range moved(0) {
		a.Add(r.from, []Record{r.Record})
	}
	a.Judge(ms(90))
	if open := a.Open(); len(open) != 0 {
		t.Errorf("%v", open)
	}
	a.Judge(ms(300))
	if open := a.Open(); len(open) != 1 || open[0].Length() != ms(200) {
		t.Errorf("%v", open)
	}
}

// TestTwoPorts checks that a split lasts while the datagrams of one port are at another member.
func TestTwoPorts(t *testing.T) {
	records := moved(0) // from 100 ms, port 40000 sends to another member
	for n := 105; n < 490; n += 10 {
		records = append(records, at(0, n, Datagram, 40001))
	}
	a := analyse(t, records)
	if devices, longest := a.SplitDevices(0); len(a.Splits) != 1 || devices != 1 || longest != ms(390) {
		t.Errorf("%v", a.Splits)
	}
}

// TestSilence checks that a device is not split while no member receives its datagrams.
func TestSilence(t *testing.T) {
	silent := func(a *Analysis) { a.Silence = ms(50) }
	records := []observed{at(FromDevices, 0, Connected, 10000), at(0, 1, Accepted, 10000), at(0, 3, Dumped, 10000)}
	records = append(records, sent(1, 100, 200)...)
	closed := append(slices.Clone(records), at(FromDevices, 590, Closed, 10000))
	again := append(slices.Clone(closed), sent(1, 400, 450)...)
	for name, c := range map[string]struct {
		records []observed
		want    []time.Duration
	}{
		"closed late":  {closed, []time.Duration{ms(90 + 50)}},
		"closed soon":  {append(slices.Clone(records), at(FromDevices, 210, Closed, 10000)), []time.Duration{ms(110)}},
		"never closed": {append(slices.Clone(records), at(FromDevices, 590, Stalled, 0)), []time.Duration{ms(90 + 50)}},
		"again":        {again, []time.Duration{ms(90 + 50), ms(40 + 50)}},
	} {
		var got []time.Duration
		for _, s := range analyse(t, c.records, silent).Splits {
			got = append(got, s.To-s.From)
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
}

func TestHistory(t *testing.T) {
	a := analyse(t, moved(4))
	h := a.History(7)
	if len(h) != 49+3 || h[0] != (Seen{Accepted, 0, 0, 10000}) || h[9].Kind != Datagram || h[11].Kind != Closed {
		t.Errorf("%v", h)
	}
}

func TestLate(t *testing.T) {
	a := &Analysis{}
	add := func(records ...observed) {
		for _, r := range records {
			a.Add(r.from, []Record{r.Record})
		}
	}
	add(moved(4)...)
	a.Judge(ms(300))
	add(sent(0, 150, 160)...)
	a.Finish()
	if a.Late != 1 || a.Received != 50 || len(a.Splits) != 1 {
		t.Errorf("%+v", a.Result)
	}
}

// TestUndecodable counts the datagrams of a port whose member has not the template, and the longest time without a decoded
// one.
func TestUndecodable(t *testing.T) {
	records := append(sent(0, 10, 100), sent(1, 250, 400)...)
	for n := 100; n < 250; n += 10 {
		records = append(records, at(1, n, Undecodable, 40000))
	}
	records = append(records, at(1, 20, Undecodable, 40001), at(1, 300, Datagram, 40001))
	a := analyse(t, records, func(a *Analysis) { a.Begin, a.End = ms(5), ms(500) })
	if a.Received != 41 || a.Undecodable != 16 || a.Undecoded != (Gap{7, Interval{ms(5), ms(300)}}) {
		t.Errorf("%+v, %+v", a.Result, a.Undecoded)
	}
	a = analyse(t, sent(1, 250, 400), func(a *Analysis) { a.Begin, a.End = ms(240), ms(600) })
	if a.Undecoded != (Gap{7, Interval{ms(390), ms(600)}}) {
		t.Errorf("%+v", a.Undecoded)
	}
}

// TestMissing finds the times of datagrams that no member has received.
func TestMissing(t *testing.T) {
	a := &Analysis{Begin: ms(100), Period: ms(10)}
	for number, n := range map[uint32]int{1: 115, 2: 125, 5: 400} {
		r := at(0, n, Datagram, 40000)
		r.Value = number
		a.Add(0, []Record{r.Record})
	}
	if got, want := a.Missing(), []time.Duration{ms(110), ms(135), ms(145)}; !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	for number, n := range []int{102, 112, 122, 132, 142, 395} {
		r := at(FromDevices, n, Sent, 40000)
		r.Value = uint32(number)
		a.Add(FromDevices, []Record{r.Record})
	}
	if got, want := a.Missing(), []time.Duration{ms(102), ms(132), ms(142)}; !slices.Equal(got, want) {
		t.Errorf("with recorded times: %v, want %v", got, want)
	}
}

// TestKnowledge checks which messages a member can decode.
func TestKnowledge(t *testing.T) {
	one, other := netip.MustParseAddrPort("[fd80::1]:1000"), netip.MustParseAddrPort("[fd80::1]:1001")
	now := time.Now()
	flow := traffic.Flow{Src: netip.MustParseAddr("192.0.2.1"), Dst: netip.MustParseAddr("192.0.2.2"), Packets: 1, Octets: 1}
	templates, records := traffic.AppendTemplates(nil, now, 0, 3), traffic.AppendData(nil, now, 0, 3, []traffic.Flow{flow})
	k := knowledge{}
	for i, c := range []struct {
		from            netip.AddrPort
		message         []byte
		data, decodable bool
	}{
		{one, records, true, false},
		{one, templates, false, true},
		{one, records, true, true},
		{other, records, true, false},
		{one, traffic.AppendData(nil, now, 0, 4, []traffic.Flow{flow}), true, false},
	} {
		if data, decodable, err := k.message(c.from, c.message); data != c.data || decodable != c.decodable || err != nil {
			t.Errorf("%d: %v, %v, %v", i, data, decodable, err)
		}
	}
	for n := range templates {
		if _, _, err := k.message(one, templates[:n]); err == nil && n != ipfixHeaderLen {
			t.Errorf("%d of %d bytes are no error", n, len(templates))
		}
	}
}

func TestLength(t *testing.T) {
	i := Interval{ms(100), ms(200)}
	for _, c := range []struct {
		without []Interval
		want    int
	}{
		{nil, 100},
		{[]Interval{{ms(0), ms(100)}, {ms(200), ms(300)}}, 100},
		{[]Interval{{ms(150), ms(160)}}, 90},
		{[]Interval{{ms(190), ms(300)}, {ms(50), ms(110)}}, 80},
		{[]Interval{{ms(120), ms(150)}, {ms(110), ms(130)}, {ms(125), ms(128)}}, 60},
		{[]Interval{{ms(0), ms(300)}, {ms(120), ms(150)}}, 0},
	} {
		if got := i.Length(c.without...); got != ms(c.want) {
			t.Errorf("without %v: %v, want %v", c.without, got, ms(c.want))
		}
	}
}

func TestAddress(t *testing.T) {
	for i := range MaxDevices {
		if got, ok := Device(Address(i)); got != i || !ok {
			t.Fatalf("%v: %d, %t, want %d", Address(i), got, ok, i)
		}
	}
}

func TestRecords(t *testing.T) {
	path := filepath.Join(t.TempDir(), "records")
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR|os.O_APPEND, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	want := []Record{{ms(5), 1, 2, 3, Datagram}, {ms(1 << 40), 1 << 31, 1<<32 - 1, 1<<16 - 1, Stalled}}
	if err := (recorder{f}).note(want...); err != nil {
		t.Fatal(err)
	}
	if _, err := f.Write(make([]byte, recordLen-1)); err != nil { // an incomplete record
		t.Fatal(err)
	}
	got, next, err := readRecords(f, 0)
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("%+v, %v", got, err)
	}
	if got, again, err := readRecords(f, next); err != nil || len(got) != 0 || again != next {
		t.Errorf("%+v, %d, %v", got, again, err)
	}
}
