// SPDX-License-Identifier: Apache-2.0

package tracecmd

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"sockeye/internal/api"
	"sockeye/internal/cli/command"
	"sockeye/internal/config"
	"sockeye/internal/fault"
	"sockeye/internal/format"
	"sockeye/internal/trace/capture"
	"sockeye/internal/trace/measure"
	"sockeye/internal/trace/packets"
)

// Packets is the JSON output of trace packets.
type Packets struct {
	Connection api.TraceConnection `json:"connection"`
	Packets    []packets.Packet    `json:"packets"`
	Summary    packets.Summary     `json:"summary"`
	File       string              `json:"file,omitempty"`
}

// Limits of the agent.
const (
	mostPacketsFor = 10 * time.Minute
	mostEvents     = 10_000_000
)

func (c *commands) tracePacketsCommand() *cobra.Command {
	var pid, fd, limit int
	var local, remote, buffer, path string
	var force bool
	cmd := &cobra.Command{
		Use:   "packets (--pid N --fd N | --local A:P --remote A:P)",
		Short: "Trace each packet of a TCP connection or a UDP socket",
		Long: `Packets traces all packets of an open TCP connection for a limited time: sent
packets through the queueing discipline and the driver until their
acknowledgement, with retransmissions and segmentation, and received packets
with their acknowledgements. It needs a running agent, but neither a trace rule
nor BPF timestamping. Sequence numbers are relative to the first packet seen.

For a UDP socket, it traces sent datagrams through the queueing discipline to
the driver, with segments and fragments; received datagrams from the socket
until the application reads them; and datagrams that are dropped on sending or
at the socket, with the reason. Datagrams that are dropped before the socket,
as by a firewall, are not shown. The lines are in the order of the times: a
datagram that waits to be read holds back the later lines.

With --write, it also writes the first 192 bytes of each packet, from the IP
header on, to a pcapng file for Wireshark, with the times as packet comments.
These bytes include data of the application.`,
		Example: `  sockeye trace packets --pid 812 --fd 7
  sockeye trace packets --local 10.0.0.1:1790 --remote 192.0.2.1:40000
  sockeye trace packets --pid 812 --fd 5 --for 1m
  sockeye trace packets --pid 812 --fd 7 --for 30s -w connection.pcapng`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			q, err := connectionQuery(cmd, pid, fd, local, remote)
			if err != nil {
				return err
			}
			during, err := command.Interval(cmd, "for")
			if err != nil {
				return err
			}
			if during > mostPacketsFor {
				return fault.Usage(fmt.Errorf("--for is %q", cmd.Flag("for").Value), "at most "+mostPacketsFor.String())
			}
			if during > 0 {
				q.Set("for", during.String())
			}
			size, err := bufferSize(cmd, buffer)
			if err != nil {
				return err
			}
			if size > 0 {
				q.Set("buffer", strconv.Itoa(size))
			}
			if cmd.Flags().Changed("limit") {
				if limit < 1 || limit > mostEvents {
					return fault.Usage(fmt.Errorf("--limit is %d", limit), fmt.Sprintf("1 to %d", mostEvents))
				}
				q.Set("limit", strconv.Itoa(limit))
			}
			if force && !cmd.Flags().Changed("write") {
				return fault.Usage(errors.New("--force requires --write"), "--force replaces an existing file")
			}
			if cmd.Flags().Changed("write") && path == "" {
				return fault.Usage(errors.New(`--write is ""`), "name a file")
			}
			return c.packets(cmd.Context(), q, path, force)
		},
	}
	cmd.Flags().IntVar(&pid, "pid", 0, "PID of a process that has the socket open")
	cmd.Flags().IntVar(&fd, "fd", 0, "file descriptor of the socket in the process")
	cmd.Flags().StringVar(&local, "local", "", "local address and port")
	cmd.Flags().StringVar(&remote, "remote", "", "remote address and port")
	cmd.Flags().String("for", "10s", "duration of the trace, at most 10m")
	cmd.Flags().IntVar(&limit, "limit", mostEvents, "maximum number of events; most packets have two or more events")
	bufferFlag(cmd, &buffer, "4MB")
	cmd.Flags().StringVarP(&path, "write", "w", "", "write the first bytes of the packets to this pcapng file")
	cmd.Flags().BoolVar(&force, "force", false, "replace an existing file")
	for _, free := range []string{"pid", "fd", "local", "remote", "for", "limit"} {
		command.CompleteFlag(cmd, free)
	}
	return cmd
}

// connectionQuery returns the query for a connection, by descriptor or by addresses.
func connectionQuery(cmd *cobra.Command, pid, fd int, local, remote string) (url.Values, error) {
	const usage = "use --pid and --fd, or --local and --remote, with the values of ss -tnp; a UDP socket (ss -uanp) by --pid and --fd"
	given := cmd.Flags().Changed
	byDescriptor, byAddress := given("pid") || given("fd"), given("local") || given("remote")
	switch {
	case byDescriptor && byAddress:
		return nil, fault.Usage(errors.New("--pid and --fd exclude --local and --remote"), usage)
	case byDescriptor && (!given("pid") || !given("fd")), byAddress && (!given("local") || !given("remote")), !byDescriptor && !byAddress:
		return nil, fault.Usage(errors.New("the connection is missing"), usage)
	case byDescriptor && pid < 1:
		return nil, fault.Usage(fmt.Errorf("--pid is %d", pid), "a PID, 1 or more")
	case byDescriptor && fd < 0:
		return nil, fault.Usage(fmt.Errorf("--fd is %d", fd), "a file descriptor, 0 or more")
	case byDescriptor:
		return url.Values{"pid": {strconv.Itoa(pid)}, "fd": {strconv.Itoa(fd)}}, nil
	}
	l, r, err := command.Endpoints(local, remote)
	if err != nil {
		return nil, err
	}
	if l.Port() == 0 || r.Port() == 0 {
		return nil, fault.Usage(errors.New("a port is missing"), "give both ports, as in --local 10.0.0.1:1790 --remote 192.0.2.1:40000")
	}
	return url.Values{"local": {l.String()}, "remote": {r.String()}}, nil
}

// packetView writes packets when they are complete.
type packetView struct {
	*command.Command
	answer         Packets
	file           *packets.Writer // nil without a file
	begun          bool
	first          time.Time
	qdisc, network measure.Histogram
	waited         measure.Histogram // of received datagrams
}

// packets traces a connection until the agent ends the stream or ctx is done.
func (c *commands) packets(ctx context.Context, q url.Values, path string, force bool) error {
	var file *newFile
	var err error
	if path != "" {
		if file, err = createFile(path, force, 0o600); err != nil { // it has the beginning of the payload
			return err
		}
		defer file.discard()
	}
	s, err := c.Client().Stream(ctx, "/v1/trace/packets", q)
	if err != nil {
		return unlessDone(ctx, err)
	}
	defer s.Close()
	var line api.TracePacketLine
	if err := s.Next(&line); err != nil {
		return unlessDone(ctx, truncated(err))
	}
	if line.Connection == nil {
		return truncated(errors.New("the first line has no connection"))
	}
	v := &packetView{Command: c.Command, answer: Packets{Connection: *line.Connection, Packets: []packets.Packet{}, File: path}}
	if file != nil {
		about := ends(&v.answer.Connection)
		if v.file, err = packets.NewWriter(file, about, "sockeye "+command.Version); err != nil {
			return err
		}
	}
	if err := v.follow(ctx, s); err != nil {
		return err
	}
	if file != nil {
		if err := v.file.Close(&v.answer.Summary); err != nil {
			return err
		}
		if err := file.finish(); err != nil {
			return err
		}
	}
	return v.writeTotals()
}

type assembler interface {
	Add(*capture.Event) error
	Close() (*packets.Summary, error)
}

// stopped maps the agent's reasons for the end of the stream.
var stopped = map[string]packets.Reason{"time": packets.StoppedDeadline, "limit": packets.StoppedEvents, "closed": packets.StoppedClosed}

// follow reads the stream until its end.
func (v *packetView) follow(ctx context.Context, s *api.Stream) error {
	a := v.assembler()
	var end *api.TracePacketsEnd
	for end == nil && ctx.Err() == nil {
		var line api.TracePacketLine
		err := s.Next(&line)
		switch {
		case ctx.Err() != nil:
		case err != nil:
			return truncated(err)
		case line.Event != nil:
			if err := a.Add(line.Event); err != nil {
				return err
			}
		default:
			end = line.End
		}
	}
	summary, err := a.Close()
	if err != nil {
		return err
	}
	v.answer.Summary = *summary
	v.answer.Summary.Missing = v.answer.Connection.Missing
	v.answer.Summary.Stopped = packets.StoppedInterrupted
	if end != nil {
		v.answer.Summary.LostEvents = end.Lost
		v.answer.Summary.Stopped = stopped[end.Reason]
	}
	return nil
}

// assembler returns the assembler for the events of the connection or the UDP socket.
func (v *packetView) assembler() assembler {
	c := &v.answer.Connection
	if c.Protocol == "udp" {
		return packets.NewDatagramAssembler(packets.Clock(c.Clock), 0, c.DropReasons, v.writePacket)
	}
	return packets.NewAssembler(packets.Clock(c.Clock), 0, v.writePacket)
}

// packetRow is the format of a packet: number, time, direction, sequence number, length, flags, times and note.
const packetRow = "%6v  %11s  %s  %11v  %8v  %-11s  %8s  %9s  %s"

// datagramRow is the format of a datagram: number, time, direction, length, times, peer and note.
const datagramRow = "%6v  %11s  %s  %8v  %8s  %8s  %-23s  %s"

// writePacket writes a complete packet.
func (v *packetView) writePacket(p *packets.Packet) error {
	if v.file != nil {
		if err := v.file.Write(p); err != nil {
			return err
		}
	}
	qdisc, network, direction, note := "-", "-", "<", p.Comment()
	if p.Sent != nil {
		direction = ">"
		_, note, _ = strings.Cut(note, "; ") // the comment starts with the times
		if !p.Sent.Driver.IsZero() {
			qdisc = command.Duration(p.Sent.Qdisc)
			v.qdisc.Observe(uint64(max(p.Sent.Qdisc, 0)))
		}
		if !p.Sent.Acked.IsZero() {
			network = command.Duration(p.Sent.Network)
			v.network.Observe(uint64(max(p.Sent.Network, 0)))
		}
	}
	waited := "-"
	if r := p.Received; r != nil && !r.Read.IsZero() {
		waited, note = command.Duration(r.Waited), ""
		v.waited.Observe(uint64(max(r.Waited, 0)))
	}
	if v.Output == "json" {
		v.answer.Packets = append(v.answer.Packets, *p)
		return nil
	}
	var l command.Text
	v.writeHeader(&l)
	if v.first.IsZero() {
		v.first = p.Time
	}
	at := strconv.FormatFloat(p.Time.Sub(v.first).Seconds(), 'f', 6, 64)
	if p.Peer.IsValid() {
		peer := p.Peer.String()
		if p.Fragment != nil && p.Fragment.Offset > 0 {
			peer = p.Peer.Addr().String()
		}
		l.Line(datagramRow, p.Number, at, direction, p.Length, qdisc, waited, peer, note)
		_, err := l.WriteTo(v.Out)
		return err
	}
	l.Line(packetRow, p.Number, at, direction, p.Seq, p.Length, p.Flags, qdisc, network, note)
	_, err := l.WriteTo(v.Out)
	return err
}

// writeTotals writes the totals.
func (v *packetView) writeTotals() error {
	if v.Output == "json" {
		return v.JSON(v.answer)
	}
	var l command.Text
	v.writeHeader(&l)
	s := &v.answer.Summary
	l.Line("")
	l.Line("%s sent (%s in %s), %s received (%s), in %s", format.Count(s.Sent, "packet", "packets"), command.Bytes(s.SentBytes), format.Count(s.Segments, "segment", "segments"),
		format.Count(s.Received, "packet", "packets"), command.Bytes(s.ReceivedBytes), command.Duration(s.To.Sub(s.From)))
	var fates []string
	for _, f := range []packets.Fate{packets.Acknowledged, packets.PartlyLost, packets.Lost, packets.Dropped, packets.Needless, packets.Unacknowledged} {
		if n := s.Fates[f]; n > 0 {
			fates = append(fates, fmt.Sprintf("%d %s", n, strings.ReplaceAll(string(f), "_", " ")))
		}
	}
	if s.Retransmissions > 0 {
		fates = append(fates, format.Count(s.Retransmissions, "retransmission", "retransmissions"))
	}
	if len(fates) > 0 {
		l.Line("sent packets: %s", strings.Join(fates, ", "))
	}
	if v.answer.Connection.Protocol == "udp" && s.Received > 0 {
		l.Line("received datagrams: %d read, %d not read, %d dropped", s.Read, s.Unread, s.ReceivedDropped)
	}
	for _, of := range []struct {
		name config.Stage
		*measure.Histogram
	}{{"qdisc", &v.qdisc}, {"driver to ACK", &v.network}, {"socket to application", &v.waited}} {
		if of.Count > 0 {
			l.Line("%s: p50 %s, p99 %s, max %s", of.name, command.Duration(of.Quantile(0.5)), command.Duration(of.Quantile(0.99)), command.Duration(time.Duration(of.Max)))
		}
	}
	lost := "lost because the buffer was full: packets or times are missing; use a larger --buffer"
	if v.answer.Connection.Protocol == "udp" {
		lost = "lost because the buffer was full: packets or times are missing, and datagrams can be counted wrongly; use a larger --buffer"
	}
	for _, lack := range []struct {
		n               uint64
		one, many, Text string
	}{
		{s.LostEvents, "event", "events", lost},
		{uint64(s.Strays), "part of a packet", "parts of packets", "without the beginning of the packet"},
		{uint64(s.Unreadable), "packet", "packets", "with an unreadable header"},
		{uint64(s.EarlierReads), "datagram", "datagrams", "read whose arrival was not seen: before the trace, or the socket is of another cgroup"},
		{uint64(s.ReceivedUnseen), "datagram", "datagrams", "left the queue of the socket, the event was lost"},
		{uint64(s.Unfinished), "packet", "packets", "dropped from memory before they were complete"},
	} {
		if lack.n > 0 {
			l.Line("%s %s", format.Count(lack.n, lack.one, lack.many), lack.Text)
		}
	}
	if s.Unseen > 0 {
		l.Line("%s sent in packets that were not captured", command.Bytes(s.Unseen))
	}
	switch s.Stopped {
	case packets.StoppedEvents:
		l.Line("stopped by --limit")
	case packets.StoppedClosed:
		l.Line("the connection has closed")
	}
	if v.answer.File != "" {
		l.Line("wrote %s", v.answer.File)
	}
	_, err := l.WriteTo(v.Out)
	return err
}

// without describes the data that is missing without a tracepoint.
var without = map[string]string{
	"tcp_probe":           "received packets are not shown",
	"netif_receive_skb":   "packets received after one side has closed the connection are not shown",
	"tcp_retransmit_skb":  "the causes of retransmissions are unknown",
	"inet_sock_set_state": "the end of the connection is not detected",
}

// writeHeader writes the connection, once.
func (v *packetView) writeHeader(l *command.Text) {
	if v.begun {
		return
	}
	v.begun = true
	connection := &v.answer.Connection
	l.Line("%s: descriptor %d of process %d (%s)", ends(connection), connection.FD, connection.PID, command.Shorten(connection.Command, 50))
	for _, m := range connection.Missing {
		l.Line("this kernel has no tracepoint %s: %s", m, without[m])
	}
	l.Line("")
	if connection.Protocol == "udp" {
		l.Line(datagramRow, "PACKET", "SECONDS", " ", "LENGTH", "QDISC", "WAITED", "PEER", "NOTE")
		return
	}
	l.Line(packetRow, "PACKET", "SECONDS", " ", "SEQ", "LENGTH", "FLAGS", "QDISC", "TO ACK", "NOTE")
}

// ends names the ends of a connection or a UDP socket.
func ends(c *api.TraceConnection) string {
	if c.Protocol == "udp" {
		if c.Remote == "" {
			return "udp " + c.Local
		}
		return "udp " + c.Local + " to " + c.Remote
	}
	return c.Local + " to " + c.Remote
}
