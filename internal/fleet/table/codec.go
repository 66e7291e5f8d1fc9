// SPDX-License-Identifier: Apache-2.0

package table

import (
	"bytes"
	"compress/flate"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
)

// format is the version of the encoding. A later version has another number, so that earlier agents refuse it and keep the
// table that they have.
const format = 1

// MostEncoded is the largest encoded table in bytes; etcd refuses requests of more than 1.5 MiB.
const MostEncoded = 1 << 20

// encoded is a table as JSON. The columns are compressed: those of a fleet at rest are nearly empty.
type encoded struct {
	Format  int    `json:"format"`
	Epoch   uint64 `json:"epoch"`
	Nonce   uint64 `json:"nonce,string"`
	Hosts   []Host `json:"hosts"`
	Columns []byte `json:"columns"` // DEFLATE of owner, previous, next, each 16384 little-endian 16-bit integers
}

// Encode returns the encoding of a table, of at most MostEncoded bytes.
func (t *Table) Encode() ([]byte, error) {
	var columns bytes.Buffer
	w, err := flate.NewWriter(&columns, flate.BestSpeed)
	if err != nil {
		return nil, err
	}
	if err := errors.Join(binary.Write(w, binary.LittleEndian, [][Buckets]uint16{t.Owner, t.Previous, t.Next}), w.Close()); err != nil {
		return nil, err
	}
	data, err := json.Marshal(encoded{Format: format, Epoch: t.Epoch, Nonce: t.Nonce, Hosts: t.Hosts, Columns: columns.Bytes()})
	if err == nil && len(data) > MostEncoded {
		err = fmt.Errorf("the table has %d bytes, at most %d fit", len(data), MostEncoded)
	}
	return data, err
}

// Decode returns the table of an encoding. Anybody who can write to the store can write anything there.
func Decode(data []byte) (*Table, error) {
	if len(data) > MostEncoded {
		return nil, fmt.Errorf("the table has %d bytes, at most %d are allowed", len(data), MostEncoded)
	}
	var e encoded
	if err := json.Unmarshal(data, &e); err != nil {
		return nil, fmt.Errorf("decode table: %w", err)
	}
	if e.Format != format {
		return nil, fmt.Errorf("decode table: its format is %d, this version knows %d", e.Format, format)
	}
	t := &Table{Epoch: e.Epoch, Nonce: e.Nonce, Hosts: e.Hosts}
	r := flate.NewReader(bytes.NewReader(e.Columns))
	for _, column := range []*Column{&t.Owner, &t.Previous, &t.Next} {
		if err := binary.Read(r, binary.LittleEndian, column); err != nil {
			return nil, fmt.Errorf("decode columns of the table: %w", err)
		}
	}
	if n, err := io.CopyN(io.Discard, r, 1); n != 0 || !errors.Is(err, io.EOF) {
		return nil, errors.New("decode columns of the table: they are longer than three columns")
	}
	if err := t.Check(); err != nil {
		return nil, fmt.Errorf("the table is damaged: %w", err)
	}
	return t, nil
}
