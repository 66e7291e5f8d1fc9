// SPDX-License-Identifier: Apache-2.0

package connlimit

import (
	"bytes"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"testing"
	"time"
)

// TestListenerEvicts checks that a connection at the limit gives way to a new one if its client does not read the answer, and
// not if the answer takes long to make.
func TestListenerEvicts(t *testing.T) {
	const size = 64 << 20 // more than any socket buffer
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	begun := make(chan struct{}, 2)
	mux := http.NewServeMux()
	mux.HandleFunc("GET /slow", func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write([]byte("a"))
		begun <- struct{}{}
		time.Sleep(4 * sendTime)
		_, _ = w.Write([]byte("b"))
	})
	mux.HandleFunc("GET /large", func(w http.ResponseWriter, _ *http.Request) {
		begun <- struct{}{}
		_, _ = w.Write(make([]byte, size))
	})
	mux.HandleFunc("GET /", func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("c")) })
	server := &http.Server{Handler: mux}
	g := &Listener{Listener: listener, Name: "test", Log: slog.New(slog.DiscardHandler), Limit: 1, EvictsOldest: true}
	g.Wrap(server)
	served := make(chan error, 1)
	go func() { served <- server.Serve(g) }()
	t.Cleanup(func() {
		server.Close()
		if err := <-served; !errors.Is(err, http.ErrServerClosed) {
			t.Error(err)
		}
	})
	ask := func(path string) net.Conn {
		t.Helper()
		c, err := net.Dial("tcp", listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		if _, err := io.WriteString(c, "GET "+path+" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"); err != nil {
			t.Fatal(err)
		}
		return c
	}
	answer := func(c net.Conn, end string) {
		t.Helper()
		text, err := io.ReadAll(c)
		if err != nil || !bytes.HasSuffix(text, []byte(end)) {
			t.Errorf("got %q, %v", text, err)
		}
	}
	slow := ask("/slow")
	<-begun
	next := ask("/")
	answer(slow, "\r\nab")
	answer(next, "\r\nc")
	ask("/large") // and reads nothing
	<-begun
	answer(ask("/"), "\r\nc")
}
