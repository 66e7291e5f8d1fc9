// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"context"
	"encoding/binary"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"sockeye/internal/api"
	"sockeye/internal/cli/clitest"
	"sockeye/internal/cli/command"
	"sockeye/internal/cli/tracecmd"
	"sockeye/internal/fault"
	"sockeye/internal/trace/capture"
	"sockeye/internal/trace/packets"
)

// event is an event of a packet, in microseconds.
func event(kind uint8, at uint64, seq, ack, length uint32) api.TracePacketLine {
	e := &capture.Event{}
	e.Kind, e.Time, e.Flags, e.Ifindex = kind, at*1000, capture.TCP, 2
	e.Skb, e.Seq, e.Ack, e.Length, e.Size, e.Window, e.Tcp = uint64(seq), seq, ack, length, length+40, 65535, 1<<4
	for i, c := range "eth0" {
		e.Name[i] = int8(c)
	}
	if kind == capture.Queue || kind == capture.Receive {
		e.Bytes = header(seq, ack, length)
		e.Captured = uint16(len(e.Bytes))
	}
	return api.TracePacketLine{Event: e}
}

// header is the start of an IPv4 packet with a TCP header.
func header(seq, ack, length uint32) []byte {
	b := make([]byte, 40)
	b[0], b[8], b[9], b[32], b[33] = 0x45, 64, 6, 5<<4, 1<<4
	binary.BigEndian.PutUint16(b[2:], uint16(length+40))
	copy(b[12:], []byte{10, 0, 0, 1, 192, 0, 2, 7})
	binary.BigEndian.PutUint16(b[20:], 1790)
	binary.BigEndian.PutUint16(b[22:], 40000)
	binary.BigEndian.PutUint32(b[24:], seq)
	binary.BigEndian.PutUint32(b[28:], ack)
	return b
}

// connection is the first line of the response. Its clock starts at noon.
func connection() api.TracePacketLine {
	return api.TracePacketLine{Connection: &api.TraceConnection{
		Local: "10.0.0.1:1790", Remote: "192.0.2.7:40000", PID: 812, FD: 7, Command: "nfacctd -f " + clitest.Hostile, Cookie: 17, Clock: noon.UnixNano(), Missing: []string{},
	}}
}

func ending(lost uint64, reason string) api.TracePacketLine {
	return api.TracePacketLine{End: &api.TracePacketsEnd{Lost: lost, Reason: reason}}
}

// exchange has two data packets, one of them retransmitted, and their acknowledgements.
func exchange(rest ...any) []any {
	again := event(capture.Queue, 205_000, 2001, 500, 1000)
	again.Event.Skb = 99
	driver := event(capture.Driver, 205_100, 2001, 500, 1000)
	driver.Event.Skb = 99
	return append([]any{
		connection(),
		event(capture.Queue, 1000, 1001, 500, 1000), event(capture.Driver, 1012, 1001, 500, 1000),
		event(capture.Queue, 1020, 2001, 500, 1000), event(capture.Driver, 1040, 2001, 500, 1000),
		event(capture.Receive, 11_000, 500, 2001, 0),
		again, driver,
		event(capture.Receive, 215_000, 500, 3001, 0),
	}, rest...)
}

func TestTracePackets(t *testing.T) {
	f := newFake(t)
	answer := func(last func(http.ResponseWriter, *http.Request), all ...any) {
		f.answers["GET /v1/trace/packets"] = lines(t, last, all...)
		f.asked = nil
	}
	answer(nil, exchange(ending(0, "time"))...)
	f.printsGolden("trace-packets", "trace", "packets", "--pid", "812", "--fd", "7")
	f.wasAsked("GET /v1/trace/packets fd=7 pid=812")

	file := f.dir + "/x.pcapng"
	got := must[tracecmd.Packets](f.host, "trace", "packets", "--local", "10.0.0.1:1790", "--remote", "192.0.2.7:40000", "--for", "30s", "--limit", "1000", "--buffer", "8MiB", "-w", file)
	f.wasAsked("GET /v1/trace/packets buffer=8388608 for=30s limit=1000 local=10.0.0.1:1790 remote=192.0.2.7:40000")
	if len(got.Packets) != 5 || got.Packets[1].Sent.Again != 4 || got.Packets[3].Sent.Retransmission.Ordinal != 1 || got.Packets[0].Sent.Qdisc != 12*time.Microsecond ||
		got.Packets[4].Received.Acked != 1000 || !got.Packets[0].Time.Equal(noon.Add(time.Millisecond)) || got.Summary.Stopped != packets.StoppedDeadline ||
		got.Summary.Sent != 3 || got.Summary.Retransmissions != 1 || got.Connection.Cookie != 17 || got.File != file {
		t.Errorf("%+v", got)
	}
	if info, err := os.Stat(file); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the file with payload: %v, %v", info, err)
	}
	// The file is pcapng and contains each packet with its comment.
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"\x0a\x0d\x0d\x0a", "10.0.0.1:1790 to 192.0.2.7:40000", "sockeye devel", "eth0"} {
		if !bytes.Contains(data, []byte(want)) {
			t.Errorf("%q is not in the file", want)
		}
	}
	for _, p := range got.Packets {
		if !bytes.Contains(data, []byte(p.Comment())) || !bytes.Contains(data, p.Header) {
			t.Errorf("packet %d is not in the file", p.Number)
		}
	}
	f.refused(2, "DIR/x.pcapng exists", "name another file, or use --force to replace it", nil, "trace", "packets", "--pid", "812", "--fd", "7", "-w", file)
	if r := f.at("trace", "packets", "--pid", "812", "--fd", "7", "-w", file, "--force"); r.code != 0 || !strings.HasSuffix(r.out, "\nwrote "+file+"\n") {
		t.Errorf("%+v", r)
	}
	f.leaves("policy.yaml", "run", "x.pcapng")

	// Missing values are reported.
	first := connection()
	first.Connection.Missing = []string{"tcp_probe", "inet_sock_set_state"}
	stray := event(capture.Driver, 5, 77, 0, 10)
	far := event(capture.Queue, 10, 50_077, 0, 10)
	answer(nil, first, stray, event(capture.Queue, 6, 77, 0, 10), far, ending(12, "limit"))
	f.printsGolden("trace-packets-lost", "trace", "packets", "--pid", "812", "--fd", "7", "--limit", "1")
	datagrams := connection()
	datagrams.Connection.Protocol = "udp"
	answer(nil, datagrams, ending(1, "limit"))
	if r := f.at("trace", "packets", "--pid", "812", "--fd", "7"); r.code != 0 || !strings.Contains(r.out, "\n1 event lost because the buffer was full: packets or times are missing, and datagrams can be counted wrongly; use a larger --buffer\n") {
		t.Errorf("%+v", r)
	}
	answer(nil, connection(), ending(0, "closed"))
	if r := f.at("trace", "packets", "--pid", "812", "--fd", "7"); r.code != 0 || !strings.HasSuffix(r.out, "\n0 packets sent (0 B in 0 segments), 0 packets received (0 B), in 0 ns\nthe connection has closed\n") {
		t.Errorf("%+v", r)
	}

	// SIGINT prints and writes the packets so far.
	answer(untilGone, exchange()...)
	ctx, stop := context.WithTimeout(context.Background(), 20*time.Second)
	defer stop()
	var out, errs bytes.Buffer
	code := Run(ctx, []string{"--run-dir", f.run, "trace", "packets", "--pid", "812", "--fd", "7", "-w", f.dir + "/y.pcapng"},
		command.Environment{Out: writer(func(b []byte) { stop(); out.Write(b) }), Err: &errs, Now: time.Now})
	if code != 0 || errs.Len() > 0 || !strings.Contains(out.String(), "\n     1     0.000000  >") || !strings.HasSuffix(out.String(), "\nwrote "+f.dir+"/y.pcapng\n") {
		t.Errorf("%d %s\n%s", code, errs.String(), out.String())
	}
	f.leaves("policy.yaml", "run", "x.pcapng", "y.pcapng")

	// If the agent exits, the command fails.
	for _, last := range []func(http.ResponseWriter, *http.Request){nil, breakOff} {
		for _, all := range [][]any{exchange(), {}, {ending(0, "time")}} {
			answer(last, all...)
			r := f.at("trace", "packets", "--pid", "812", "--fd", "7", "-w", f.dir+"/z.pcapng")
			if r.code != 1 || !strings.HasPrefix(r.err, "sockeye: the answer of the agent is incomplete: ") || !strings.HasSuffix(r.err, "\nhint: the agent may have exited; see sockeye status\n") {
				t.Errorf("%+v", r)
			}
			f.leaves("policy.yaml", "run", "x.pcapng", "y.pcapng")
		}
	}

	f.answers["GET /v1/trace/packets"] = api.Failure{Error: "there is no process 812", Hint: "name another", Code: fault.CodeUsage}
	f.refused(2, "there is no process 812", "name another", nil, "trace", "packets", "--pid", "812", "--fd", "7", "-w", f.dir+"/z.pcapng")
	f.leaves("policy.yaml", "run", "x.pcapng", "y.pcapng")
}

type writer func([]byte)

func (w writer) Write(b []byte) (int, error) {
	w(b)
	return len(b), nil
}
