// SPDX-License-Identifier: Apache-2.0

package command

import (
	"context"
	"fmt"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/format"
)

// Escape sequences, see console_codes(4): move to the first line, clear the rest of a line, clear
// the rest of the screen, truncate long lines, wrap long lines.
const (
	atHome     = "\x1b[H"
	clearLine  = "\x1b[K"
	clearBelow = "\x1b[J"
	cutLines   = "\x1b[?7l"
	wrapLines  = "\x1b[?7h"
)

// Watch prints a screen every second until ctx is done.
func (c *Command) Watch(ctx context.Context, screen func() (*Text, error)) error {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	begun := false
	defer func() {
		if begun {
			// If the write fails, the terminal is gone.
			_ = WriteTerminal(c.Out, wrapLines)
		}
	}()
	for {
		l, err := screen()
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return err
		}
		begun = true
		if err := WriteTerminal(c.Out, cutLines+atHome+c.Fit(l)+clearBelow); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// Fit returns the lines of a screen, truncated to the height of the terminal.
func (c *Command) Fit(l *Text) string {
	lines := strings.SplitAfter(l.String(), "\n")
	lines = lines[:len(lines)-1]
	if height := c.height(); len(lines) > height {
		left := len(lines) - height + 1
		lines = append(lines[:height-1], fmt.Sprintf("… %s, the terminal is too small\n", format.Count(left, "more line", "more lines")))
	}
	for i, line := range lines {
		lines[i] = Printable(strings.TrimSuffix(line, "\n")) + clearLine + "\n"
	}
	return strings.Join(lines, "")
}

// IsTerminal reports whether the output is a terminal.
func (c *Command) IsTerminal() bool {
	file, ok := Underlying(c.Out).(*os.File)
	if !ok {
		return false
	}
	_, err := unix.IoctlGetTermios(int(file.Fd()), unix.TCGETS)
	return err == nil
}

// height returns the number of lines that the terminal shows, less the line of the cursor.
func (c *Command) height() int {
	const endless = 1 << 20
	file, ok := Underlying(c.Out).(*os.File)
	if !ok {
		return endless
	}
	size, err := unix.IoctlGetWinsize(int(file.Fd()), unix.TIOCGWINSZ)
	if err != nil || size.Row < 3 {
		return endless
	}
	return int(size.Row) - 1 // the cursor is in the last line
}
