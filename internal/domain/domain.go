// SPDX-License-Identifier: Apache-2.0

// Package domain has what the agent and its domains share: the interface of a domain, the steps of a plan, and
// the host.
package domain

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"slices"

	"github.com/prometheus/client_golang/prometheus"

	"sockeye/internal/api"
	"sockeye/internal/bpf"
	"sockeye/internal/config"
	"sockeye/internal/fault"
	"sockeye/internal/rights"
	"sockeye/internal/scope"
)

// Domain carries out one part of the policy: steer, tune, trace, or bigtcp. A domain looks after its own
// locking: its methods are called from several goroutines, but never two of Start, Plan, the functions of
// a Step, Applied and Close at a time.
type Domain interface {
	// Needs lists the capabilities beyond those of the unit that a policy needs.
	Needs(policy *config.Policy) []rights.Need
	// Check fails if the policy names something that the host does not have. It is called before Start:
	// a policy that fails here is not in force.
	Check(policy *config.Policy) error
	// Start carries out the first policy of this process. It adopts what an earlier agent has left on the
	// Host, and removes the parts of it that are not in the policy.
	Start(policy *config.Policy) error
	// Plan returns the steps from the policy in force to another one, in order. It changes nothing.
	Plan(policy *config.Policy) ([]Step, error)
	// Applied is called when all steps of all domains were carried out, and the policy is in force. It may
	// add to the plan.
	Applied(policy *config.Policy, c api.Candidate, plan *api.Plan) error
	// Status adds the state of the domain to the answer.
	Status(status *api.Status) error
	// Collect sends the metrics of the domain. A part that fails is logged; the others are sent.
	Collect(out chan<- prometheus.Metric)
	// Routes adds the requests that the domain answers.
	Routes(r *Router)
	// Close ends what the domain does in this process. Everything that is attached stays attached.
	Close()
}

// Step is a part of a plan. Apply carries it out and returns how to roll it back; a step that fails has
// rolled itself back.
type Step struct {
	Changes []api.Change
	Apply   func() (rollback func() error, err error)
}

// CarryOut carries out steps. If one fails, those before it are rolled back, the last one first.
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
				err = fault.Join(err, fmt.Errorf("go back to the policy before: %w", failed))
			}
		}
		return err
	}
	return nil
}

// Host is what the domains share.
type Host struct {
	Log      *slog.Logger
	Root     *bpf.Root // of the pins
	StateDir string    // kept over reboots
	Cgroups  scope.Tree
	Watch    *scope.Watch
	programs []func() ([]uint32, error)
}

// OwnPrograms adds a source of the ids of sock_ops programs that are Sockeye's.
func (h *Host) AddPrograms(ids func() ([]uint32, error)) { h.programs = append(h.programs, ids) }

// OwnPrograms returns the ids of all sock_ops programs that are Sockeye's.
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

// Router collects the requests that the agent answers.
type Router struct {
	mux   *http.ServeMux
	reply func(w http.ResponseWriter, r *http.Request, answer func(*http.Request) (any, error))
}

// NewRouter returns a router that adds requests to mux, and answers them by reply.
func NewRouter(mux *http.ServeMux, reply func(w http.ResponseWriter, r *http.Request, answer func(*http.Request) (any, error))) *Router {
	return &Router{mux, reply}
}

// Get answers GET requests to a path.
func (r *Router) Get(path string, answer func(*http.Request) (any, error)) {
	r.mux.HandleFunc("GET "+path, func(w http.ResponseWriter, request *http.Request) { r.reply(w, request, answer) })
}

// Post answers POST requests to a path, with a body of at most 8 MiB.
func (r *Router) Post(path string, answer func(*http.Request) (any, error)) {
	r.mux.HandleFunc("POST "+path, func(w http.ResponseWriter, request *http.Request) {
		request.Body = http.MaxBytesReader(w, request.Body, MaxBody)
		r.reply(w, request, answer)
	})
}

// Stream answers GET requests to a path with an answer that goes on. An error before the first line is
// answered like any other.
func (r *Router) Stream(path string, answer func(http.ResponseWriter, *http.Request) error) {
	r.mux.HandleFunc("GET "+path, func(w http.ResponseWriter, request *http.Request) {
		if err := answer(w, request); err != nil && request.Context().Err() == nil {
			r.reply(w, request, func(*http.Request) (any, error) { return nil, err })
		}
	})
}

// MaxBody bounds a request: a policy file has at most 1 MiB, and its text
// grows when it is written as JSON.
const MaxBody = 8 << 20

const requestHint = "send one JSON object of at most 8 MiB"

// Decode reads the JSON object that is the body of a request. A request without a body leaves into as it is.
func Decode(r *http.Request, into any) error {
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
