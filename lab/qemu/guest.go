// SPDX-License-Identifier: Apache-2.0

package qemu

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// Event is a line that the guest writes to its second serial port, which the
// kernel's console does not use. One field is set.
type Event struct {
	Start   *int    `json:",omitempty"` // a suite begins: its index in the job
	Output  []byte  `json:",omitempty"` // of the running suite
	End     *string `json:",omitempty"` // a suite has ended: the error, or "" for exit code 0
	Error   string  `json:",omitempty"` // an error of the guest itself
	Journal []byte  `json:",omitempty"` // of the machine
	Done    bool    `json:",omitempty"` // all suites have ended
}

// Port is the serial port to the host.
type Port struct {
	mu sync.Mutex
	f  *os.File
}

// OpenPort opens the serial port at a path. It panics on an error.
func OpenPort(path string) *Port {
	f, err := os.OpenFile(path, os.O_WRONLY|unix.O_NOCTTY, 0)
	Must(err, "open the port")
	tio, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	Must(err, "set the port up")
	tio.Oflag &^= unix.OPOST
	Must(unix.IoctlSetTermios(int(f.Fd()), unix.TCSETS, tio), "set the port up")
	return &Port{f: f}
}

// Write sends output of the running suite.
func (p *Port) Write(b []byte) (int, error) {
	p.Send(Event{Output: b})
	return len(b), nil
}

// Send sends an event. It panics on an error.
func (p *Port) Send(e Event) {
	p.mu.Lock()
	defer p.mu.Unlock()
	line, err := json.Marshal(e)
	Must(err, "encode an event")
	_, err = p.f.Write(append(line, '\n'))
	Must(err, "write to the port")
}

// LoadModule loads the kernel module in a file, unless it is already loaded. It
// panics on an error.
func LoadModule(path string) {
	f, err := os.Open(path)
	Must(err, "load kernel module ", path)
	defer f.Close()
	if err := unix.FinitModule(int(f.Fd()), "", 0); !errors.Is(err, unix.EEXIST) {
		Must(err, "load kernel module ", path)
	}
}

// Must panics on an error. Process 1 of the guest uses it: before the port is open,
// the panic stops the machine; afterwards, process 1 recovers and reports the error.
func Must(err error, what ...any) {
	if err != nil {
		panic(fmt.Sprintf("%s: %v", fmt.Sprint(what...), err))
	}
}
