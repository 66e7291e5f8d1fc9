// SPDX-License-Identifier: Apache-2.0

package ui

import (
	"bufio"
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/api"
	"sockeye/internal/config"
	"sockeye/internal/fault"
)

const token = "0123456789abcdef0123456789abcdef"

// newServer returns a server with a configuration and a token; "" for none.
func newServer(t testing.TB, c config.UI, token string) *Server {
	t.Helper()
	settings := &Settings{Config: c}
	if token != "" {
		settings.token = []byte(token)
	}
	s, err := New(settings, newFake(devicesFrame(2, 10, 1)), slog.New(slog.DiscardHandler), 4)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// ask sends a request to a server. header has pairs of names and values.
func ask(s http.Handler, method, target, body string, header ...string) *http.Response {
	r := httptest.NewRequest(method, target, strings.NewReader(body))
	for i := 0; i < len(header); i += 2 {
		if header[i] == "Host" {
			r.Host = header[i+1]
		}
		r.Header.Set(header[i], header[i+1])
	}
	w := httptest.NewRecorder()
	s.ServeHTTP(w, r)
	return w.Result()
}

func text(t *testing.T, r *http.Response) string {
	t.Helper()
	body, err := io.ReadAll(r.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(body)
}

// Every answer forbids what the page does not need.
func TestHeaders(t *testing.T) {
	s := newServer(t, config.UI{Listen: "127.0.0.1:9733"}, "")
	for path, policy := range map[string]string{
		"/": pagePolicy, "/app.js": pagePolicy, "/app.css": pagePolicy, "/nowhere": pagePolicy, "/login": loginPolicy, "/events": pagePolicy,
		"/report?last=5m": "default-src 'none'; style-src 'sha256-",
	} {
		r := ask(s, "GET", "http://localhost"+path, "")
		if got := r.Header.Get("Content-Security-Policy"); !strings.HasPrefix(got, policy) || strings.Contains(got, "unsafe") || !strings.Contains(got, "frame-ancestors") {
			t.Errorf("%s has the policy %q", path, got)
		}
		if r.Header.Get("X-Content-Type-Options") != "nosniff" || r.Header.Get("Referrer-Policy") != "no-referrer" {
			t.Errorf("%s has the headers %v", path, r.Header)
		}
	}
	if got := ask(s, "GET", "http://localhost/events", "").Header.Get("Cache-Control"); got != "no-store" {
		t.Errorf("events: Cache-Control %q", got)
	}
	first := ask(s, "GET", "http://localhost/app.js", "")
	if got := ask(s, "GET", "http://localhost/app.js", "", "If-None-Match", first.Header.Get("ETag")); got.StatusCode != http.StatusNotModified {
		t.Errorf("a file that is the same: status %d", got.StatusCode)
	}
}

// The files have neither inline scripts nor styles, nor addresses of other hosts.
func TestFilesAlone(t *testing.T) {
	files, err := static.ReadDir("static")
	if err != nil {
		t.Fatal(err)
	}
	forbidden := regexp.MustCompile(`(?i)<script>|<style|\sstyle=|\son[a-z]+=["']|javascript:|@import|https?://|innerHTML|insertAdjacentHTML|document\.write|\beval\(`)
	for _, f := range files {
		data, err := static.ReadFile("static/" + f.Name())
		if err != nil {
			t.Fatal(err)
		}
		data = bytes.ReplaceAll(data, []byte("http://www.w3.org/2000/svg"), nil)
		if found := forbidden.Find(data); found != nil {
			t.Errorf("%s has %q", f.Name(), found)
		}
	}
}

func TestRefused(t *testing.T) {
	loopback, socket := config.UI{Listen: "127.0.0.1:9733"}, config.UI{Listen: "unix:/run/ui.sock"}
	for _, c := range []struct {
		name   string
		config config.UI
		method string
		path   string
		header []string
		status int
	}{
		{"localhost", loopback, "GET", "/", []string{"Host", "localhost:9733"}, 200},
		{"upper case", loopback, "GET", "/", []string{"Host", "LOCALHOST"}, 200},
		{"IPv4", loopback, "GET", "/", []string{"Host", "127.0.0.1:1"}, 200},
		{"IPv6", loopback, "GET", "/", []string{"Host", "[::1]:9733"}, 200},
		{"rebinding", loopback, "GET", "/", []string{"Host", "evil.example:9733"}, 403},
		{"a name that begins with localhost", loopback, "GET", "/", []string{"Host", "localhost.evil.example"}, 403},
		{"rebinding to data", loopback, "GET", "/live", []string{"Host", "evil.example"}, 403},
		{"another address", loopback, "GET", "/", []string{"Host", "192.0.2.1:9733"}, 403},
		{"any name at the socket", socket, "GET", "/", []string{"Host", "monitor.example"}, 200},
		{"post", loopback, "POST", "/", []string{"Host", "localhost"}, 405},
		{"post to data", loopback, "POST", "/events", []string{"Host", "localhost"}, 405},
		{"put to login", loopback, "PUT", "/login", []string{"Host", "localhost"}, 405},
		{"head", loopback, "HEAD", "/live", []string{"Host", "localhost"}, 200},
		{"nowhere", loopback, "GET", "/../etc/passwd", []string{"Host", "localhost"}, 307},
		{"another site", loopback, "GET", "/live", []string{"Host", "localhost", "Sec-Fetch-Site", "cross-site", "Sec-Fetch-Mode", "cors"}, 403},
		{"another port", loopback, "GET", "/events", []string{"Host", "localhost", "Sec-Fetch-Site", "same-site", "Sec-Fetch-Mode", "cors"}, 403},
		{"a link", loopback, "GET", "/", []string{"Host", "localhost", "Sec-Fetch-Site", "cross-site", "Sec-Fetch-Mode", "navigate"}, 200},
		{"a form of another site", loopback, "POST", "/login", []string{"Host", "localhost", "Sec-Fetch-Site", "cross-site", "Sec-Fetch-Mode", "navigate"}, 403},
		{"a form of another site, old browser", socket, "POST", "/login", []string{"Host", "a.example", "Origin", "https://b.example"}, 403},
		{"report", loopback, "GET", "/report?last=2h", []string{"Host", "localhost"}, 400},
		{"report without time", loopback, "GET", "/report", []string{"Host", "localhost"}, 400},
	} {
		r := ask(newServer(t, c.config, ""), c.method, c.path, "", c.header...)
		if r.StatusCode != c.status {
			t.Errorf("%s: status %d, want %d", c.name, r.StatusCode, c.status)
		}
		if body := text(t, r); c.status >= 400 && (strings.Count(body, "\n") != 1 || len(body) < 10) {
			t.Errorf("%s: the refusal is %q, want one line", c.name, body)
		}
	}
}

func TestToken(t *testing.T) {
	s := newServer(t, config.UI{Listen: "127.0.0.1:9733", TokenFile: "/token"}, token)
	get := func(path string, header ...string) *http.Response {
		return ask(s, "GET", path, "", append(header, "Host", "localhost")...)
	}
	for _, path := range []string{"/live", "/events", "/app.js", "/report?last=5m"} {
		if r := get(path); r.StatusCode != http.StatusUnauthorized || r.Header.Get("WWW-Authenticate") == "" {
			t.Errorf("%s without the token: status %d", path, r.StatusCode)
		}
	}
	if r := get("/"); r.StatusCode != http.StatusSeeOther || r.Header.Get("Location") != "login" || strings.Contains(text(t, r), "app.js") {
		t.Errorf("the page without the token: status %d, %v", r.StatusCode, r.Header)
	}
	for header, status := range map[string]int{
		"Bearer " + token: 200, "bearer " + token: 200, "Bearer " + token + "0": 401, "Bearer": 401, "Bearer ": 401, "Basic " + token: 401, token: 401, "Bearer " + token[1:]: 401,
	} {
		if r := get("/app.js", "Authorization", header); r.StatusCode != status {
			t.Errorf("Authorization: %s: status %d, want %d", header, r.StatusCode, status)
		}
	}
	login := func(given string) *http.Response {
		return ask(s, "POST", "/login", url.Values{"token": {given}}.Encode(), "Host", "localhost", "Content-Type", "application/x-www-form-urlencoded")
	}
	if r := login("x" + token[1:]); r.StatusCode != http.StatusForbidden || len(r.Cookies()) > 0 || !strings.Contains(text(t, r), "This is not the token") {
		t.Errorf("a wrong token: status %d", r.StatusCode)
	}
	if r := login(strings.Repeat("x", 2*maxLogin)); r.StatusCode != http.StatusBadRequest {
		t.Errorf("a long token: status %d", r.StatusCode)
	}
	r := login(" " + token + "\n")
	if r.StatusCode != http.StatusSeeOther || len(r.Cookies()) != 1 {
		t.Fatalf("the token: status %d, %v", r.StatusCode, r.Header)
	}
	cookie := r.Cookies()[0]
	if !cookie.HttpOnly || cookie.SameSite != http.SameSiteStrictMode || cookie.Secure || strings.Contains(cookie.Value, token) {
		t.Errorf("cookie %v", cookie)
	}
	if r := get("/app.js", "Cookie", cookie.Name+"="+cookie.Value); r.StatusCode != http.StatusOK {
		t.Errorf("with the session: status %d", r.StatusCode)
	}
	end, mac, _ := strings.Cut(cookie.Value, ".")
	for _, value := range []string{"", ".", end, end + ".", end + "." + mac[1:], "9" + end + "." + mac, "-1." + mac, "." + mac} {
		if r := get("/app.js", "Cookie", cookie.Name+"="+value); r.StatusCode != http.StatusUnauthorized {
			t.Errorf("with the session %q: status %d", value, r.StatusCode)
		}
	}
	settings := s.Settings()
	if now := time.Now(); settings.isSession(cookie.Value, now.Add(sessionTime+time.Minute)) || !settings.isSession(cookie.Value, now.Add(sessionTime-time.Minute)) {
		t.Error("the session ends at another time")
	}
	s.Set(&Settings{Config: settings.Config, token: []byte(strings.Repeat("z", 40))})
	if r := get("/app.js", "Cookie", cookie.Name+"="+cookie.Value); r.StatusCode != http.StatusUnauthorized {
		t.Errorf("the session goes on with another token: status %d", r.StatusCode)
	}
}

// Behind a proxy with TLS, the cookie is only for TLS.
func TestSecureCookie(t *testing.T) {
	for _, c := range []struct {
		listen string
		secure bool
	}{{"unix:/run/ui.sock", true}, {"127.0.0.1:9733", false}} {
		s := newServer(t, config.UI{Listen: c.listen}, token)
		r := ask(s, "POST", "/login", "token="+token, "Host", "localhost", "Content-Type", "application/x-www-form-urlencoded", "X-Forwarded-Proto", "https")
		if len(r.Cookies()) != 1 || r.Cookies()[0].Secure != c.secure || (r.Cookies()[0].Name == "__Host-sockeye") != c.secure {
			t.Errorf("%s: %v", c.listen, r.Header)
		}
	}
}

func TestStreamsLimited(t *testing.T) {
	source := newFake(devicesFrame(2, 10, 1))
	page := "http://" + serve(t, source, 2)
	open := func(path string) (*http.Response, string) {
		t.Helper()
		r, err := http.Get(page + path)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { r.Body.Close() })
		line, err := bufio.NewReader(r.Body).ReadString('\n')
		if err != nil {
			t.Fatal(err)
		}
		return r, line
	}
	first, _ := open("/live")
	second, _ := open("/live")
	for _, path := range []string{"/live", "/events?follow=1"} {
		if r, line := open(path); r.StatusCode != http.StatusServiceUnavailable || !strings.Contains(line, "2 streams of the web page are open") {
			t.Errorf("%s: status %d, %s", path, r.StatusCode, line)
		}
	}
	source.mu.Lock()
	if source.watchers != 1 {
		t.Errorf("%d watchers for two browsers", source.watchers)
	}
	source.mu.Unlock()
	// Browsers that disconnect leave their places, and the last one ends the watch.
	first.Body.Close()
	second.Body.Close()
	<-source.idle
	for {
		r, err := http.Get(page + "/live")
		if err != nil {
			t.Fatal(err)
		}
		r.Body.Close()
		if r.StatusCode == http.StatusOK {
			break
		}
	}
}

// A browser that does not read delays no other, and others get the newest frame.
func TestSlowBrowser(t *testing.T) {
	source := newFake(devicesFrame(2, 2000, 0))
	at := serve(t, source, 2)
	slow, err := net.Dial("tcp", at)
	if err != nil {
		t.Fatal(err)
	}
	defer slow.Close()
	if err := errors.Join(slow.(*net.TCPConn).SetReadBuffer(4096), slow.SetDeadline(time.Now().Add(time.Minute))); err != nil {
		t.Fatal(err)
	}
	if _, err := fmt.Fprint(slow, "GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	if _, err := slow.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	fast, err := http.Get("http://" + at + "/live")
	if err != nil {
		t.Fatal(err)
	}
	defer fast.Body.Close()
	lines := bufio.NewReader(fast.Body)
	const frames = 59
	for n := 1; n <= frames; n++ {
		frame := devicesFrame(2, 2000, n)
		source.set(frame)
		for want := frame.Time.Format(`"time":"` + time.RFC3339); ; {
			line, err := lines.ReadString('\n')
			if err != nil {
				t.Fatal(err)
			}
			if strings.Contains(line, want) {
				break
			}
		}
	}
}

func TestWatchRefused(t *testing.T) {
	source := newFake(nil)
	source.refusal = errors.New("64 live views are open")
	r, err := http.Get("http://" + serve(t, source, 2) + "/live")
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	if got := text(t, r); r.StatusCode != http.StatusServiceUnavailable || got != "64 live views are open\n" {
		t.Errorf("status %d, %s", r.StatusCode, got)
	}
}

// A message has what the frame has. Rates of devices are rounded.
func TestMessage(t *testing.T) {
	frame := devicesFrame(3, 100, 1)
	frame.Services[0].Devices[5].Device = "a \"quoted\"\n</script> name"
	frame.Services[0].Devices[5].Split, frame.Services[0].Devices[6].Pinned = true, true
	frame.Services[0].Devices[7].Datagrams = 12.34
	h := &hub{}
	var got struct {
		Services []struct {
			Slots []struct {
				api.LiveSlot
				Tiles []string
				Rows  int
			}
			Devices [][]any
		}
	}
	data, ok := bytes.CutPrefix(h.encoded(frame), []byte("data: "))
	if !ok || bytes.Count(data, []byte("\n")) != 2 {
		t.Fatalf("not one event: %.100s", data)
	}
	if err := json.Unmarshal(data, &got); err != nil {
		t.Fatal(err)
	}
	s := got.Services[0]
	if len(s.Devices) != 100 || len(s.Slots) != 3 || s.Slots[1].PID != 1001 || s.Slots[1].Rows != 1 {
		t.Fatalf("%d devices, slots %+v", len(s.Devices), s.Slots)
	}
	for i, d := range frame.Services[0].Devices {
		flags := map[int]float64{5: deviceSplit, 6: devicePinned}[i]
		want := []any{d.Address.String(), d.Device, float64(d.Slot), d.Datagrams, d.Bytes, d.Refused, float64(d.Sessions), float64(d.LastSeen.Unix()), flags}
		if i == 7 {
			want[3] = 12.3
		}
		if fmt.Sprint(s.Devices[i]) != fmt.Sprint(want) {
			t.Errorf("got  %v\nwant %v", s.Devices[i], want)
		}
	}
	if last := s.Slots[frame.Services[0].Devices[5].Slot].Tiles[tileLevels-1]; strings.Count(last, "h1") != 1 {
		t.Errorf("the split device is %q", last)
	}
	// The same frame is encoded once, and an older one not at all.
	again, older := h.encoded(frame), h.encoded(devicesFrame(3, 100, 0))
	if &again[0] != &h.message[0] || &older[0] != &h.message[0] {
		t.Error("the frame is encoded again")
	}
}

// certificate writes a certificate with its key to files. A nil parent is the certificate itself.
func certificate(t *testing.T, dir, name string, parent *tls.Certificate, until time.Time) (pair tls.Certificate, cert, key string) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, NotBefore: time.Now().Add(-48 * time.Hour), NotAfter: until,
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: parent == nil, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth}}
	signer, signing := template, any(private)
	if parent != nil {
		signer, signing = parent.Leaf, parent.PrivateKey
	}
	der, err := x509.CreateCertificate(rand.Reader, template, signer, &private.PublicKey, signing)
	if err != nil {
		t.Fatal(err)
	}
	secret, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	cert, key = filepath.Join(dir, name+".pem"), filepath.Join(dir, name+".key")
	for path, block := range map[string]*pem.Block{cert: {Type: "CERTIFICATE", Bytes: der}, key: {Type: "PRIVATE KEY", Bytes: secret}} {
		if err := os.WriteFile(path, pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if pair, err = tls.LoadX509KeyPair(cert, key); err != nil {
		t.Fatal(err)
	}
	return pair, cert, key
}

// With TLS, a browser needs a certificate that the file client_ca signs, and the token besides.
func TestTLS(t *testing.T) {
	dir, later := t.TempDir(), time.Now().Add(time.Hour)
	ca, caFile, _ := certificate(t, dir, "ca", nil, later)
	_, cert, key := certificate(t, dir, "server", &ca, later)
	client, _, _ := certificate(t, dir, "client", &ca, later)
	stranger, _, _ := certificate(t, dir, "stranger", nil, later)
	secret := filepath.Join(dir, "token")
	if err := os.WriteFile(secret, []byte(token), 0o600); err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AddCert(ca.Leaf)
	settings, err := ReadSettings(config.UI{Listen: "127.0.0.1:1", TLS: config.UITLS{Cert: cert, Key: key, ClientCA: caFile}, TokenFile: secret})
	if err != nil {
		t.Fatal(err)
	}
	s, at := serveWith(t, settings, newFake(devicesFrame(2, 10, 1)), 4)
	request := func(scheme string, config *tls.Config, header string) (int, error) {
		transport := &http.Transport{TLSClientConfig: config}
		defer transport.CloseIdleConnections()
		r, err := http.NewRequest("GET", scheme+"://"+at+"/app.js", nil)
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("Authorization", "Bearer "+header)
		answer, err := transport.RoundTrip(r)
		if err != nil {
			return 0, err
		}
		answer.Body.Close()
		return answer.StatusCode, nil
	}
	with := func(pairs ...tls.Certificate) *tls.Config { return &tls.Config{RootCAs: roots, Certificates: pairs} }
	if status, err := request("https", with(client), token); status != http.StatusOK {
		t.Errorf("with certificate and token: %d, %v", status, err)
	}
	if status, err := request("https", with(client), token[1:]); status != http.StatusUnauthorized {
		t.Errorf("without the token: %d, %v", status, err)
	}
	for name, config := range map[string]*tls.Config{"no certificate": with(), "a certificate of others": with(stranger), "an old TLS": {RootCAs: roots, Certificates: []tls.Certificate{client}, MaxVersion: tls.VersionTLS11}} {
		if status, err := request("https", config, token); err == nil {
			t.Errorf("%s: status %d", name, status)
		}
	}
	if status, _ := request("http", nil, token); status == http.StatusOK {
		t.Error("the page answers without TLS")
	}
	// Other settings are in force for the next connection.
	s.Set(&Settings{Config: config.UI{Listen: "127.0.0.1:1"}})
	if status, err := request("http", nil, ""); status != http.StatusOK {
		t.Errorf("after a change to no TLS: status %d, %v", status, err)
	}
	s.Set(settings)
	if status, _ := request("http", nil, token); status == http.StatusOK {
		t.Error("the page answers without TLS after a change to TLS")
	}
	if status, err := request("https", with(client), token); status != http.StatusOK {
		t.Errorf("after a change to TLS: status %d, %v", status, err)
	}
}

func TestSettingsRefused(t *testing.T) {
	dir, later := t.TempDir(), time.Now().Add(time.Hour)
	ca, cert, key := certificate(t, dir, "one", nil, later)
	_, other, otherKey := certificate(t, dir, "two", &ca, later)
	_, old, oldKey := certificate(t, dir, "old", nil, time.Now().Add(-time.Hour))
	open, short, empty := filepath.Join(dir, "open"), filepath.Join(dir, "short"), filepath.Join(dir, "empty")
	for path, mode := range map[string]os.FileMode{open: 0o644, short: 0o600, empty: 0o600} {
		content := map[string]string{open: token, short: "secret", empty: ""}[path]
		if err := os.WriteFile(path, []byte(content), mode); err != nil {
			t.Fatal(err)
		}
	}
	theirs, fifo := filepath.Join(dir, "theirs"), filepath.Join(dir, "fifo")
	if err := errors.Join(os.WriteFile(theirs, []byte(token), 0o600), os.Chown(theirs, 65533, -1), unix.Mkfifo(fifo, 0o600)); err != nil {
		t.Fatal(err)
	}
	for want, c := range map[string]config.UI{
		"belongs to user 65533": {TokenFile: theirs},
		"fifo is not a regular": {TokenFile: fifo},
		"does not match":        {TLS: config.UITLS{Cert: cert, Key: otherKey}},
		"has expired":           {TLS: config.UITLS{Cert: old, Key: oldKey}},
		"failed to find any":    {TLS: config.UITLS{Cert: empty, Key: key}},
		"no such file":          {TLS: config.UITLS{Cert: other, Key: filepath.Join(dir, "nowhere")}},
		"has no certificate":    {TLS: config.UITLS{Cert: other, Key: otherKey, ClientCA: key}},
		"all users may use it":  {TokenFile: open},
		"has 6 characters":      {TokenFile: short},
		"has 0 characters":      {TokenFile: empty},
		"not a regular file":    {TokenFile: dir},
	} {
		c.Listen = "127.0.0.1:9733"
		if _, err := ReadSettings(c); err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%+v: got %v, want %s", c, err, want)
		} else if want != "no such file" && !strings.Contains(want, "not a regular") && fault.Hint(err) == "" {
			t.Errorf("%v has no hint", err)
		}
	}
}

// The group may connect to the socket, and nobody else.
func TestSocketMode(t *testing.T) {
	path := filepath.Join(t.TempDir(), "ui.sock")
	l, err := Listen(config.UI{Listen: "unix:" + path}, 65534)
	if err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(path)
	if err != nil || info.Mode().Perm() != 0o660 || info.Sys().(*syscall.Stat_t).Gid != 65534 {
		t.Errorf("%v, %v", info.Mode(), err)
	}
	if _, err := Listen(config.UI{Listen: "unix:" + path}, -1); err == nil || fault.Code(err) != fault.CodeConflict {
		t.Errorf("a socket in use: %v", err)
	}
	l.Close()
	if _, err := Listen(config.UI{Listen: "unix:" + filepath.Join(t.TempDir(), "no", "ui.sock")}, -1); err == nil || fault.Hint(err) == "" {
		t.Errorf("a directory that does not exist: %v", err)
	}
	open := t.TempDir()
	if err := os.Chmod(open, 0o777); err != nil {
		t.Fatal(err)
	}
	if _, err := Listen(config.UI{Listen: "unix:" + open + "/ui.sock"}, 65534); err == nil || !strings.Contains(err.Error(), "writable for others") {
		t.Errorf("a directory in which every user can replace the socket: %v", err)
	}
}

func FuzzSession(f *testing.F) {
	s := &Settings{token: []byte(token)}
	now := time.Unix(1_800_000_000, 0)
	valid := s.newSession(now)
	f.Add(valid)
	f.Add("." + token)
	f.Add("1.")
	f.Fuzz(func(t *testing.T, value string) {
		if s.isSession(value, now) && value != valid {
			end, mac, _ := strings.Cut(value, ".")
			if mac != s.sign(end) {
				t.Errorf("%q is a session", value)
			}
		}
	})
}

func FuzzToken(f *testing.F) {
	f.Add([]byte(token))
	f.Add([]byte(" \n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		parsed, err := parseToken(data)
		if err == nil && !(&Settings{token: parsed}).isToken(string(parsed)) {
			t.Errorf("%q is not its own token", data)
		}
	})
}

func FuzzLogin(f *testing.F) {
	s := newServer(f, config.UI{Listen: "127.0.0.1:9733"}, token)
	f.Add("token="+token, "application/x-www-form-urlencoded")
	f.Add("token=%", "application/x-www-form-urlencoded")
	f.Add("--a\r\nContent-Disposition: form-data; name=\"token\"\r\n\r\n"+token+"\r\n--a--", "multipart/form-data; boundary=a")
	f.Fuzz(func(t *testing.T, body, kind string) {
		r := ask(s, "POST", "/login", body, "Host", "localhost", "Content-Type", kind)
		values, err := url.ParseQuery(body)
		if r.StatusCode == http.StatusSeeOther && (err != nil || strings.TrimSpace(values.Get("token")) != token) {
			t.Errorf("%q of type %q is a login", body, kind)
		}
	})
}
