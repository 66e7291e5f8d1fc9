// SPDX-License-Identifier: Apache-2.0

package domain

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// TestTooManyParameters is that a request with more parameters than net/url reads is refused: its handler would see none of them.
func TestTooManyParameters(t *testing.T) {
	mux := http.NewServeMux()
	var refused error
	r := NewRouter(mux, func(_ http.ResponseWriter, r *http.Request, answer func(*http.Request) (any, error)) {
		_, refused = answer(r)
	})
	seen := -1
	r.Get("/v1/where", func(r *http.Request) (any, error) { seen = len(r.URL.Query()["address"]); return nil, nil })
	for _, c := range []struct {
		addresses, want int
		refused         bool
	}{{3, 3, false}, {10_000, 10_000, false}, {10_001, -1, true}} {
		seen = -1
		mux.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest(http.MethodGet, "/v1/where?"+strings.Repeat("address=1&", c.addresses-1)+"address=1", nil))
		if seen != c.want || (refused != nil) != c.refused {
			t.Errorf("%d addresses: the handler has seen %d; %v", c.addresses, seen, refused)
		}
	}
}
