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
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/fault"
)

// SocketPath is where the agent of a run directory listens.
func SocketPath(runDir string) string { return filepath.Join(runDir, "agent.sock") }

// Client talks to an agent.
type Client struct {
	path string
	http *http.Client
}

// NewClient makes a client of the agent that listens on a Unix socket.
func NewClient(path string) *Client {
	return &Client{path: path, http: &http.Client{
		Timeout: time.Minute,
		Transport: &http.Transport{
			DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
				return new(net.Dialer).DialContext(ctx, "unix", path)
			},
			// The agent bounds the connections of each user.
			DisableKeepAlives: true,
		},
	}}
}

// ErrNoAgent means that no agent answers.
var ErrNoAgent = errors.New("no agent answers")

// Get asks for something.
func (c *Client) Get(ctx context.Context, path string, query url.Values, into any) error {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://agent"+path+"?"+query.Encode(), nil)
	if err != nil {
		return err
	}
	return c.do(r, into)
}

// Post asks for a change.
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

// Stream asks for something that goes on, until the agent or ctx ends it. The
// caller closes it.
func (c *Client) Stream(ctx context.Context, path string, query url.Values) (*Stream, error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://agent"+path+"?"+query.Encode(), nil)
	if err != nil {
		return nil, err
	}
	endless := *c.http
	endless.Timeout = 0
	response, err := c.send(&endless, r)
	if err != nil {
		return nil, err
	}
	return &Stream{body: response.Body, buffer: bufio.NewReaderSize(response.Body, 64<<10)}, nil
}

// Stream is an answer of many JSON values, a line each.
type Stream struct {
	body   io.ReadCloser
	buffer *bufio.Reader
}

// Next waits for the next value. Its error is io.EOF where the agent has ended
// the answer as a whole, and wraps that of the context where this has ended.
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

// Waiting tells whether some of the next value is here already.
func (s *Stream) Waiting() bool { return s.buffer.Buffered() > 0 }

// Close ends the answer.
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

// send gives the answer to a request that the agent grants. The caller closes its
// body.
func (c *Client) send(by *http.Client, r *http.Request) (*http.Response, error) {
	response, err := by.Do(r)
	var wrapped *url.Error
	if errors.As(err, &wrapped) {
		err = wrapped.Err // without the URL, which nobody asked for
	}
	switch {
	case errors.Is(err, os.ErrNotExist), errors.Is(err, unix.ECONNREFUSED):
		return nil, fault.WithHint(fmt.Errorf("%w on %s", ErrNoAgent, c.path),
			"start it with sockeye agent, or name its directory with --run-dir; services that were set up are still steered")
	case errors.Is(err, os.ErrPermission):
		return nil, &fault.Error{Err: fmt.Errorf("connect to agent: %w", err), Hint: "run as root, or as a member of the agent's --group", Code: fault.CodeNotPermitted}
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
