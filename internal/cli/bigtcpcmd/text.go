// SPDX-License-Identifier: Apache-2.0

package bigtcpcmd

import (
	"fmt"
	"regexp"
	"slices"
	"strings"

	"sockeye/internal/bigtcp/compat"
	"sockeye/internal/bigtcp/netif"
	"sockeye/internal/bigtcp/sizing"
	"sockeye/internal/cli/command"
	"sockeye/internal/format"
)

const (
	// bigtcpRows is the maximum number of rows without --all. In a longer list, similar
	// interfaces share a row.
	bigtcpRows = 24
	// bigtcpNames is the maximum number of interface names in a line.
	bigtcpNames = 6
)

const bigtcpEffect = "only new connections use the new sizes; open ones keep theirs until their route is looked up again"

// shared are incompatibilities of several rows, with the names of their interfaces.
type shared struct {
	order []compat.Incompatibility
	names map[compat.Incompatibility][]string
}

// bigtcpText prints the interfaces and the incompatibilities of the host.
func bigtcpText(t *command.Text, s *Shown, all bool) {
	if s.Netns != "" {
		t.Line("network namespace %s", s.Netns)
		t.Line("")
	}
	shown := s.Interfaces
	if !all {
		shown = slices.DeleteFunc(slices.Clone(shown), func(i Interface) bool { return i.isIdle() })
	}
	rows, cut := bigtcpGroups(shown, all)
	shared := sharedIncompatibilities(rows)
	if len(rows) > 0 {
		writeInterfaces(t, rows, shared)
	} else {
		t.Line("there is no interface to show")
	}
	if cut > 0 {
		t.Line("and %s; --all shows all", format.Count(cut, "more interface", "more interfaces"))
	}
	if hidden := len(s.Interfaces) - len(shown); hidden > 0 {
		t.Paragraph("", "%s not shown: lo, and virtual interfaces that are down and unrelated; --all shows all", format.Count(hidden, "interface is", "interfaces are"))
	}
	if len(s.Incompatibilities)+len(shared.order) > 0 {
		t.Line("")
	}
	for _, trouble := range shared.order {
		writeIncompatibility(t, "", trouble, shared.names[trouble]...)
	}
	for _, trouble := range s.Incompatibilities {
		writeIncompatibility(t, "", trouble)
	}
	if len(s.Problems) > 0 {
		t.Line("")
	}
	for _, problem := range s.Problems {
		t.Paragraph("", "not read: %s", problem)
	}
}

// similar are interfaces that share a row.
type similar []*Interface

func sharedIncompatibilities(rows []similar) shared {
	s := shared{names: make(map[compat.Incompatibility][]string)}
	for _, row := range rows {
		for _, trouble := range row[0].Incompatibilities {
			s.names[trouble] = append(s.names[trouble], row[0].Name)
			if len(s.names[trouble]) == 2 {
				s.order = append(s.order, trouble)
			}
		}
	}
	return s
}

// isIdle reports whether an interface is omitted without --all.
func (i *Interface) isIdle() bool {
	if i.Requested != nil || i.Verdict.State == netif.On || i.Verdict.State == netif.Partly {
		return false
	}
	return i.Name == "lo" || !i.Up && i.Kind != "" && len(i.Related) == 0
}

// bigtcpGroups groups interfaces into rows, one row per interface if all is set or the
// list is short. rest is the number of interfaces without a row.
func bigtcpGroups(interfaces []Interface, all bool) (rows []similar, rest int) {
	if all || len(interfaces) <= bigtcpRows {
		for i := range interfaces {
			rows = append(rows, similar{&interfaces[i]})
		}
		return rows, 0
	}
	places := make(map[string]int)
	for i := range interfaces {
		key := interfaces[i].similarityKey()
		place, ok := places[key]
		if !ok {
			place = len(rows)
			places[key] = place
			rows = append(rows, nil)
		}
		rows[place] = append(rows[place], &interfaces[i])
	}
	if len(rows) > bigtcpRows {
		// Rows with a request come first.
		slices.SortStableFunc(rows, func(a, b similar) int { return a.rank() - b.rank() })
		for _, row := range rows[bigtcpRows:] {
			rest += len(row)
		}
		rows = rows[:bigtcpRows]
	}
	return rows, rest
}

// similarityKey returns a key that is equal for interfaces that differ only in their
// names and peers.
func (i *Interface) similarityKey() string {
	requested := Requested{}
	if i.Requested != nil {
		requested = *i.Requested
	}
	return fmt.Sprintf("%q %q %d %d %v %v %v %s", i.Kind, i.Driver, i.TSOMaxSize, i.Bound.Size, i.Sizes, requested, i.neighbours(),
		withoutName(fmt.Sprint(i.Verdict.Text, i.Incompatibilities), i.Name))
}

// withoutName removes the name of the interface from a text.
func withoutName(text, name string) string {
	return regexp.MustCompile(`\b`+regexp.QuoteMeta(name)+`\b`).ReplaceAllLiteralString(text, "")
}

// neighbours returns the lower and upper interfaces.
func (i *Interface) neighbours() []netif.Related {
	return slices.DeleteFunc(slices.Clone(i.Related), func(r netif.Related) bool { return r.Relation == netif.Peer })
}

func (a similar) rank() int {
	if a[0].Requested != nil {
		return 0
	}
	return 1
}

func writeInterfaces(t *command.Text, rows []similar, shared shared) {
	table := [][]string{{"INTERFACE", "KIND", "TSO MAX", "IPV6 SEND/RECEIVE", "IPV4 SEND/RECEIVE", "REQUESTED IPV6/IPV4"}}
	for _, row := range rows {
		i := row[0]
		most, requested := "-", "-"
		if i.TSOMaxSize > 0 {
			most = fmt.Sprint(i.TSOMaxSize)
		}
		if i.Requested != nil {
			requested = requestedSize(i.Requested.IPv6) + "/" + requestedSize(i.Requested.IPv4)
		}
		table = append(table, []string{i.Name, interfaceKind(i.Kind, i.Driver), most,
			bothWays(i.Sizes.GSO, i.Sizes.GRO), bothWays(i.Sizes.GSOIPv4, i.Sizes.GROIPv4), requested})
	}
	var lines command.Text
	lines.Table("llrrrl", table)
	for n := range table {
		line, _ := lines.ReadString('\n')
		t.WriteString(line)
		if n > 0 {
			writeNotes(t, rows[n-1], shared)
		}
	}
}

// requestedSize formats a requested size.
func requestedSize(size uint32) string {
	switch size {
	case 0:
		return "-"
	case netif.Legacy:
		return "off"
	}
	return fmt.Sprint(size)
}

// writeNotes adds the lines below a row.
func writeNotes(t *command.Text, row similar, shared shared) {
	i := row[0]
	t.Paragraph("  ", "%s", i.Verdict.Text)
	if i.Requested != nil {
		t.Paragraph("  ", "%s", i.Requested.words())
	}
	if i.Bound.Size < i.TSOMaxSize && !strings.Contains(i.Verdict.Text, i.Bound.By) {
		t.Paragraph("  ", "the lower interface %s limits sent packets to %d bytes", i.Bound.By, i.Bound.Size)
	}
	if len(row) == 1 {
		writeRelated(t, i.Related)
	} else {
		writeRelated(t, i.neighbours())
	}
	for _, trouble := range i.Incompatibilities {
		if len(shared.names[trouble]) == 1 {
			writeIncompatibility(t, "  ", trouble)
		}
	}
	if len(row) > 1 {
		var names []string
		for _, other := range row[1:] {
			names = append(names, other.Name)
		}
		t.Paragraph("  ", "and %d similar: %s; --all shows each", len(names), firstNames(names))
	}
}

// words returns a description of the source of a request and of its state.
func (w *Requested) words() string {
	text := map[string]string{
		string(sizing.ByCommand): "requested by sockeye bigtcp apply",
		string(sizing.ByPolicy):  "requested by the agent's policy",
		byFile:                   "requested by the policy file",
	}[w.By]
	if len(w.For) > 0 {
		text += ", as a lower interface of " + firstNames(w.For)
	}
	switch w.State {
	case requestChanged:
		text += "; somebody else has changed it since"
	case requestUnset:
		text += "; not applied"
	}
	return text
}

// writeRelated adds the related interfaces. Similar interfaces share a line.
func writeRelated(t *command.Text, related []netif.Related) {
	type sort struct {
		relation            netif.Relation
		netns, kind, driver string
		most                uint32
		sizes               netif.Sizes
	}
	var order []sort
	names := make(map[sort][]string)
	for _, r := range related {
		s := sort{r.Relation, r.Netns, r.Kind, r.Driver, r.TSOMaxSize, r.Sizes}
		if names[s] == nil {
			order = append(order, s)
		}
		name := r.Name
		if name == "" {
			name = fmt.Sprintf("interface %d", r.Index)
		}
		names[s] = append(names[s], name)
	}
	for _, s := range order {
		line := string(s.relation) + " " + firstNames(names[s])
		switch s.netns {
		case "":
		case "unknown":
			line += " in an unknown namespace"
		default:
			line += " in " + s.netns
		}
		var parts []string
		if what := interfaceKind(s.kind, s.driver); what != "-" {
			parts = append(parts, what)
		}
		if s.most > 0 {
			parts = append(parts, fmt.Sprintf("TSO max %d", s.most))
		}
		if s.sizes != (netif.Sizes{}) {
			parts = append(parts, sizesText(s.sizes))
		}
		if len(parts) > 0 {
			line += ": " + strings.Join(parts, ", ")
		}
		t.Paragraph("  ", "%s", line)
	}
}

// sizesText formats sizes in words.
func sizesText(s netif.Sizes) string {
	if s == (netif.Sizes{GSO: s.GSO, GRO: s.GSO, GSOIPv4: s.GSO, GROIPv4: s.GSO}) {
		return fmt.Sprintf("sizes %d", s.GSO)
	}
	text := "IPv6 " + bothWays(s.GSO, s.GRO)
	if s.GSOIPv4 > 0 {
		text += ", IPv4 " + bothWays(s.GSOIPv4, s.GROIPv4)
	}
	return text
}

// bothWays formats the sizes of a family, to send and to receive; 0 means that the
// kernel has no such size.
func bothWays(send, receive uint32) string {
	switch {
	case send == 0:
		return "-"
	case receive == 0:
		return fmt.Sprintf("%d/-", send)
	}
	return fmt.Sprintf("%d/%d", send, receive)
}

// interfaceKind returns the kind of an interface, or the driver of hardware.
func interfaceKind(kind, driver string) string {
	if kind != "" {
		return kind
	}
	return command.OrDash(driver)
}

// changesText prints planned or completed changes.
func changesText(t *command.Text, answer *Changes, verb string) {
	var worth []sizing.Change
	var already []string
	changed := 0
	for _, c := range answer.Changes {
		switch {
		case c.From != c.To:
			changed++
			worth = append(worth, c)
		case len(c.Notes) > 0:
			worth = append(worth, c)
		default:
			already = append(already, placeText(c.Interface, c.Netns))
		}
	}
	writeChanges(t, worth)
	if len(already) > 0 {
		t.Paragraph("", "unchanged: %s", firstNames(already))
	}
	for _, s := range answer.Skipped {
		t.Paragraph("", "skipped %s: %s", placeText(s.Interface, s.Netns), s.Reason)
	}
	for _, problem := range answer.Problems {
		t.Paragraph("", "not read: %s", problem)
	}
	if changed == 0 {
		t.Line("nothing %s", verb)
		return
	}
	t.Line("%s %s", format.Count(changed, "interface", "interfaces"), verb)
	t.Line(bigtcpEffect)
}

// revertedText prints the results of a revert.
func revertedText(t *command.Text, answer *Reverted) {
	if len(answer.Reverted) == 0 {
		t.Line("nothing to revert")
		return
	}
	var back []sizing.Change
	names := make(map[string][]string)
	for _, r := range answer.Reverted {
		if r.Result == sizing.ResultReverted {
			back = append(back, r.Change)
		}
		names[r.Result] = append(names[r.Result], placeText(r.Interface, r.Netns))
	}
	writeChanges(t, back)
	for _, became := range []struct{ result, words string }{
		{sizing.ResultAlready, "already reverted"},
		{sizing.ResultGone, "no longer exists"},
		{sizing.ResultChanged, "not reverted, because somebody else has changed the sizes"},
	} {
		if names := names[became.result]; len(names) > 0 {
			t.Paragraph("", "%s: %s", became.words, firstNames(names))
		}
	}
	if len(back) > 0 {
		t.Line("%s reverted", format.Count(len(back), "interface", "interfaces"))
		t.Line(bigtcpEffect)
	}
}

// placeText formats the name of an interface, with its namespace unless netns is empty.
func placeText(name, netns string) string {
	if netns == "" {
		return name
	}
	return name + " in " + netns
}

// writeChanges prints a row for each changed family of each interface, followed by notes.
func writeChanges(t *command.Text, changes []sizing.Change) {
	if len(changes) == 0 {
		return
	}
	rows := [][]string{{"INTERFACE", "FAMILY", "SEND", "RECEIVE"}}
	notes := [][]string{nil}
	for _, c := range changeGroups(changes) {
		sizes := sizeRows(&c.Change)
		rows = append(rows, sizes...)
		notes = append(notes, make([][]string, len(sizes))...)
		notes[len(notes)-1] = c.notes()
	}
	var table command.Text
	table.Table("llll", rows)
	for _, below := range notes {
		line, _ := table.ReadString('\n')
		t.WriteString(line)
		for _, note := range below {
			t.Paragraph("  ", "%s", note)
		}
	}
}

// changeRow is a change, and the other interfaces with the same change.
type changeRow struct {
	sizing.Change
	others []string
}

// changeGroups groups changes into rows, one row per change if there are at most
// bigtcpRows changes.
func changeGroups(changes []sizing.Change) []changeRow {
	var rows []changeRow
	places := make(map[string]int)
	for _, c := range changes {
		key := fmt.Sprintf("%q %v %v %q %s", c.Netns, c.From, c.To, c.UpperInterface, withoutName(fmt.Sprint(c.Notes), c.Interface))
		if at, ok := places[key]; ok && len(changes) > bigtcpRows {
			rows[at].others = append(rows[at].others, c.Interface)
			continue
		}
		places[key] = len(rows)
		rows = append(rows, changeRow{Change: c})
	}
	return rows
}

// sizeRows returns a row for each changed family. The first row has the name of the
// interface.
func sizeRows(c *sizing.Change) [][]string {
	var rows [][]string
	name := c.Interface
	for _, f := range []struct {
		family                                   string
		sendFrom, sendTo, receiveFrom, receiveTo uint32
	}{
		{"IPv6", c.From.GSO, c.To.GSO, c.From.GRO, c.To.GRO},
		{"IPv4", c.From.GSOIPv4, c.To.GSOIPv4, c.From.GROIPv4, c.To.GROIPv4},
	} {
		if f.sendFrom != f.sendTo || f.receiveFrom != f.receiveTo {
			rows = append(rows, []string{name, f.family, fromTo(f.sendFrom, f.sendTo), fromTo(f.receiveFrom, f.receiveTo)})
			name = ""
		}
	}
	if rows == nil {
		rows = [][]string{{name, "-", "unchanged", "unchanged"}}
	}
	return rows
}

// fromTo formats a size before and after a change.
func fromTo(from, to uint32) string {
	if from == to {
		return fmt.Sprint(to)
	}
	return fmt.Sprintf("%d -> %d", from, to)
}

func (c *changeRow) notes() []string {
	var notes []string
	if c.Netns != "" {
		notes = append(notes, "in "+c.Netns)
	}
	if c.UpperInterface != "" {
		notes = append(notes, "as a lower interface of "+c.UpperInterface)
	}
	notes = append(notes, c.Notes...)
	if len(c.others) > 0 {
		notes = append(notes, fmt.Sprintf("and %d similar: %s", len(c.others), firstNames(c.others)))
	}
	return notes
}

// writeIncompatibility adds an incompatibility with its hint. names are its interfaces,
// if the context does not show them.
func writeIncompatibility(t *command.Text, indent string, of compat.Incompatibility, names ...string) {
	where := ""
	if len(names) > 0 {
		where = " on " + firstNames(names)
	}
	t.Paragraph(indent, "%s%s: %s", strings.ReplaceAll(of.Name, "_", " "), where, of.Detail)
	if of.Hint != "" {
		t.Paragraph(indent+"  ", "hint: %s", of.Hint)
	}
}

// firstNames lists the first names and counts the others.
func firstNames(names []string) string {
	if len(names) <= bigtcpNames {
		return strings.Join(names, ", ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(names[:bigtcpNames], ", "), len(names)-bigtcpNames)
}
