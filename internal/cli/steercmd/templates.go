// SPDX-License-Identifier: Apache-2.0

package steercmd

import (
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"sockeye/internal/api"
	"sockeye/internal/cli/command"
	"sockeye/internal/fault"
)

func (c *commands) templatesCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "templates [DEVICE]",
		Short: "List the templates of IPFIX and NetFlow v9 exporters",
		Long: `Templates lists the templates that the agent keeps. When a member newly serves
an exporter, the agent sends the exporter's templates to that member, so that
the member can decode the exporter's records at once. REPLAYED is the time since
the last such message. With DEVICE, an address or a name in the device map, the
command also lists the fields of each template: information element (with its
enterprise number) and length.`,
		Example: "  sockeye templates\n  sockeye templates 192.0.2.1",
		Args:    cobra.MaximumNArgs(1),
	}
	query := serviceFlag(cmd)
	cmd.ValidArgsFunction = c.complete(c.deviceNames)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		values := query()
		if len(args) > 0 {
			if args[0] == "" {
				return fault.Usage(fmt.Errorf("the device is empty"), "name an address, or a name in the device map")
			}
			values.Set("device", args[0])
		}
		var list []api.TemplateStatus
		if err := c.Client().Get(cmd.Context(), "/v1/templates", values, &list); err != nil {
			return err
		}
		return c.Show(list, func(w io.Writer) { c.templates(w, list, values.Get("device")) })
	}
	return cmd
}

func (c *commands) templates(w io.Writer, list []api.TemplateStatus, device string) {
	if len(list) == 0 && device != "" {
		fmt.Fprintln(w, "no templates of", device)
		return
	}
	if len(list) == 0 {
		fmt.Fprintln(w, "no templates: no exporter of IPFIX or NetFlow v9 has sent any, or the services have templates: off")
		return
	}
	fmt.Fprintln(w, "SERVICE\tEXPORTER\tDEVICE\tPROTOCOL\tDOMAIN\tTEMPLATE\tFIELDS\tLEARNED\tREFRESHED\tREPLAYED")
	for i := range list {
		t := &list[i]
		id := fmt.Sprint(t.Template)
		if t.Options {
			id += " options"
		}
		replayed := "-"
		if t.Replayed != nil {
			replayed = c.ago(*t.Replayed)
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%d\t%s\t%d\t%s\t%s\t%s\n", t.Service, t.Source, command.OrDash(t.Device), t.Protocol, t.Domain,
			id, t.Fields, c.ago(t.Learned), c.ago(t.Refreshed), replayed)
	}
	if device == "" {
		return
	}
	for i := range list {
		t := &list[i]
		fmt.Fprintf(w, "\n%s domain %d template %d: %s\n", t.Source, t.Domain, t.Template, elements(t.Elements))
	}
}

func (c *commands) ago(t time.Time) string {
	return max(0, c.Now().Sub(t)).Round(time.Second).String() + " ago"
}

// elements formats the fields of a template.
func elements(list []api.TemplateField) string {
	var words []string
	for _, f := range list {
		word := fmt.Sprint(f.Element)
		if f.Enterprise != 0 {
			word = fmt.Sprintf("%d/%d", f.Enterprise, f.Element)
		}
		if f.Length == 65535 {
			word += " (variable)"
		} else {
			word += fmt.Sprintf(" (%d)", f.Length)
		}
		if f.Scope {
			word = "scope " + word
		}
		words = append(words, word)
	}
	return strings.Join(words, ", ")
}
