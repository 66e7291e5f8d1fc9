// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"

	"sockeye/bench/harness"
	"sockeye/lab"
)

// Programs that people measure gateways with, over a veth pair: wrk with keepalive, redis-benchmark with a new connection for each
// request, and wget. Their servers, nginx and redis, are on the far host.

const (
	webPort   = 8080
	redisPort = 6379

	programMTU     = 65520 // of the guest, the default of both gateways
	wgetBytes      = 1 << 30
	wgetBytesQuick = 100 << 20
	programTime    = time.Minute // longest time of a program
	aimLevel       = 1.05        // highest ratio of two times that are level
)

// A program is a client that prints one figure.
type program struct {
	name    string
	unit    string
	smaller bool // smaller figures are better
	command []string
	figure  *regexp.Regexp // its first group is the figure in the output
	factor  float64        // of the figure, to the unit
}

// gatewayProgram contains the figures of a program, by side, round by round.
type gatewayProgram struct {
	Name string               `json:"program"`
	Unit string               `json:"unit"`
	Runs map[string][]float64 `json:"runs"`

	smaller bool
}

func (x *gatewayProgram) String() string {
	s := x.Name + ", " + x.Unit + ":"
	for _, side := range having(x.Runs) {
		s += fmt.Sprintf(" %s %s", side, x.text(side))
	}
	return s
}

// freePorts makes a namespace use the ports of closed connections again after a second.
func freePorts(n *lab.Namespace) error {
	return errors.Join(n.Sysctl("ipv4.ip_local_port_range", "1024 65535"), n.Sysctl("ipv4.tcp_tw_reuse", "1"))
}

// runPrograms runs the programs on all sides, in rotating order.
func (b *bench) runPrograms(ctx context.Context) (err error) {
	p, err := newGatewayPath(ctx, b.lab, linkPrograms, b.newPasta)
	if err != nil {
		return err
	}
	guest, err := p.newSide(ctx, sideSockeye, programMTU)
	if guest != nil {
		defer func() { err = errors.Join(err, guest.stop()) }()
	}
	if err != nil {
		return err
	}
	if err := errors.Join(freePorts(p.host), freePorts(guest.in)); err != nil {
		return err
	}
	stop, err := b.startServers(ctx, p)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stop()) }()
	rounds := 5 * b.Rounds
	if b.Quick {
		rounds = b.Rounds
	}
	for _, c := range b.programs(p.addresses[1].String()) {
		x := &gatewayProgram{Name: c.name, Unit: c.unit, Runs: map[string][]float64{}, smaller: c.smaller}
		for range rounds {
			for _, name := range harness.Turn(b.Sides, b.round) {
				in, command := p.host, c.command
				switch name {
				case sideSockeye:
					in = guest.in
				case sidePasta, sidePastaNew:
					command = append(p.pasta(name, programMTU, 0), command...)
				}
				figure, err := c.run(ctx, in, command)
				if err != nil {
					return fmt.Errorf("%s of %s: %w", c.name, name, err)
				}
				x.Runs[name] = append(x.Runs[name], figure)
			}
			b.round++
		}
		b.report.Programs = append(b.report.Programs, x)
		fmt.Fprintln(os.Stderr, x)
	}
	return nil
}

// programs returns the clients of the servers at an address.
func (o *options) programs(address string) []program {
	time, requests := "2", "5000"
	if o.Quick {
		time, requests = "1", "1000"
	}
	return []program{
		{
			name: "wrk", unit: "requests/s", factor: 1,
			command: []string{"wrk", "--threads", "1", "--connections", "64", "--duration", time + "s", fmt.Sprintf("http://%s:%d/small", address, webPort)},
			figure:  regexp.MustCompile(`Requests/sec:\s+([0-9.]+)`),
		},
		{
			name: "redis-benchmark", unit: "connections/s", factor: 1,
			command: []string{"redis-benchmark", "-h", address, "-p", strconv.Itoa(redisPort), "-c", "50", "-n", requests, "-k", "0", "-t", "ping_mbulk", "--csv"},
			figure:  regexp.MustCompile(`"PING_MBULK","([0-9.]+)"`),
		},
		{
			name: "wget", unit: "s", smaller: true, factor: 1e-9,
			command: []string{"sh", "-c", `a=$(date +%s%N) && wget --quiet --output-document /dev/null "$0" && b=$(date +%s%N) && echo took $((b - a))`,
				fmt.Sprintf("http://%s:%d/large", address, webPort)},
			figure: regexp.MustCompile(`took ([0-9]+)`),
		},
	}
}

// webConfiguration is that of nginx, with a directory.
const webConfiguration = `daemon off;
master_process off;
pid DIR/nginx.pid;
error_log stderr crit;
events { worker_connections 4096; }
http {
	access_log off;
	sendfile on;
	tcp_nopush on;
	keepalive_requests 1000000000;
	server {
		listen [::]:PORT ipv6only=off backlog=4096;
		root DIR/www;
	}
}
`

// startServers starts nginx and redis on the far host.
func (b *bench) startServers(ctx context.Context, p *gatewayPath) (stop func() error, err error) {
	dir := filepath.Join(b.lab.Dir(), "servers")
	www := filepath.Join(dir, "www")
	if err := os.MkdirAll(www, 0o755); err != nil {
		return nil, err
	}
	size := int64(wgetBytes)
	if b.Quick {
		size = wgetBytesQuick
	}
	configuration := strings.NewReplacer("DIR", dir, "PORT", strconv.Itoa(webPort)).Replace(webConfiguration)
	large := filepath.Join(www, "large")
	err = errors.Join(os.WriteFile(filepath.Join(dir, "nginx.conf"), []byte(configuration), 0o644),
		os.WriteFile(filepath.Join(www, "small"), bytes.Repeat([]byte("x"), 128), 0o644),
		os.WriteFile(large, nil, 0o644), os.Truncate(large, size))
	if err != nil {
		return nil, err
	}
	var started []*lab.Process
	stop = func() (err error) {
		for _, s := range started {
			err = errors.Join(err, s.Stop(time.Second))
		}
		return err
	}
	for port, command := range map[uint16][]string{
		webPort:   {"nginx", "-p", dir, "-c", "nginx.conf"},
		redisPort: {"redis-server", "--bind", "*", "-::*", "--port", strconv.Itoa(redisPort), "--save", "", "--protected-mode", "no", "--dir", dir},
	} {
		server := p.far.Command(ctx, command...)
		if err := server.Start(); err != nil {
			return nil, errors.Join(err, stop())
		}
		started = append(started, server)
		err := b.lab.WaitFor(ctx, command[0], func() (bool, error) {
			if err := server.Err(); err != nil {
				return false, err
			}
			return listens(p.far, port)
		})
		if err != nil {
			return nil, errors.Join(err, stop())
		}
	}
	return stop, nil
}

// run runs a program, and returns its figure.
func (c *program) run(ctx context.Context, in *lab.Namespace, command []string) (float64, error) {
	ctx, stop := context.WithTimeout(ctx, programTime)
	defer stop()
	var out, log bytes.Buffer
	cmd := in.Command(ctx, command...)
	cmd.Cmd.Stdout, cmd.Cmd.Stderr = &out, &log
	if err := cmd.Start(); err != nil {
		return 0, err
	}
	err := cmd.Wait()
	found := c.figure.FindSubmatch(out.Bytes())
	if err != nil || found == nil {
		return 0, fmt.Errorf("it printed no figure: %w\n%s%s", err, out.Bytes(), log.Bytes())
	}
	figure, err := strconv.ParseFloat(string(found[1]), 64)
	return figure * c.factor, err
}

func (r *gatewayReport) printPrograms(p harness.Printf) {
	if len(r.Programs) == 0 {
		return
	}
	sides := r.Options.Sides
	p("\nPrograms over veth, MTU %d: wrk with 64 connections to nginx, redis-benchmark with 50 clients and a new connection for each request, and\n", programMTU)
	p("wget of a large file (%d MiB). Medians of %d rounds; ratios within each round: median [95 %% confidence interval; with 5 rounds: all].\n",
		r.largeBytes()>>20, len(r.Programs[0].Runs[sides[0]]))
	p("\tunit\t%s\tto native\tto pasta_new\n", strings.Join(sides, "\t"))
	for _, x := range r.Programs {
		p("%s\t%s", x.Name, x.Unit)
		for _, side := range sides {
			p("\t%s", x.text(side))
		}
		for _, to := range []string{sideNative, sidePastaNew} {
			p("\t%s", harness.DistributionOf(x.ratios(sideSockeye, to)).Format("%.2f"))
		}
		p("\n")
	}
}

// text returns the median of a side.
func (x *gatewayProgram) text(side string) string {
	format := "%.0f"
	if x.smaller {
		format = "%.2f"
	}
	return orDash(format, harness.SpreadOf(x.Runs[side]).Median)
}

// largeBytes returns the size of the file that wget reads.
func (r *gatewayReport) largeBytes() int {
	if r.Options.Quick {
		return wgetBytesQuick
	}
	return wgetBytes
}

// programTargets returns the goals of the programs.
func (r *gatewayReport) programTargets() (all []harness.Target) {
	for _, x := range r.Programs {
		if x.smaller {
			d := harness.DistributionOf(x.ratios(sideSockeye, sideNative))
			all = append(all, harness.AtMost("time of "+x.Name+" to native's", "%.2f", aimLevel, d))
			continue
		}
		d := harness.DistributionOf(x.ratios(sideSockeye, sidePastaNew))
		all = append(all, harness.AtLeast(x.Unit+" of "+x.Name+" to the newest pasta's", "%.2f", 1, d))
	}
	return all
}

// ratios returns the ratios of the figures of two sides, computed within each round.
func (x *gatewayProgram) ratios(side, to string) (ratios []float64) {
	for i := range min(len(x.Runs[side]), len(x.Runs[to])) {
		ratios = append(ratios, x.Runs[side][i]/x.Runs[to][i])
	}
	return ratios
}
