// SPDX-License-Identifier: Apache-2.0

package store

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"time"

	"sockeye/internal/owned"
)

// mostAuthorities is the largest file of authorities, in bytes. That of Debian has 220 KB.
const mostAuthorities = 4 << 20

// TLSConfig returns the settings of connections to etcd. ca is the file of the authorities that sign the certificates of the
// servers, "" for those of the host; certificate and key are the files of this host, "" for none. They are read at each
// connection, so that a renewed certificate needs no restart.
func TLSConfig(ca, certificate, key string) (*tls.Config, error) {
	c := &tls.Config{MinVersion: tls.VersionTLS12}
	if ca != "" {
		text, err := owned.ReadFile(ca, false, mostAuthorities)
		if err != nil {
			return nil, fmt.Errorf("read authorities: %w", err)
		}
		c.RootCAs = x509.NewCertPool()
		if !c.RootCAs.AppendCertsFromPEM(text) {
			return nil, fmt.Errorf("%s has no certificate in PEM", ca)
		}
	}
	if certificate == "" && key == "" {
		return c, nil
	}
	if certificate == "" || key == "" {
		return nil, errors.New("a certificate needs its key, and a key its certificate")
	}
	if _, err := ownCertificate(certificate, key); err != nil {
		return nil, err
	}
	c.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return ownCertificate(certificate, key) }
	return c, nil
}

// ownCertificate reads the certificate of this host. The server would only say that it does not like an expired one.
func ownCertificate(certificate, key string) (*tls.Certificate, error) {
	first, err := owned.ReadFile(certificate, false, mostAuthorities)
	if err != nil {
		return nil, fmt.Errorf("read certificate: %w", err)
	}
	second, err := owned.ReadFile(key, false, mostAuthorities)
	if err != nil {
		return nil, fmt.Errorf("read key: %w", err)
	}
	pair, err := tls.X509KeyPair(first, second)
	if err != nil {
		return nil, fmt.Errorf("read certificate %s: %w", certificate, err)
	}
	if pair.Leaf == nil {
		return &pair, nil
	}
	switch now := time.Now(); {
	case now.After(pair.Leaf.NotAfter):
		return nil, fmt.Errorf("certificate %s has expired at %s: renew it, no restart is needed", certificate, day(pair.Leaf.NotAfter))
	case now.Before(pair.Leaf.NotBefore):
		return nil, fmt.Errorf("certificate %s is valid from %s, which is later than the clock of this host: set the clock", certificate, day(pair.Leaf.NotBefore))
	}
	return &pair, nil
}
