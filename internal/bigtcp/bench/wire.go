// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bufio"
	"bytes"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base32"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"time"
	"unicode"

	"sockeye/internal/bigtcp/netif"
)

// Two hosts talk in lines of JSON over a control connection, which the client opens
// for each family:
//
//	server: greeting
//	client: request{op: hello}    server: reply
//	client: request{op: run}      server: reply{token}
//	        The client opens a connection for data to the same port, and sends
//	        dataLine; the server answers with a line feed, and the load runs.
//	                              server: reply{count ...}
//	client: request{op: bye}      server: reply, after its sizes are as before
//
// The client knows the server's key, which does not cross the network. What is sent
// is neither secret nor guarded against who can change packets on the way.

const (
	protocol = 1
	maxLine  = 16 << 10 // bytes
	maxWords = 300      // bytes of a text from the peer that is shown
	// patience is for an answer that needs no work, and idle for the next request.
	patience = 10 * time.Second
	idle     = 30 * time.Second
)

type greeting struct {
	Sockeye int    `json:"sockeye_bench"` // protocol
	Nonce   string `json:"nonce"`         // hexadecimal, 16 bytes
}

const (
	opHello = "hello"
	opRun   = "run"
	opBye   = "bye"
)

// A request is one of the client.
type request struct {
	Op string `json:"op"`
	// Of hello.
	Nonce string `json:"nonce,omitempty"` // of the client
	MAC   string `json:"mac,omitempty"`   // see mac
	Size  uint32 `json:"size,omitempty"`  // of packets while on, in bytes
	// Of run.
	On       bool   `json:"on,omitempty"`
	Load     string `json:"load,omitempty"`
	Message  int    `json:"message,omitempty"` // bytes
	WarmupNS int64  `json:"warmup_ns,omitempty"`
	ForNS    int64  `json:"for_ns,omitempty"`
}

// A reply is the server's.
type reply struct {
	Error string `json:"error,omitempty"`
	Hint  string `json:"hint,omitempty"`
	Kind  string `json:"kind,omitempty"` // of kinds; "" for any other
	Host  *Host  `json:"host,omitempty"` // of hello
	Token string `json:"token,omitempty"`
	// What it measured of a run.
	Count     int64 `json:"count,omitempty"`
	Bytes     int64 `json:"bytes,omitempty"`
	ElapsedNS int64 `json:"elapsed_ns,omitempty"`
	CPUNS     int64 `json:"cpu_ns,omitempty"`
}

// kinds are the words for what kind of error the server had.
var kinds = map[string]netif.Kind{
	"usage": netif.KindUsage, "unsupported": netif.KindUnsupported, "conflict": netif.KindConflict,
}

// refusal is a reply that tells an error.
func refusal(err error) reply {
	r := reply{Error: plain(err.Error())}
	var known *netif.Error
	if errors.As(err, &known) {
		r.Hint = plain(known.Hint)
		for word, kind := range kinds {
			if kind == known.Kind {
				r.Kind = word
			}
		}
	}
	return r
}

// err is what a reply tells, of the peer by that name.
func (r *reply) err(peer string) error {
	if r.Error == "" {
		return nil
	}
	err := fmt.Errorf("%s: %s", peer, plain(r.Error))
	kind, ok := kinds[r.Kind]
	if !ok {
		return err
	}
	return &netif.Error{Kind: kind, Err: err, Hint: plain(r.Hint)}
}

// plain is a text of the peer as it may be shown: one line of bounded length.
func plain(s string) string {
	if len(s) > maxWords {
		s = s[:maxWords] + "..."
	}
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return '?'
	}, s)
}

// decodeRequest reads a request, and refuses what is out of bounds.
func decodeRequest(line []byte) (r request, err error) {
	if err := decode(line, &r); err != nil {
		return r, err
	}
	switch r.Op {
	case opHello:
		if r.Size <= netif.Legacy || r.Size > netif.Most || len(r.Nonce) != 2*nonceSize || len(r.MAC) != 2*sha256.Size {
			return r, errors.New("hello: out of bounds")
		}
	case opRun:
		o := Options{Size: netif.Most, Message: r.Message, Rounds: 1, For: time.Duration(r.ForNS), Warmup: time.Duration(r.WarmupNS)}
		if err := o.Check(); err != nil {
			return r, fmt.Errorf("run: %w", err)
		}
		if r.Load != loadRR && r.Load != loadStream {
			return r, errors.New("run: no such load")
		}
	case opBye:
	default:
		return r, errors.New("no such request")
	}
	return r, nil
}

func decode(line []byte, into any) error {
	d := json.NewDecoder(bytes.NewReader(line))
	d.DisallowUnknownFields()
	if err := d.Decode(into); err != nil {
		return fmt.Errorf("understand what the peer says: %w", err)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return errors.New("understand what the peer says: more than one value in a line")
	}
	return nil
}

// A wire is a control connection.
type wire struct {
	net.Conn
	lines *bufio.Reader
}

func newWire(conn net.Conn) *wire { return &wire{conn, bufio.NewReaderSize(conn, maxLine)} }

// readLine reads a line, for which there is so much time. io.EOF if the peer has
// closed, and os.ErrDeadlineExceeded if it is silent.
func (w *wire) readLine(within time.Duration) ([]byte, error) {
	if err := w.SetReadDeadline(time.Now().Add(within)); err != nil {
		return nil, fmt.Errorf("listen to the peer: %w", err)
	}
	line, err := w.lines.ReadSlice('\n')
	switch {
	case errors.Is(err, bufio.ErrBufferFull):
		return nil, fmt.Errorf("listen to the peer: a line of more than %d bytes", maxLine)
	case err != nil:
		return nil, fmt.Errorf("listen to the peer: %w", err)
	}
	return line, nil
}

func (w *wire) write(v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("talk to the peer: %w", err)
	}
	if len(b) >= maxLine {
		return fmt.Errorf("talk to the peer: a line of %d bytes", len(b))
	}
	if err := w.SetWriteDeadline(time.Now().Add(patience)); err != nil {
		return fmt.Errorf("talk to the peer: %w", err)
	}
	if _, err := w.Write(append(b, '\n')); err != nil {
		return fmt.Errorf("talk to the peer: %w", err)
	}
	return nil
}

// A key lets a client have a server change its sizes.
type key []byte

const (
	keySize   = 15 // bytes; 24 characters
	nonceSize = 16
)

var keyText = base32.StdEncoding.WithPadding(base32.NoPadding)

func newKey() key {
	k := make(key, keySize)
	_, _ = rand.Read(k) // never fails
	return k
}

func (k key) String() string { return strings.ToLower(keyText.EncodeToString(k)) }

// parseKey reads what String writes.
func parseKey(text string) (key, error) {
	k, err := keyText.DecodeString(strings.ToUpper(strings.TrimSpace(text)))
	if err != nil || len(k) != keySize {
		return nil, usage("it is what sockeye bigtcp bench --serve prints", "this is no key: %q", plain(text))
	}
	return k, nil
}

// mac proves that one knows the key.
func (k key) mac(server, client string) string {
	h := hmac.New(sha256.New, k)
	fmt.Fprintf(h, "sockeye bigtcp bench\n%s\n%s\n", server, client)
	return hex.EncodeToString(h.Sum(nil))
}

func newNonce() string {
	b := make([]byte, nonceSize)
	_, _ = rand.Read(b)
	return hex.EncodeToString(b)
}

// dataLine begins a connection for data.
func dataLine(token string) string { return "data " + token + "\n" }

// dataToken is the token in a line that begins a connection for data; "" if it is
// none.
func dataToken(line []byte) string {
	token, ok := strings.CutPrefix(strings.TrimSuffix(string(line), "\n"), "data ")
	if !ok || len(token) != 2*nonceSize {
		return ""
	}
	return token
}
