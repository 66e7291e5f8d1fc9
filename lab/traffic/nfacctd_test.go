// SPDX-License-Identifier: Apache-2.0

package traffic

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// inNamespace runs the calling test again in a separate process and network
// namespace with lo up, and reports whether this is the second run.
func inNamespace(t *testing.T) bool {
	t.Helper()
	const env = "SOCKEYE_TRAFFIC_TEST_NETNS"
	if os.Getenv(env) != t.Name() {
		if os.Geteuid() != 0 {
			t.Fatal("root is required to create a network namespace")
		}
		runtime.LockOSThread() // Pdeathsig is sent when the thread exits
		defer runtime.UnlockOSThread()
		cmd := exec.CommandContext(t.Context(), "/proc/self/exe", "-test.run=^"+t.Name()+"$", "-test.v", "-test.count=1")
		cmd.Env = append(os.Environ(), env+"="+t.Name())
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNET, Pdeathsig: unix.SIGKILL}
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("in its namespace: %v\n%s", err, out)
		}
		return false
	}
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	ifr, _ := unix.NewIfreq("lo")
	ifr.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
	if err := unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, ifr); err != nil {
		t.Fatalf("set lo up: %v", err)
	}
	return true
}

func poll(t *testing.T, what string, done func() bool) {
	t.Helper()
	deadline := time.Now().Add(time.Minute)
	for !done() {
		if time.Now().After(deadline) {
			t.Fatalf("timeout: wait for %s", what)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// TestNfacctd sends BMP and IPFIX to Debian's nfacctd, and checks that the records of
// each router have the communities of its own BMP session, for IPv4 and IPv6 flows.
func TestNfacctd(t *testing.T) {
	if !inNamespace(t) {
		return
	}
	const routers = 6 // more than bmp_daemon_max_peers' default of 4
	dir := t.TempDir()
	out, conf, logFile := filepath.Join(dir, "out.json"), filepath.Join(dir, "nfacctd.conf"), filepath.Join(dir, "log")
	if err := os.WriteFile(conf, fmt.Appendf(nil, `daemonize: false
logfile: %s
nfacctd_ip: 127.0.0.1
nfacctd_port: 4739
nfacctd_as: bmp
nfacctd_net: bmp
bmp_daemon: true
bmp_daemon_ip: 127.0.0.1
bmp_daemon_port: 1790
bmp_daemon_max_peers: 100
aggregate: peer_src_ip, dst_net, dst_mask, dst_as, std_comm, as_path
plugins: print
print_output: json
print_output_file: %s
print_output_file_append: true
print_refresh_time: 1
`, logFile, out), 0o600); err != nil {
		t.Fatal(err)
	}
	nfacctd := exec.Command("nfacctd", "-f", conf)
	var stderr bytes.Buffer
	nfacctd.Stderr = &stderr
	nfacctd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: unix.SIGKILL, Setpgid: true}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := nfacctd.Start(); err != nil {
		t.Fatalf("start nfacctd: %v (Debian package pmacct)", err)
	}
	defer func() {
		_ = nfacctd.Process.Signal(unix.SIGINT) // nfacctd also stops its plugins
		// The signal handler of the plugin allocates memory: if the signal interrupts an allocation, the plugin waits
		// for a lock of malloc(3) forever, and nfacctd for the plugin (pmacct 1.7.7).
		stuck := time.AfterFunc(10*time.Second, func() { _ = unix.Kill(-nfacctd.Process.Pid, unix.SIGKILL) })
		defer stuck.Stop()
		_ = nfacctd.Wait()
		if t.Failed() {
			b, _ := os.ReadFile(logFile)
			t.Logf("nfacctd: %s%s", stderr.Bytes(), b)
		}
	}()
	poll(t, "nfacctd's sockets", func() bool {
		udp, _ := os.ReadFile("/proc/net/udp")
		tcp, _ := os.ReadFile("/proc/net/tcp")
		return strings.Contains(string(udp), ":1283 ") && strings.Contains(string(tcp), ":06FE 00000000:0000 0A")
	})

	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	var exporters sync.WaitGroup
	defer exporters.Wait()
	defer cancel()
	want := map[string]string{} // exporter and prefix -> communities and path
	for i := range byte(routers) {
		source := netip.AddrFrom4([4]byte{127, 9, 0, i + 1})
		prefix := netip.PrefixFrom(netip.AddrFrom4([4]byte{203, 0, i, 0}), 24)
		prefix6 := netip.PrefixFrom(netip.AddrFrom16([16]byte{0x20, 1, 0xd, 0xb8, 0, i}), 48)
		as := uint32(65000) + uint32(i)
		comms := []uint32{Community(uint16(as), 100), Community(uint16(as), 200)}
		s, err := DialBMP(ctx, SessionConfig{
			Source: source, Target: netip.MustParseAddrPort("127.0.0.1:1790"),
			Peer: Peer{Address: netip.AddrFrom4([4]byte{192, 0, 2, i + 1}), AS: as},
			Routes: []Route{
				{Prefixes: []netip.Prefix{prefix}, NextHop: netip.AddrFrom4([4]byte{192, 0, 2, i + 1}), ASPath: []uint32{as, 70000}, Communities: comms},
				{Prefixes: []netip.Prefix{prefix6}, NextHop: netip.MustParseAddr("fd00::1"), ASPath: []uint32{as}, Communities: comms[:1]},
			},
		})
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		want[source.String()+" "+prefix.String()] = fmt.Sprintf("%d:100_%d:200 %d_70000", as, as, as)
		want[source.String()+" "+prefix6.String()] = fmt.Sprintf("%d:100 %d", as, as)

		flow := flow4
		flow.Dst = prefix.Addr().Next()
		flow6 := flow4
		flow6.Src, flow6.Dst = netip.MustParseAddr("fd00::99"), prefix6.Addr().Next()
		e, err := NewExporter(ExporterConfig{Source: source, Target: netip.MustParseAddrPort("127.0.0.1:4739"), Domain: 1, Messages: [][]Flow{{flow, flow6, flow}}})
		if err != nil {
			t.Fatal(err)
		}
		// Flows are repeated, because nfacctd does not report the arrival of the
		// routes.
		exporters.Go(func() {
			defer e.Close()
			_, err := Drive(ctx, Limit{Rate: 20, Batch: 1}, 1, func(_, n int) (int, error) { return e.Send(n) })
			if err != nil {
				t.Errorf("send: %v", err)
			}
		})
	}

	got := map[string]string{}
	poll(t, "records with the routes of every router", func() bool {
		f, err := os.Open(out)
		if err != nil {
			return false
		}
		defer f.Close()
		for sc := bufio.NewScanner(f); sc.Scan(); {
			var r struct {
				Exporter string `json:"peer_ip_src"`
				Net      string `json:"ip_dst"`
				DstNet   string `json:"net_dst"`
				Mask     int    `json:"mask_dst"`
				Comms    string `json:"comms"`
				Path     string `json:"as_path"`
				Packets  uint64 `json:"packets"`
			}
			if json.Unmarshal(sc.Bytes(), &r) != nil || r.Packets == 0 || r.Packets%3 != 0 {
				continue
			}
			key := fmt.Sprintf("%s %s/%d", r.Exporter, r.DstNet, r.Mask)
			if r.Comms != "" {
				got[key] = r.Comms + " " + strings.ReplaceAll(r.Path, " ", "_")
			}
		}
		return len(got) >= len(want)
	})
	for k, w := range want {
		if got[k] != w {
			t.Errorf("records of %s have %q, want %q", k, got[k], w)
		}
	}
	for k := range got {
		if _, ok := want[k]; !ok {
			t.Errorf("unexpected records of %s with %q", k, got[k])
		}
	}
}
