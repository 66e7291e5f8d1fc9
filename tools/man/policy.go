// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"regexp"
	"strings"

	"github.com/cpuguy83/go-md2man/v2/md2man"
)

// policyPage returns sockeye-policy(5), which has the contents of docs/policy.md. Tables become lists, because the cells
// are longer than the lines of a terminal.
func policyPage(markdown string) []byte {
	_, body, _ := strings.Cut(markdown, "\n")
	var b strings.Builder
	b.WriteString("% SOCKEYE-POLICY 5 \"\" Sockeye \"Sockeye\"\n# NAME\nsockeye-policy - the policy file of Sockeye\n\n# DESCRIPTION\n")
	var header []string
	fenced := false
	for line := range strings.SplitSeq(body, "\n") {
		fenced = fenced != strings.HasPrefix(line, "```")
		switch {
		case fenced:
			b.WriteString(line + "\n")
		case !strings.HasPrefix(line, "|"):
			header = nil
			b.WriteString(withoutLinks(line) + "\n")
		case header == nil:
			header = cells(line)
			if header[1] != "meaning" { // the header describes a key, and the rows its values
				fmt.Fprintf(&b, "%s: %s:\n\n", header[0], header[1])
			}
		case !strings.HasPrefix(line, "|-"):
			writeRow(&b, header, cells(line))
		}
	}
	return md2man.Render([]byte(b.String()))
}

// writeRow writes a row of a table as an item of a list.
func writeRow(b *strings.Builder, header, row []string) {
	fmt.Fprintf(b, "- %s: ", row[0])
	for i, cell := range row[1:] {
		name := header[i+1]
		switch {
		case cell == "":
		case i == 0:
			b.WriteString(cell)
		default:
			fmt.Fprintf(b, ". %s: %s", strings.ToUpper(name[:1])+name[1:], cell)
		}
	}
	b.WriteString("\n")
}

// cells returns the cells of a row of a Markdown table.
func cells(line string) []string {
	const escaped = "\x00"
	list := strings.Split(strings.Trim(strings.ReplaceAll(withoutLinks(line), `\|`, escaped), "|"), "|")
	for i, cell := range list {
		list[i] = strings.TrimSuffix(strings.TrimSpace(strings.ReplaceAll(cell, escaped, "|")), ".")
	}
	return list
}

var link = regexp.MustCompile(`\[([^\]]+)\]\([^)]*\)`)

// withoutLinks replaces links by their text, and the documents by their names in the source.
func withoutLinks(line string) string {
	return link.ReplaceAllStringFunc(line, func(found string) string {
		text := link.FindStringSubmatch(found)[1]
		if strings.HasSuffix(text, ".md") && !strings.Contains(text, "/") {
			return "docs/" + text
		}
		return text
	})
}
