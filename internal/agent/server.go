// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/user"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/api"
	"sockeye/internal/domain"
	"sockeye/internal/events"
	"sockeye/internal/fault"
	"sockeye/internal/peer"
)

type server struct {
	listener net.Listener
	http     *http.Server
}

// listen opens the agent's socket. The socket file of an agent that was killed is replaced.
func (a *Agent) listen() (*server, error) {
	path := api.SocketPath(a.options.RunDir)
	gid, err := a.group()
	if err != nil {
		return nil, err
	}
	if other, err := net.DialTimeout("unix", path, time.Second); err == nil {
		other.Close()
		return nil, fault.Conflict(fmt.Errorf("listen on %s: another agent listens there", path), "give this one its own --run-dir")
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("replace socket: %w", err)
	}
	old := unix.Umask(0o177)
	listener, err := net.Listen("unix", path)
	unix.Umask(old)
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	if gid >= 0 {
		err = os.Chown(path, -1, gid)
		if err == nil {
			err = os.Chmod(path, 0o660)
		}
		if err != nil {
			listener.Close()
			return nil, fmt.Errorf("give socket to group %s: %w", a.options.Group, err)
		}
	}
	return a.guardAPI(&server{listener: peer.Listener{Listener: listener}, http: &http.Server{
		Handler:           requireLocalCaller(a.handler()),
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       30 * time.Second,
		ErrorLog:          slog.NewLogLogger(a.log.Handler(), slog.LevelWarn),
		ConnContext:       peer.WithCaller,
	}}), nil
}

// group returns the group that may connect to the agent's sockets, or -1 for none.
func (a *Agent) group() (int, error) {
	if a.options.Group == "" {
		return -1, nil
	}
	group, err := user.LookupGroup(a.options.Group)
	if err != nil {
		return -1, fault.Usage(fmt.Errorf("look up group %s: %w", a.options.Group, err), "create the group, or leave --group out")
	}
	gid, err := strconv.Atoi(group.Gid)
	if err != nil {
		return -1, fmt.Errorf("look up group %s: %w", a.options.Group, err)
	}
	return gid, nil
}

func (s *server) serve() <-chan error {
	failed := make(chan error, 1)
	go func() {
		if err := s.http.Serve(s.listener); !errors.Is(err, http.ErrServerClosed) {
			failed <- fmt.Errorf("serve API: %w", err)
		}
	}()
	return failed
}

func (s *server) close() {
	s.http.Close()
	s.listener.Close()
}

func (a *Agent) handler() http.Handler {
	mux := http.NewServeMux()
	router := domain.NewRouter(mux, a.answer)
	for _, d := range a.domains {
		d.Routes(router)
	}
	router.Get("/v1/status", func(*http.Request) (any, error) { return a.Status() })
	router.PostOfAny("/v1/plan", func(r *http.Request) (any, error) {
		var c api.Candidate
		if err := domain.Decode(r, &c); err != nil {
			return nil, err
		}
		// A policy names files, and errors quote their contents.
		if c.Text != "" || c.Path != "" {
			if err := peer.MustBeRoot(r); err != nil {
				return nil, err
			}
		}
		return a.Plan(c)
	})
	router.Post("/v1/apply", func(r *http.Request) (any, error) {
		var c api.Candidate
		if err := domain.Decode(r, &c); err != nil {
			return nil, err
		}
		return a.Apply(c)
	})
	router.Get("/v1/why", a.why)
	router.Stream("/v1/events", a.streamEvents)
	router.Stream("/v1/live", a.live.stream)
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		reply(w, r, func(r *http.Request) (any, error) {
			return nil, fault.Usage(fmt.Errorf("the agent has no %s %s", r.Method, r.URL.Path), "is it of another version? see sockeye version and status")
		})
	})
	return mux
}

// answer replies to a request, and records requests that have changed something.
func (a *Agent) answer(w http.ResponseWriter, r *http.Request, answer func(*http.Request) (any, error)) {
	reply(w, r, func(r *http.Request) (any, error) {
		body, err := answer(r)
		if k := peer.From(r); k != nil && err == nil && r.Method == http.MethodPost && r.URL.Path != "/v1/plan" {
			a.log.Info("request", append([]any{events.Requested, "path", r.URL.Path}, k.Attrs()...)...)
		}
		return body, err
	})
}

// requireLocalCaller refuses requests of callers that have exited or that are in another user namespace. An isolated
// program keeps its user, who may have access to the socket. The check is per request, because a connection can
// outlive the process that opened it.
func requireLocalCaller(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		refuse := func(err error) {
			reply(w, r, func(*http.Request) (any, error) { return nil, err })
		}
		switch k := peer.From(r); {
		case k == nil || k.Alive() != nil:
			refuse(peer.ErrGone)
		case k.Stranger:
			refuse(&fault.Error{
				Err:  errors.New("the agent does not answer processes in another user namespace, such as isolated programs"),
				Hint: "run the command outside the isolated program", Code: fault.CodeNotPermitted,
			})
		default:
			next.ServeHTTP(w, r)
		}
	})
}

var httpStatus = map[int]int{
	fault.CodeFailed:       http.StatusInternalServerError,
	fault.CodeUsage:        http.StatusBadRequest,
	fault.CodeUnsupported:  http.StatusNotImplemented,
	fault.CodeNotPermitted: http.StatusForbidden,
	fault.CodeConflict:     http.StatusConflict,
}

func reply(w http.ResponseWriter, r *http.Request, answer func(*http.Request) (any, error)) {
	body, err := answer(r)
	w.Header().Set("Content-Type", "application/json")
	if err != nil {
		w.WriteHeader(httpStatus[fault.Code(err)])
		body = api.Failure{Error: fault.Message(err), Hint: fault.Hint(err), Code: fault.Code(err)}
	}
	// The client may have disconnected.
	_ = json.NewEncoder(w).Encode(body)
}
