// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/ringbuf"
	"golang.org/x/sys/unix"

	"sockeye/internal/bpf/load"
)

// TemplateSets is a UDP datagram with template sets of IPFIX or NetFlow v9 that a member has received.
type TemplateSets struct {
	Source   netip.AddrPort
	Cookie   uint64 // of the member's socket
	Datagram []byte // valid until the next call of Next
}

// TemplateReader reads the datagrams with template sets from the ring of a service.
type TemplateReader struct {
	reader *ringbuf.Reader
	record ringbuf.Record
}

// openTemplates loads the socket filter that copies datagrams with template sets.
func (s *Steer) openTemplates(spec *ebpf.CollectionSpec) error {
	program, err := load.Program(spec, "steer_copy_templates", map[string]*ebpf.Map{
		pinTemplateSets: s.templateSets, pinLostTemplates: s.lostTemplates,
	})
	if err == nil {
		s.templates = program
	}
	return err
}

// LoadTemplateFilter loads the socket filter that copies datagrams with template sets, with a ring of its own, so that its
// cost can be measured.
func LoadTemplateFilter() (filter *ebpf.Program, unload func(), err error) {
	spec, err := loadSteerTemplates()
	if err != nil {
		return nil, nil, fmt.Errorf("read program: %w", err)
	}
	collection, err := load.Collection(spec, nil)
	if err != nil {
		return nil, nil, err
	}
	return collection.Programs["steer_copy_templates"], collection.Close, nil
}

// ErrFiltered is the error for a socket that has a filter of its own.
var ErrFiltered = errors.New("the socket has a socket filter")

// AttachTemplateFilter attaches the filter that copies datagrams with template sets to a member's UDP socket. own is set if the
// socket has had this filter, possibly that of another version, which is replaced. The error is ErrFiltered for a socket
// with another filter.
func (s *Steer) AttachTemplateFilter(fd int, own bool) error {
	classic, extended, err := ReadFilter(fd)
	if err != nil {
		return err
	}
	if classic || extended && !own {
		return ErrFiltered
	}
	err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ATTACH_BPF, s.templates.FD())
	if errors.Is(err, unix.EPERM) { // SO_LOCK_FILTER
		return ErrFiltered
	}
	if err != nil {
		return fmt.Errorf("set SO_ATTACH_BPF: %w", err)
	}
	return nil
}

// DetachFilter removes the filter of AttachTemplateFilter from a socket, unless the program has replaced it by one of classic BPF.
func DetachFilter(fd int) error {
	if classic, _, err := ReadFilter(fd); err != nil || classic {
		return err
	}
	err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DETACH_FILTER, 0)
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("set SO_DETACH_FILTER: %w", err)
	}
	return nil
}

// ReadFilter reports whether a socket has a filter of classic BPF, or one of eBPF. The kernel takes the length of the buffer for a number of
// instructions (sk_get_filter, net/core/filter.c, Linux 6.18): it would write four instructions, of 8 bytes each, to an int. With a length of
// 0, it returns their number alone.
func ReadFilter(fd int) (classic, extended bool, err error) {
	var none, instructions uint32
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), unix.SOL_SOCKET, unix.SO_GET_FILTER,
		uintptr(unsafe.Pointer(&none)), uintptr(unsafe.Pointer(&instructions)), 0)
	switch errno {
	case 0:
		return instructions > 0, false, nil
	case unix.EACCES:
		return false, true, nil
	}
	return false, false, fmt.Errorf("read SO_GET_FILTER: %w", errno)
}

// LostTemplates returns the number of datagrams with template sets that did not fit into the ring.
func (s *Steer) LostTemplates() (sum uint64, err error) {
	var perCPU []uint64
	if err := s.lostTemplates.Lookup(uint32(0), &perCPU); err != nil {
		return 0, fmt.Errorf("read lost templates: %w", err)
	}
	for _, n := range perCPU {
		sum += n
	}
	return sum, nil
}

// Templates opens the ring. There is one reader at a time. The ring keeps what arrives while there is none.
func (s *Steer) Templates() (*TemplateReader, error) {
	reader, err := ringbuf.NewReader(s.templateSets)
	if err != nil {
		return nil, fmt.Errorf("open ring of template sets: %w", err)
	}
	return &TemplateReader{reader: reader}, nil
}

// Next waits for a datagram. The error is os.ErrClosed after Close.
func (r *TemplateReader) Next() (t TemplateSets, err error) {
	err = os.ErrDeadlineExceeded
	for errors.Is(err, os.ErrDeadlineExceeded) {
		r.reader.SetDeadline(time.Now().Add(time.Second)) // see Events.Next
		err = r.reader.ReadInto(&r.record)
	}
	if err != nil {
		return t, err
	}
	const header = 32 // struct steer_templates
	b := r.record.RawSample
	if len(b) < header {
		return t, fmt.Errorf("read template sets: %d bytes", len(b))
	}
	length := binary.NativeEndian.Uint32(b[24:])
	return TemplateSets{
		Source:   netip.AddrPortFrom(netip.AddrFrom16([16]byte(b[:16])).Unmap(), binary.BigEndian.Uint16(b[28:])),
		Cookie:   binary.NativeEndian.Uint64(b[16:]),
		Datagram: b[header:min(header+int(length), len(b))],
	}, nil
}

// Close ends Next.
func (r *TemplateReader) Close() error { return r.reader.Close() }
