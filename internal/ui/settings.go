// SPDX-License-Identifier: Apache-2.0

package ui

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha256"
	"crypto/subtle"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	"sockeye/internal/config"
	"sockeye/internal/fault"
	"sockeye/internal/owned"
)

const (
	// minToken and maxToken are the lengths of a token in bytes.
	minToken, maxToken = 32, 1024
	// maxFile is the size of a file of the settings in bytes.
	maxFile = 1 << 20
	// sessionTime is the time after which a browser asks for the token again.
	sessionTime = 12 * time.Hour
)

// Settings are the address, and the contents of the files that the policy names.
type Settings struct {
	Config config.UI
	tls    tlsFiles
	token  []byte // nil without a token
}

// tlsFiles are the contents of the files of TLS.
type tlsFiles struct {
	cert, key, ca []byte
	config        *tls.Config // nil without TLS
}

// ReadSettings reads the files of a policy's ui.
func ReadSettings(c config.UI) (*Settings, error) {
	s := &Settings{Config: c}
	if c.TLS.Cert != "" {
		if err := s.tls.read(c.TLS); err != nil {
			return nil, err
		}
	}
	if c.TokenFile == "" {
		return s, nil
	}
	text, err := owned.ReadFile(c.TokenFile, true, maxFile)
	if err != nil {
		return nil, fmt.Errorf("read the token of the web page: %w", err)
	}
	if s.token, err = parseToken(text); err != nil {
		return nil, fault.Usage(fmt.Errorf("read the token of the web page: %s: %w", c.TokenFile, err), "openssl rand -hex 32 writes one")
	}
	return s, nil
}

// parseToken returns the token of a file: its text without the white space at the ends.
func parseToken(text []byte) ([]byte, error) {
	token := bytes.TrimSpace(text)
	switch {
	case len(token) < minToken || len(token) > maxToken:
		return nil, fmt.Errorf("the token has %d characters, it must have %d to %d", len(token), minToken, maxToken)
	case bytes.ContainsFunc(token, func(r rune) bool { return r <= ' ' || r > '~' }):
		return nil, errors.New("the token must be one word of ASCII characters")
	}
	return token, nil
}

func (f *tlsFiles) read(c config.UITLS) (err error) {
	if f.cert, err = owned.ReadFile(c.Cert, false, maxFile); err != nil {
		return fmt.Errorf("read the certificate of the web page: %w", err)
	}
	if f.key, err = owned.ReadFile(c.Key, true, maxFile); err != nil {
		return fmt.Errorf("read the key of the web page: %w", err)
	}
	pair, err := tls.X509KeyPair(f.cert, f.key)
	if err != nil {
		return fault.Usage(fmt.Errorf("the certificate %s and the key %s of the web page: %s", c.Cert, c.Key, strings.TrimPrefix(err.Error(), "tls: ")), "give ui.tls a certificate and its key, in PEM")
	}
	if left := pair.Leaf.NotAfter; time.Now().After(left) {
		return fault.Usage(fmt.Errorf("the certificate %s of the web page has expired at %s", c.Cert, left.UTC().Format(time.RFC3339)), "renew it, then sockeye apply")
	}
	f.config = &tls.Config{MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{pair}, NextProtos: []string{"http/1.1"}}
	if c.ClientCA == "" {
		return nil
	}
	if f.ca, err = owned.ReadFile(c.ClientCA, false, maxFile); err != nil {
		return fmt.Errorf("read the client certificates of the web page: %w", err)
	}
	f.config.ClientCAs = x509.NewCertPool()
	if !f.config.ClientCAs.AppendCertsFromPEM(f.ca) {
		return fault.Usage(fmt.Errorf("%s has no certificate in PEM", c.ClientCA), "give ui.tls.client_ca the certificates that sign client certificates")
	}
	f.config.ClientAuth = tls.RequireAndVerifyClientCert
	return nil
}

// Equal reports whether two settings are the same, including the contents of the files.
func (s *Settings) Equal(o *Settings) bool {
	return s.Config == o.Config && bytes.Equal(s.token, o.token) &&
		bytes.Equal(s.tls.cert, o.tls.cert) && bytes.Equal(s.tls.key, o.tls.key) && bytes.Equal(s.tls.ca, o.tls.ca)
}

// admits reports whether a request has what the settings ask for: a client certificate, which TLS has checked, and the
// token or a session that began with it.
func (s *Settings) admits(r *http.Request, now time.Time) bool {
	if s.tls.config != nil && r.TLS == nil {
		return false // a connection of earlier settings
	}
	if s.token == nil {
		return true
	}
	if scheme, given, ok := strings.Cut(r.Header.Get("Authorization"), " "); ok && strings.EqualFold(scheme, "Bearer") {
		return s.isToken(given)
	}
	for _, c := range r.CookiesNamed(s.cookieName(r)) {
		if s.isSession(c.Value, now) {
			return true
		}
	}
	return false
}

func (s *Settings) isSession(value string, now time.Time) bool {
	end, mac, ok := strings.Cut(value, ".")
	if !ok || !hmac.Equal([]byte(mac), []byte(s.sign(end))) {
		return false
	}
	until, err := strconv.ParseInt(end, 10, 64)
	return err == nil && now.Unix() < until
}

// isSecure reports whether the browser uses TLS. Only a proxy can connect to the Unix socket, so that its header counts.
func (s *Settings) isSecure(r *http.Request) bool {
	return r.TLS != nil || s.Config.SocketPath() != "" && r.Header.Get("X-Forwarded-Proto") == "https"
}

func (s *Server) showLogin(w http.ResponseWriter, r *http.Request) {
	s.writeLogin(w, r, http.StatusOK, "")
}

// maxLogin is the size of a login form in bytes.
const maxLogin = 4096

// refusedInterval is the minimum time between two warnings about refused tokens.
const refusedInterval = time.Minute

// login checks the token of the form, and gives the browser a session.
func (s *Server) login(w http.ResponseWriter, r *http.Request) {
	settings := s.settings.Load()
	if origin := r.Header.Get("Origin"); origin != "" && r.Header.Get("Sec-Fetch-Site") == "" {
		if _, host, _ := strings.Cut(origin, "://"); host != r.Host {
			http.Error(w, "the page does not answer requests of other sites", http.StatusForbidden)
			return
		}
	}
	r.Body = http.MaxBytesReader(w, r.Body, maxLogin)
	if err := r.ParseForm(); err != nil {
		http.Error(w, "the form is not valid", http.StatusBadRequest)
		return
	}
	now := time.Now()
	if settings.token != nil && !settings.isToken(strings.TrimSpace(r.PostForm.Get("token"))) {
		if last := s.refused.Load(); now.UnixNano()-last >= int64(refusedInterval) && s.refused.CompareAndSwap(last, now.UnixNano()) {
			s.log.Warn("web page: token refused", "from", r.RemoteAddr)
		}
		s.writeLogin(w, r, http.StatusForbidden, "This is not the token.")
		return
	}
	if settings.token != nil {
		http.SetCookie(w, &http.Cookie{Name: settings.cookieName(r), Value: settings.newSession(now), Path: "/", MaxAge: int(sessionTime.Seconds()),
			HttpOnly: true, SameSite: http.SameSiteStrictMode, Secure: settings.isSecure(r)})
	}
	w.Header().Set("Location", "./")
	w.WriteHeader(http.StatusSeeOther)
}

// isToken compares in constant time. The hashes hide the length.
func (s *Settings) isToken(given string) bool {
	a, b := sha256.Sum256(s.token), sha256.Sum256([]byte(given))
	return s.token != nil && subtle.ConstantTimeCompare(a[:], b[:]) == 1
}

// newSession returns the value of a cookie: the time at which the session ends, and its authentication by the token.
// The agent keeps no sessions; with another token all end.
func (s *Settings) newSession(now time.Time) string {
	end := strconv.FormatInt(now.Add(sessionTime).Unix(), 10)
	return end + "." + s.sign(end)
}

func (s *Settings) sign(end string) string {
	mac := hmac.New(sha256.New, s.token)
	mac.Write([]byte("sockeye web page, session until " + end))
	return base64.RawURLEncoding.EncodeToString(mac.Sum(nil))
}

// cookieName returns the name of the session's cookie. The prefix keeps other names of the domain, and pages without TLS,
// from setting it. Another port of the host has the same cookies.
func (s *Settings) cookieName(r *http.Request) string {
	if s.isSecure(r) {
		return "__Host-sockeye"
	}
	return "sockeye"
}

// writeLogin sends the login form with a message, which is a constant.
func (s *Server) writeLogin(w http.ResponseWriter, r *http.Request, status int, message string) {
	page, err := static.ReadFile("static/login.html")
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Security-Policy", loginPolicy)
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	w.WriteHeader(status)
	if r.Method == http.MethodHead {
		return
	}
	// The browser may have disconnected.
	_, _ = w.Write(bytes.Replace(page, []byte("{message}"), []byte(message), 1))
}
