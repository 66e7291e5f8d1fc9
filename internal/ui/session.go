// SPDX-License-Identifier: Apache-2.0

package ui

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// sessionTime is the time after which a browser asks for the token again.
const sessionTime = 12 * time.Hour

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
