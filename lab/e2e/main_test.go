// SPDX-License-Identifier: Apache-2.0

// Package e2e_test has the end-to-end tests: they run the built binary in a lab
// with an agent, members and devices, and check which member receives which
// traffic. Members are nfacctd processes in tests of real collectors, otherwise
// receivers: processes that log all arrivals and respond with their slot.
package e2e_test

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	_ "sockeye/internal/cli" // a dependency of the binary: invalidates the test cache if the binary changes
	"sockeye/internal/testenv"
	"sockeye/lab/swarm"
)

const binaryEnv = "SOCKEYE_E2E_BINARY"

// TestMain runs the role of this process. Each role other than the tests is selected by one environment variable.
func TestMain(m *testing.M) {
	if os.Getenv(receiverEnv) != "" {
		fmt.Fprintln(os.Stderr, receive(os.Getenv(receiverEnv)))
		os.Exit(1)
	}
	if swarm.HasRole() {
		if err := swarm.Run(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	if os.Getenv(peerEnv) != "" {
		fmt.Fprintln(os.Stderr, bePeer())
		os.Exit(1)
	}
	if testenv.Cgroup() == "" {
		if err := build(); err != nil {
			fmt.Fprintln(os.Stderr, "build sockeye:", err)
			os.Exit(1)
		}
	}
	testenv.Main(m)
}

// build builds the binary in a temporary directory.
func build() error {
	dir, err := os.MkdirTemp("", "sockeye-e2e-")
	if err != nil {
		return err
	}
	remover := exec.Command("sh", "-c", `cat; rm -rf "$1"`, "sockeye-e2e", dir)
	remover.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	var pipe io.WriteCloser
	if pipe, err = remover.StdinPipe(); err == nil {
		err = remover.Start()
	}
	if err != nil {
		return err
	}
	keepOpen = pipe
	if err := os.Chmod(dir, 0o755); err != nil {
		return err
	}
	binary := filepath.Join(dir, "sockeye")
	cmd := exec.Command("go", "build", "-o", binary, "sockeye/cmd/sockeye")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%w\n%s", err, out)
	}
	return errors.Join(os.Setenv(binaryEnv, binary), installGoflow2(dir))
}

var keepOpen io.Closer // closed by the exit of this process
