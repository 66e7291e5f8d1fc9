// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"fmt"
	"net/http"

	"sockeye/internal/api"
	"sockeye/internal/config"
	"sockeye/internal/domain"
	"sockeye/internal/fault"
	"sockeye/internal/match"
	"sockeye/internal/peer"
)

// Routes adds the API routes for tuning.
func (d *Domain) Routes(r *domain.Router) {
	r.Get("/v1/tune", func(r *http.Request) (any, error) { return d.Cgroups(r.URL.Query().Get("cgroup")) })
	r.Get("/v1/tune/options", func(*http.Request) (any, error) { return d.Options() })
	r.Get("/v1/tune/explain", func(r *http.Request) (any, error) {
		questions, err := tuneQuestion(r)
		if err != nil {
			return nil, err
		}
		return d.Explain(r.URL.Query().Get("cgroup"), questions)
	})
	r.Get("/v1/tune/socket", func(r *http.Request) (any, error) {
		// Only root may see the descriptors of processes.
		if err := peer.MustBeRoot(r); err != nil {
			return nil, err
		}
		return d.Socket(r)
	})
	r.Get("/v1/tune/trial", func(r *http.Request) (any, error) { return d.Trial(r.URL.Query().Get("rule")) })
	r.Get("/v1/tune/learned", func(r *http.Request) (any, error) { return d.Learned(r.URL.Query().Get("rule")) })
	r.Post("/v1/tune/revert", func(r *http.Request) (any, error) {
		var which api.TuneRevert
		if err := domain.Decode(r, &which); err != nil {
			return nil, err
		}
		return d.Revert(which)
	})
}

// tuneQuestion decodes the connection of a request.
func tuneQuestion(r *http.Request) (questions []match.Question, err error) {
	q := r.URL.Query()
	var base match.Question
	if base.Local, err = api.ParseEndpoint("local", q.Get("local")); err != nil {
		return nil, err
	}
	if base.Remote, err = api.ParseEndpoint("remote", q.Get("remote")); err != nil {
		return nil, err
	}
	if base.Local.Addr().Is4() != base.Remote.Addr().Is4() {
		return nil, fault.Usage(fmt.Errorf("%s and %s are of different families", base.Local.Addr(), base.Remote.Addr()), "give two IPv4 or two IPv6 addresses")
	}
	if text := q.Get("tag"); text != "" {
		if base.Tag, err = config.ParseTag(text); err != nil {
			return nil, fault.Usage(err, "1 to 16 printable characters, or 0x and hexadecimal digits")
		}
	}
	for _, role := range []config.Role{config.RoleConnect, config.RoleAccept} {
		switch wanted := q.Get("role"); wanted {
		case "", string(role):
			base.Role = role
			questions = append(questions, base)
		case string(config.RoleConnect), string(config.RoleAccept):
		default:
			return nil, fault.Usage(fmt.Errorf("the role is %q", wanted), "connect or accept")
		}
	}
	return questions, nil
}
