// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/lab"
)

// user is an ordinary user who runs isolated programs.
const user = 65534

// isolated is a host with isolated programs, and a remote host with servers.
type isolated struct {
	*testing.T
	host, far *lab.Namespace
	dir       string // writable by the user
}

var (
	web4 = netip.MustParseAddr("10.97.0.2")
	web6 = netip.MustParseAddr("fd97::2")
)

func newIsolated(t *testing.T) *isolated {
	t.Helper()
	dir, err := os.MkdirTemp("", "sockeye-e2e-programs-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	l, err := lab.New(t.Context(), lab.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
	i := &isolated{T: t, dir: dir}
	for name, n := range map[string]**lab.Namespace{"host": &i.host, "far": &i.far} {
		*n, err = l.Namespace(name)
		i.must(err)
	}
	_, err = l.Connect(i.host, i.far, lab.LinkOptions{Offload: true},
		[]netip.Prefix{netip.MustParsePrefix("10.97.0.1/24"), netip.MustParsePrefix("fd97::1/64")},
		[]netip.Prefix{netip.PrefixFrom(web4, 24), netip.PrefixFrom(web6, 64)})
	i.must(err)
	// The host needs a source address.
	i.must(i.host.AddRoute(netip.MustParsePrefix("0.0.0.0/0"), web4))
	i.must(i.host.AddRoute(netip.MustParsePrefix("::/0"), web6))
	i.must(os.Chown(dir, user, user))
	// The mount namespace of the tests has a /dev/net/tun that all users may open, as on most hosts, and the lab's name
	// server.
	tun := filepath.Join(dir, "tun")
	i.must(unix.Mknod(tun, unix.S_IFCHR|0o666, int(unix.Mkdev(10, 200))))
	i.must(os.Chmod(tun, 0o666))
	i.cover("/dev/net/tun", tun)
	conf := filepath.Join(dir, "resolv.conf")
	i.must(os.WriteFile(conf, fmt.Appendf(nil, "nameserver %v\n", web4), 0o644))
	i.cover("/etc/resolv.conf", conf)
	return i
}

func (i *isolated) must(err error) {
	i.Helper()
	if err != nil {
		i.Fatal(err)
	}
}

func (i *isolated) cover(path, with string) {
	i.Helper()
	i.must(unix.Mount(with, path, "", unix.MS_BIND, ""))
	i.Cleanup(func() {
		if err := unix.Unmount(path, unix.MNT_DETACH); err != nil {
			i.Error(err)
		}
	})
}

// run runs an isolated program as the user and returns its output.
func (i *isolated) run(stdin io.Reader, options []string, program ...string) (stdout string, err error) {
	i.Helper()
	ctx, cancel := context.WithTimeout(i.Context(), patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, os.Getenv(binaryEnv), append(append([]string{"isolate"}, options...), append([]string{"--"}, program...)...)...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: user, Gid: user}}
	cmd.Dir = i.dir
	cmd.Stdin = stdin
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	i.must(i.host.Do(cmd.Start))
	if err := cmd.Wait(); err != nil {
		return out.String(), fmt.Errorf("%v: %w: %s%s", program, err, errs.String(), out.String())
	}
	return out.String(), nil
}

// serve starts a program on the remote host.
func (i *isolated) serve(program ...string) *lab.Process {
	i.Helper()
	p := i.far.Command(i.Context(), program...)
	i.must(p.Start())
	return p
}

// listen opens a listener on the remote host.
func (i *isolated) listen(at netip.AddrPort) (l net.Listener) {
	i.Helper()
	i.must(i.far.Do(func() (err error) {
		l, err = net.Listen("tcp", at.String())
		return err
	}))
	return l
}

// TestProgramsIsolated runs common programs: HTTP clients, remote shells, benchmarks, resolvers and package managers.
func TestProgramsIsolated(t *testing.T) {
	i := newIsolated(t)
	i.nameServer()
	t.Run("getent", func(t *testing.T) { i.with(t).names() })
	t.Run("curl", func(t *testing.T) { i.with(t).https() })
	t.Run("download", func(t *testing.T) { i.with(t).download() })
	t.Run("iperf3", func(t *testing.T) { i.with(t).iperf() })
	t.Run("ssh", func(t *testing.T) { i.with(t).ssh() })
}

func (i *isolated) with(t *testing.T) *isolated {
	c := *i
	c.T = t
	return &c
}

// nameServer answers each query with the remote host's addresses.
func (i *isolated) nameServer() {
	i.Helper()
	var c net.PacketConn
	i.must(i.far.Do(func() (err error) {
		c, err = net.ListenPacket("udp", netip.AddrPortFrom(web4, 53).String())
		return err
	}))
	i.Cleanup(func() { c.Close() })
	go func() {
		b := make([]byte, 512)
		for {
			n, from, err := c.ReadFrom(b)
			if err != nil {
				return
			}
			if a := answerName(b[:n]); a != nil {
				_, _ = c.WriteTo(a, from)
			}
		}
	}()
}

// answerName answers an address query (RFC 1035, section 4) with one question.
func answerName(q []byte) []byte {
	const header, typeA, typeAAAA = 12, 1, 28
	end := bytes.IndexByte(q[min(header, len(q)):], 0) + header + 5
	if len(q) < end {
		return nil
	}
	a := append([]byte(nil), q[:end]...)
	a[2], a[3] = 0x81, 0x80 // an answer, recursion available, no error
	clear(a[6:header])
	var address []byte
	switch kind := binary.BigEndian.Uint16(q[end-4:]); kind {
	case typeA:
		address = web4.AsSlice()
	case typeAAAA:
		address = web6.AsSlice()
	default:
		return a
	}
	a[7] = 1
	a = append(a, 0xc0, header)          // the name in the query
	a = append(a, q[end-4:end]...)       // type and class
	a = append(a, 0, 0, 0, 60)           // seconds
	a = append(a, 0, byte(len(address))) // bytes
	return append(a, address...)
}

func (i *isolated) names() {
	out, err := i.run(nil, nil, "getent", "ahosts", "collector.example.com")
	i.must(err)
	for _, a := range []netip.Addr{web4, web6} {
		if !strings.Contains(out, a.String()) {
			i.Errorf("getent lacks %v: %s", a, out)
		}
	}
}

func (i *isolated) https() {
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		n, _ := io.Copy(io.Discard, r.Body)
		fmt.Fprintf(w, "%s from %s, %d bytes", r.Proto, strings.Split(r.RemoteAddr, ":")[0], n)
	}))
	server.Listener = i.listen(netip.AddrPortFrom(web4, 443))
	server.EnableHTTP2 = true
	server.StartTLS()
	defer server.Close()
	ca := filepath.Join(i.dir, "ca.pem")
	i.must(os.WriteFile(ca, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw}), 0o644))
	out, err := i.run(bytes.NewReader(make([]byte, 5_000_000)), []string{"--allow", web4.String() + ":443/tcp"},
		"curl", "-4", "-sS", "--cacert", ca, "--data-binary", "@-", "https://example.com/")
	i.must(err)
	if want := "HTTP/2.0 from 10.97.0.1, 5000000 bytes"; out != want {
		i.Errorf("output of curl: %q, want %q", out, want)
	}
	if out, err := i.run(nil, []string{"--allow", web4.String() + ":80/tcp"}, "curl", "-4", "-sS", "--cacert", ca, "https://example.com/"); err == nil {
		i.Errorf("curl reached a denied destination: %s", out)
	}
}

// file is a large virtual file that repeats one block.
type file []byte

func (f file) ReadAt(p []byte, at int64) (int, error) {
	n := 0
	for n < len(p) {
		n += copy(p[n:], f[(at+int64(n))%int64(len(f)):])
	}
	return n, nil
}

func (i *isolated) download() {
	const size = 200 << 20
	block := make(file, 1<<20+1)
	_, _ = rand.NewChaCha8([32]byte{}).Read(block)
	content := func() *io.SectionReader { return io.NewSectionReader(block, 0, size) }
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		http.ServeContent(w, r, "package.deb", time.Unix(1e9, 0), content())
	})}
	l := i.listen(netip.AddrPortFrom(web6, 80))
	go func() { _ = server.Serve(l) }()
	defer server.Close()
	path := filepath.Join(i.dir, "package.deb")
	url := "http://deb.example.com/package.deb"
	_, err := i.run(nil, nil, "curl", "-6", "-sS", "--range", "0-77777777", "-o", path, url)
	i.must(err)
	_, err = i.run(nil, nil, "curl", "-6", "-sS", "-C", "-", "-o", path, url)
	i.must(err)
	got, want := sha256.New(), sha256.New()
	f, err := os.Open(path)
	i.must(err)
	defer f.Close()
	n, err := io.Copy(got, f)
	i.must(err)
	_, err = io.Copy(want, content())
	i.must(err)
	if n != size || !bytes.Equal(got.Sum(nil), want.Sum(nil)) {
		i.Errorf("received %d of %d bytes, or different content", n, size)
	}
	i.must(os.Remove(path))
}

func (i *isolated) iperf() {
	const size = 100 << 20
	for _, direction := range []string{"up", "-R", "--bidir"} {
		server := i.serve("iperf3", "-s", "-1", "-B", web4.String())
		var out string
		deadline := time.Now().Add(patience)
		for {
			var err error
			args := []string{"iperf3", "-c", web4.String(), "-n", fmt.Sprint(size), "-J", direction}
			if direction == "up" {
				args = args[:len(args)-1]
			}
			if out, err = i.run(nil, nil, args...); err == nil {
				break
			}
			if server.Err() != nil || time.Now().After(deadline) || !strings.Contains(out, "refused") {
				i.Fatalf("%v: %s", err, out)
			}
		}
		select {
		case <-server.Done():
		case <-time.After(patience):
			sockets, _ := exec.Command("nsenter", "-t", strconv.Itoa(server.Pid()), "-n", "ss", "-tanpoie").CombinedOutput()
			i.Fatalf("iperf3 %v: the server does not exit after %s: %s", direction, out, sockets)
		}
		var report struct {
			End struct {
				Received struct {
					Bytes float64 `json:"bytes"`
					Bits  float64 `json:"bits_per_second"`
				} `json:"sum_received"`
			} `json:"end"`
		}
		i.must(json.Unmarshal([]byte(out), &report))
		// Bytes in transit at the end are not counted. With two directions, the measurement stops when the faster direction
		// has finished.
		if report.End.Received.Bytes < size*0.5 && direction != "--bidir" || report.End.Received.Bytes == 0 {
			i.Errorf("iperf3 %v: %.0f bytes received, of %d", direction, report.End.Received.Bytes, size)
		}
		i.Logf("iperf3 %v: %.1f Gbit/s", direction, report.End.Received.Bits/1e9)
	}
}

func (i *isolated) ssh() {
	sshd, err := exec.LookPath("sshd")
	if err != nil {
		sshd = "/usr/sbin/sshd"
	}
	i.must(os.MkdirAll("/run/sshd", 0o755))
	key := filepath.Join(i.dir, "key")
	for _, name := range []string{key, filepath.Join(i.dir, "host")} {
		if out, err := exec.Command("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", name).CombinedOutput(); err != nil {
			i.Fatalf("make a key: %v: %s", err, out)
		}
	}
	i.must(os.Chown(key, user, user))
	server := i.serve(sshd, "-D", "-e", "-f", "/dev/null", "-p", "22", "-h", filepath.Join(i.dir, "host"),
		"-o", "ListenAddress="+web4.String(), "-o", "AuthorizedKeysFile="+key+".pub", "-o", "StrictModes=no", "-o", "PidFile=none")
	sent := make([]byte, 3_000_000)
	_, _ = rand.NewChaCha8([32]byte{1}).Read(sent)
	var out string
	for deadline := time.Now().Add(patience); ; {
		out, err = i.run(bytes.NewReader(sent), nil, "ssh", "-i", key, "-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null",
			"-o", "BatchMode=yes", "-o", "LogLevel=ERROR", "root@far.example.com", "echo $SSH_CONNECTION; cat; exit 7")
		if err == nil || !strings.Contains(err.Error(), "refused") || server.Err() != nil || time.Now().After(deadline) {
			break
		}
	}
	line, rest, _ := strings.Cut(out, "\n")
	if err == nil || !strings.Contains(err.Error(), "exit status 7") {
		i.Fatalf("ssh: %v; output of the server:\n%s", err, server.LogTail(20))
	}
	if !strings.HasPrefix(line, "10.97.0.1 ") || rest != string(sent) {
		i.Errorf("connection %q; received %d of %d bytes, or different content", line, len(rest), len(sent))
	}
}
