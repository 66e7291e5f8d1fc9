// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"sync"
	"time"

	"sockeye/bench/harness"
	"sockeye/lab"
)

// Arms of the part iw.
const (
	fixed10  = "fixed_10"
	fixed40  = "fixed_40"
	explored = "explored"
	// exploring is not an arm of its own: it has the transfers of explored until the rule has settled.
	exploring = "exploring"
)

var (
	iwArms   = []string{fixed10, fixed40, explored}
	iwTitles = map[string]string{fixed10: "fixed 10", fixed40: "fixed 40", exploring: "while exploring", explored: "explored"}
	iwRTTs   = []time.Duration{20 * time.Millisecond, 50 * time.Millisecond, 100 * time.Millisecond, 150 * time.Millisecond}
)

const (
	iwGroup    = "window"
	iwRate     = 100e6 // bits per second
	iwSmallest = 15_000
	iwLargest  = 1_000_000
	iwMost     = 300 // maximum number of transfers until a rule has settled
)

// iwQueues are the queues of the links of an RTT, in packets. Into the second one, a first flight of 16 fits, one of 40
// does not.
var iwQueues = []int{700, 20}

// iwLink contains the transfers over a link. The i-th transfers of fixed_10, fixed_40 and explored have the same size.
type iwLink struct {
	rtt   time.Duration
	queue int
	// window is the learned initial window.
	window int
	took   map[string][]float64 // ms from connect(2) to the last byte, by arm
}

// initialWindows measures all links in parallel, with sequential transfers on each.
func (t *bench) initialWindows(ctx context.Context) ([]iwLink, error) {
	fmt.Fprint(os.Stderr, "initial window: ")
	defer fmt.Fprintln(os.Stderr)
	var nets []*linkNet
	var arms []map[string]endpoint
	var links []iwLink
	for _, rtt := range t.rtts() {
		for _, queue := range iwQueues {
			name := fmt.Sprintf("iw%d-%d", rtt.Milliseconds(), queue)
			n, err := t.linkNet(name, byte(len(nets)), lab.LinkOptions{Delay: rtt / 2, Rate: iwRate, Limit: queue * 1500})
			if err != nil {
				return nil, err
			}
			a, err := t.arms(ctx, n, iwGroup, iwArms...)
			if err != nil {
				return nil, err
			}
			nets, arms, links = append(nets, n), append(arms, a), append(links, iwLink{rtt: rtt, queue: queue, took: map[string][]float64{}})
		}
	}
	errs := make([]error, len(nets))
	var wg sync.WaitGroup
	for i := range nets {
		wg.Go(func() { errs[i] = t.initialWindow(ctx, nets[i], arms[i], &links[i]) })
	}
	wg.Wait()
	for i, err := range errs {
		if err != nil {
			return nil, fmt.Errorf("initial window, RTT %v, queue of %d packets: %w", links[i].rtt, links[i].queue, err)
		}
	}
	return links, nil
}

// rtts returns the RTTs to measure: quick runs omit the long ones.
func (t *bench) rtts() []time.Duration {
	if t.Quick {
		return iwRTTs[:2]
	}
	return iwRTTs
}

// initialWindow lets the rule settle, and then runs the transfers of all arms in turn.
func (t *bench) initialWindow(ctx context.Context, n *linkNet, arms map[string]endpoint, l *iwLink) error {
	fetch := func(arm, as string, size int) error {
		var us int64
		if err := arms[arm].client.Ask(task{Target: arms[arm].target, Fetch: size}, &us); err != nil {
			return err
		}
		l.took[as] = appendMilliseconds(l.took[as], []int64{us})
		return nil
	}
	sizes := iwTransferSizes(t.Transfers)
	for settled := false; !settled; {
		done := len(l.took[exploring])
		if done >= iwMost {
			return fmt.Errorf("the rule has not settled after %d transfers", done)
		}
		// Each further pass begins with another size: the rule tries its candidates in turn, and each of them should have all sizes.
		if err := fetch(explored, exploring, sizes[(done+done/len(sizes))%len(sizes)]); err != nil {
			return err
		}
		if done%learningBatch < learningBatch-1 {
			continue
		}
		learned, err := t.learned(ctx, n)
		if err != nil {
			return err
		}
		settled, l.window = learned.Settled, learned.Window
		fmt.Fprint(os.Stderr, "-")
	}
	for round, size := range sizes {
		for _, arm := range harness.Turn(iwArms, round) {
			if err := fetch(arm, arm, size); err != nil {
				return err
			}
		}
		fmt.Fprint(os.Stderr, ".")
	}
	return nil
}

// iwTransferSizes returns n sizes in bytes whose logarithms are evenly distributed from iwSmallest to iwLargest, in random
// order. The order is the same in each run.
func iwTransferSizes(n int) []int {
	sizes := make([]int, n)
	for i, at := range rand.New(rand.NewPCG(1, 1)).Perm(n) {
		sizes[at] = int(iwSmallest * math.Pow(float64(iwLargest)/iwSmallest, float64(i)/float64(max(n-1, 1))))
	}
	return sizes
}

// iwTimes describes the completion times of an arm in milliseconds.
type iwTimes struct {
	Transfers int            `json:"transfers"`
	Mean      harness.Figure `json:"mean_ms"`
	P10       harness.Figure `json:"p10_ms"`
	P25       harness.Figure `json:"p25_ms"`
	P50       harness.Figure `json:"p50_ms"`
	P75       harness.Figure `json:"p75_ms"`
	P90       harness.Figure `json:"p90_ms"`
	P99       harness.Figure `json:"p99_ms"`
	// Ratio is the median of the ratios to fixed_10, by transfer, with a 95 % confidence interval. It is null for exploring.
	Ratio *harness.Distribution `json:"ratio_to_fixed_10"`
}

// figures returns the JSON of a link.
func (l iwLink) figures() any {
	arms, cdf := map[string]iwTimes{}, map[string][]float64{}
	for _, arm := range append([]string{exploring}, iwArms...) {
		arms[arm] = l.times(arm)
		for _, ms := range l.took[arm] {
			cdf[arm] = append(cdf[arm], math.Round(ms*10)/10)
		}
	}
	return map[string]any{"rtt_ms": l.rtt.Milliseconds(), "queue_packets": l.queue, "learned_window": l.window, "arms": arms, "took_ms": cdf}
}

func (l iwLink) times(arm string) iwTimes {
	v := l.took[arm]
	sum := 0.0
	for _, ms := range v {
		sum += ms
	}
	t := iwTimes{len(v), harness.Figure(sum / float64(len(v))), harness.Quantile(v, 0.1), harness.Quantile(v, 0.25), harness.Quantile(v, 0.5),
		harness.Quantile(v, 0.75), harness.Quantile(v, 0.9), harness.Quantile(v, 0.99), nil}
	if arm != exploring {
		var ratios []float64
		for i := range v {
			ratios = append(ratios, v[i]/l.took[fixed10][i])
		}
		d := harness.DistributionOf(ratios)
		t.Ratio = &d
	}
	return t
}
