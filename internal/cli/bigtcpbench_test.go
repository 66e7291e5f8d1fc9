// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"sockeye/internal/bigtcp/bench"
	"sockeye/internal/bigtcp/netif"
	"sockeye/internal/testenv"
)

func TestBenchRefusals(t *testing.T) {
	h := newBigTCPHost(t)
	const key = "aaaaaaaaaaaaaaaaaaaaaaaa"
	help := "sockeye bigtcp bench --help says what does"
	for _, c := range []struct {
		code          int
		message, hint string
		args          []string
	}{
		{2, "HOST is missing", "usage: sockeye bigtcp bench [HOST] [flags]", nil},
		{2, `there is one argument too many: "b"`, "usage: sockeye bigtcp bench [HOST] [flags]", []string{"a", "b", "--key", key}},
		{2, `there is one argument too many: "a"`, "usage: sockeye bigtcp bench [HOST] [flags]", []string{"a", "--local"}},
		{2, "--key is missing", "it is what sockeye bigtcp bench --serve prints on the other host", []string{"192.0.2.1"}},
		{2, "--serve and --local do not go together", "--local needs no other end", []string{"--serve", "--local"}},
		{2, "--rounds and --serve do not go together", help, []string{"--serve", "--rounds", "3"}},
		{2, "--listen and --local do not go together", help, []string{"--local", "--listen", "[::]:1"}},
		{2, "--key and --local do not go together", help, []string{"--local", "--key", key}},
		{2, "--path and HOST do not go together", help, []string{"192.0.2.1", "--key", key, "--path", "veth"}},
		{2, `this is no key: "abc"`, "it is what sockeye bigtcp bench --serve prints", []string{"192.0.2.1", "--key", "abc"}},
		{2, `there is no path "moon"`, "bridge, veth or router", []string{"--local", "--path", "moon"}},
		{2, "there are to be 0 rounds", "1 to 100", []string{"--local", "--rounds", "0"}},
		{2, "there are to be 101 rounds", "1 to 100", []string{"--local", "--rounds", "101"}},
		{2, "the message is of 1 bytes", "72 to 1048576", []string{"--local", "--message", "1"}},
		{2, "a run is to take 1m0s", "10ms to 30s", []string{"--local", "--for", "1m"}},
		{2, `--for is "soon"`, spanHint, []string{"--local", "--for", "soon"}},
		{2, `--rounds is "many"`, "a whole number", []string{"--local", "--rounds", "many"}},
		{2, "the size is 65536 bytes", "above 65536, up to 524280", []string{"--local", "--size", "off"}},
		{2, "127.0.0.1 is this host itself", "sockeye bigtcp bench --local measures within a host", []string{"127.0.0.1", "--key", key, "--state-dir", h.state}},
	} {
		h.refused(c.code, c.message, c.hint, nil, append([]string{"bigtcp", "bench"}, c.args...)...)
	}
	if r := h.sockeye("bigtcp", "bench", "--local", "--size", "1MB"); r.code != 2 || !strings.Contains(r.err, "65536 to 524280 bytes") {
		t.Errorf("%+v", r)
	}
	// Making namespaces is not for everybody.
	r := h.child(asNobody, "sockeye", "bigtcp", "bench", "--local")
	if r.code != 4 || !strings.Contains(r.err, "operation not permitted") || !strings.Contains(r.err, "hint: run as root") {
		t.Errorf("as nobody: %+v", r)
	}
}

func TestBenchLocal(t *testing.T) {
	h := newBigTCPHost(t)
	args := []string{"bigtcp", "bench", "--local", "--rounds", "1", "--for", "20ms", "--size", "192KB", "--path", "veth"}
	r := h.sockeye(args...)
	if r.code != 0 || r.err != "" {
		t.Fatalf("%+v", r)
	}
	for _, want := range []string{
		"A veth pair between two namespaces", "packets of up to 65536 bytes (off) and 192000 (on)",
		"\nIPv6 ", "\nIPv4 ", "\nlatency, P90 ", "\ntransactions ", "\nstream ", " s/GB ",
	} {
		if !strings.Contains(r.out, want) {
			t.Errorf("no %q in\n%s", want, r.out)
		}
	}
	for line := range strings.Lines(r.out) {
		if len([]rune(line)) > 121 {
			t.Errorf("a line of %d columns: %s", len([]rune(line)), line)
		}
	}
	result := must[bench.Result](h, args...)
	if row, ok := result.Row(bench.IPv6, "stream_packet"); !ok || row.On <= 65536 || row.Off > 65536 || result.Size != 192000 {
		t.Errorf("%+v of %d", row, result.Size)
	}
}

// benchHosts are two network namespaces with a link between them, by their paths.
func benchHosts(t *testing.T) (paths [2]string) {
	t.Helper()
	var fds [2]netns.NsHandle
	for i := range fds {
		err := testenv.OnThread(func() (err error) {
			fds[i], err = netns.New()
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { fds[i].Close() })
		paths[i] = fmt.Sprintf("/proc/self/fd/%d", int(fds[i]))
	}
	for i := range fds {
		nl, err := netlink.NewHandleAt(fds[i], unix.NETLINK_ROUTE)
		if err != nil {
			t.Fatal(err)
		}
		defer nl.Close()
		if i == 0 {
			if err := nl.LinkAdd(&netlink.Veth{LinkAttrs: attributesOf("eth0"), PeerName: "eth0", PeerNamespace: netlink.NsFd(fds[1])}); err != nil {
				t.Fatal(err)
			}
		}
		link, err := nl.LinkByName("eth0")
		if err == nil {
			err = nl.LinkSetUp(link)
		}
		if err == nil {
			var a *netlink.Addr
			if a, err = netlink.ParseAddr(fmt.Sprintf("10.85.0.%d/24", 1+i)); err == nil {
				err = nl.AddrAdd(link, a)
			}
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return paths
}

func TestBenchServe(t *testing.T) {
	h := newBigTCPHost(t)
	paths := benchHosts(t)
	sizes := func(path string) netif.Sizes {
		t.Helper()
		n, err := netif.OpenNetwork(path)
		if err != nil {
			t.Fatal(err)
		}
		defer n.Close()
		i, err := n.Interface("eth0")
		if err != nil {
			t.Fatal(err)
		}
		return i.Sizes
	}
	before := [2]netif.Sizes{sizes(paths[0]), sizes(paths[1])}
	ctx, stop := context.WithTimeout(context.Background(), patience)
	defer stop()
	out, in := io.Pipe()
	errs := &strings.Builder{}
	ended := make(chan int, 1)
	go func() {
		ended <- Run(ctx, []string{"bigtcp", "bench", "--serve", "--netns", paths[1], "--state-dir", filepath.Join(h.dir, "server"), "--listen", "0.0.0.0:0", "-o", "json"},
			Environment{Out: in, Err: errs, In: strings.NewReader(""), Now: time.Now})
		in.Close()
	}()
	var serving benchServing
	if err := json.NewDecoder(out).Decode(&serving); err != nil {
		t.Fatal(err)
	}
	go func() { _, _ = io.Copy(io.Discard, out) }()
	at, err := netip.ParseAddrPort(serving.Listen)
	if err != nil {
		t.Fatal(err)
	}
	client := []string{"bigtcp", "bench", "10.85.0.2", "--port", fmt.Sprint(at.Port()), "--netns", paths[0], "--state-dir", h.state, "--rounds", "1", "--for", "20ms", "--key"}
	h.refused(2, "the server: the key is wrong", "it is what sockeye bigtcp bench --serve printed", nil, append(client, strings.Repeat("a", 24))...)
	r := h.sockeye(append(client, serving.Key)...)
	if r.code != 0 || r.err != "" || !strings.Contains(r.out, "eth0 of this host to eth0 of the server") || !strings.Contains(r.out, "\nIPv4 ") {
		t.Errorf("%+v", r)
	}
	stop()
	if code := <-ended; code != 0 {
		t.Errorf("the server ends with %d: %s", code, errs)
	}
	for _, want := range []string{"refused: the key is wrong\n", ": begins\n", ": is done\n"} {
		if !strings.Contains(errs.String(), want) {
			t.Errorf("the server does not say %q: %s", want, errs)
		}
	}
	if got := [2]netif.Sizes{sizes(paths[0]), sizes(paths[1])}; got != before {
		t.Errorf("sizes %+v, were %+v", got, before)
	}
}
