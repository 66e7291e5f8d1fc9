// SPDX-License-Identifier: Apache-2.0

// Package transfers measures the effect of BIG TCP between two network namespaces that it
// creates: requests with responses, and streams, alternating between BIG TCP off and on.
package transfers

import (
	"fmt"
	"time"

	"sockeye/internal/bigtcp/netif"
	"sockeye/internal/fault"
)

// Families are the IP families in the order of the measurement.
var Families = []string{IPv6, IPv4}

// The families.
const (
	IPv6 = "ipv6"
	IPv4 = "ipv4"
)

// Paths on one host.
const (
	// PathVeth is a veth pair between two namespaces.
	PathVeth = "veth"
	// PathBridge is a bridge between two namespaces, as between the containers of a
	// host.
	PathBridge = "bridge"
	// PathRouter is a namespace that forwards between two others with an MTU of 1500.
	// Its own MTU is 1508: before Linux 7.0 an IPv6 packet above 65535 bytes has a
	// hop-by-hop option of 8 bytes, which Linux counts for each segment of a forwarded
	// packet, so that it drops packets at an MTU of 1500.
	PathRouter = "router"
)

// Paths are the paths of Local.
var Paths = []string{PathBridge, PathVeth, PathRouter}

const (
	maxMessage = 1 << 20
	maxRounds  = 100
	minFor     = 10 * time.Millisecond
	maxFor     = 30 * time.Second
	maxWarmup  = 5 * time.Second
)

// Options of a benchmark.
type Options struct {
	// Size is the largest packet while BIG TCP is on, in bytes: above bigtcp.Legacy, up
	// to bigtcp.Most.
	Size    uint32
	Message int           // bytes of a request, and of its response; 64 to 1 MiB
	Rounds  int           // in each of which both loads run off and on; 1 to 100
	For     time.Duration // measured of each run; 10 ms to 30 s
	Warmup  time.Duration // of its connection, before; up to 5 s
	// Path is between the namespaces of Local.
	Path string
	// Segmentation compares packets of the MTU (off) with packets of up to 65536 bytes (on), instead of BIG TCP: the effect of
	// segmentation offload.
	Segmentation bool
	// TwoCPUs binds the ends to two CPUs.
	TwoCPUs bool
	// Progress, unless nil, is called after each run with the number of completed runs
	// and of all runs.
	Progress func(done, of int)
}

// Defaults are the sizes of published measurements (netperf TCP_RR of 80000 bytes, with
// packets of up to 185000), and ten rounds.
func Defaults() Options {
	return Options{
		Size: 185000, Message: 80000, Rounds: 10, For: time.Second, Warmup: 200 * time.Millisecond, Path: PathBridge,
	}
}

// Check returns a [fault.Error] if an option is out of bounds.
func (o *Options) Check() error {
	switch {
	case o.Size <= netif.Legacy || o.Size > netif.MaxSize:
		return usage(fmt.Sprintf("above %d, up to %d", netif.Legacy, netif.MaxSize), "the size is %d bytes", o.Size)
	case o.Message < sequenceSize+checkedSize || o.Message > maxMessage:
		return usage(fmt.Sprintf("%d to %d", sequenceSize+checkedSize, maxMessage), "the message is of %d bytes", o.Message)
	case o.Rounds < 1 || o.Rounds > maxRounds:
		return usage(fmt.Sprintf("1 to %d", maxRounds), "there are to be %d rounds", o.Rounds)
	case o.For < minFor || o.For > maxFor:
		return usage(fmt.Sprintf("%v to %v", minFor, maxFor), "a run is to take %v", o.For)
	case o.Warmup < 0 || o.Warmup > maxWarmup:
		return usage(fmt.Sprintf("0 to %v", maxWarmup), "a run is to be warmed up for %v", o.Warmup)
	}
	return nil
}

func usage(hint, format string, args ...any) error {
	return fault.Usage(fmt.Errorf(format, args...), hint)
}

// joined joins errors in one line; any may be nil.
func joined(errs ...error) (all error) {
	for _, err := range errs {
		switch {
		case err == nil:
		case all == nil:
			all = err
		default:
			all = fmt.Errorf("%w; %w", all, err)
		}
	}
	return all
}
