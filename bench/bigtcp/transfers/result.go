// SPDX-License-Identifier: Apache-2.0

package transfers

import (
	"errors"
	"fmt"
	"iter"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"sockeye/internal/stats"
)

// Result is the result of a benchmark.
type Result struct {
	Path      string `json:"path"`       // of Paths
	Kernel    string `json:"kernel"`     // release
	ClientCPU int    `json:"client_cpu"` // to which that end was bound
	ServerCPU int    `json:"server_cpu"`
	Message   int    `json:"message_bytes"` // of a request, and of its response
	Size      uint32 `json:"size_bytes"`    // of the largest packet while on
	// Segmentation is set if off are packets of the MTU, and on those of up to 65536 bytes.
	Segmentation bool     `json:"segmentation,omitempty"`
	Rounds       int      `json:"rounds"`
	ForNS        int64    `json:"for_ns"` // measured of each run
	Families     []Family `json:"families"`
	Notes        []string `json:"notes,omitempty"` // of what could not be measured
}

// Family is the results of one IP family.
type Family struct {
	Family string   `json:"family"` // ipv6 or ipv4
	Rows   []Row    `json:"rows"`
	Runs   []Sample `json:"runs"`
}

// Row is a figure with BIG TCP off and on.
type Row struct {
	Name  string `json:"name"` // fixed: rr_min, rr_p50, rr_p90, rr_p99, rr_rate, rr_cpu, rr_cpu_gb, rr_packets, stream_rate, stream_cpu_gb, stream_packet
	Title string `json:"title"`
	Unit  string `json:"unit"`
	// Off and On are medians of the rounds, Ratio is the median of the rounds' ratios
	// of on to off. Low and High are its 95 % confidence interval for six rounds or
	// more, and the extremes for fewer.
	Off   float64 `json:"off"`
	On    float64 `json:"on"`
	Ratio float64 `json:"ratio"`
	Low   float64 `json:"low"`
	High  float64 `json:"high"`
}

// Sample is one run.
type Sample struct {
	Round int    `json:"round"`
	Load  string `json:"load"` // rr or stream
	On    bool   `json:"on"`
	// Latencies of rr, in microseconds. Quantiles, and the rate, are medians of ten
	// parts of the run.
	Min float64 `json:"min_us,omitempty"`
	P50 float64 `json:"p50_us,omitempty"`
	P90 float64 `json:"p90_us,omitempty"`
	P99 float64 `json:"p99_us,omitempty"`
	Max float64 `json:"max_us,omitempty"`
	// Rate is transactions per second of rr, and bits per second of a stream.
	Rate float64 `json:"rate"`
	// CPU is the time of both ends, in seconds per transaction of rr or per byte of a
	// stream.
	CPU float64 `json:"cpu_s"`
	// Share is the CPU time of both ends divided by the elapsed time.
	Share float64 `json:"cpu_share"`
	// Packets of each transaction, in both directions, and the mean size of those of a
	// stream.
	Packets     float64 `json:"packets,omitempty"`
	PacketBytes float64 `json:"packet_bytes,omitempty"`
}

type piece struct {
	rate float64  // transactions a second
	took []uint32 // ns of each transaction, sorted
}

func sample(kind string, own, peer *measured) (*Sample, error) {
	s := &Sample{}
	if kind == loadStream {
		if own.Bytes == 0 || peer.Bytes == 0 || peer.Elapsed == 0 {
			return nil, errors.New("no data was transferred")
		}
		s.Rate = 8 * stats.Median(own.rates)
		s.CPU = own.CPU.Seconds()/float64(own.Bytes) + peer.CPU.Seconds()/float64(peer.Bytes)
		s.Share = s.CPU * float64(own.Bytes) / own.Elapsed.Seconds()
		return s, nil
	}
	if own.Count == 0 || peer.Count == 0 {
		return nil, errors.New("no data was transferred")
	}
	var rates, p50, p90, p99 []float64
	for piece := range inPieces(own.took, own.Elapsed) {
		rates = append(rates, piece.rate)
		if len(piece.took) > 0 {
			p50, p90, p99 = append(p50, piece.at(0.5)), append(p90, piece.at(0.9)), append(p99, piece.at(0.99))
		}
	}
	s.Rate, s.P50, s.P90, s.P99 = stats.Median(rates), stats.Median(p50), stats.Median(p90), stats.Median(p99)
	all := piece{took: own.took} // each of its pieces is sorted
	slices.Sort(all.took)
	s.Min, s.Max = all.at(0), all.at(1)
	s.CPU = own.CPU.Seconds()/float64(own.Count) + peer.CPU.Seconds()/float64(peer.Count)
	s.Share = s.CPU * float64(own.Count) / own.Elapsed.Seconds()
	return s, nil
}

// at returns a quantile in microseconds.
func (p piece) at(q float64) float64 {
	return float64(p.took[stats.Rank(len(p.took), q)]) / 1000
}

// pieces is the number of parts of a run. Figures are medians of the parts, which
// excludes short disturbances.
const pieces = 10

// inPieces splits consecutive transactions into parts of equal duration; few
// transactions are one part.
func inPieces(took []uint32, elapsed time.Duration) iter.Seq[piece] {
	count := pieces
	if len(took) < 10*pieces {
		count = 1
	}
	return func(yield func(piece) bool) {
		var now time.Duration
		for i, first := 1, 0; i <= count; i++ {
			last := first
			for limit := elapsed * time.Duration(i) / time.Duration(count); last < len(took) && (now < limit || i == count); last++ {
				now += time.Duration(took[last])
			}
			p := piece{float64(last-first) / (elapsed.Seconds() / float64(count)), took[first:last]}
			slices.Sort(p.took)
			if !yield(p) {
				return
			}
			first = last
		}
	}
}

// rows compares the runs round by round.
func rows(runs []Sample, message int) []Row {
	rows := []Row{}
	for _, m := range measures(message) {
		var off, on, ratios []float64
		for i := range runs {
			if runs[i].Load != m.load || runs[i].On {
				continue
			}
			j := slices.IndexFunc(runs, func(s Sample) bool { return s.Load == m.load && s.On && s.Round == runs[i].Round })
			if j < 0 || m.figure(&runs[i]) == 0 {
				continue
			}
			off, on = append(off, m.figure(&runs[i])), append(on, m.figure(&runs[j]))
			ratios = append(ratios, on[len(on)-1]/off[len(off)-1])
		}
		if len(ratios) == 0 {
			continue
		}
		r := Row{Name: m.name, Title: m.title, Unit: m.unit, Off: stats.Median(off), On: stats.Median(on), Ratio: stats.Median(ratios)}
		r.Low, r.High = stats.MedianInterval(ratios)
		rows = append(rows, r)
	}
	return rows
}

// A measure defines a row.
type measure struct {
	name, load, title, unit string
	figure                  func(*Sample) float64
}

func measures(message int) []measure {
	return []measure{
		{"rr_min", loadRR, "latency, minimum", "µs", func(s *Sample) float64 { return s.Min }},
		{"rr_p50", loadRR, "latency, median", "µs", func(s *Sample) float64 { return s.P50 }},
		{"rr_p90", loadRR, "latency, P90", "µs", func(s *Sample) float64 { return s.P90 }},
		{"rr_p99", loadRR, "latency, P99", "µs", func(s *Sample) float64 { return s.P99 }},
		{"rr_rate", loadRR, "transactions", "a second", func(s *Sample) float64 { return s.Rate }},
		{"rr_cpu", loadRR, "their CPU, both ends", "µs each", func(s *Sample) float64 { return s.CPU * 1e6 }},
		{"rr_cpu_gb", loadRR, "the same, of their bytes", "s/GB", func(s *Sample) float64 { return s.CPU / float64(2*message) * 1e9 }},
		{"rr_packets", loadRR, "their packets", "each", func(s *Sample) float64 { return s.Packets }},
		{"stream_rate", loadStream, "stream", "Gbit/s", func(s *Sample) float64 { return s.Rate / 1e9 }},
		{"stream_cpu_gb", loadStream, "its CPU, both ends", "s/GB", func(s *Sample) float64 { return s.CPU * 1e9 }},
		{"stream_packet", loadStream, "its packets, mean", "bytes", func(s *Sample) float64 { return s.PacketBytes }},
	}
}

func familyName(family string) string { return map[string]string{IPv6: "IPv6", IPv4: "IPv4"}[family] }

// Row finds a row of a family by its name.
func (r *Result) Row(family, name string) (Row, bool) {
	for _, f := range r.Families {
		for _, row := range f.Rows {
			if f.Family == family && row.Name == name {
				return row, true
			}
		}
	}
	return Row{}, false
}

// Text returns the result as a table, in lines.
func (r *Result) Text() []string {
	var text strings.Builder
	p := func(format string, args ...any) { fmt.Fprintf(&text, format, args...) }
	p("%s\n", r.path())
	off, on := "up to 65536 bytes", fmt.Sprint(r.Size)
	if r.Segmentation {
		off, on = "the MTU", "up to 65536 bytes"
	}
	p("Requests and responses of %d bytes, and streams; packets of %s (off) and %s (on), in turns.\n", r.Message, off, on)
	p("Medians of %d rounds of %v; ratio of on to off, with its 95 %% confidence interval.\n", r.Rounds, time.Duration(r.ForNS))
	for _, f := range r.Families {
		table := [][]string{{familyName(f.Family), "", "off", "on", "ratio", "interval"}}
		for _, row := range f.Rows {
			table = append(table, []string{row.Title, row.Unit, number(row.Off), number(row.On),
				fmt.Sprintf("%.2f", row.Ratio), fmt.Sprintf("%.2f .. %.2f", row.Low, row.High)})
		}
		p("\n%s", aligned(table))
	}
	p("\n")
	if share, ok := r.share(); ok {
		p("The ends had %.0f %% of their CPU, by the median; less than 95 %% makes all uncertain but the minimum and CPU.\n", 100*share)
	}
	for _, note := range r.Notes {
		p("%s\n", note)
	}
	return strings.Split(strings.TrimRight(text.String(), "\n"), "\n")
}

// aligned formats a table: the first two columns left-aligned, the others
// right-aligned.
func aligned(table [][]string) string {
	widths := make([]int, len(table[0]))
	for _, row := range table {
		for i, cell := range row {
			widths[i] = max(widths[i], utf8.RuneCountInString(cell))
		}
	}
	var text strings.Builder
	for _, row := range table {
		var line strings.Builder
		for i, cell := range row {
			pad := strings.Repeat(" ", widths[i]-utf8.RuneCountInString(cell))
			if i < 2 {
				line.WriteString(cell + pad + "  ")
			} else {
				line.WriteString(pad + cell + "  ")
			}
		}
		text.WriteString(strings.TrimRight(line.String(), " ") + "\n")
	}
	return text.String()
}

// number formats a value with at least three digits.
func number(v float64) string {
	switch {
	case v >= 100:
		return fmt.Sprintf("%.0f", v)
	case v >= 10:
		return fmt.Sprintf("%.1f", v)
	case v >= 1:
		return fmt.Sprintf("%.2f", v)
	}
	return fmt.Sprintf("%.3f", v)
}

// path describes where the measurement took place.
func (r *Result) path() string {
	cpus := fmt.Sprintf("CPU %d for both ends", r.ClientCPU)
	if r.ClientCPU != r.ServerCPU {
		cpus = fmt.Sprintf("CPU %d for the client and %d for the server", r.ClientCPU, r.ServerCPU)
	}
	where := map[string]string{
		PathVeth:   "A veth pair between two namespaces",
		PathBridge: "Two namespaces at a bridge, by a veth pair each",
		PathRouter: "Two namespaces with a third between them that forwards",
	}[r.Path]
	return fmt.Sprintf("%s; %s; Linux %s.", where, cpus, r.Kernel)
}

// share returns the median share of the CPU that two ends on the same CPU had.
func (r *Result) share() (share float64, ok bool) {
	if r.ClientCPU != r.ServerCPU {
		return 0, false
	}
	var shares []float64
	for _, f := range r.Families {
		for _, s := range f.Runs {
			shares = append(shares, s.Share)
		}
	}
	if len(shares) == 0 {
		return 0, false
	}
	return min(1, stats.Median(shares)), true
}
