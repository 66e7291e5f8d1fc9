// SPDX-License-Identifier: Apache-2.0

// Package domain defines the interface between the agent and its domains: the domain, the steps of a plan, the routes
// of the API, and the host.
package domain

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net/http"
	"net/url"
	"slices"

	"github.com/prometheus/client_golang/prometheus"

	"sockeye/internal/api"
	"sockeye/internal/bpf"
	"sockeye/internal/config"
	"sockeye/internal/fault"
	"sockeye/internal/peer"
	"sockeye/internal/rights"
	"sockeye/internal/scope"
)

// Domain applies one part of the policy: steer, tune, trace, bigtcp, or fleet. The agent calls the methods from several
// goroutines, and a domain does its own locking. The agent serializes Start, Plan, the functions of a Step, Applied and
// Close.
type Domain interface {
	// Needs lists the capabilities that a policy needs beyond those of the agent's systemd unit.
	Needs(policy *config.Policy) []rights.Need
	// Check returns an error if the policy refers to an object that the host does not have. The agent calls Check
	// before Start and does not start with a policy that fails.
	Check(policy *config.Policy) error
	// Start applies the first policy of this process. Start adopts the pins of an earlier agent, and
	// removes state that is not in the policy.
	Start(policy *config.Policy) error
	// Plan returns the steps from the policy in force to another policy, in order. Plan changes nothing.
	Plan(policy *config.Policy) ([]Step, error)
	// Applied runs after all steps of all domains, when the policy is in force. Applied may add to the plan.
	Applied(policy *config.Policy, c api.Candidate, plan *api.Plan) error
	// Status adds the state of the domain to status.
	Status(status *api.Status) error
	// Frame adds the state of the domain to a frame of the live views.
	Frame(frame *api.Frame) error
	// Collect sends the metrics of the domain. Errors are logged, and the remaining metrics are sent.
	Collect(out chan<- prometheus.Metric)
	// Routes adds the API routes of the domain.
	Routes(r *Router)
	// Close stops the goroutines of the domain and closes its descriptors. Pinned programs stay attached.
	Close()
}

// Step is a part of a plan. Apply makes the changes and returns a function that rolls them back. An Apply that fails
// has rolled back its own changes.
type Step struct {
	Changes []api.Change
	Apply   func() (rollback func() error, err error)
}

// ApplySteps applies steps in order. If a step fails, the steps before it are rolled back in reverse order.
func ApplySteps(steps []Step) error {
	var rollbacks []func() error
	for _, step := range steps {
		rollback, err := step.Apply()
		if err == nil {
			rollbacks = append(rollbacks, rollback)
			continue
		}
		for _, rollback := range slices.Backward(rollbacks) {
			if failed := rollback(); failed != nil {
				err = fault.Join(err, fmt.Errorf("roll back to the previous policy: %w", failed))
			}
		}
		return err
	}
	return nil
}

// Retry returns a step that attaches the programs of a cgroup again, which failed with problem before. The result is nil if
// nothing has failed, or if there is no such cgroup: the watch notices a new one.
func (h *Host) Retry(cgroup, what string, problem error) []Step {
	if problem == nil || errors.Is(problem, fs.ErrNotExist) {
		return nil
	}
	return []Step{{
		Changes: []api.Change{{Cgroup: cgroup, Action: "change", What: what + " is tried again", Effect: "not in force: " + fault.Message(problem)}},
		Apply: func() (func() error, error) {
			h.Watch.Look()
			return func() error { return nil }, nil
		},
	}}
}

// Host has the resources that the domains share.
type Host struct {
	Log      *slog.Logger
	Root     *bpf.Root // pin directory
	StateDir string    // persistent state directory
	Cgroups  scope.Tree
	Watch    *scope.Watch
	programs []func() ([]uint32, error)
}

// AddPrograms adds a function that lists the ids of sock_ops programs of Sockeye.
func (h *Host) AddPrograms(ids func() ([]uint32, error)) { h.programs = append(h.programs, ids) }

// OwnPrograms returns the ids of all sock_ops programs of Sockeye.
func (h *Host) OwnPrograms() ([]uint32, error) {
	var own []uint32
	for _, ids := range h.programs {
		part, err := ids()
		if err != nil {
			return nil, err
		}
		own = append(own, part...)
	}
	return own, nil
}

// Router adds routes to the API of the agent.
type Router struct {
	mux   *http.ServeMux
	reply func(w http.ResponseWriter, r *http.Request, answer func(*http.Request) (any, error))
}

// NewRouter returns a router that adds routes to mux. reply runs the handler of a request and writes the answer.
func NewRouter(mux *http.ServeMux, reply func(w http.ResponseWriter, r *http.Request, answer func(*http.Request) (any, error))) *Router {
	return &Router{mux, reply}
}

// Get answers GET requests to a path.
func (r *Router) Get(path string, answer func(*http.Request) (any, error)) {
	r.mux.HandleFunc("GET "+path, func(w http.ResponseWriter, request *http.Request) {
		r.reply(w, request, func(request *http.Request) (any, error) {
			// URL.Query leaves out all parameters if there are too many.
			if _, err := url.ParseQuery(request.URL.RawQuery); err != nil {
				return nil, fault.Usage(fmt.Errorf("read request: %w", err), "a query has 10,000 parameters at most, of the form name=value")
			}
			return answer(request)
		})
	})
}

// Post answers POST requests of root to a path, with a body of at most 8 MiB.
func (r *Router) Post(path string, answer func(*http.Request) (any, error)) {
	r.PostOfAny(path, func(request *http.Request) (any, error) {
		if err := peer.MustBeRoot(request); err != nil {
			return nil, err
		}
		return answer(request)
	})
}

// PostOfAny is Post for requests of every user who may connect to the agent: answer must check what the user may do.
func (r *Router) PostOfAny(path string, answer func(*http.Request) (any, error)) {
	r.mux.HandleFunc("POST "+path, func(w http.ResponseWriter, request *http.Request) {
		request.Body = http.MaxBytesReader(w, request.Body, MaxBody)
		r.reply(w, request, answer)
	})
}

// Stream answers GET requests to a path with a stream. An error before the first line has the same answer as an error
// of Get.
func (r *Router) Stream(path string, answer func(http.ResponseWriter, *http.Request) error) {
	r.mux.HandleFunc("GET "+path, func(w http.ResponseWriter, request *http.Request) {
		if err := answer(w, request); err != nil && request.Context().Err() == nil {
			r.reply(w, request, func(*http.Request) (any, error) { return nil, err })
		}
	})
}

// MaxBody is the largest request body in bytes. A policy file has at most 1 MiB, and JSON escapes enlarge the text.
const MaxBody = 8 << 20

const requestHint = "send one JSON object of at most 8 MiB"

// Decode decodes the JSON object in the body of a request. If the body is empty, into is not changed.
func Decode(r *http.Request, into any) error {
	d := json.NewDecoder(r.Body)
	d.DisallowUnknownFields()
	if err := d.Decode(into); errors.Is(err, io.EOF) {
		return nil // no body: default values
	} else if err != nil {
		return fault.Usage(fmt.Errorf("read request: %w", err), requestHint)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return fault.Usage(errors.New("read request: unexpected data after the JSON object"), requestHint)
	}
	return nil
}
