// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"unicode/utf8"

	"golang.org/x/sys/unix"
)

// terminal is a pseudoterminal with a program in it. It interprets the escape sequences that xterm has for cells
// (console_codes(4)) and ignores modes and colors.
type terminal struct {
	*testing.T
	master *os.File
	slave  *os.File // keeps the settings of the terminal after the program
	cmd    *exec.Cmd
	before unix.Termios
	read   chan struct{} // closed when the reader has ended

	mu      sync.Mutex
	raw     bytes.Buffer // all output
	rest    []byte       // the beginning of a sequence
	cells   [][]rune
	x, y    int
	first   int // scrolling region
	last    int
	unknown []string // sequences that were not interpreted
}

// startIn starts a program in a terminal of a size, with additional variables of the environment.
func startIn(t *testing.T, width, height int, env []string, command ...string) *terminal {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	s := &terminal{T: t, master: master, read: make(chan struct{})}
	var number int
	s.control(func(fd int) error {
		if err := unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0); err != nil {
			return err
		}
		number, err = unix.IoctlGetInt(fd, unix.TIOCGPTN)
		return err
	})
	if s.slave, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|unix.O_NOCTTY, 0); err != nil {
		t.Fatal(err)
	}
	s.before = s.settings()
	s.resize(width, height)
	go s.follow()
	s.cmd = exec.CommandContext(t.Context(), command[0], command[1:]...)
	s.cmd.Env = append(slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, "NO_COLOR=") }), append([]string{"TERM=xterm-256color"}, env...)...)
	s.cmd.Stdin, s.cmd.Stdout, s.cmd.Stderr = s.slave, s.slave, s.slave
	s.cmd.SysProcAttr = &unix.SysProcAttr{Setsid: true, Setctty: true}
	if err := s.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = s.cmd.Process.Kill()
		_ = s.cmd.Wait()
		s.hangUp()
		<-s.read
		if len(s.unknown) > 0 {
			t.Errorf("unknown sequences: %q", s.unknown)
		}
		if t.Failed() {
			t.Logf("the last screen:\n%s", s.text())
		}
	})
	return s
}

// control calls f with the descriptor of the terminal, which stays non-blocking.
func (s *terminal) control(f func(fd int) error) {
	s.Helper()
	c, err := s.master.SyscallConn()
	if err != nil {
		s.Fatal(err)
	}
	var failed error
	if err := errors.Join(c.Control(func(fd uintptr) { failed = f(int(fd)) }), failed); err != nil || failed != nil {
		s.Fatal(err, failed)
	}
}

func (s *terminal) settings() unix.Termios {
	s.Helper()
	t, err := unix.IoctlGetTermios(int(s.slave.Fd()), unix.TCGETS)
	if err != nil {
		s.Fatal(err)
	}
	return *t
}

// resize changes the size and clears the cells.
func (s *terminal) resize(width, height int) {
	s.Helper()
	s.mu.Lock()
	s.cells = make([][]rune, height)
	for y := range s.cells {
		s.cells[y] = slices.Repeat([]rune{' '}, width)
	}
	s.x, s.y, s.first, s.last = 0, 0, 0, height-1
	s.mu.Unlock()
	s.control(func(fd int) error {
		return unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{Row: uint16(height), Col: uint16(width)})
	})
}

// hangUp closes the terminal.
func (s *terminal) hangUp() {
	s.slave.Close()
	s.master.Close()
}

// keys sends text as if it were typed.
func (s *terminal) keys(text string) {
	s.Helper()
	if _, err := s.master.WriteString(text); err != nil {
		s.Fatal(err)
	}
}

// follow interprets the output until the terminal is closed.
func (s *terminal) follow() {
	defer close(s.read)
	b := make([]byte, 4096)
	for {
		n, err := s.master.Read(b)
		s.mu.Lock()
		s.raw.Write(b[:n])
		s.rest = append(s.rest, b[:n]...)
		for len(s.rest) > 0 {
			used := s.interpret(s.rest)
			if used == 0 {
				break
			}
			s.rest = s.rest[used:]
		}
		s.mu.Unlock()
		if err != nil {
			return
		}
	}
}

// text returns the lines of the screen, without spaces at their ends.
func (s *terminal) text() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var lines []string
	for _, row := range s.cells {
		lines = append(lines, strings.TrimRight(string(row), " "))
	}
	return strings.Join(lines, "\n")
}

func (s *terminal) output() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.raw.String()
}

// lacks returns an error that describes the screen if it lacks one of the texts.
func (s *terminal) lacks(texts ...string) error {
	now := s.text()
	for _, text := range texts {
		if !strings.Contains(now, text) {
			return fmt.Errorf("%q is not on the screen:\n%s", text, now)
		}
	}
	return nil
}

// interpret interprets the first character or sequence of b, and returns its length; 0: it is incomplete.
func (s *terminal) interpret(b []byte) int {
	switch b[0] {
	case '\r':
		s.x = 0
	case '\n':
		s.down()
	case '\b':
		s.x = max(0, s.x-1)
	case '\t':
		s.x = min((s.x/8+1)*8, s.width()-1)
	case 0x1b:
		return s.escape(b)
	default:
		if !utf8.FullRune(b) {
			return 0
		}
		r, size := utf8.DecodeRune(b)
		s.put(r)
		return size
	}
	return 1
}

func (s *terminal) width() int { return len(s.cells[0]) }

func (s *terminal) put(r rune) {
	if s.x >= s.width() { // the cursor waits behind the last column
		s.x = 0
		s.down()
	}
	s.cells[s.y][s.x] = r
	s.x++
}

func (s *terminal) down() {
	if s.y == s.last {
		s.scroll(s.first, 1)
		return
	}
	s.y = min(s.y+1, len(s.cells)-1)
}

// scroll moves the lines from top to the end of the scrolling region up by n, or down by -n.
func (s *terminal) scroll(top, n int) {
	region := s.cells[top : s.last+1]
	for ; n > 0; n-- {
		copy(region, region[1:])
		region[len(region)-1] = slices.Repeat([]rune{' '}, s.width())
	}
	for ; n < 0; n++ {
		copy(region[1:], region)
		region[0] = slices.Repeat([]rune{' '}, s.width())
	}
}

// escape interprets an escape sequence.
func (s *terminal) escape(b []byte) int {
	switch {
	case len(b) < 2:
		return 0
	case b[1] == ']' || b[1] == 'P': // a string, up to BEL or ST
		for i := 2; i < len(b); i++ {
			if b[i] == 7 {
				return i + 1
			}
			if b[i] == '\\' && b[i-1] == 0x1b {
				return i + 1
			}
		}
		return 0
	case b[1] == 'M':
		if s.y == s.first {
			s.scroll(s.first, -1)
		} else {
			s.y = max(0, s.y-1)
		}
		return 2
	case b[1] == '7' || b[1] == '8' || b[1] == '=' || b[1] == '>':
		return 2
	case b[1] != '[':
		s.unknown = append(s.unknown, string(b[:2]))
		return 2
	}
	end := 2
	for end < len(b) && b[end] < 0x40 {
		end++
	}
	if end == len(b) {
		return 0
	}
	s.sequence(string(b[2:end]), b[end])
	return end + 1
}

// sequence interprets a control sequence.
func (s *terminal) sequence(parameters string, final byte) {
	if strings.ContainsAny(parameters, "?<>=$ ") || final == 'm' {
		return // modes, queries, colors
	}
	var numbers []int
	for _, text := range strings.Split(parameters, ";") {
		n, _ := strconv.Atoi(text)
		numbers = append(numbers, n)
	}
	n := max(1, numbers[0])
	second := 1
	if len(numbers) > 1 {
		second = max(1, numbers[1])
	}
	s.x = min(s.x, s.width()-1)
	row := s.cells[s.y]
	blank := func(cells []rune) {
		for i := range cells {
			cells[i] = ' '
		}
	}
	switch final {
	case 'A':
		s.y -= n
	case 'B':
		s.y += n
	case 'C':
		s.x += n
	case 'D':
		s.x -= n
	case 'G', '`':
		s.x = n - 1
	case 'd':
		s.y = n - 1
	case 'H', 'f':
		s.y, s.x = n-1, second-1
	case 'I':
		s.x = (s.x/8 + n) * 8
	case 'Z':
		s.x = (s.x + 7) / 8 * 8
		s.x -= 8 * n
	case 'J':
		switch numbers[0] {
		case 0:
			blank(row[s.x:])
			for _, below := range s.cells[s.y+1:] {
				blank(below)
			}
		case 2:
			for _, any := range s.cells {
				blank(any)
			}
		default:
			s.unknown = append(s.unknown, parameters+"J")
		}
	case 'K':
		switch numbers[0] {
		case 0:
			blank(row[s.x:])
		case 1:
			blank(row[:s.x+1])
		default:
			blank(row)
		}
	case 'X':
		blank(row[s.x:min(s.x+n, len(row))])
	case 'P':
		copy(row[s.x:], row[min(s.x+n, len(row)):])
		blank(row[max(s.x, len(row)-n):])
	case '@':
		n = min(n, len(row)-s.x)
		copy(row[s.x+n:], slices.Clone(row[s.x:]))
		blank(row[s.x : s.x+n])
	case 'L':
		s.scroll(s.y, -n)
	case 'M':
		s.scroll(s.y, n)
	case 'S':
		s.scroll(s.first, n)
	case 'T':
		s.scroll(s.first, -n)
	case 'r':
		s.first, s.last = n-1, len(s.cells)-1
		if len(numbers) > 1 && numbers[1] > 0 {
			s.last = min(s.last, numbers[1]-1)
		}
		s.x, s.y = 0, 0
	case 'c', 'n', 't':
		// queries
	default:
		s.unknown = append(s.unknown, parameters+string(final))
	}
	s.x, s.y = max(0, min(s.x, s.width()-1)), max(0, min(s.y, len(s.cells)-1))
}
