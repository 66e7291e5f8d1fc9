// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"fmt"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// What a terminal is told, see console_codes(4): to begin at its first line, to
// clear a line's or the screen's rest, and whether lines that are too long go on in
// the next one.
const (
	atHome     = "\x1b[H"
	clearLine  = "\x1b[K"
	clearBelow = "\x1b[J"
	cutLines   = "\x1b[?7l"
	wrapLines  = "\x1b[?7h"
)

// watch shows a screen each second until ctx ends.
func (c *command) watch(ctx context.Context, screen func() (*text, error)) error {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	begun := false
	defer func() {
		if begun {
			// Without a terminal there is nothing to set back.
			_ = toTerminal(c.Out, wrapLines)
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
		if err := toTerminal(c.Out, cutLines+atHome+c.fit(l)+clearBelow); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// fit gives the lines of a screen, as many as the terminal has.
func (c *command) fit(l *text) string {
	lines := strings.SplitAfter(l.String(), "\n")
	lines = lines[:len(lines)-1]
	if height := c.height(); len(lines) > height {
		left := len(lines) - height + 1
		lines = append(lines[:height-1], fmt.Sprintf("… %s, for which the terminal is too small\n", count(left, "more line", "more lines")))
	}
	for i, line := range lines {
		lines[i] = printable(strings.TrimSuffix(line, "\n")) + clearLine + "\n"
	}
	return strings.Join(lines, "")
}

// height is how many lines can be shown.
func (c *command) height() int {
	const endless = 1 << 20
	file, ok := behind(c.Out).(*os.File)
	if !ok {
		return endless
	}
	size, err := unix.IoctlGetWinsize(int(file.Fd()), unix.TIOCGWINSZ)
	if err != nil || size.Row < 3 {
		return endless
	}
	return int(size.Row) - 1 // the cursor is in the last one
}
