// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"sockeye/bench/harness"
	"sockeye/internal/api"
	"sockeye/lab"
)

const (
	learningGroup = "learning"
	learningBytes = 200_000 // bytes per transfer
	learningMost  = 400     // maximum number of transfers to a prefix
	learningBatch = 20
	learningRate  = 50e6 // bits per second
	learningDelay = 10 * time.Millisecond

	// learningQueue is the queue of the second prefix' link in packets: a first flight of 16 fits, one of 40 does
	// not.
	learningQueue = 20
)

// learnedPrefix contains the learned window of a prefix, and its evidence.
type learnedPrefix struct {
	api.TuneLearned
	Link      string         `json:"link"`
	Transfers int            `json:"transfers"`
	Dropped   uint64         `json:"dropped"` // packets dropped by the queue of the link
	Took      harness.Spread `json:"took_ms"` // transfers after the prefix had settled
}

// learning runs transfers from a server to two prefixes, over links with a long and with a short queue, until the
// server's rule has settled for both.
func (t *bench) learning(ctx context.Context) ([]learnedPrefix, error) {
	fmt.Fprint(os.Stderr, "learning: ")
	defer fmt.Fprintln(os.Stderr)
	server, err := plainHost(t.Lab, "learning-server")
	if err != nil {
		return nil, err
	}
	var out []learnedPrefix
	var nets []*linkNet
	var ends []endpoint
	for i, limit := range []int{1 << 20, learningQueue * 1500} {
		n, err := t.linkTo(server, fmt.Sprintf("learn%d", i), byte(20+i), lab.LinkOptions{Delay: learningDelay, Rate: learningRate, Limit: limit})
		if err != nil {
			return nil, err
		}
		e, err := t.endpoints(ctx, n, learningGroup, tunePort)
		if err != nil {
			return nil, err
		}
		nets, ends = append(nets, n), append(ends, e)
		out = append(out, learnedPrefix{Link: fmt.Sprintf("queue of %d packets", limit/1500)})
	}
	fetch := func(i int) (took []float64, err error) {
		for range learningBatch {
			var us int64
			if err := ends[i].client.Ask(task{Target: ends[i].target, Fetch: learningBytes}, &us); err != nil {
				return nil, err
			}
			took = appendMilliseconds(took, []int64{us})
		}
		fmt.Fprint(os.Stderr, ".")
		return took, nil
	}
	for settled := 0; settled < len(nets); {
		settled = 0
		for i, n := range nets {
			if out[i].Settled {
				settled++
				continue
			}
			if out[i].Transfers >= learningMost {
				return nil, fmt.Errorf("the rule has not settled for %v after %d transfers: %+v", n.address.Next(), out[i].Transfers, out[i].TuneLearned)
			}
			if _, err := fetch(i); err != nil {
				return nil, err
			}
			out[i].Transfers += learningBatch
			if out[i].TuneLearned, err = t.learned(ctx, n); err != nil {
				return nil, err
			}
		}
	}
	for i, n := range nets {
		took, err := fetch(i)
		if err != nil {
			return nil, err
		}
		out[i].Took, out[i].Dropped = harness.SpreadOf(took), n.link.Counts().BToA.Overflowed
	}
	return out, nil
}

// learned returns the learned window for the client of a link.
func (t *bench) learned(ctx context.Context, n *linkNet) (api.TuneLearned, error) {
	var all []api.TuneLearned
	if err := t.Ask(ctx, "/v1/tune/learned", &all); err != nil {
		return api.TuneLearned{}, err
	}
	want := fmt.Sprintf("10.81.%d.0/24", n.address.As4()[2])
	for _, l := range all {
		if strings.HasPrefix(l.Prefix, want) {
			return l, nil
		}
	}
	return api.TuneLearned{}, errors.New("no learned window for " + want)
}
