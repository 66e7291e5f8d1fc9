// SPDX-License-Identifier: Apache-2.0

package store

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// authority signs certificates.
type authority struct {
	t    *testing.T
	dir  string
	root *x509.Certificate
	key  *ecdsa.PrivateKey
	file string
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	a := &authority{t: t, dir: t.TempDir(), key: key}
	a.root = &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "authority"}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), KeyUsage: x509.KeyUsageCertSign}
	a.file, _ = a.sign("authority", a.root, key)
	return a
}

// sign writes a certificate and its key, and returns the files.
func (a *authority) sign(name string, template *x509.Certificate, key *ecdsa.PrivateKey) (certificate, keyFile string) {
	a.t.Helper()
	der, err := x509.CreateCertificate(rand.Reader, template, a.root, &key.PublicKey, a.key)
	if err != nil {
		a.t.Fatal(err)
	}
	secret, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		a.t.Fatal(err)
	}
	certificate, keyFile = filepath.Join(a.dir, name+".pem"), filepath.Join(a.dir, name+".key")
	for path, block := range map[string]*pem.Block{certificate: {Type: "CERTIFICATE", Bytes: der}, keyFile: {Type: "EC PRIVATE KEY", Bytes: secret}} {
		if err := os.WriteFile(path, pem.EncodeToMemory(block), 0o600); err != nil {
			a.t.Fatal(err)
		}
	}
	return certificate, keyFile
}

// issue writes a certificate for clients and servers at 127.0.0.1 that is valid for a time.
func (a *authority) issue(name string, valid time.Duration) (certificate, keyFile string) {
	a.t.Helper()
	return a.issueFrom(name, -time.Hour, valid)
}

// issueFrom is issue for a certificate that is valid between two times from now on.
func (a *authority) issueFrom(name string, from, to time.Duration) (certificate, keyFile string) {
	a.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		a.t.Fatal(err)
	}
	return a.sign(name, &x509.Certificate{SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: name},
		NotBefore: time.Now().Add(from), NotAfter: time.Now().Add(to), KeyUsage: x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}}, key)
}

// TestTLS connects with certificates: a valid one, none, one of another authority, and one that expires.
func TestTLS(t *testing.T) {
	t.Parallel()
	a := newAuthority(t)
	certificate, key := a.issue("server", time.Hour)
	servers, endpoints := startCluster(t, 1, "--client-cert-auth", "--trusted-ca-file", a.file, "--cert-file", certificate, "--key-file", key)
	with := func(ca, certificate, key string) func(*EtcdConfig) {
		t.Helper()
		c, err := TLSConfig(ca, certificate, key)
		if err != nil {
			t.Fatal(err)
		}
		return func(e *EtcdConfig) { e.TLS = c }
	}
	certificate, key = a.issue("client", time.Hour)
	good := join(t, endpoints, "good", with(a.file, certificate, key))
	good.await("leadership", func(s *Snapshot) bool { return s.Leads })

	problem := func(m *member, want string) {
		t.Helper()
		// On a busy host, an attempt may end before the server has told the cause.
		m.await(want, func(s *Snapshot) bool { return !s.Connected && strings.Contains(strings.Join(s.Problems, "\n"), want) })
	}
	problem(join(t, endpoints, "none", with(a.file, "", "")), "not connected to etcd: "+endpoints[0]+": remote error: tls: ")
	stranger := newAuthority(t)
	certificate, key = stranger.issue("stranger", time.Hour)
	problem(join(t, endpoints, "stranger", with(a.file, certificate, key)), "not connected to etcd: "+endpoints[0]+": remote error: tls: ")
	problem(join(t, endpoints, "deceived", with(stranger.file, certificate, key)), "not connected to etcd: "+endpoints[0]+": tls: failed to verify certificate: x509: certificate signed by unknown authority")
	if s := good.awaitAlive("good"); !s.Leads {
		t.Errorf("%+v", s)
	}

	// A certificate expires, that of a host or of the server: the connection that is open goes on, and the next one tells the cause until the
	// certificate is renewed.
	restart := func() {
		t.Helper()
		servers[0].kill()
		servers[0].start()
	}
	certificate, key = a.issue("late", time.Hour)
	late := join(t, endpoints, "late", with(a.file, certificate, key))
	problems := func(want string) {
		t.Helper()
		late.await(want, func(s *Snapshot) bool { return !s.Connected && strings.Contains(strings.Join(s.Problems, "\n"), want) })
	}
	late.awaitAlive("good late")
	a.issue("late", -time.Minute)
	restart()
	problems("certificate " + certificate + " has expired at ")
	a.issue("late", time.Hour)
	late.awaitAlive("good late")
	a.issue("server", -time.Minute)
	restart()
	problems("the certificate of the server is valid from ")
	a.issue("server", time.Hour)
	late.awaitAlive("good late")
	servers[0].kill()
	problems("not connected to etcd: " + endpoints[0] + ": connect: connection refused")
	servers[0].start()
	late.awaitAlive("good late")

	certificate, key = a.issue("expires", time.Hour)
	c, err := TLSConfig(a.file, certificate, key)
	if err != nil {
		t.Fatal(err)
	}
	a.issueFrom("expires", time.Hour, 2*time.Hour)
	if _, err := TLSConfig(a.file, certificate, key); err == nil || !strings.Contains(err.Error(), "which is later than the clock of this host") {
		t.Errorf("a certificate of the future: %v", err)
	}
	a.issue("expires", -time.Minute)
	if _, err := c.GetClientCertificate(&tls.CertificateRequestInfo{}); err == nil || !strings.Contains(err.Error(), "has expired at") {
		t.Errorf("an expired certificate: %v", err)
	}
	if _, err := TLSConfig(a.file, certificate, key); err == nil || !strings.Contains(err.Error(), "has expired at") {
		t.Errorf("an expired certificate: %v", err)
	}
	empty := filepath.Join(t.TempDir(), "empty")
	if err := os.WriteFile(empty, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, one := range []struct{ ca, certificate, key, want string }{
		{empty, "", "", "has no certificate"}, {empty + "x", "", "", "read authorities"}, {a.file, certificate, "", "needs its key"},
		{a.file, empty, empty, "read certificate"}, {a.file, a.file, key, "read certificate"},
	} {
		if _, err := TLSConfig(one.ca, one.certificate, one.key); err == nil || !strings.Contains(err.Error(), one.want) {
			t.Errorf("%+v: %v", one, err)
		}
	}
}

// TestPassword connects to servers that ask for a password.
func TestPassword(t *testing.T) {
	t.Parallel()
	_, endpoints := startCluster(t, 1)
	client := raw(t, endpoints)
	for _, do := range []func() error{
		func() error { _, err := client.UserAdd(t.Context(), "root", "secret"); return err },
		func() error { _, err := client.UserGrantRole(t.Context(), "root", "root"); return err },
		func() error { _, err := client.AuthEnable(t.Context()); return err },
	} {
		if err := do(); err != nil {
			t.Fatal(err)
		}
	}
	for _, password := range []string{"", "wrong"} {
		m := join(t, endpoints, "refused", func(c *EtcdConfig) {
			if password != "" {
				c.Username, c.Password = "root", password
			}
		})
		s := m.await("a problem", func(s *Snapshot) bool { return len(s.Problems) > 0 })
		if s.Connected || !strings.Contains(s.Problems[0], "not connected to etcd") || strings.Contains(s.Problems[0], "wrong") {
			t.Errorf("password %q: %+v", password, s)
		}
		m.stop()
	}
	m := join(t, endpoints, "a", func(c *EtcdConfig) { c.Username, c.Password = "root", "secret" })
	m.awaitAlive("a")
}

// TestConfig checks names of fleets and hosts.
func TestConfig(t *testing.T) {
	for name, change := range map[string]func(*EtcdConfig){
		"fleet": func(c *EtcdConfig) { c.Fleet = "" }, "slash": func(c *EtcdConfig) { c.Fleet = "a/b" },
		"host": func(c *EtcdConfig) { c.Host.Name = "" }, "weight": func(c *EtcdConfig) { c.Host.Weight = 0 },
	} {
		c := EtcdConfig{Endpoints: []string{"127.0.0.1:1"}, Fleet: "test"}
		c.Host.Name, c.Host.Weight = "a", 1
		change(&c)
		if e, err := OpenEtcd(c); err == nil {
			t.Errorf("%s is accepted", name)
			e.Close(false)
		}
	}
}
