// SPDX-License-Identifier: Apache-2.0

package api

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/fault"
	"sockeye/internal/owned"
)

// SocketPath returns the path of the agent's socket in a run directory.
func SocketPath(runDir string) string { return filepath.Join(runDir, "agent.sock") }

// RemoveDeadSocket removes the socket file that a killed agent has left in a run directory. The socket of a process that runs, other files, and
// files in a directory that others may write, which no agent uses, stay.
func RemoveDeadSocket(runDir string) (removed bool, err error) {
	if runDir, err = filepath.Abs(runDir); err != nil {
		return false, err
	}
	path := SocketPath(runDir)
	before, err := os.Lstat(path)
	if err != nil || before.Mode()&fs.ModeSocket == 0 || owned.Check(runDir) != nil || isBound(path) {
		return false, nil
	}
	// The process may run in another network namespace, whose sockets isBound does not see.
	running, err := net.DialTimeout("unix", path, time.Second)
	if err == nil {
		running.Close()
	}
	// Another agent, with other pins, may have replaced the file meanwhile.
	if now, _ := os.Lstat(path); !errors.Is(err, unix.ECONNREFUSED) || now == nil || !os.SameFile(before, now) {
		return false, nil
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return false, fmt.Errorf("remove the socket of an agent that was killed: %w", err)
	}
	return true, nil
}

// isBound returns whether a socket of this network namespace has a path (unix_seq_show), or may have it: a socket that does not listen yet
// refuses connections, too.
func isBound(path string) bool {
	text, err := os.ReadFile("/proc/net/unix")
	return err != nil || slices.Contains(strings.Fields(string(text)), path)
}

// Client sends requests to an agent.
type Client struct {
	path string
	http *http.Client
}

// NewClient returns a client of the agent that listens on the Unix socket at path.
func NewClient(path string) *Client {
	return &Client{path: path, http: &http.Client{
		Timeout: time.Minute,
		Transport: &http.Transport{
			DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
				return new(net.Dialer).DialContext(ctx, "unix", path)
			},
			// The agent limits the connections of each user.
			DisableKeepAlives: true,
		},
	}}
}

// ErrNoAgent is the error of a request when no agent listens on the socket.
var ErrNoAgent = errors.New("no agent answers")

// ErrSilent is the error of a request to an agent that accepts the connection and does not answer in time.
var ErrSilent = errors.New("the agent does not answer")

// Get sends a GET request and decodes the answer.
func (c *Client) Get(ctx context.Context, path string, query url.Values, into any) error {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://agent"+path+"?"+query.Encode(), nil)
	if err != nil {
		return err
	}
	return c.do(r, into)
}

// Post sends a POST request with a JSON body and decodes the answer.
func (c *Client) Post(ctx context.Context, path string, body, into any) error {
	data, err := json.Marshal(body)
	if err != nil {
		return err
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://agent"+path, bytes.NewReader(data))
	if err != nil {
		return err
	}
	return c.do(r, into)
}

// Stream sends a GET request and returns the stream of the answer, which ends with the agent or with ctx. The caller
// closes the stream.
func (c *Client) Stream(ctx context.Context, path string, query url.Values) (*Stream, error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://agent"+path+"?"+query.Encode(), nil)
	if err != nil {
		return nil, err
	}
	withoutTimeout := *c.http
	withoutTimeout.Timeout = 0
	response, err := c.send(&withoutTimeout, r)
	if err != nil {
		return nil, err
	}
	return &Stream{body: response.Body, buffer: bufio.NewReaderSize(response.Body, 64<<10)}, nil
}

// Stream is an answer that consists of JSON values, one per line.
type Stream struct {
	body   io.ReadCloser
	buffer *bufio.Reader
}

// Next reads the next value. Next returns io.EOF after the last value, and an error that wraps that of the context
// after its end.
func (s *Stream) Next(into any) error {
	line, err := s.buffer.ReadBytes('\n')
	switch {
	case errors.Is(err, io.EOF) && len(line) == 0:
		return io.EOF
	case errors.Is(err, io.EOF):
		err = io.ErrUnexpectedEOF
	case err == nil:
		err = json.Unmarshal(line, into)
	}
	if err != nil {
		return fmt.Errorf("read agent's answer: %w", err)
	}
	return nil
}

// Waiting reports whether data of the next value has arrived.
func (s *Stream) Waiting() bool { return s.buffer.Buffered() > 0 }

// Close closes the connection.
func (s *Stream) Close() error { return s.body.Close() }

func (c *Client) do(r *http.Request, into any) error {
	response, err := c.send(c.http, r)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	if err := json.NewDecoder(response.Body).Decode(into); err != nil {
		return fmt.Errorf("read agent's answer: %w", err)
	}
	return nil
}

// send returns the answer to a request that succeeds; any other answer is an error. The caller closes the body.
func (c *Client) send(by *http.Client, r *http.Request) (*http.Response, error) {
	response, err := by.Do(r)
	var wrapped *url.Error
	if errors.As(err, &wrapped) {
		err = wrapped.Err // without the URL, which is internal
	}
	switch {
	case errors.Is(err, os.ErrNotExist), errors.Is(err, unix.ECONNREFUSED):
		return nil, fault.WithHint(fmt.Errorf("%w on %s", ErrNoAgent, c.path),
			"start it with sockeye agent, or name its directory with --run-dir; services that were set up are still steered")
	case errors.Is(err, os.ErrPermission):
		return nil, &fault.Error{Err: fmt.Errorf("connect to agent: %w", err), Hint: "run as root; a member of the agent's --group may use the commands that only show", Code: fault.CodeNotPermitted}
	case errors.Is(err, context.DeadlineExceeded):
		return nil, fault.WithHint(fmt.Errorf("%w on %s", ErrSilent, c.path), "it is stopped or overloaded: look at its process, and at its log")
	case err != nil:
		return nil, fmt.Errorf("ask agent: %w", err)
	}
	if response.StatusCode == http.StatusOK {
		return response, nil
	}
	defer response.Body.Close()
	var f Failure
	if err := json.NewDecoder(response.Body).Decode(&f); err != nil || f.Code == 0 {
		return nil, fmt.Errorf("ask agent: unexpected answer %s", response.Status)
	}
	return nil, &fault.Error{Err: errors.New(f.Error), Hint: f.Hint, Code: f.Code}
}
