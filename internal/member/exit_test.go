// SPDX-License-Identifier: Apache-2.0

//go:build !vm

package member

import (
	"os/exec"
	"testing"
)

// TestAliveAtExit checks that a process which exits is not alive from the beginning of its exit: the kernel closes its
// sockets later, and the process becomes a zombie after that.
func TestAliveAtExit(t *testing.T) {
	const attempts = 10
	for range attempts {
		// A process with one thread, whose memory the kernel frees before it closes the sockets.
		c := exec.Command("sh", "-c", `x=$(head -c 64000000 /dev/zero | tr '\0' a); echo; read y`)
		in, err := c.StdinPipe()
		check(t, err)
		out, err := c.StdoutPipe()
		check(t, err)
		check(t, c.Start())
		defer func() {
			in.Close()
			c.Wait()
		}()
		_, err = out.Read(make([]byte, 1))
		check(t, err)
		p, err := Read(c.Process.Pid)
		check(t, err)
		h, err := Open(c.Process.Pid)
		check(t, err)
		defer h.Close()
		check(t, h.Kill())
		for !h.Ended() {
			if !Alive(p.PID, p.StartTime) && !h.Ended() {
				return
			}
		}
	}
	t.Errorf("alive until the end of the exit in %d attempts", attempts)
}
