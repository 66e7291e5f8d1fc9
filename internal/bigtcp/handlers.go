// SPDX-License-Identifier: Apache-2.0

package bigtcp

import (
	"net/http"

	"sockeye/internal/domain"
)

// Routes adds GET /v1/bigtcp.
func (d *Domain) Routes(r *domain.Router) {
	r.Get("/v1/bigtcp", func(r *http.Request) (any, error) {
		return d.Interfaces(r.URL.Query().Get("netns"), r.URL.Query().Get("interface"))
	})
}
