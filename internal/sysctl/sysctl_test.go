// SPDX-License-Identifier: Apache-2.0

package sysctl_test

import (
	"errors"
	"io/fs"
	"os"
	"testing"

	"sockeye/internal/sysctl"
	"sockeye/internal/testenv"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

// TestSettings reads settings of one number, of three, of text, and one that no kernel has.
func TestSettings(t *testing.T) {
	if n, ok := sysctl.Number("kernel.pid_max"); !ok || n < 301 {
		t.Errorf("kernel.pid_max is %d, %v", n, ok)
	}
	limits := sysctl.Numbers("net.ipv4.tcp_rmem")
	if len(limits) != 3 || limits[0] <= 0 || limits[2] < limits[0] {
		t.Errorf("net.ipv4.tcp_rmem is %v", limits)
	}
	if n, ok := sysctl.Number("net.ipv4.tcp_rmem"); ok {
		t.Errorf("net.ipv4.tcp_rmem is the number %d", n)
	}
	if text, err := sysctl.Read("kernel.ostype"); text != "Linux" || err != nil {
		t.Errorf("kernel.ostype is %q, %v", text, err)
	}
	if n := sysctl.Numbers("kernel.ostype"); n != nil {
		t.Errorf("kernel.ostype has the numbers %v", n)
	}
	if err := sysctl.Write("net.sockeye", "1"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("write net.sockeye: %v", err)
	}
	if text, err := sysctl.Read("net.sockeye"); text != "" || !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("net.sockeye is %q, %v", text, err)
	}
}
