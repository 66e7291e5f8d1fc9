// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// receiverEnv makes the test binary a receiver. Its name does not start with SOCKEYE_, because "sockeye run" removes
// such variables.
const receiverEnv = "E2E_RECEIVER"

// receiver configures a receiver.
type receiver struct {
	Slot    int // the slot in responses
	Sockets []socket
	// Counts makes the receiver count datagrams. It responds to a datagram of one byte with the number of longer
	// datagrams before it, and does not log datagrams.
	Counts bool
	// Records makes the receiver log the payload of each datagram, and the first line of each connection.
	Records bool
	// Deaf makes the receiver open its sockets and read nothing.
	Deaf bool
	// Starts is the time for which the first thread of the receiver is busy after it has opened its sockets. The receiver fails if
	// it gets a connection before the end.
	Starts time.Duration `json:",omitempty"`
	// Decodes is the time for which the receiver leaves the first datagrams unread, and then works with them. The receiver fails if it
	// gets other datagrams before the end.
	Decodes time.Duration `json:",omitempty"`
}

// socket is a socket of a receiver. Sockets are opened in order.
type socket struct {
	Protocol string // tcp or udp
	Address  netip.AddrPort
	V6Only   bool
	Plain    bool // without SO_REUSEPORT
}

// The first thread of a process runs init functions, and this goroutine stays on that thread.
func init() {
	if strings.Contains(os.Getenv(receiverEnv), `"Starts":`) {
		runtime.LockOSThread()
	}
}

// receive returns only for an error. It writes a line "up" when its sockets are open, and "PROTOCOL ADDRESS" for each
// connection and datagram. It responds to both with its slot, and echoes further data of connections. Commands on
// stdin: "close tcp" and "close udp" close sockets, "fork" starts a child that inherits all of them.
func receive(spec string) error {
	var r receiver
	if err := json.Unmarshal([]byte(spec), &r); err != nil {
		return err
	}
	answer := fmt.Appendf(nil, "%d\n", r.Slot)
	note := func(protocol string, from net.Addr) {
		a, _ := netip.ParseAddrPort(from.String())
		fmt.Fprintf(os.Stdout, "%s %v\n", protocol, a.Addr().Unmap())
	}
	var starting atomic.Bool
	starting.Store(r.Starts > 0)
	open := map[string][]interface {
		io.Closer
		File() (*os.File, error)
	}{}
	for _, s := range r.Sockets {
		fd, err := s.open()
		if err != nil {
			return fmt.Errorf("open %s %v: %w", s.Protocol, s.Address, err)
		}
		if r.Deaf {
			continue
		}
		f := os.NewFile(uintptr(fd), s.Protocol)
		if s.Protocol == "udp" {
			c, err := net.FilePacketConn(f)
			if err != nil {
				return err
			}
			open["udp"] = append(open["udp"], c.(*net.UDPConn))
			go func() {
				b := make([]byte, 2048)
				counted := 0
				if r.Decodes > 0 {
					if err := decodeSlowly(c.(*net.UDPConn), r.Decodes); err != nil {
						fmt.Fprintln(os.Stderr, err)
						os.Exit(1)
					}
				}
				for n, from, err := c.ReadFrom(b); err == nil; n, from, err = c.ReadFrom(b) {
					switch {
					case r.Counts && n > 1:
						counted++
						continue
					case r.Counts:
						answer = fmt.Appendf(nil, "%d\n", counted)
					case r.Records:
						a, _ := netip.ParseAddrPort(from.String())
						fmt.Fprintf(os.Stdout, "udp %v %x\n", a.Addr().Unmap(), b[:n])
					default:
						note("udp", from)
					}
					_, _ = c.WriteTo(answer, from) // the device may have closed its socket
				}
			}()
		} else {
			l, err := net.FileListener(f)
			if err != nil {
				return err
			}
			open["tcp"] = append(open["tcp"], l.(*net.TCPListener))
			go func() {
				for c, err := l.Accept(); err == nil; c, err = l.Accept() {
					if starting.Load() {
						fmt.Fprintln(os.Stderr, "a connection during the start")
						os.Exit(1)
					}
					go func() {
						defer c.Close()
						if !r.Records {
							note("tcp", c.RemoteAddr())
						}
						if _, err := c.Write(answer); err != nil {
							return
						}
						data := bufio.NewReader(io.TeeReader(c, c))
						if r.Records {
							line, _ := data.ReadString('\n')
							a, _ := netip.ParseAddrPort(c.RemoteAddr().String())
							fmt.Fprintf(os.Stdout, "tcp %v %x\n", a.Addr().Unmap(), strings.TrimSpace(line))
						}
						_, _ = io.Copy(io.Discard, data)
					}()
				}
			}()
		}
		f.Close()
	}
	for begun := time.Now(); time.Since(begun) < r.Starts; { //nolint:revive // busy, as a program that starts
	}
	starting.Store(false)
	fmt.Println("up")
	in := bufio.NewScanner(os.Stdin)
	for in.Scan() {
		var closing string
		if _, err := fmt.Sscanf(in.Text(), "close %s", &closing); err == nil {
			for _, s := range open[closing] {
				s.Close()
			}
			continue
		}
		child := exec.Command("sleep", "1000")
		for _, s := range append(open["tcp"], open["udp"]...) {
			f, err := s.File()
			if err != nil {
				return err
			}
			defer f.Close() // the child has its own copy
			child.ExtraFiles = append(child.ExtraFiles, f)
		}
		if err := child.Start(); err != nil {
			return err
		}
	}
	return in.Err()
}

// decodeSlowly leaves the first datagrams unread for a time, reads them, and works for the same time. It returns an error if another
// datagram than an IPFIX message with a template set comes before the end.
func decodeSlowly(c *net.UDPConn, each time.Duration) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	peek := func(fd uintptr) bool {
		_, _, err = unix.Recvfrom(int(fd), make([]byte, 1), unix.MSG_PEEK|unix.MSG_DONTWAIT)
		return !errors.Is(err, unix.EAGAIN)
	}
	if err := raw.Read(peek); err != nil {
		return err
	}
	time.Sleep(each)
	b := make([]byte, 2048)
	for {
		var n int
		if err := raw.Read(func(fd uintptr) bool {
			n, _, err = unix.Recvfrom(int(fd), b, unix.MSG_DONTWAIT)
			return true
		}); err != nil {
			return err
		}
		if errors.Is(err, unix.EAGAIN) {
			break
		}
		if err != nil {
			return err
		}
		if n < 18 || binary.BigEndian.Uint16(b) != 10 || binary.BigEndian.Uint16(b[16:]) != 2 {
			return fmt.Errorf("a record behind unread templates: %x", b[:n])
		}
	}
	for begun := time.Now(); time.Since(begun) < each; { //nolint:revive // busy, as a thread that decodes
	}
	var came bool
	if err := raw.Control(func(fd uintptr) { came = peek(fd) }); err != nil {
		return err
	}
	if came {
		return errors.New("a record before the templates are decoded")
	}
	return nil
}

// open binds a socket. Listeners have a backlog of 1, as nfacctd's.
func (s socket) open() (fd int, err error) {
	kind, domain := unix.SOCK_STREAM, unix.AF_INET6
	if s.Protocol == "udp" {
		kind = unix.SOCK_DGRAM
	}
	var to unix.Sockaddr = &unix.SockaddrInet6{Port: int(s.Address.Port()), Addr: s.Address.Addr().As16()}
	if s.Address.Addr().Is4() {
		domain, to = unix.AF_INET, &unix.SockaddrInet4{Port: int(s.Address.Port()), Addr: s.Address.Addr().As4()}
	}
	fd, err = unix.Socket(domain, kind|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	for option, wanted := range map[[2]int]bool{
		{unix.SOL_SOCKET, unix.SO_REUSEPORT}:  !s.Plain,
		{unix.IPPROTO_IPV6, unix.IPV6_V6ONLY}: s.V6Only,
	} {
		if err == nil && wanted {
			err = unix.SetsockoptInt(fd, option[0], option[1], 1)
		}
	}
	if err == nil {
		err = unix.Bind(fd, to)
	}
	// Without SO_REUSEPORT, bind fails until the predecessor's socket is closed, including the copy that the agent has
	// during registration.
	for deadline := time.Now().Add(patience); s.Plain && errors.Is(err, unix.EADDRINUSE) && time.Now().Before(deadline); {
		time.Sleep(10 * time.Millisecond)
		err = unix.Bind(fd, to)
	}
	if err == nil && kind == unix.SOCK_STREAM {
		err = unix.Listen(fd, 1)
	}
	return fd, err
}
