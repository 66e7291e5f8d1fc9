// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/bigtcp/netif"
	"sockeye/internal/bigtcp/sizing"
)

// Run measures from a network to the server at a host's port, for each family of
// which the host has an address. What it changes is recorded in the store, and
// given back before it returns, also when ctx ends.
func Run(ctx context.Context, n *netif.Network, store *sizing.Store, host string, port uint16, key string, o Options) (*Result, error) {
	if err := o.Check(); err != nil {
		return nil, err
	}
	k, err := parseKey(key)
	if err != nil {
		return nil, err
	}
	addresses, err := resolve(ctx, host)
	if err != nil {
		return nil, err
	}
	cpu, _, err := lastCPUs()
	if err != nil {
		return nil, err
	}
	result := &Result{Path: pathNetwork, Message: o.Message, Size: o.Size, Rounds: o.Rounds, ForNS: o.For.Nanoseconds(), Families: []Family{}}
	var first error
	for i, address := range addresses {
		c := &client{Options: o, network: n, key: k, cpu: cpu, runs: o.Rounds * runsOfRound * len(addresses), done: i * o.Rounds * runsOfRound}
		f, err := c.remote(ctx, store, netip.AddrPortFrom(address, port))
		switch {
		case err == nil:
			result.Families = append(result.Families, *f)
		case ctx.Err() != nil || len(addresses) == 1:
			return nil, err
		default:
			result.Notes = append(result.Notes, fmt.Sprintf("%s was not measured: %v", familyName(familyOf(address)), err))
			first = joined(first, err)
		}
	}
	if len(result.Families) == 0 {
		return nil, first
	}
	return result, nil
}

// resolve finds one address of each family.
func resolve(ctx context.Context, host string) ([]netip.Addr, error) {
	all, err := net.DefaultResolver.LookupNetIP(ctx, "ip", host)
	if err != nil {
		return nil, usage("a name or an address, without a port", "find %q: %w", host, err)
	}
	var found []netip.Addr
	for _, family := range Families {
		if i := slices.IndexFunc(all, func(a netip.Addr) bool { return familyOf(a.Unmap()) == family }); i >= 0 {
			found = append(found, all[i].Unmap())
		}
	}
	return found, nil
}

// A client measures one family.
type client struct {
	Options
	network *netif.Network
	key     key
	cpu     int
	sizes   setter
	// counted are the packets of the interface, where these are as the kernel makes
	// them, not those of a wire.
	counted    func() (counters, error)
	runs, done int
}

// counters are of all that an interface has sent and received.
type counters struct{ sent, sentBytes, received uint64 }

// remote measures with a server of another host.
func (c *client) remote(ctx context.Context, store *sizing.Store, server netip.AddrPort) (f *Family, err error) {
	if err := lacks(c.network, familyOf(server.Addr())); err != nil {
		return nil, err
	}
	own := Host{Kernel: kernelRelease(), CPU: c.cpu, Changed: true}
	if own.Interface, err = towards(c.network, server.Addr()); err != nil {
		return nil, err
	}
	r := &recorded{network: c.network, store: store, name: own.Interface, size: c.Size}
	c.sizes = r
	// The server is asked first: who may not measure changes nothing.
	w, host, err := c.hello(ctx, server)
	if err != nil {
		return nil, err
	}
	defer w.Close()
	defer func() { err = joined(err, r.restore()) }()
	if err := r.begin(); err != nil {
		return nil, err
	}
	own.Notes = r.notes()
	if f, err = c.measure(ctx, w, server); err != nil {
		return nil, err
	}
	f.Client, f.Server = own, *host
	return f, nil
}

func (c *client) dial(ctx context.Context, server netip.AddrPort) (w *wire, g greeting, err error) {
	var conn net.Conn
	err = c.network.Do(func() error {
		d := net.Dialer{Timeout: patience}
		d.SetMultipathTCP(false)
		conn, err = d.DialContext(ctx, "tcp", server.String())
		return err
	})
	if ctx.Err() != nil {
		return nil, g, joined(context.Cause(ctx), err)
	}
	if err != nil {
		return nil, g, fmt.Errorf("connect to the server: %w", err)
	}
	w = newWire(conn)
	line, err := w.readLine(patience)
	if err == nil {
		err = decode(line, &g)
	}
	if err == nil && (g.Sockeye != protocol || len(g.Nonce) != 2*nonceSize) {
		err = fmt.Errorf("%s speaks another version of this protocol", server)
	}
	if err != nil {
		conn.Close()
		return nil, g, err
	}
	return w, g, nil
}

// hello begins with a server.
func (c *client) hello(ctx context.Context, server netip.AddrPort) (*wire, *Host, error) {
	w, g, err := c.dial(ctx, server)
	if err != nil {
		return nil, nil, err
	}
	nonce := newNonce()
	err = notice(w.Conn)
	if err == nil {
		err = w.write(request{Op: opHello, Nonce: nonce, MAC: c.key.mac(g.Nonce, nonce), Size: c.Size})
	}
	var answer reply
	if err == nil {
		answer, err = w.reply(patience)
	}
	if err == nil && answer.Host == nil {
		err = errors.New("the server does not say what it is")
	}
	if err != nil {
		w.Close()
		return nil, nil, err
	}
	return w, answer.Host.plain(), nil
}

// reply reads what the server answers.
func (w *wire) reply(within time.Duration) (r reply, err error) {
	line, err := w.readLine(within)
	if errors.Is(err, io.EOF) {
		return r, errors.New("the server has gone")
	}
	if err == nil {
		err = decode(line, &r)
	}
	if err == nil {
		err = r.err("the server")
	}
	return r, err
}

// runsOfRound are both loads, off and on.
const runsOfRound = 4

// measure runs all rounds, and has the server give back what it changed. Within a
// round off and on take turns in being first.
func (c *client) measure(ctx context.Context, w *wire, server netip.AddrPort) (*Family, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(ctx, func() { w.Close() })()
	f := &Family{Family: familyOf(server.Addr())}
	for round := range c.Rounds {
		for l, kind := range []string{loadRR, loadStream} {
			for turn := range 2 {
				on := (round+l+turn)%2 == 1
				s, err := c.run(ctx, w, server, kind, on)
				if ctx.Err() != nil {
					return nil, context.Cause(ctx)
				}
				if err != nil {
					return nil, fmt.Errorf("%s, %s, %s: %w", familyName(f.Family), kind, onOff(on), err)
				}
				s.Round, s.Load, s.On = round, kind, on
				f.Runs = append(f.Runs, *s)
				if c.done++; c.Progress != nil {
					c.Progress(c.done, c.runs)
				}
			}
		}
	}
	if err := w.write(request{Op: opBye}); err != nil {
		return nil, err
	}
	if _, err := w.reply(patience); err != nil {
		return nil, err
	}
	// It closes when it can take the next.
	_, _ = w.readLine(patience)
	f.Rows = rows(f.Runs, c.Message)
	return f, nil
}

func onOff(on bool) string {
	if on {
		return "on"
	}
	return "off"
}

// run runs a load once, on a connection of its own.
func (c *client) run(ctx context.Context, w *wire, server netip.AddrPort, kind string, on bool) (*Sample, error) {
	if err := c.sizes.set(on); err != nil {
		return nil, err
	}
	r := request{Op: opRun, On: on, Load: kind, Message: c.Message, WarmupNS: c.Warmup.Nanoseconds(), ForNS: c.For.Nanoseconds()}
	if err := w.write(r); err != nil {
		return nil, err
	}
	answer, err := w.reply(patience)
	if err != nil {
		return nil, err
	}
	if len(answer.Token) != 2*nonceSize {
		return nil, errors.New("the server gives no token")
	}
	data, _, err := c.dial(ctx, server)
	if err != nil {
		return nil, err
	}
	defer data.Close()
	if _, err := data.Write([]byte(dataLine(answer.Token))); err != nil {
		return nil, fmt.Errorf("begin with data: %w", err)
	}
	fd, err := take(data.Conn)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	var before counters
	if c.counted != nil {
		if before, err = c.counted(); err != nil {
			return nil, err
		}
	}
	l := &load{Kind: kind, Message: c.Message, Warmup: c.Warmup, For: c.For, Seed: answer.Token, CPU: c.cpu}
	own, err := l.on(ctx, fd, func(e *end) (measured, error) {
		if n, err := e.read(e.buf[:1]); err != nil || n != 1 || e.buf[0] != '\n' {
			return measured{}, joined(errors.New("the server does not begin"), err)
		}
		e.begun = time.Now()
		if kind == loadRR {
			return e.ask()
		}
		return e.pour()
	})
	if err != nil {
		// The server knows better why the connection ended.
		if _, told := w.reply(time.Second); told != nil && ctx.Err() == nil {
			return nil, joined(err, told)
		}
		return nil, err
	}
	if answer, err = w.reply(patience + stall); err != nil {
		return nil, err
	}
	s, err := sample(kind, &own, &answer)
	if err != nil {
		return nil, err
	}
	if c.counted != nil {
		after, err := c.counted()
		if err != nil {
			return nil, err
		}
		sent := after.sent - before.sent
		if kind == loadStream {
			s.PacketBytes = float64(after.sentBytes-before.sentBytes) / float64(max(1, sent))
		} else {
			s.Packets = float64(sent+after.received-before.received) / float64(own.all)
		}
	}
	return s, nil
}
