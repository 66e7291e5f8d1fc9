// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"time"

	"sockeye/bench/harness"
	"sockeye/lab"
)

// linkNet is a client and a server with their own link.
type linkNet struct {
	link           *lab.Link
	client, server *lab.Namespace
	address        netip.Addr // address of the server
}

const handshakeGroup = "handshake"

// handshakeTimes contains the durations of connect(2) in milliseconds when a packet of the handshake is lost.
type handshakeTimes struct {
	Baseline harness.Spread `json:"baseline_ms"`
	Tuned    harness.Spread `json:"tuned_ms"`
}

type handshakeLosses struct {
	RTT    float64        `json:"rtt_ms"`
	SYN    handshakeTimes `json:"syn_lost"`
	SYNACK handshakeTimes `json:"synack_lost"`
}

const (
	handshakesAtOnce = 10
	tcpSYN           = 2
	tcpACK           = 16
)

func (t *bench) handshakes(ctx context.Context) (*handshakeLosses, error) {
	fmt.Fprint(os.Stderr, "handshake: ")
	defer fmt.Fprintln(os.Stderr)
	const delay = time.Millisecond
	n, err := t.linkNet("syn", 10, lab.LinkOptions{Delay: delay})
	if err != nil {
		return nil, err
	}
	arms, err := t.arms(ctx, n, handshakeGroup, baseline, tuned)
	if err != nil {
		return nil, err
	}
	r := &handshakeLosses{RTT: float64(2*delay) / float64(time.Millisecond)}
	for _, loss := range []struct {
		to        *handshakeTimes
		direction lab.Direction
		flags     byte
	}{{&r.SYN, lab.AToB, tcpSYN}, {&r.SYNACK, lab.BToA, tcpSYN | tcpACK}} {
		took := map[string][]float64{}
		for range t.Rounds {
			for _, arm := range []string{baseline, tuned} {
				o := n.link.Options()
				o.Drop = dropFirst(loss.direction, loss.flags)
				if err := n.link.Set(o); err != nil {
					return nil, err
				}
				var us []int64
				if err := arms[arm].client.Ask(task{Target: arms[arm].target, Connect: handshakesAtOnce}, &us); err != nil {
					return nil, fmt.Errorf("connect, %s: %w", arm, err)
				}
				took[arm] = appendMilliseconds(took[arm], us)
				fmt.Fprint(os.Stderr, ".")
			}
		}
		*loss.to = handshakeTimes{harness.SpreadOf(took[baseline]), harness.SpreadOf(took[tuned])}
	}
	// The link may also drop late packets of earlier connections.
	c := n.link.Counts()
	if want := uint64(2 * t.Rounds * handshakesAtOnce); c.AToB.Dropped < want || c.BToA.Dropped < want {
		return nil, fmt.Errorf("the link dropped %d SYNs and %d SYN-ACKs, want %d of each", c.AToB.Dropped, c.BToA.Dropped, want)
	}
	return r, nil
}

func (t *bench) linkNet(name string, subnet byte, o lab.LinkOptions) (*linkNet, error) {
	server, err := plainHost(t.Lab, name+"-server")
	if err != nil {
		return nil, err
	}
	return t.linkTo(server, name, subnet, o)
}

// linkTo adds a client to a server.
func (t *bench) linkTo(server *lab.Namespace, name string, subnet byte, o lab.LinkOptions) (*linkNet, error) {
	n := &linkNet{server: server, address: netip.AddrFrom4([4]byte{10, 81, subnet, 1})}
	var err error
	if n.client, err = plainHost(t.Lab, name+"-client"); err != nil {
		return nil, err
	}
	o.Name = name
	n.link, err = t.Lab.Connect(n.client, n.server, o,
		[]netip.Prefix{netip.PrefixFrom(n.address.Next(), 24)}, []netip.Prefix{netip.PrefixFrom(n.address, 24)})
	return n, err
}

// endpoint is a client and a server of one arm.
type endpoint struct {
	client *harness.Worker
	target string
}

// arms starts the arms of a comparison over a link.
func (t *bench) arms(ctx context.Context, n *linkNet, part string, names ...string) (map[string]endpoint, error) {
	out := map[string]endpoint{}
	for i, arm := range names {
		var err error
		if out[arm], err = t.endpoints(ctx, n, part+"-"+arm, tunePort+uint16(i)); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// endpoints starts client and server of an arm in its cgroup.
func (t *bench) endpoints(ctx context.Context, n *linkNet, group string, port uint16) (e endpoint, err error) {
	if _, err := t.Group(group); err != nil {
		return e, err
	}
	e.target = netip.AddrPortFrom(n.address, port).String()
	if err := t.server(ctx, n.server, group, e.target, socketOptions{}); err != nil {
		return e, err
	}
	e.client, err = t.Worker(ctx, n.client, group, clientRole)
	return e, err
}

// dropFirst returns a filter that drops the first IPv4 TCP packet of each connection whose SYN and ACK flags are flags.
func dropFirst(direction lab.Direction, flags byte) func(lab.Direction, []byte) bool {
	seen := map[[12]byte]bool{}
	return func(d lab.Direction, packet []byte) bool {
		if d != direction || len(packet) < 20 || packet[0]>>4 != 4 || packet[9] != 6 {
			return false
		}
		tcp := packet[int(packet[0]&15)*4:]
		if len(tcp) < 20 || tcp[13]&(tcpSYN|tcpACK) != flags {
			return false
		}
		var connection [12]byte
		copy(connection[:], packet[12:20])
		copy(connection[8:], tcp[:4])
		first := !seen[connection]
		seen[connection] = true
		return first
	}
}
