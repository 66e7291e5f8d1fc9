// SPDX-License-Identifier: Apache-2.0

package ui

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
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
