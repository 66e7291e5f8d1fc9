// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"sockeye/bench/harness"
	"sockeye/lab"
)

// seeds are the RTTs at which an earlier review measured pasta at 13 Mbit/s instead of 941 and 490 Mbit/s: an iperf3
// upload over one connection, sampled once per second.
var seeds = []int{15, 285} // ms of RTT

const (
	iperfPort = 5201
	// seedBuffers are tcp_wmem and tcp_rmem of all ends. With the kernel's default of 4 MB, the throughput at 285 ms is
	// at most 117 Mbit/s.
	seedBuffers = "4096 131072 67108864"
	seedMTU     = 65520 // of the guest, the default of both gateways
)

// A gatewaySeed contains the iperf3 results at one RTT, by side: the rate sent in each second, in Mbit/s.
type gatewaySeed struct {
	RTT     int                       `json:"rtt_ms"`
	Seconds map[string][]float64      `json:"seconds_mbit"`
	Mean    map[string]harness.Figure `json:"mbit"` // received, over the whole time
}

// enlarge sets the largest buffers of sockets in a namespace. A gateway reads these sysctls when it starts.
func enlarge(n *lab.Namespace) error {
	return errors.Join(n.Sysctl("ipv4.tcp_wmem", seedBuffers), n.Sysctl("ipv4.tcp_rmem", seedBuffers))
}

func (b *bench) seeds(ctx context.Context) (err error) {
	p, err := newGatewayPath(ctx, b.lab, linkSeed, b.newPasta)
	if err != nil {
		return err
	}
	if err := errors.Join(enlarge(p.host), enlarge(p.far)); err != nil {
		return err
	}
	guest, err := p.newSide(ctx, sideSockeye, seedMTU)
	if guest != nil {
		defer func() { err = errors.Join(err, guest.stop()) }()
	}
	if err != nil {
		return err
	}
	if err := enlarge(guest.in); err != nil {
		return err
	}
	if err := choose(p, map[string]*gatewaySide{sideSockeye: guest}, "cubic"); err != nil {
		return err
	}
	seconds := 10
	if b.Quick {
		seconds = 5
	}
	for i, rtt := range seeds {
		if err := p.delay(time.Duration(rtt) * time.Millisecond); err != nil {
			return err
		}
		seed := gatewaySeed{RTT: rtt, Seconds: map[string][]float64{}, Mean: map[string]harness.Figure{}}
		for _, name := range harness.Turn(b.Sides, i) {
			in, command := p.host, []string{"iperf3", "--client", p.addresses[1].String(), "--port", strconv.Itoa(iperfPort), "--time", strconv.Itoa(seconds), "--json"}
			switch name {
			case sideSockeye:
				in = guest.in
			case sidePasta, sidePastaNew:
				// pasta's guest has its own sysctls; set the same values.
				script := `echo "$0" >/proc/sys/net/ipv4/tcp_wmem; echo "$0" >/proc/sys/net/ipv4/tcp_rmem; exec "$@"`
				command = append(append(p.pasta(name, seedMTU, 0), "sh", "-c", script, seedBuffers), command...)
			}
			server, err := b.iperfServer(ctx, p)
			if err != nil {
				return err
			}
			err = seed.measure(ctx, name, in, command, time.Duration(seconds)*time.Second)
			if err := errors.Join(err, server.Stop(time.Second)); err != nil {
				return err
			}
		}
		b.report.Seeds = append(b.report.Seeds, seed)
		fmt.Fprintln(os.Stderr, seed)
	}
	return nil
}

// iperfServer starts an iperf3 server for one client, and returns when it listens. A server for several clients closes
// its listener between two clients, and a connection in its accept queue with it.
func (b *bench) iperfServer(ctx context.Context, p *gatewayPath) (*lab.Process, error) {
	server := p.far.Command(ctx, "iperf3", "--server", "--one-off", "--port", strconv.Itoa(iperfPort))
	if err := server.Start(); err != nil {
		return nil, err
	}
	return server, b.lab.WaitFor(ctx, "iperf3", func() (bool, error) {
		if err := server.Err(); err != nil {
			return false, err
		}
		return listens(p.far, iperfPort)
	})
}

// listens returns whether a dual-stack IPv6 socket listens on a port in a namespace.
func listens(n *lab.Namespace, port uint16) (found bool, err error) {
	const listening = 10 // TCP_LISTEN
	err = n.Do(func() error {
		sockets, err := netlink.SocketDiagTCP(unix.AF_INET6)
		for _, s := range sockets {
			found = found || s.State == listening && s.ID.SourcePort == port
		}
		return err
	})
	if err != nil {
		return false, fmt.Errorf("list sockets of %s: %w", n.Name(), err)
	}
	return found, nil
}

// iperfGrace is added to the duration of iperf3 before iperf3 is killed.
const iperfGrace = 20 * time.Second

// measure runs iperf3. If iperf3 fails, its side has no mean.
func (s *gatewaySeed) measure(ctx context.Context, side string, in *lab.Namespace, command []string, wanted time.Duration) error {
	ctx, stop := context.WithTimeout(ctx, wanted+iperfGrace)
	defer stop()
	var out, log bytes.Buffer
	c := in.Command(ctx, command...)
	c.Cmd.Stdout, c.Cmd.Stderr = &out, &log
	if err := c.Start(); err != nil {
		return err
	}
	failed := c.Wait()
	rates, mean, err := parseIperf(out.Bytes())
	if err != nil {
		return fmt.Errorf("iperf3 of %s: %w\n%s", side, errors.Join(failed, err), log.Bytes())
	}
	s.Seconds[side], s.Mean[side] = rates, harness.Figure(mean)
	return nil
}

// parseIperf parses the output of iperf3 --json. It returns, in Mbit/s, the rate sent in each second and the mean rate
// received.
func parseIperf(text []byte) (rates []float64, mean float64, err error) {
	type sum struct {
		BitsPerSecond float64 `json:"bits_per_second"`
	}
	var report struct {
		Error     string `json:"error"`
		Intervals []struct {
			Sum sum `json:"sum"`
		} `json:"intervals"`
		End struct {
			Received sum `json:"sum_received"`
		} `json:"end"`
	}
	if err := json.Unmarshal(text, &report); err != nil {
		return nil, 0, fmt.Errorf("read report: %w", err)
	}
	if report.Error != "" {
		return nil, 0, errors.New(report.Error)
	}
	for _, i := range report.Intervals {
		rates = append(rates, i.Sum.BitsPerSecond/1e6)
	}
	return rates, report.End.Received.BitsPerSecond / 1e6, nil
}

func (s gatewaySeed) String() string {
	text := fmt.Sprintf("iperf3 %3d ms", s.RTT)
	for _, side := range having(s.Mean) {
		text += fmt.Sprintf("; %s %.0f Mbit/s:", side, s.Mean[side])
		for _, rate := range s.Seconds[side] {
			text += fmt.Sprintf(" %.0f", rate)
		}
	}
	return text
}
