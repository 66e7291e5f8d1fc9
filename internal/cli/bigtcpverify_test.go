// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"sockeye/internal/bigtcp/verify"
	"sockeye/internal/cli/command"
	"sockeye/internal/testenv"
)

// loStream sends through lo until the test ends or end is called.
func loStream(t *testing.T) (end func()) {
	t.Helper()
	var c net.ListenConfig
	c.SetMultipathTCP(false)
	l, err := c.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		conn, err := l.Accept()
		if err == nil {
			_, _ = io.Copy(io.Discard, conn) // until the connection is closed
			conn.Close()
		}
	}()
	conn, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		block := make([]byte, 1<<16)
		for err := error(nil); err == nil; {
			_, err = conn.Write(block)
		}
	}()
	return func() {
		conn.Close()
		l.Close()
		<-done
	}
}

// TestBigTCPVerify counts the packets on lo, once for a fixed time and once until an interrupt.
func TestBigTCPVerify(t *testing.T) {
	h := newHost(t, "bigtcp: []\n")
	end := loStream(t)
	t.Cleanup(end)
	p := must[verify.Report](h, "bigtcp", "verify", "lo", "--for", "1s")
	if p.Share == nil || p.TCPBytes < 1<<20 || p.Interrupted || p.Interface != "lo" || p.Seconds < 1 {
		t.Errorf("proof %+v", p)
	}
	r := h.sockeye("bigtcp", "verify", "lo", "--for", "1s")
	for _, want := range []string{"lo, 1", "of TCP's bytes travelled in packets above 64 KB", "PACKETS OF TCP, BYTES", "PACKETS OF TCP, SEGMENTS", "received", "sent", "causes of smaller packets"} {
		if r.code != 0 || !strings.Contains(r.out, want) {
			t.Errorf("no %q in %d %s%s", want, r.code, r.out, r.err)
		}
	}

	ctx, interrupt := context.WithTimeout(t.Context(), patience)
	defer interrupt()
	var out, errs bytes.Buffer
	code := make(chan int, 1)
	go func() {
		code <- Run(ctx, []string{"bigtcp", "verify", "lo", "--for", "10m", "-o", "json"}, command.Environment{Out: &out, Err: &errs, Now: time.Now})
	}()
	h.eventually("it counts", func() bool { return loHasProgram(t) })
	interrupt()
	var seen verify.Report
	if got := <-code; got != 0 || errs.Len() > 0 {
		t.Fatalf("interrupted: %d %s", got, &errs)
	}
	if err := json.Unmarshal(out.Bytes(), &seen); err != nil || !seen.Interrupted {
		t.Errorf("interrupted: %v %s", err, &out)
	}
	if loHasProgram(t) {
		t.Error("verify left programs on lo")
	}
}

// loHasProgram reports whether a program is attached to lo.
func loHasProgram(t testing.TB) bool {
	t.Helper()
	found, err := link.QueryPrograms(link.QueryOptions{Target: 1, Attach: ebpf.AttachTCXEgress})
	if err != nil {
		t.Fatal(err)
	}
	return len(found.Programs) > 0
}

// TestBigTCPVerifyRefuses checks bad arguments and missing capabilities.
func TestBigTCPVerifyRefuses(t *testing.T) {
	h := newHost(t, "bigtcp: []\n")
	for _, test := range []struct {
		code                int
		message, hint, args string
	}{
		{2, "INTERFACE is missing", "usage: sockeye bigtcp verify INTERFACE [flags]", ""},
		{2, `unexpected argument "b"`, "usage: sockeye bigtcp verify INTERFACE [flags]", "lo b"},
		{2, `--for is "soon"`, command.IntervalHint, "lo --for soon"},
		{2, `--for is "-1s"`, command.IntervalHint, "lo --for -1s"},
		{2, `--for is "11m"`, "at most 10m0s", "lo --for 11m"},
	} {
		h.refused(test.code, test.message, test.hint, nil, append([]string{"bigtcp", "verify"}, strings.Fields(test.args)...)...)
	}
	for _, args := range [][]string{{"none0"}, {"lo", "--netns", h.dir}, {"lo", "--netns", "/nowhere"}} {
		if r := h.sockeye(append([]string{"bigtcp", "verify"}, args...)...); r.code != 2 || !strings.Contains(r.err, "hint: ") || r.out != "" {
			t.Errorf("%q: %+v", args, r)
		}
	}
	testenv.WithoutRights(t, func() {
		if r := h.sockeye("bigtcp", "verify", "lo", "--for", "1s"); r.code != 4 || !strings.Contains(r.err, "hint: ") {
			t.Errorf("without rights: %+v", r)
		}
	})
}

// TestBigTCPVerifyVanishes deletes the interface during verify.
func TestBigTCPVerifyVanishes(t *testing.T) {
	h := newHost(t, "bigtcp: []\n")
	pair := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "fleeting"}, PeerName: "fleeting-peer"}
	if err := netlink.LinkAdd(pair); err != nil {
		t.Fatal(err)
	}
	done := make(chan result, 1)
	go func() { done <- h.sockeye("bigtcp", "verify", "fleeting", "--for", "1m") }()
	l, err := netlink.LinkByName("fleeting")
	if err != nil {
		t.Fatal(err)
	}
	h.eventually("it counts", func() bool {
		found, err := link.QueryPrograms(link.QueryOptions{Target: l.Attrs().Index, Attach: ebpf.AttachTCXEgress})
		return err == nil && len(found.Programs) > 0
	})
	if err := netlink.LinkDel(l); err != nil {
		t.Fatal(err)
	}
	if r := <-done; r.code != 5 || !strings.Contains(r.err, "interface fleeting has vanished from its network namespace") {
		t.Errorf("%+v", r)
	}
}
