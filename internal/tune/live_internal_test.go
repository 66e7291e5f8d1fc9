// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"errors"
	"fmt"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

func TestLacksHelper(t *testing.T) {
	for _, c := range []struct {
		err  error
		want bool
	}{
		{&ebpf.VerifierError{Cause: unix.EINVAL, Log: []string{"0: (85) call 49", "unknown func bpf_setsockopt#49"}}, true},
		{fmt.Errorf("load: %w", &ebpf.VerifierError{Cause: unix.EINVAL, Log: []string{"program of this type cannot use helper bpf_setsockopt#49"}}), true},
		{&ebpf.VerifierError{Cause: unix.EACCES, Log: []string{"R1 invalid mem access 'scalar'"}}, false},
		{unix.EPERM, false},
		{errors.New("unknown func"), false},
	} {
		if got := lacksHelper(c.err); got != c.want {
			t.Errorf("%v: %v, want %v", c.err, got, c.want)
		}
	}
}
