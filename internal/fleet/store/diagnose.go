// SPDX-License-Identifier: Apache-2.0

package store

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"strings"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

const (
	// probeTime is the time that an attempt to connect may take.
	probeTime = time.Second
	// alertTime is the time for which a probe waits for the answer of a server to the certificate of this host: with TLS 1.3, the
	// server checks it after the handshake.
	alertTime = 200 * time.Millisecond
)

// diagnose returns why a request has got no answer. The client of etcd waits for a connection until its deadline, and tells nothing else:
// not that the port is closed, and not that a certificate has expired.
func (e *Etcd) diagnose(ctx context.Context, err error) error {
	if ctx.Err() != nil || answered(err) {
		return err
	}
	problems := make([]string, len(e.config.Endpoints))
	var all sync.WaitGroup
	for i, endpoint := range e.config.Endpoints {
		all.Go(func() {
			if err := e.probe(ctx, endpoint); err != nil {
				problems[i] = endpoint + ": " + describeProbe(err)
			}
		})
	}
	all.Wait()
	for i, problem := range problems {
		switch {
		case problem == "" && errors.Is(err, context.DeadlineExceeded):
			return fmt.Errorf("%s: it accepts connections, and does not answer requests within %v: its cluster has no majority, it uses TLS, or it is not etcd", e.config.Endpoints[i], requestTimeout)
		case problem == "":
			return err
		}
	}
	return errors.New(strings.Join(problems, "; "))
}

// answered reports whether an error is the answer of a server.
func answered(err error) bool {
	if _, ok := errors.AsType[rpctypes.EtcdError](err); ok {
		return true
	}
	switch status.Code(err) {
	case codes.OK, codes.Unknown, codes.DeadlineExceeded, codes.Unavailable, codes.Canceled:
		return false
	}
	return true
}

// probe connects to a server as the client of etcd does.
func (e *Etcd) probe(ctx context.Context, endpoint string) error {
	u, err := url.Parse(endpoint)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, probeTime)
	defer cancel()
	var d net.Dialer
	conn, err := d.DialContext(ctx, "tcp", u.Host)
	if err != nil {
		return err
	}
	defer conn.Close()
	if u.Scheme != "https" || e.config.TLS == nil {
		return nil
	}
	c := e.config.TLS.Clone()
	c.ServerName, c.NextProtos = u.Hostname(), []string{"h2"}
	secure := tls.Client(conn, c)
	if err := secure.HandshakeContext(ctx); err != nil {
		if errors.Is(err, io.EOF) {
			return errors.New("the server does not speak TLS (http instead of https)")
		}
		return err
	}
	if err := secure.SetReadDeadline(time.Now().Add(alertTime)); err != nil {
		return err
	}
	if _, err := secure.Read(make([]byte, 1)); err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
		if c.GetClientCertificate == nil {
			return fmt.Errorf("%w: the server wants a certificate of this host (cert and key of the policy)", err)
		}
		return err
	}
	return nil
}

// describeProbe returns an error of probe as text that is the same at each attempt: that of crypto/x509 has the present time.
func describeProbe(err error) string {
	if invalid, ok := errors.AsType[x509.CertificateInvalidError](err); ok && invalid.Reason == x509.Expired {
		return fmt.Sprintf("the certificate of the server is valid from %s to %s, not now by the clock of this host", day(invalid.Cert.NotBefore), day(invalid.Cert.NotAfter))
	}
	if _, ok := errors.AsType[*net.DNSError](err); ok {
		return "the name cannot be resolved"
	}
	if failed, ok := errors.AsType[*net.OpError](err); ok && failed.Op != "remote error" {
		if failed.Timeout() {
			return "no answer"
		}
		return failed.Err.Error()
	}
	if errors.Is(err, context.DeadlineExceeded) {
		return "no answer"
	}
	return err.Error()
}

// day returns a time as text, with its zone.
func day(t time.Time) string { return t.UTC().Format(time.RFC3339) }
