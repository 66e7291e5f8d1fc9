// SPDX-License-Identifier: Apache-2.0

package command

import "testing"

func TestShorten(t *testing.T) {
	for in, want := range map[string]string{
		"nfacctd -f a.conf":                       "nfacctd -f a.conf",
		"/usr/sbin/nfacctd -f /etc/pmacct/2.conf": "/usr/s…macct/2.conf",
		"ääääääääääääääääääääääää":                "ääääää…ääääääääääää",
	} {
		if got := Shorten(in, 19); got != want {
			t.Errorf("%q became %q, want %q", in, got, want)
		}
	}
}
