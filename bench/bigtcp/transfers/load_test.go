// SPDX-License-Identifier: Apache-2.0

package transfers

import (
	"errors"
	"io"
	"net"
	"reflect"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// connection is a TCP connection on loopback; one end is a net.Conn.
func connection(t *testing.T) (fd int, other net.Conn) {
	t.Helper()
	var c net.ListenConfig
	c.SetMultipathTCP(false)
	l, err := c.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	var d net.Dialer
	d.SetMultipathTCP(false)
	conn, err := d.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	if other, err = l.Accept(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { other.Close() })
	if fd, err = detach(conn); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	return fd, other
}

// TestCorruption checks that changed data is detected: at any place before the end of the warm-up, and soon
// afterwards.
func TestCorruption(t *testing.T) {
	const message = 2000
	for _, c := range []struct {
		name   string
		warmup time.Duration
		spoil  func(n int, b []byte)
	}{
		{"a byte", time.Minute, func(_ int, b []byte) { b[message/2] ^= 1 }},
		{"the last byte", time.Minute, func(_ int, b []byte) { b[message-1] ^= 1 }},
		{"an old answer", 0, func(n int, b []byte) { b[0] = byte(n) }},
		{"a byte, once warm", 0, func(_ int, b []byte) { b[message/2] ^= 1 }},
	} {
		fd, other := connection(t)
		go func() {
			b := make([]byte, message)
			for n := 0; ; n++ {
				if _, err := io.ReadFull(other, b); err != nil {
					return
				}
				c.spoil(n, b)
				if _, err := other.Write(b); err != nil {
					return
				}
			}
		}()
		l := &load{Kind: loadRR, Message: message, Warmup: c.warmup, For: 10 * time.Second, Seed: "x"}
		if _, err := l.on(t.Context(), fd, (*end).sendRequests); !errors.Is(err, errCorrupt) {
			t.Errorf("%s: %v", c.name, err)
		}
	}
	fd, other := connection(t)
	data := content("x", streamBuffer)
	go func() {
		_, _ = other.Write(data)
		_, _ = other.Write(data[1:])
		other.Close()
	}()
	l := &load{Kind: loadStream, Warmup: time.Minute, Seed: "x"}
	if _, err := l.on(t.Context(), fd, (*end).receiveStream); !errors.Is(err, errCorrupt) {
		t.Errorf("a byte is missing: %v", err)
	}
}

// TestShort checks that a peer that closes within a message or too early is an error.
func TestShort(t *testing.T) {
	for name, send := range map[string]string{"within a message": "abc", "without one": ""} {
		fd, other := connection(t)
		go func() {
			_, _ = io.WriteString(other, send)
			_ = other.(*net.TCPConn).CloseWrite()
		}()
		l := &load{Kind: loadRR, Message: 1000, For: time.Second, Seed: "x"}
		if _, err := l.on(t.Context(), fd, (*end).sendRequests); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

func TestRows(t *testing.T) {
	var runs []Sample
	for round, factor := range []float64{2, 1.5, 3} { // the machine was slower in the last two
		speed := []float64{100, 50, 20}[round]
		runs = append(runs,
			Sample{Round: round, Load: loadRR, On: true, Min: 1, P50: 1, P90: 1, P99: 1, Rate: speed * factor, CPU: 1e-6},
			Sample{Round: round, Load: loadRR, Min: 2, P50: 2, P90: 2, P99: 2, Rate: speed, CPU: 4e-6},
			Sample{Round: round, Load: loadStream, Rate: 1e9, CPU: 1e-9},
			Sample{Round: round, Load: loadStream, On: true, Rate: 4e9, CPU: 1e-9})
	}
	got := map[string]Row{}
	for _, row := range rows(runs, 1000) {
		got[row.Name] = row
	}
	if _, ok := got["stream_packet"]; ok {
		t.Error("packets that were not counted have a row")
	}
	for _, want := range []Row{
		{"rr_min", "latency, minimum", "µs", 2, 1, 0.5, 0.5, 0.5},
		{"rr_rate", "transactions", "a second", 50, 75, 2, 1.5, 3},
		{"rr_cpu", "their CPU, both ends", "µs each", 4, 1, 0.25, 0.25, 0.25},
		{"rr_cpu_gb", "the same, of their bytes", "s/GB", 2, 0.5, 0.25, 0.25, 0.25},
		{"stream_rate", "stream", "Gbit/s", 1, 4, 4, 4, 4},
		{"stream_cpu_gb", "its CPU, both ends", "s/GB", 1, 1, 1, 1, 1},
	} {
		if !reflect.DeepEqual(rounded(got[want.Name]), want) {
			t.Errorf("%+v, want %+v", got[want.Name], want)
		}
	}
}

func rounded(r Row) Row {
	for _, v := range []*float64{&r.Off, &r.On, &r.Ratio, &r.Low, &r.High} {
		*v = float64(int(*v*1e6+0.5)) / 1e6
	}
	return r
}

// TestPieces checks that a short disturbance does not affect the result.
func TestPieces(t *testing.T) {
	var took []uint32
	for i := range 1000 {
		took = append(took, 10_000) // 1000 of 10 µs
		if i == 500 {
			took = append(took, 5_000_000)
		}
	}
	own := measured{Count: 1001, Elapsed: 15 * time.Millisecond, took: took}
	s, err := sample(loadRR, &own, &measured{Count: 1})
	if err != nil || s.Rate != 100_000 || s.P99 != 10 || s.Min != 10 || s.Max != 5000 {
		t.Errorf("%+v, %v", s, err)
	}
	n := 0
	for p := range inPieces(took, own.Elapsed) {
		n += len(p.took)
	}
	if n != len(took) {
		t.Errorf("%d of %d are in a piece", n, len(took))
	}
	own = measured{Bytes: 1, Elapsed: 1, rates: []float64{1e9, 1, 1e9, 1e9, 2e9}}
	if s, err := sample(loadStream, &own, &measured{Bytes: 1, Elapsed: 1}); err != nil || s.Rate != 8e9 {
		t.Errorf("%+v, %v", s, err)
	}
}

// TestSample checks that a run in which one end has no measurement is refused.
func TestSample(t *testing.T) {
	own := measured{Count: 3, Bytes: 6000, Elapsed: time.Second, CPU: time.Second, took: []uint32{3000, 1000, 2000}}
	good := measured{Count: 2, Bytes: 4000, Elapsed: time.Second, CPU: time.Second}
	s, err := sample(loadRR, &own, &good)
	if err != nil || s.Min != 1 || s.P50 != 2 || s.Max != 3 || s.Rate != 3 {
		t.Errorf("%+v, %v", s, err)
	}
	for _, kind := range []string{loadRR, loadStream} {
		if _, err := sample(kind, &own, &measured{}); err == nil {
			t.Errorf("%s: no error", kind)
		}
	}
}

func TestText(t *testing.T) {
	r := Result{Path: PathBridge, Kernel: "6.18", ClientCPU: 1, ServerCPU: 1, Message: 80000, Size: 185000, Rounds: 10, ForNS: 1e9, Notes: []string{"IPv4 was not measured"}, Families: []Family{{
		Family: IPv6,
		Runs:   []Sample{{Share: 0.9}, {Share: 0.97}, {Share: 1.01}},
		Rows: []Row{
			{"rr_min", "latency, minimum", "µs", 51.25, 34.1, 0.664, 0.651, 0.671},
			{"rr_rate", "transactions", "a second", 17883.4, 27482, 1.523, 1.48, 1.55},
			{"stream_cpu_gb", "its CPU, both ends", "s/GB", 0.4694, 0.191, 0.41, 0.34, 0.52},
		},
	}}}
	const want = `Two namespaces at a bridge, by a veth pair each; CPU 1 for both ends; Linux 6.18.
Requests and responses of 80000 bytes, and streams; packets of up to 65536 bytes (off) and 185000 (on), in turns.
Medians of 10 rounds of 1s; ratio of on to off, with its 95 % confidence interval.

IPv6                            off     on  ratio      interval
latency, minimum    µs         51.2   34.1   0.66  0.65 .. 0.67
transactions        a second  17883  27482   1.52  1.48 .. 1.55
its CPU, both ends  s/GB      0.469  0.191   0.41  0.34 .. 0.52

The ends had 97 % of their CPU, by the median; less than 95 % makes all uncertain but the minimum and CPU.
IPv4 was not measured`
	if got := strings.Join(r.Text(), "\n"); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}
