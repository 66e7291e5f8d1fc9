// SPDX-License-Identifier: Apache-2.0

package bigtcpcmd

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"sockeye/internal/bigtcp/netif"
	"sockeye/internal/bigtcp/verify"
	"sockeye/internal/cli/command"
	"sockeye/internal/fault"
	"sockeye/internal/format"
)

const verifyFor = 10 * time.Second

func (c *commands) bigtcpVerifyCommand() *cobra.Command {
	var where bigtcpPlace
	cmd := &cobra.Command{
		Use:   "verify INTERFACE",
		Short: "Measure the packet sizes of an interface",
		Long: `Verify counts the packets that an interface receives and sends, for a limited
time, by bytes and by segments, separately for TCP over IPv4 and over IPv6. It
shows the share of TCP's bytes in packets above 64 KB, and the causes of smaller
packets. Sent packets are counted twice: before the kernel segments packets that
are too large for the interface, and at the driver. A note is added if somebody
has changed the sizes since Sockeye set them.

It does not modify packets, and detaches its programs at the end. After an
interrupt it shows the packets that were counted so far.`,
		Example: `  sockeye bigtcp verify eth0
  sockeye bigtcp verify veth0 --netns /run/netns/blue --for 1m -o json`,
		Args:              command.Arguments(1, 1, "INTERFACE"),
		ValidArgsFunction: where.interfaces,
		RunE: func(cmd *cobra.Command, args []string) error {
			during, err := command.Interval(cmd, "for")
			if err != nil {
				return err
			}
			if during > verify.MaxDuration {
				return fault.Usage(fmt.Errorf("--for is %q", cmd.Flag("for").Value), "at most "+verify.MaxDuration.String())
			}
			network, err := netif.OpenNamespace(where.netns)
			if err != nil {
				return err
			}
			defer network.Close()
			proof, err := verify.Run(cmd.Context(), network, args[0], cmp.Or(during, verifyFor))
			if err != nil {
				return err
			}
			if note := changedNote(network, args[0], where.state); note != "" {
				proof.Notes = append(proof.Notes, note)
			}
			return c.Print(proof, func(t *command.Text) { verifyText(t, proof) })
		},
	}
	where.flags(cmd)
	cmd.Flags().String("for", verifyFor.String(), "duration of the measurement, at most 10m")
	command.CompleteFlag(cmd, "for")
	return cmd
}

// changedNote returns a note if the sizes of an interface have changed since Sockeye set
// them; otherwise "".
func changedNote(network *netif.Namespace, name, stateDir string) string {
	records, _, err := recordsOf(network, stateDir)
	if err != nil {
		return fmt.Sprintf("read records of changed sizes: %v", err)
	}
	list, err := network.Interfaces()
	if err != nil {
		return fmt.Sprintf("read records of changed sizes: %v", err)
	}
	i := slices.IndexFunc(list, func(i netif.Interface) bool { return i.Name == name })
	if i < 0 {
		return ""
	}
	requested := requestOf(&list[i], list, records, nil)
	if requested == nil || requested.State == requestSet {
		return ""
	}
	return "sizes: " + requested.words()
}

// verifyText prints a report: the verdict, then the figures.
func verifyText(t *command.Text, p *verify.Report) {
	name := p.Interface
	if p.Netns != "" {
		name += " in " + p.Netns
	}
	t.Paragraph("", "%s, %s: %s", name, command.Duration(time.Duration(p.Seconds*float64(time.Second))), p.Verdict.Text)
	t.Line("")
	if p.Share != nil {
		t.Line("%s of TCP's bytes travelled in packets above 64 KB (%s of %s)", percent(*p.Share), command.Bytes(p.LargeBytes), command.Bytes(p.TCPBytes))
	}
	if p.Cut > 0 {
		t.Line("segmented by the kernel before the driver: %s of the bytes that TCP sent", percent(p.Cut))
	}
	for _, note := range p.Notes {
		t.Paragraph("", "%s", note)
	}
	if len(p.Counts) == 0 {
		return
	}
	t.Line("")
	verifyTotals(t, p)
	verifyClasses(t, p, "PACKETS OF TCP, BYTES", func(c *verify.Count) []verify.Class { return c.Sizes })
	verifyClasses(t, p, "PACKETS OF TCP, SEGMENTS", func(c *verify.Count) []verify.Class { return c.BySegments })
	if len(p.Causes) > 0 {
		t.Line("causes of smaller packets, by share of TCP's bytes:")
		for _, why := range p.Causes {
			verifyCause(t, &why)
		}
	}
}

func verifyCause(t *command.Text, why *verify.Cause) {
	of := ""
	if why.Connections > 0 {
		of = ", " + format.Count(why.Connections, "connection", "connections")
	}
	t.Line("%6s  %s%s", percent(why.Share), why.Name, of)
	t.Paragraph("        ", "%s", why.Detail)
	if why.Example != "" {
		t.Line("        example: %s", why.Example)
	}
	t.Paragraph("        ", "hint: %s", why.Hint)
}

func percent(share float64) string { return strconv.FormatFloat(100*share, 'f', 1, 64) + " %" }

var familyNames = map[verify.Family]string{verify.TCP4: "TCP, IPv4", verify.TCP6: "TCP, IPv6", verify.Other: "other"}

func verifyTotals(t *command.Text, p *verify.Report) {
	rows := [][]string{{"", "", "PACKETS", "BYTES", "SEGMENTS", "LARGEST", "ABOVE 64 KB"}}
	for _, c := range p.Counts {
		rows = append(rows, []string{
			string(c.Point), familyNames[c.Family], strconv.FormatUint(c.Packets, 10), command.Bytes(c.Bytes), strconv.FormatUint(c.Segments, 10),
			strconv.FormatUint(c.Largest, 10), percent(float64(c.LargeBytes) / float64(c.Bytes)),
		})
	}
	t.Table("llrrrrr", rows)
	t.Line("")
}

// verifyClasses prints the number of TCP packets in each size class at each point, and
// their share of the bytes at this point. Classes are by bytes or by segments.
func verifyClasses(t *command.Text, p *verify.Report, title string, classes func(*verify.Count) []verify.Class) {
	points := []verify.Point{verify.Received, verify.Sent, verify.Driver}
	if p.NoDriver != "" {
		points = points[:2]
	}
	type cell struct{ packets, bytes uint64 }
	cells := make(map[verify.Point]map[uint32]cell)
	upTo := make(map[uint32]uint32)
	all := make(map[verify.Point]uint64)
	for _, point := range points {
		cells[point] = make(map[uint32]cell)
	}
	for _, c := range p.Counts {
		if c.Family == verify.Other {
			continue
		}
		for _, class := range classes(&c) {
			was := cells[c.Point][class.Above]
			cells[c.Point][class.Above] = cell{was.packets + class.Packets, was.bytes + class.Bytes}
			upTo[class.Above] = class.UpTo
			all[c.Point] += class.Bytes
		}
	}
	if len(upTo) == 0 {
		return
	}
	header := []string{title}
	alignment := "l"
	for _, point := range points {
		header = append(header, string(point), "of bytes")
		alignment += "rr"
	}
	rows := [][]string{header}
	for _, above := range slices.Sorted(maps.Keys(upTo)) {
		row := []string{classText(above, upTo[above])}
		for _, point := range points {
			n := cells[point][above]
			if n.packets == 0 {
				row = append(row, "-", "-")
				continue
			}
			row = append(row, strconv.FormatUint(n.packets, 10), percent(float64(n.bytes)/float64(all[point])))
		}
		rows = append(rows, row)
	}
	t.Table(alignment, rows)
	t.Line("")
}

func classText(above, upTo uint32) string {
	switch {
	case upTo == 0:
		return fmt.Sprintf("above %d", above)
	case above+1 == upTo:
		return strconv.FormatUint(uint64(upTo), 10)
	}
	return fmt.Sprintf("%d to %d", above+1, upTo)
}
