// SPDX-License-Identifier: Apache-2.0

// Command vulncheck runs the given version of govulncheck on packages. It fails if a package calls
// a function with a known vulnerability, or if the scan fails. If the database is unreachable, it
// prints a note and does not fail. Its last line is the verdict, which it also writes to a file.
package main

import (
	"context"
	"crypto/tls"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

const (
	// askTime is the timeout of the first request to the database, including name resolution.
	askTime = 20 * time.Second
	// scanTime is the timeout of the scan, sufficient for two busy CPUs.
	scanTime = 10 * time.Minute
	// found is govulncheck's exit code for vulnerabilities. 0 means no vulnerabilities, other codes are errors.
	found = 3
)

func main() {
	scanner := flag.String("scanner", "", "package of govulncheck, with its version")
	database := flag.String("db", "https://vuln.go.dev", "address of the database")
	verdictFile := flag.String("o", "", "file for the verdict")
	flag.Parse()
	text, ok := check(context.Background(), *scanner, *database, flag.Args())
	text = "vulnerabilities: " + text
	fmt.Println(text)
	if *verdictFile != "" {
		err := os.MkdirAll(filepath.Dir(*verdictFile), 0o755)
		if err == nil {
			err = os.WriteFile(*verdictFile, []byte(text+"\n"), 0o644)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, "vulncheck:", err)
			ok = false
		}
	}
	if !ok {
		os.Exit(1)
	}
}

// check builds and runs the scanner and returns the verdict.
func check(ctx context.Context, scanner, database string, packages []string) (verdict string, ok bool) {
	if err := ask(ctx, database, askTime); err != nil {
		return unable(err)
	}
	dir, err := os.MkdirTemp("", "vulncheck")
	if err != nil {
		return unable(err)
	}
	defer os.RemoveAll(dir)
	// go run would replace the exit code of govulncheck by its own.
	build := exec.CommandContext(ctx, "go", "install", scanner)
	build.Env = append(os.Environ(), "GOBIN="+dir)
	build.Stdout, build.Stderr = os.Stderr, os.Stderr
	if err := build.Run(); err != nil {
		return unable(fmt.Errorf("build %s: %w", scanner, err))
	}
	ctx, cancel := context.WithTimeout(ctx, scanTime)
	defer cancel()
	scan := exec.CommandContext(ctx, filepath.Join(dir, "govulncheck"), append([]string{"-db", database}, packages...)...)
	scan.WaitDelay = 5 * time.Second
	var output strings.Builder
	scan.Stdout, scan.Stderr = io.MultiWriter(os.Stdout, &output), io.MultiWriter(os.Stderr, &output)
	err = scan.Run()
	if ctx.Err() != nil {
		return unable(fmt.Errorf("the scan took longer than %v", scanTime))
	}
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		return unable(err)
	}
	return classify(scan.ProcessState.ExitCode(), output.String())
}

// classify returns the verdict for the exit code and the output of govulncheck.
func classify(code int, output string) (verdict string, ok bool) {
	switch code {
	case 0:
		return "no known vulnerabilities in called functions", true
	case found:
		return "FOUND, see above", false
	}
	const lost = "govulncheck: fetching vulnerabilities: Get "
	for line := range strings.Lines(output) {
		if reason, ok := strings.CutPrefix(line, lost); ok {
			// The database was reachable before the scan.
			return notChecked(strings.TrimSpace(reason)), true
		}
	}
	return fmt.Sprintf("NOT CHECKED: govulncheck failed with code %d, see above", code), false
}

// unable returns the verdict for an error before or during the scan.
func unable(err error) (verdict string, ok bool) {
	if unreachable(err) {
		return notChecked(err.Error()), true
	}
	return "NOT CHECKED: " + err.Error(), false
}

func notChecked(reason string) string {
	return "NOT CHECKED: the database cannot be reached: " + reason
}

// statusError is an HTTP status other than 200.
type statusError int

func (s statusError) Error() string {
	return fmt.Sprintf("HTTP status %d %s", int(s), http.StatusText(int(s)))
}

// away are HTTP statuses of a proxy that denies access, and of a server that is overloaded or down.
var away = []int{
	http.StatusForbidden, http.StatusProxyAuthRequired, http.StatusTooManyRequests,
	http.StatusInternalServerError, http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout,
}

// ask requests the file of the database that each scan reads first.
func ask(ctx context.Context, database string, within time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodHead, strings.TrimRight(database, "/")+"/index/modules.json.gz", nil)
	if err != nil {
		return err
	}
	answer, err := http.DefaultClient.Do(r)
	if err != nil {
		return err
	}
	answer.Body.Close()
	if answer.StatusCode != http.StatusOK {
		return statusError(answer.StatusCode)
	}
	return nil
}

// unreachable reports whether err means that the database is unreachable. This excludes an invalid
// certificate, which may be an attack.
func unreachable(err error) bool {
	var (
		wrapped     *url.Error
		certificate *tls.CertificateVerificationError
		network     *net.OpError
		name        *net.DNSError
		status      statusError
	)
	switch {
	case errors.As(err, &status):
		return slices.Contains(away, int(status))
	case !errors.As(err, &wrapped), errors.As(err, &certificate):
		return false
	}
	return wrapped.Timeout() || errors.As(err, &network) || errors.As(err, &name) || errors.Is(err, io.EOF) ||
		errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, syscall.ECONNRESET)
}
