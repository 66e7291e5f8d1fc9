// SPDX-License-Identifier: Apache-2.0

package packets

import (
	"encoding/binary"
	"fmt"
	"io"
	"strings"

	"sockeye/internal/trace/capture"
)

// Blocks, options and values of pcapng (draft-ietf-opsawg-pcapng).
const (
	blockSection    = 0x0a0d0d0a
	blockInterface  = 1
	blockStatistics = 5
	blockPacket     = 6

	byteOrderMagic = 0x1a2b3c4d
	linkTypeRaw    = 101 // IPv4 or IPv6, by the version field

	optComment    = 1
	shbOS         = 3
	shbUserAppl   = 4
	ifName        = 2
	ifTsresol     = 9
	epbFlags      = 2
	isbIfdrop     = 5
	nanoseconds   = 9 // value of ifTsresol
	directionIn   = 1 // value of epbFlags
	directionOut  = 2
	maxPcapOption = 65532
)

// Writer writes packets in the pcapng format of Wireshark. Each packet has its Comment.
type Writer struct {
	w          io.Writer
	interfaces map[int]uint32
	block      []byte
}

// NewWriter writes the section and interface headers. about describes the capture, and program the writing program.
func NewWriter(w io.Writer, about, program string) (*Writer, error) {
	p := &Writer{w: w, interfaces: make(map[int]uint32)}
	p.beginBlock(blockSection)
	p.u32(byteOrderMagic)
	p.block = binary.LittleEndian.AppendUint16(p.block, 1) // version 1.0
	p.block = binary.LittleEndian.AppendUint16(p.block, 0)
	p.u64(^uint64(0)) // unspecified section length
	p.text(optComment, about)
	p.text(shbOS, "Linux")
	p.text(shbUserAppl, program)
	if err := p.end(); err != nil {
		return nil, err
	}
	return p, nil
}

// Write writes a packet. It skips packets without a captured header.
func (p *Writer) Write(packet *Packet) error {
	if len(packet.Header) == 0 {
		return nil
	}
	id, known := p.interfaces[packet.Index]
	if !known {
		id = uint32(len(p.interfaces))
		p.interfaces[packet.Index] = id
		if err := p.addInterface(packet.Interface); err != nil {
			return err
		}
	}
	direction := uint32(directionIn)
	if packet.Sent != nil {
		direction = directionOut
	}
	p.beginBlock(blockPacket)
	p.u32(id)
	at := uint64(packet.Time.UnixNano())
	p.u32(uint32(at >> 32))
	p.u32(uint32(at))
	p.u32(uint32(len(packet.Header)))
	p.u32(uint32(max(packet.Size, len(packet.Header))))
	p.bytes(packet.Header)
	p.text(optComment, packet.Comment())
	p.option(epbFlags, binary.LittleEndian.AppendUint32(nil, direction))
	return p.end()
}

func (p *Writer) addInterface(name string) error {
	p.beginBlock(blockInterface)
	p.block = binary.LittleEndian.AppendUint16(p.block, linkTypeRaw)
	p.block = binary.LittleEndian.AppendUint16(p.block, 0)
	p.u32(uint32(capture.Bytes)) // snapshot length
	if name == "" {
		name = "unknown"
	}
	p.text(ifName, name)
	p.option(ifTsresol, []byte{nanoseconds})
	return p.end()
}

// Close writes the interface statistics with the losses of the summary. Close does not close the io.Writer.
func (p *Writer) Close(s *Summary) error {
	if len(p.interfaces) == 0 || s.LostEvents == 0 {
		return nil
	}
	at := uint64(s.To.UnixNano())
	p.beginBlock(blockStatistics)
	p.u32(0)
	p.u32(uint32(at >> 32))
	p.u32(uint32(at))
	p.text(optComment, fmt.Sprintf("%d events were lost because the ring buffer was full: packets, times or acknowledgements are missing", s.LostEvents))
	p.option(isbIfdrop, binary.LittleEndian.AppendUint64(nil, s.LostEvents))
	return p.end()
}

func (p *Writer) beginBlock(kind uint32) {
	p.block = p.block[:0]
	p.u32(kind)
	p.u32(0) // block length, set by end
}

// end writes the block with its two length fields.
func (p *Writer) end() error {
	p.block = binary.LittleEndian.AppendUint32(p.block, 0) // opt_endofopt
	length := uint32(len(p.block) + 4)
	p.u32(length)
	binary.LittleEndian.PutUint32(p.block[4:], length)
	if _, err := p.w.Write(p.block); err != nil {
		return fmt.Errorf("write pcapng: %w", err)
	}
	return nil
}

func (p *Writer) u32(v uint32) { p.block = binary.LittleEndian.AppendUint32(p.block, v) }
func (p *Writer) u64(v uint64) { p.block = binary.LittleEndian.AppendUint64(p.block, v) }

func (p *Writer) text(code uint16, s string) {
	if s == "" {
		return
	}
	s = strings.ToValidUTF8(s, "?")
	for len(s) > maxPcapOption {
		s = strings.ToValidUTF8(s[:maxPcapOption], "")
	}
	p.option(code, []byte(s))
}

func (p *Writer) option(code uint16, value []byte) {
	p.block = binary.LittleEndian.AppendUint16(p.block, code)
	p.block = binary.LittleEndian.AppendUint16(p.block, uint16(len(value)))
	p.bytes(value)
}

// bytes appends bytes with padding to 32 bits.
func (p *Writer) bytes(b []byte) {
	p.block = append(p.block, b...)
	for len(p.block)%4 != 0 {
		p.block = append(p.block, 0)
	}
}
