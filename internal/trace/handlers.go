// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"context"
	"net/http"
	"net/url"

	"sockeye/internal/domain"
	"sockeye/internal/peer"
)

// Routes adds the API routes for tracing.
func (d *Domain) Routes(r *domain.Router) {
	r.Get("/v1/trace", func(r *http.Request) (any, error) { return d.Cgroups(r.URL.Query().Get("cgroup")) })
	r.Get("/v1/trace/results", func(r *http.Request) (any, error) { return d.Results(r.URL.Query()) })
	r.Get("/v1/trace/history", func(r *http.Request) (any, error) { return d.History(r.URL.Query()) })
	r.Get("/v1/trace/slow", func(r *http.Request) (any, error) {
		// Only root may see the addresses of connections.
		if err := peer.MustBeRoot(r); err != nil {
			return nil, err
		}
		return d.Slow(r.URL.Query())
	})
	for path, answer := range map[string]func(context.Context, http.ResponseWriter, url.Values) error{
		"/v1/trace/samples": d.streamSamples,
		"/v1/trace/packets": d.streamPackets,
	} {
		r.Stream(path, func(w http.ResponseWriter, r *http.Request) error {
			if err := peer.MustBeRoot(r); err != nil {
				return err
			}
			return answer(r.Context(), w, r.URL.Query())
		})
	}
}
