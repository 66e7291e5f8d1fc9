// SPDX-License-Identifier: Apache-2.0

package main

import (
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"time"

	"sockeye/internal/testenv"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

// TestClassify checks that the exit code and the output of the scanner are classified correctly. Only an unreachable
// database is not a failure.
func TestClassify(t *testing.T) {
	for _, c := range []struct {
		code int
		said string
		want string
		ok   bool
	}{
		{0, "No vulnerabilities found.\n", "no known vulnerabilities in called functions", true},
		{3, "Vulnerability #1: GO-2024-0001\n", "FOUND, see above", false},
		{1, "govulncheck: fetching vulnerabilities: Get \"https://vuln.go.dev/index/modules.json.gz\": dial tcp: lookup vuln.go.dev: no such host\n",
			"NOT CHECKED: the database cannot be reached: \"https://vuln.go.dev/index/modules.json.gz\": dial tcp: lookup vuln.go.dev: no such host", true},
		{1, "govulncheck: loading packages:\nThere are errors with the provided package patterns\n", "NOT CHECKED: govulncheck failed with code 1, see above", false},
		{1, "govulncheck: fetching vulnerabilities: HTTP GET returned unexpected status: 404\n", "NOT CHECKED: govulncheck failed with code 1, see above", false},
		{2, "usage", "NOT CHECKED: govulncheck failed with code 2, see above", false},
		{-1, "", "NOT CHECKED: govulncheck failed with code -1, see above", false},
		// The text must be at the start of a line.
		{3, "x govulncheck: fetching vulnerabilities: Get \n", "FOUND, see above", false},
		{1, "x govulncheck: fetching vulnerabilities: Get \n", "NOT CHECKED: govulncheck failed with code 1, see above", false},
	} {
		if got, ok := classify(c.code, c.said); got != c.want || ok != c.ok {
			t.Errorf("%d %q: %q %v, want %q %v", c.code, c.said, got, ok, c.want, c.ok)
		}
	}
}

func TestUnreachable(t *testing.T) {
	status := 0
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(status) }))
	defer server.Close()
	secure := httptest.NewTLSServer(http.NotFoundHandler()) // its certificate is not trusted
	defer secure.Close()
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	gone, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	gone.Close()
	for _, c := range []struct {
		address string
		status  int
		away    bool
	}{
		{"http://" + gone.Addr().String(), 0, true},
		{"http://" + silent.Addr().String(), 0, true},
		{"http://nowhere.invalid", 0, true},
		{server.URL, 503, true},
		{server.URL, 403, true},
		{server.URL, 404, false},
		{secure.URL, 0, false},
		{"nonsense://x", 0, false},
		{"http://[", 0, false},
	} {
		status = c.status
		start := time.Now()
		err := ask(t.Context(), c.address, 2*time.Second)
		if err == nil || unreachable(err) != c.away {
			t.Errorf("%s, status %d: %v, unreachable %v, want %v", c.address, c.status, err, unreachable(err), c.away)
			continue
		}
		if d := time.Since(start); d > 10*time.Second {
			t.Errorf("%s: took %v", c.address, d)
		}
		verdict, ok := unable(err)
		if ok != c.away || strings.HasPrefix(verdict, "NOT CHECKED: the database cannot be reached: ") != c.away || !strings.HasPrefix(verdict, "NOT CHECKED: ") {
			t.Errorf("%s: %q %v", c.address, verdict, ok)
		}
	}
	if status = 200; ask(t.Context(), server.URL+"/", time.Second) != nil {
		t.Error("a reachable database is reported as unreachable")
	}
}
