// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/user"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/api"
	"sockeye/internal/fault"
)

// maxBody bounds a request: a policy file has at most 1 MiB, and its text
// grows when it is written as JSON.
const maxBody = 8 << 20

type server struct {
	listener net.Listener
	http     *http.Server
}

// listen opens the agent's socket. A socket that is left from an agent that
// was killed is replaced.
func (a *Agent) listen() (*server, error) {
	path := api.SocketPath(a.options.RunDir)
	gid := -1
	if a.options.Group != "" {
		group, err := user.LookupGroup(a.options.Group)
		if err != nil {
			return nil, fault.Usage(fmt.Errorf("look up group %s: %w", a.options.Group, err), "create the group, or leave --group out")
		}
		if gid, err = strconv.Atoi(group.Gid); err != nil {
			return nil, fmt.Errorf("look up group %s: %w", a.options.Group, err)
		}
	}
	if other, err := net.DialTimeout("unix", path, time.Second); err == nil {
		other.Close()
		return nil, fault.Conflict(fmt.Errorf("listen on %s: another agent does", path), "give this one its own --run-dir")
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
	return a.guardAPI(&server{listener: callerListener{listener}, http: &http.Server{
		Handler:           known(a.handler()),
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       30 * time.Second,
		ErrorLog:          slog.NewLogLogger(a.log.Handler(), slog.LevelWarn),
		ConnContext:       withCaller,
	}}), nil
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
	show := func(path string, answer func(*http.Request) (any, error)) {
		mux.HandleFunc("GET "+path, func(w http.ResponseWriter, r *http.Request) {
			reply(w, r, answer)
		})
	}
	change := func(path string, answer func(*http.Request) (any, error)) {
		mux.HandleFunc("POST "+path, func(w http.ResponseWriter, r *http.Request) {
			r.Body = http.MaxBytesReader(w, r.Body, maxBody)
			reply(w, r, answer)
		})
	}
	show("/v1/status", func(*http.Request) (any, error) { return a.Status() })
	show("/v1/slots", func(r *http.Request) (any, error) {
		return collect(a, r, (*service).slots)
	})
	show("/v1/devices", func(r *http.Request) (any, error) {
		return collect(a, r, func(s *service) ([]api.DeviceStatus, error) { return s.devices(), nil })
	})
	show("/v1/where", func(r *http.Request) (any, error) {
		addresses, err := api.ParseAddresses(r.URL.Query()["address"])
		if err != nil {
			return nil, err
		}
		return collect(a, r, func(s *service) ([]api.WhereStatus, error) { return s.where(addresses), nil })
	})
	show("/v1/tune", func(r *http.Request) (any, error) { return a.TuneStatus(r.URL.Query().Get("cgroup")) })
	show("/v1/tune/options", func(*http.Request) (any, error) { return a.TuneOptions() })
	show("/v1/tune/explain", func(r *http.Request) (any, error) {
		questions, err := tuneQuestion(r)
		if err != nil {
			return nil, err
		}
		return a.TuneExplain(r.URL.Query().Get("cgroup"), questions)
	})
	show("/v1/tune/socket", func(r *http.Request) (any, error) {
		// What a process has open is nobody's business but root's.
		if err := mustBeRoot(r); err != nil {
			return nil, err
		}
		return a.TuneSocket(r)
	})
	show("/v1/tune/trial", func(r *http.Request) (any, error) { return a.TuneTrial(r.URL.Query().Get("rule")) })
	show("/v1/tune/learned", func(r *http.Request) (any, error) { return a.TuneLearned(r.URL.Query().Get("rule")) })
	change("/v1/tune/revert", func(r *http.Request) (any, error) {
		if err := mustBeRoot(r); err != nil {
			return nil, err
		}
		var which api.TuneRevert
		if err := decode(r, &which); err != nil {
			return nil, err
		}
		return a.TuneRevert(which)
	})
	show("/v1/bigtcp", func(r *http.Request) (any, error) {
		return a.BigTCPStatus(r.URL.Query().Get("netns"), r.URL.Query().Get("interface"))
	})
	a.traceRoutes(show)
	a.traceStreams(mux)
	change("/v1/register", func(r *http.Request) (any, error) {
		m, s, err := a.membership(r, true)
		if err != nil {
			return nil, err
		}
		if m.PID == 0 {
			return nil, fault.Usage(errors.New("which process?"), "name one with --pid")
		}
		slot, err := s.claim(m.PID, m.Slot, "register", nil)
		return api.Membership{Service: s.config.Name, Slot: &slot, PID: m.PID}, err
	})
	change("/v1/unregister", func(r *http.Request) (any, error) {
		m, s, err := a.membership(r, true)
		if err != nil {
			return nil, err
		}
		if m.Slot == nil {
			return nil, fault.Usage(errors.New("which slot?"), "name one with --slot")
		}
		return api.Membership{Service: s.config.Name, Slot: m.Slot}, s.unregister(*m.Slot)
	})
	change("/v1/run", func(r *http.Request) (any, error) {
		m, s, err := a.membership(r, false)
		if err != nil {
			return nil, err
		}
		// A caller makes itself a member, nobody else.
		k := callerFrom(r)
		slot, err := s.claim(k.self.PID, m.Slot, "run", k)
		return api.Place{Membership: api.Membership{Service: s.config.Name, Slot: &slot, PID: k.self.PID}, Listeners: s.memberListeners(), User: s.soleUser()}, err
	})
	change("/v1/plan", func(r *http.Request) (any, error) {
		var c api.Candidate
		if err := decode(r, &c); err != nil {
			return nil, err
		}
		// A policy names files, and errors quote them.
		if c.Text != "" || c.Path != "" {
			if err := mustBeRoot(r); err != nil {
				return nil, err
			}
		}
		return a.Plan(c)
	})
	change("/v1/apply", func(r *http.Request) (any, error) {
		if err := mustBeRoot(r); err != nil {
			return nil, err
		}
		var c api.Candidate
		if err := decode(r, &c); err != nil {
			return nil, err
		}
		return a.Apply(c)
	})
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		reply(w, r, func(r *http.Request) (any, error) {
			return nil, fault.Usage(fmt.Errorf("the agent has no %s %s", r.Method, r.URL.Path), "is it of another version? see sockeye version and status")
		})
	})
	return mux
}

func mustBeRoot(r *http.Request) error {
	if k := callerFrom(r); k == nil || k.cred.Uid != 0 {
		return &fault.Error{Err: errors.New("only root may change what the agent does, or have it read a file"), Hint: "run it with sudo", Code: fault.CodeNotPermitted}
	}
	return nil
}

func (a *Agent) membership(r *http.Request, root bool) (m api.Membership, s *service, err error) {
	if callerFrom(r) == nil {
		return m, nil, &fault.Error{Err: errors.New("the caller is not known"), Code: fault.CodeNotPermitted}
	}
	if root {
		if err := mustBeRoot(r); err != nil {
			return m, nil, err
		}
	}
	if err := decode(r, &m); err != nil {
		return m, nil, err
	}
	s, err = a.service(m.Service)
	return m, s, err
}

const requestHint = "send one JSON object of at most 8 MiB"

func decode(r *http.Request, into any) error {
	d := json.NewDecoder(r.Body)
	d.DisallowUnknownFields()
	if err := d.Decode(into); errors.Is(err, io.EOF) {
		return nil // no body: all by default
	} else if err != nil {
		return fault.Usage(fmt.Errorf("read request: %w", err), requestHint)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return fault.Usage(errors.New("read request: something follows the JSON object"), requestHint)
	}
	return nil
}

// collect asks the services that a request names, or all.
func collect[T any](a *Agent, r *http.Request, ask func(*service) ([]T, error)) ([]T, error) {
	services, err := a.selected(r.URL.Query().Get("service"))
	if err != nil {
		return nil, err
	}
	all := []T{}
	for _, s := range services {
		part, err := ask(s)
		if err != nil {
			return nil, fmt.Errorf("service %s: %w", s.config.Name, err)
		}
		all = append(all, part...)
	}
	return all, nil
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
	// The caller may be gone; nothing is to be done about that.
	_ = json.NewEncoder(w).Encode(body)
}
