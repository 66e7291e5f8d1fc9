// SPDX-License-Identifier: Apache-2.0

package swarm

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// Kind is the kind of a Record.
type Kind uint8

// Kinds of records.
const (
	// Datagram is an IPFIX message with data that a member received. Value is its sequence number, At the time at which
	// the kernel received it.
	Datagram Kind = iota + 1
	// Accepted is a connection that a member accepted.
	Accepted
	// Dumped is a connection whose initial dump a member has read, or with Member.Process processed. Value is the number of
	// its messages.
	Dumped
	// Connected is a connection that a device opened.
	Connected
	// Closed is a connection that was closed, as the member or the device noticed. Value is the errno; 0 means that the
	// peer has closed the connection.
	Closed
	// Refused is a failed attempt of a device to connect. Value is the errno: ECONNREFUSED if the SYN got a RST, ECONNRESET if
	// a listening socket was closed that had the connection.
	Refused
	// Undecodable is a Datagram whose template its member had not received.
	Undecodable
	// Stalled is a time that ended at At and in which the devices' process did not run, although it was due. Value is the
	// length in microseconds.
	Stalled
	// Sent is a datagram with data that a device sends, with [Load.Noted]. Value is its sequence number, At the time before the
	// system call.
	Sent
)

// Record is an observation of a member or of the devices.
type Record struct {
	At     time.Duration // CLOCK_MONOTONIC
	Device uint32
	Value  uint32
	Port   uint16 // of the device; TCP, or UDP for a Datagram
	Kind   Kind
}

const recordLen = 24

// Now returns the time of CLOCK_MONOTONIC.
func Now() time.Duration {
	var t unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &t)
	return time.Duration(t.Nano())
}

// recordsFD is the descriptor of the records of a process, opened for appending: records of concurrent writes are not
// mixed, and they outlive a process that is killed.
const recordsFD = 3

type recorder struct{ file *os.File }

func (r recorder) note(records ...Record) error {
	var b []byte
	for _, x := range records {
		b = x.append(b)
	}
	if _, err := r.file.Write(b); err != nil {
		return fmt.Errorf("write records: %w", err)
	}
	return nil
}

func (r Record) append(b []byte) []byte {
	b = binary.LittleEndian.AppendUint64(b, uint64(r.At))
	b = binary.LittleEndian.AppendUint32(b, r.Device)
	b = binary.LittleEndian.AppendUint32(b, r.Value)
	b = binary.LittleEndian.AppendUint16(b, r.Port)
	return append(b, byte(r.Kind), 0, 0, 0, 0, 0)
}

// readRecords reads the complete records from an offset, and returns the next offset. It frees the space of the records.
func readRecords(file *os.File, from int64) (records []Record, next int64, err error) {
	b, err := io.ReadAll(io.NewSectionReader(file, from, 1<<40))
	if err != nil {
		return nil, from, fmt.Errorf("read records: %w", err)
	}
	n := len(b) / recordLen
	for i := range n {
		r := b[i*recordLen:]
		records = append(records, Record{
			At: time.Duration(binary.LittleEndian.Uint64(r)), Device: binary.LittleEndian.Uint32(r[8:]),
			Value: binary.LittleEndian.Uint32(r[12:]), Port: binary.LittleEndian.Uint16(r[16:]), Kind: Kind(r[18]),
		})
	}
	next = from + int64(n*recordLen)
	if n > 0 {
		err = unix.Fallocate(int(file.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, from, next-from)
		if errors.Is(err, unix.EOPNOTSUPP) { // a file system without holes keeps the records
			err = nil
		}
		if err != nil {
			return nil, from, fmt.Errorf("free records: %w", err)
		}
	}
	return records, next, nil
}
