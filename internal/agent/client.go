// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

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

func (c *Client) do(r *http.Request, into any) error {
	response, err := c.http.Do(r)
	var wrapped *url.Error
	if errors.As(err, &wrapped) {
		err = wrapped.Err // without the URL, which nobody asked for
	}
	switch {
	case errors.Is(err, os.ErrNotExist), errors.Is(err, unix.ECONNREFUSED):
		return withHint(fmt.Errorf("%w on %s", ErrNoAgent, c.path),
			"start it with sockeye agent, or name its directory with --run-dir; steering goes on without it")
	case errors.Is(err, os.ErrPermission):
		return &Error{Err: fmt.Errorf("connect to agent: %w", err), Hint: "run as root, or as a member of the agent's --group", Code: CodeNotPermitted}
	case err != nil:
		return fmt.Errorf("ask agent: %w", err)
	}
	defer response.Body.Close()
	d := json.NewDecoder(response.Body)
	if response.StatusCode != http.StatusOK {
		var f Failure
		if err := d.Decode(&f); err != nil || f.Code == 0 {
			return fmt.Errorf("ask agent: unexpected answer %s", response.Status)
		}
		return &Error{Err: errors.New(f.Error), Hint: f.Hint, Code: f.Code}
	}
	if err := d.Decode(into); err != nil {
		return fmt.Errorf("read agent's answer: %w", err)
	}
	return nil
}
