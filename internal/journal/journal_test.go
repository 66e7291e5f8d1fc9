// SPDX-License-Identifier: Apache-2.0

package journal

import (
	"bytes"
	"encoding/binary"
	"errors"
	"log/slog"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/coreos/go-systemd/v22/journal"
	"golang.org/x/sys/unix"

	"sockeye/internal/testenv"
)

func TestMain(m *testing.M) {
	journal.Enabled() // opens the socket that the library keeps
	testenv.Main(m)
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

const socketDir = "/run/systemd/journal"

// listen opens the socket of the journal in a file system of its own.
func listen(t testing.TB) *net.UnixConn {
	t.Helper()
	hideJournal(t)
	c, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: socketDir + "/socket", Net: "unixgram"})
	check(t, err)
	t.Cleanup(func() { c.Close() })
	check(t, c.SetReadDeadline(time.Now().Add(time.Minute)))
	return c
}

// hideJournal hides the journal of the host.
func hideJournal(t testing.TB) {
	t.Helper()
	check(t, os.MkdirAll(socketDir, 0o755))
	check(t, unix.Mount("journal", socketDir, "tmpfs", 0, "size=64k"))
	t.Cleanup(func() { check(t, unix.Unmount(socketDir, unix.MNT_DETACH)) })
}

// entry decodes an entry in the native protocol of the journal.
func entry(t testing.TB, data []byte) map[string]string {
	t.Helper()
	fields := make(map[string]string)
	for len(data) > 0 {
		line, rest, _ := bytes.Cut(data, []byte("\n"))
		if name, value, ok := strings.Cut(string(line), "="); ok {
			fields[name], data = value, rest
			continue
		}
		n := binary.LittleEndian.Uint64(rest)
		fields[string(line)], data = string(rest[8:8+n]), rest[9+n:]
	}
	return fields
}

// TestFields sends records with attributes, groups, several lines and odd names to the journal.
func TestFields(t *testing.T) {
	c := listen(t)
	var lines bytes.Buffer
	log := slog.New(NewHandler(&lines, slog.LevelInfo, false)).With("service", "telemetry")
	log.Debug("not sent")
	log.Warn("devices are split", "event", "devices_split", "slot", 3, "device", "192.0.2.1", "error", errors.New("two\nlines"),
		"odd-näme", "v", "none", "", slog.Group("g", "inner", 1))
	buf := make([]byte, 1<<16)
	n, err := c.Read(buf)
	check(t, err)
	got := entry(t, buf[:n])
	for name, want := range map[string]string{
		"PRIORITY": "4", "SYSLOG_IDENTIFIER": "sockeye", "SOCKEYE_EVENT": "devices_split", "SOCKEYE_SERVICE": "telemetry", "SOCKEYE_SLOT": "3",
		"SOCKEYE_DEVICE": "192.0.2.1", "SOCKEYE_ERROR": "two\nlines", "SOCKEYE_ODD_N_ME": "v", "SOCKEYE_G_INNER": "1",
	} {
		if got[name] != want {
			t.Errorf("%s is %q, want %q", name, got[name], want)
		}
		delete(got, name)
	}
	if !strings.HasPrefix(got["MESSAGE"], `msg="devices are split" service=telemetry event=devices_split slot=3`) || len(got) != 1 {
		t.Errorf("further fields: %q", got)
	}
	if lines.Len() > 0 {
		t.Errorf("the record is also a line: %q", lines.String())
	}

	log.Info("long", "error", strings.Repeat("x", 1<<20)) // more than a datagram: the journal gets a file
	oob := make([]byte, 64)
	_, oobn, _, _, err := c.ReadMsgUnix(buf, oob)
	check(t, err)
	messages, err := unix.ParseSocketControlMessage(oob[:oobn])
	if err != nil || len(messages) != 1 {
		t.Fatalf("%d control messages: %v", len(messages), err)
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	check(t, err)
	defer unix.Close(fds[0])
	var stat unix.Stat_t
	if check(t, unix.Fstat(fds[0], &stat)); stat.Size < 1<<20 {
		t.Errorf("the file has %d bytes", stat.Size)
	}
}

// TestLines writes records as lines if the journal has no socket.
func TestLines(t *testing.T) {
	hideJournal(t)
	var lines bytes.Buffer
	log := slog.New(NewHandler(&lines, slog.LevelInfo, false))
	log.Error("first", "error", "two\nlines")
	log.Info("second")
	if want := "<3>msg=first error=\"two\\nlines\"\n<6>msg=second\n"; lines.String() != want {
		t.Errorf("%q, want %q", lines.String(), want)
	}
}
