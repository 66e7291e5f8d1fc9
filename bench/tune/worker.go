// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"cmp"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/lab"
)

// Clients and servers are separate processes, so that a cgroup contains one end of one arm. A client reads tasks from
// stdin, one JSON object per line, and answers each with a line. Clients and servers exit when stdin is closed.

const (
	serverRole = "tune-server"
	clientRole = "tune-client"
	tunePort   = 1790

	rpcGrace = 30 * time.Second // for RPCs in flight at the end of a load
)

// socketOptions are the options that an application sets itself. 0 is the kernel's default.
type socketOptions struct {
	SendBuffer    int `json:"send_buffer,omitempty"`    // SO_SNDBUF in bytes
	ReceiveBuffer int `json:"receive_buffer,omitempty"` // SO_RCVBUF in bytes
	// Window is TCP_WINDOW_CLAMP in bytes. It limits what the peer has in flight, until the kernel sizes the window anew by
	// the receive buffer (tcp_measure_rcv_mss). No option limits the own congestion window.
	Window int `json:"window,omitempty"`
	// Congestion is TCP_CONGESTION; "" is cubic, as the sysctl of a namespace only accepts congestion controls that the host
	// allows for ordinary users. With dctcp, the kernel also negotiates ECN.
	Congestion string `json:"congestion,omitempty"`
}

// server starts a server and returns when it listens.
func (t *bench) server(ctx context.Context, n *lab.Namespace, group, address string, o socketOptions) error {
	w, err := t.Worker(ctx, n, group, serverRole, "-listen", address, "-rcvbuf", strconv.Itoa(o.ReceiveBuffer), "-window", strconv.Itoa(o.Window),
		"-congestion", o.Congestion)
	if err != nil {
		return err
	}
	return w.Answer(&struct{}{})
}

func tuneServer(args []string) error {
	fs := flag.NewFlagSet(serverRole, flag.ContinueOnError)
	address := fs.String("listen", "", "address and port")
	var o socketOptions
	fs.IntVar(&o.ReceiveBuffer, "rcvbuf", 0, "receive buffer in bytes")
	fs.IntVar(&o.Window, "window", 0, "maximum window in bytes")
	fs.StringVar(&o.Congestion, "congestion", "", "congestion control")
	if err := fs.Parse(args); err != nil {
		return err
	}
	lc := net.ListenConfig{Control: o.set}
	lc.SetMultipathTCP(false)
	l, err := lc.Listen(context.Background(), "tcp", *address)
	if err != nil {
		return err
	}
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				fmt.Fprintln(os.Stderr, "accept:", err)
				os.Exit(1)
			}
			go serve(conn)
		}
	}()
	fmt.Println("{}")
	_, _ = io.Copy(io.Discard, os.Stdin)
	return nil
}

// header is the first data of a connection. It describes the work of the server.
type header struct {
	Request  uint32 // size of requests in bytes, each answered with one byte; 0 without answers
	Response uint32 // bytes to send before closing; 0 to read
}

// serve serves a connection until it ends. The client reports errors of the connection.
func serve(conn net.Conn) {
	defer conn.Close()
	var h header
	if err := binary.Read(conn, binary.BigEndian, &h); err != nil {
		return
	}
	if h.Response > 0 {
		_, _ = conn.Write(make([]byte, h.Response))
		return
	}
	buf := make([]byte, 64<<10)
	for missing := h.Request; ; {
		n, err := conn.Read(buf)
		if err != nil {
			return
		}
		for got := uint32(n); got > 0 && h.Request > 0; {
			part := min(got, missing)
			got -= part
			missing -= part
			if missing > 0 {
				continue
			}
			if _, err := conn.Write([]byte{1}); err != nil {
				return
			}
			missing = h.Request
		}
	}
}

// task is a request to a client; one of Load, Fetch and Connect is set.
type task struct {
	Target  string        `json:"target"`
	Options socketOptions `json:"options"`
	Load    *rpcLoad      `json:"load,omitempty"`
	Fetch   int           `json:"fetch,omitempty"`   // bytes to fetch on a new connection
	Connect int           `json:"connect,omitempty"` // number of simultaneous connections
}

// rpcLoad has concurrent flows.
type rpcLoad struct {
	Flows    []rpcFlows    `json:"flows"`
	Warmup   time.Duration `json:"warmup_ns"`
	Duration time.Duration `json:"duration_ns"`
}

// rpcFlows are connections that send consecutive requests of a size in bytes, each answered with one byte. Size 0 is
// a stream without answers.
type rpcFlows struct {
	Size  int `json:"size"`
	Count int `json:"count"`
}

func tuneClient([]string) error {
	lines, answers := json.NewDecoder(os.Stdin), json.NewEncoder(os.Stdout)
	for {
		var t task
		if err := lines.Decode(&t); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return fmt.Errorf("read task: %w", err)
		}
		var answer any
		var err error
		switch {
		case t.Load != nil:
			answer, err = t.Load.run(t.Target, t.Options, func() error {
				if err := answers.Encode(struct{}{}); err != nil {
					return err
				}
				return lines.Decode(&struct{}{})
			})
		case t.Fetch > 0:
			answer, err = fetch(t.Target, t.Fetch)
		default:
			answer, err = connect(t.Target, t.Connect)
		}
		if err != nil {
			return err
		}
		if err := answers.Encode(answer); err != nil {
			return err
		}
	}
}

// set sets the options of a socket before it connects or listens.
func (o socketOptions) set(_, _ string, c syscall.RawConn) error {
	var err error
	if cerr := c.Control(func(fd uintptr) {
		err = unix.SetsockoptString(int(fd), unix.IPPROTO_TCP, unix.TCP_CONGESTION, cmp.Or(o.Congestion, "cubic"))
		for _, option := range []struct{ level, name, value int }{
			{unix.SOL_SOCKET, unix.SO_SNDBUF, o.SendBuffer},
			{unix.SOL_SOCKET, unix.SO_RCVBUF, o.ReceiveBuffer},
			{unix.IPPROTO_TCP, unix.TCP_WINDOW_CLAMP, o.Window},
		} {
			if err == nil && option.value > 0 {
				err = unix.SetsockoptInt(int(fd), option.level, option.name, option.value)
			}
		}
	}); cerr != nil {
		return cerr
	}
	if err != nil {
		return fmt.Errorf("set socket options: %w", err)
	}
	return nil
}

// rpcResult is the result of a flow after the warm-up.
type rpcResult struct {
	Size        int     `json:"size"`
	Bytes       int64   `json:"bytes"` // acknowledged by the peer within the duration
	Retransmits uint64  `json:"retransmits"`
	Took        []int64 `json:"microseconds"` // of requests started within the duration, or of each MB of a stream
}

// totals are the segments that a connection has retransmitted, and its bytes that the peer has acknowledged.
type totals struct{ retransmits, acknowledged uint64 }

// run opens all connections, calls ready, and starts the load.
func (l *rpcLoad) run(target string, o socketOptions, ready func() error) ([]rpcResult, error) {
	type flow struct {
		size int
		conn net.Conn
	}
	var flows []flow
	for _, f := range l.Flows {
		for range f.Count {
			conn, err := dial(target, o, header{Request: uint32(f.Size)})
			if err != nil {
				return nil, err
			}
			defer conn.Close()
			flows = append(flows, flow{f.Size, conn})
		}
	}
	if err := ready(); err != nil {
		return nil, err
	}
	begin := time.Now().Add(l.Warmup)
	end := begin.Add(l.Duration)
	results, errs := make([]rpcResult, len(flows)), make([]error, len(flows)+1)
	var wg sync.WaitGroup
	for i, f := range flows {
		wg.Go(func() {
			if f.size == stream {
				results[i], errs[i] = send(f.conn, begin, end)
			} else {
				results[i], errs[i] = request(f.conn, f.size, begin, end)
			}
		})
	}
	// The totals are read at both ends of the measured time: a large request takes most of it.
	var at [2][]totals
	for i, when := range []time.Time{begin, end} {
		time.Sleep(time.Until(when))
		for _, f := range flows {
			n, err := readTotals(f.conn)
			at[i] = append(at[i], n)
			errs[len(flows)] = errors.Join(errs[len(flows)], err)
		}
	}
	wg.Wait()
	for i := range flows {
		results[i].Retransmits = at[1][i].retransmits - at[0][i].retransmits
		results[i].Bytes = int64(at[1][i].acknowledged - at[0][i].acknowledged)
	}
	return results, errors.Join(errs...)
}

func readTotals(conn net.Conn) (n totals, err error) {
	raw, err := conn.(syscall.Conn).SyscallConn()
	if err != nil {
		return n, err
	}
	cerr := raw.Control(func(fd uintptr) {
		var info *unix.TCPInfo
		if info, err = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO); err == nil {
			n = totals{uint64(info.Total_retrans), info.Bytes_acked}
		}
	})
	if err = errors.Join(cerr, err); err != nil {
		return n, fmt.Errorf("read TCP_INFO: %w", err)
	}
	return n, nil
}

// payload is the data of all requests and streams.
var payload = make([]byte, large)

func request(conn net.Conn, size int, begin, end time.Time) (r rpcResult, err error) {
	r.Size = size
	reply := make([]byte, 1)
	if err := conn.SetDeadline(end.Add(rpcGrace)); err != nil {
		return r, err
	}
	for start := time.Now(); start.Before(end); {
		if _, err := conn.Write(payload[:size]); err != nil {
			return r, fmt.Errorf("request of %d bytes: %w", size, err)
		}
		if _, err := conn.Read(reply); err != nil {
			return r, fmt.Errorf("request of %d bytes: %w", size, err)
		}
		done := time.Now()
		if !start.Before(begin) {
			r.Took = append(r.Took, done.Sub(start).Microseconds())
		}
		start = done
	}
	return r, nil
}

// streamWrite is the size of a write to a stream in bytes, a fraction of large.
const streamWrite = 50_000

// send sends a stream. It measures the time of each MB from its first to its last write.
func send(conn net.Conn, begin, end time.Time) (r rpcResult, err error) {
	r.Size = stream
	if err := conn.SetDeadline(end); err != nil {
		return r, err
	}
	start := time.Now()
	for sent := 0; ; {
		n, err := conn.Write(payload[:streamWrite])
		now := time.Now()
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return r, nil
		}
		if err != nil {
			return r, fmt.Errorf("stream: %w", err)
		}
		if sent += n; sent == large {
			if !start.Before(begin) {
				r.Took = append(r.Took, now.Sub(start).Microseconds())
			}
			start, sent = now, 0
		}
	}
}

// fetch returns the time in microseconds for size bytes on a new connection, from connect(2) to the last byte.
func fetch(target string, size int) (int64, error) {
	start := time.Now()
	conn, err := dial(target, socketOptions{}, header{Response: uint32(size)})
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	if err := conn.SetDeadline(start.Add(rpcGrace)); err != nil {
		return 0, err
	}
	n, err := io.Copy(io.Discard, conn)
	if err == nil && n != int64(size) {
		err = io.ErrUnexpectedEOF
	}
	if err != nil {
		return 0, fmt.Errorf("fetch %d bytes, got %d: %w", size, n, err)
	}
	return time.Since(start).Microseconds(), nil
}

func dial(target string, o socketOptions, h header) (net.Conn, error) {
	conn, err := dialer(o).Dial("tcp", target)
	if err != nil {
		return nil, err
	}
	if err := binary.Write(conn, binary.BigEndian, h); err != nil {
		conn.Close()
		return nil, fmt.Errorf("send header: %w", err)
	}
	return conn, nil
}

// connect returns the duration of connect(2) in microseconds for each of n connections.
func connect(target string, n int) ([]int64, error) {
	took, errs := make([]int64, n), make([]error, n)
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			start := time.Now()
			conn, err := dialer(socketOptions{}).Dial("tcp", target)
			if err != nil {
				errs[i] = err
				return
			}
			took[i] = time.Since(start).Microseconds()
			conn.Close()
		})
	}
	wg.Wait()
	return took, errors.Join(errs...)
}

func dialer(o socketOptions) *net.Dialer {
	d := &net.Dialer{Timeout: rpcGrace, Control: o.set}
	d.SetMultipathTCP(false)
	return d
}
