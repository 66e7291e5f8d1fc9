// SPDX-License-Identifier: Apache-2.0

package steercmd

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"

	"github.com/spf13/cobra"

	"sockeye/internal/api"
	"sockeye/internal/bpf"
	"sockeye/internal/bpf/pin"
	"sockeye/internal/cli/command"
	"sockeye/internal/config"
	"sockeye/internal/fault"
	"sockeye/internal/placement"
	"sockeye/internal/steer/locate"
)

func (c *commands) whereCommand() *cobra.Command {
	var (
		slots                      int
		nonce, plan, devices, pins string
		offline                    bool
	)
	cmd := &cobra.Command{
		Use:   "where ADDRESS...",
		Short: "Show the slots of addresses in the current or another policy",
		Long: `Where shows the slots of addresses in the table of the running agent. In a
fleet, the agent also shows the host of each device and the bucket of the device
in the table of the fleet. The agent asks the other hosts over etcd for the
slots of their devices; with a file of hosts, only the host of a device shows
its slot. With --offline, the command reads the pinned table and needs no agent.
With --plan, the command shows the slots that another policy file would assign.
With --slots and --nonce, the command computes the slots from these values; it
needs neither an agent nor pins.`,
		Example: `  sockeye where 192.0.2.1 2001:db8::1
  sockeye where --plan new-policy.yaml 192.0.2.1
  sockeye where --slots 8 --nonce 0x5eed 192.0.2.1`,
		Args: command.Arguments(1, -1, "ADDRESS"),
	}
	query := serviceFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		addresses, err := api.ParseAddresses(args)
		if err != nil {
			return err
		}
		service := query().Get("service")
		changed := cmd.Flags().Changed
		var list []api.WhereStatus
		switch {
		case changed("slots") && (plan != "" || offline) || plan != "" && offline:
			return fault.Usage(errors.New("--slots, --plan and --offline are mutually exclusive"), "each option selects another table")
		case changed("pins") && !offline:
			return fault.Usage(errors.New("--pins requires --offline"), "without --offline the agent is asked")
		case changed("device-map") && !changed("slots"):
			return fault.Usage(errors.New("--device-map requires --slots"), "without --slots the device map of the service is used")
		case changed("slots") && service != "":
			return fault.Usage(errors.New("--slots and --service are mutually exclusive"), "a table of --slots does not belong to a service")
		case changed("slots") != changed("nonce"):
			return fault.Usage(fmt.Errorf("--slots and --nonce must be used together"), "sockeye status -o json shows a service's nonce")
		case changed("slots"):
			list, err = whereTable(addresses, slots, nonce, devices)
		case plan != "":
			list, err = c.wherePlan(cmd, addresses, service, plan)
		case offline:
			list, err = whereOffline(addresses, service, pins)
		default:
			list, err = c.whereNow(cmd.Context(), args, query())
		}
		if err != nil {
			return err
		}
		return c.Show(list, func(w io.Writer) { writeWhere(w, list, plan == "" && !offline) })
	}
	cmd.Flags().IntVar(&slots, "slots", 0, "number of slots of the table to compute")
	cmd.Flags().StringVar(&nonce, "nonce", "", "nonce of the table to compute")
	cmd.Flags().StringVar(&devices, "device-map", "", "device map file, with --slots")
	cmd.Flags().StringVar(&plan, "plan", "", "policy file for which the slots are computed")
	cmd.Flags().BoolVar(&offline, "offline", false, "read the pinned table, which has no names of devices; no agent is needed")
	cmd.Flags().StringVar(&pins, "pins", command.DefaultPins, "pin directory, with --offline")
	return cmd
}

// mostAddresses is the number of addresses in one request.
const mostAddresses = 1000

// whereNow returns the slots that the agent tells.
func (c *commands) whereNow(ctx context.Context, args []string, query url.Values) (list []api.WhereStatus, err error) {
	list = []api.WhereStatus{}
	for some := range slices.Chunk(args, mostAddresses) {
		var part []api.WhereStatus
		query["address"] = some
		if err := c.Client().Get(ctx, "/v1/where", query, &part); err != nil {
			return nil, err
		}
		if slices.ContainsFunc(part, func(l api.WhereStatus) bool { return l.Host != "" }) {
			c.askHosts(ctx, some, part)
		}
		list = append(list, part...)
	}
	return list, nil
}

// askHosts completes a list with the slots of devices that other hosts of the fleet serve, or with the reason why they are not known.
func (c *commands) askHosts(ctx context.Context, addresses []string, list []api.WhereStatus) {
	var answer api.FleetWhere
	err := c.Client().Get(ctx, "/v1/fleet/where", url.Values{"address": addresses}, &answer)
	for i := range list {
		l := &list[i]
		if l.Host == "" || err == nil && l.Host == answer.Host || err != nil && l.Ready != nil {
			continue
		}
		at := slices.IndexFunc(answer.Slots, func(t api.WhereStatus) bool {
			return t.Host == l.Host && t.Service == l.Service && t.Address == l.Address
		})
		if at >= 0 {
			told := &answer.Slots[at]
			l.Bucket, l.Slot, l.Pinned, l.Ready = told.Bucket, told.Slot, told.Pinned, told.Ready
			continue
		}
		l.Ready = nil // of this host, if the device comes to it now
		switch {
		case err != nil:
			l.SlotUnknown = err.Error()
		case answer.Asks:
			l.SlotUnknown = cmp.Or(answer.Silent[l.Host], "host "+l.Host+" has not told the slot: it has another table of the fleet now, or not the service")
		}
	}
}

// writeWhere writes the slots of addresses. In a fleet, only the host of a device knows its slot: with hosts, the agent has told
// which one it is, and otherwise the slots are those of the devices of this host.
func writeWhere(w io.Writer, list []api.WhereStatus, hosts bool) {
	if len(list) == 0 {
		fmt.Fprintln(w, "there are no services")
		return
	}
	fleet := hosts && slices.ContainsFunc(list, func(l api.WhereStatus) bool { return l.FleetBucket != nil || l.HostUnknown != "" })
	columns := "BUCKET"
	if fleet {
		columns = "HOST\tFLEET BUCKET\tSERVICE BUCKET"
	}
	fmt.Fprintln(w, "SERVICE\tADDRESS\tDEVICE\t"+columns+"\tSLOT\tPINNED\tREADY")
	var unknown []string
	for _, l := range list {
		ready, bucket, slot, pinned := "-", strconv.Itoa(l.Bucket), strconv.Itoa(l.Slot), command.YesNo(l.Pinned)
		switch {
		case l.Ready != nil:
			ready = command.YesNo(*l.Ready)
		case fleet && (l.Host != "" || l.HostUnknown != ""):
			bucket, slot, pinned = "-", "-", "-"
		}
		if fleet {
			fleetBucket := "-"
			if l.FleetBucket != nil {
				fleetBucket = strconv.Itoa(*l.FleetBucket)
			}
			bucket = command.OrDash(l.Host) + "\t" + fleetBucket + "\t" + bucket
		}
		if reason := cmp.Or(l.HostUnknown, l.SlotUnknown); reason != "" && !slices.Contains(unknown, reason) {
			unknown = append(unknown, reason)
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\t%s\n", command.OrDash(l.Service), l.Address, command.OrDash(l.Device), bucket, slot, pinned, ready)
	}
	for i, reason := range unknown {
		if i == 0 {
			fmt.Fprintln(w)
		}
		fmt.Fprintln(w, reason)
	}
}

func whereTable(addresses []netip.Addr, slots int, nonce, file string) ([]api.WhereStatus, error) {
	seed, err := strconv.ParseUint(nonce, 0, 64)
	if err != nil {
		return nil, fault.Usage(fmt.Errorf("--nonce is %q", nonce), "a 64-bit number, as in 0x5eed")
	}
	if slots < 1 || slots > bpf.MaxSlots {
		return nil, fault.Usage(fmt.Errorf("--slots is %d", slots), fmt.Sprintf("1 to %d", bpf.MaxSlots))
	}
	devices, err := loadDevices(file)
	if err != nil {
		return nil, err
	}
	mapping, err := placement.NewMapping(slots, bpf.NoSlot, seed, devices)
	if err != nil {
		return nil, err
	}
	return locate.Where("", mapping, addresses), nil
}

// wherePlan computes the slots of another policy file with the nonces, the states and weights of the slots, and the pins of
// the services in force, because a new policy does not change them.
func (c *commands) wherePlan(cmd *cobra.Command, addresses []netip.Addr, service, file string) ([]api.WhereStatus, error) {
	policy, err := command.LoadPolicy(file)
	if err != nil {
		return nil, err
	}
	var status api.Status
	if err := c.Client().Get(cmd.Context(), "/v1/status", nil, &status); err != nil {
		return nil, err
	}
	unknown := func(s *config.Service) string {
		if policy.Fleet != nil && policy.Fleet.Serves(s) {
			return "the host of the fleet cannot be told for another policy: the slots are those of devices of this host"
		}
		return ""
	}
	nonces := make(map[string]string)
	for _, s := range status.Services {
		nonces[s.Name] = s.Nonce
	}
	list := []api.WhereStatus{}
	for _, s := range policy.Services {
		if service != "" && s.Name != service {
			continue
		}
		name := cmp.Or(s.SlotsAs, s.Name)
		nonce, ok := nonces[name]
		if !ok {
			return nil, fault.Usage(fmt.Errorf("service %s is not in force, its nonce is unknown", name), "use --slots and --nonce, or --service with a service in force")
		}
		part, err := c.wherePlanned(cmd.Context(), addresses, s, name, nonce)
		if err != nil {
			return nil, err
		}
		for i := range part {
			part[i].HostUnknown = unknown(&s)
		}
		list = append(list, part...)
	}
	if service != "" && len(list) == 0 {
		return nil, fault.Usage(fmt.Errorf("%s has no service %q", file, service), "name a service of the file, or omit --service")
	}
	return list, nil
}

// wherePlanned computes the slots of one service of another policy file. of is the service whose slots it has.
func (c *commands) wherePlanned(ctx context.Context, addresses []netip.Addr, s config.Service, of, nonce string) ([]api.WhereStatus, error) {
	var slots []api.SlotStatus
	if err := c.Client().Get(ctx, "/v1/slots", ofService(of), &slots); err != nil {
		return nil, err
	}
	seed, err := strconv.ParseUint(nonce, 0, 64)
	if err != nil {
		return nil, fmt.Errorf("read agent's answer: %w", err)
	}
	devices, err := loadDevices(s.DeviceMap)
	if err != nil {
		return nil, err
	}
	mapping, err := locate.Planned(s, seed, devices, slots)
	if err != nil {
		return nil, err
	}
	return locate.Where(s.Name, mapping, addresses), nil
}

// loadDevices reads a device map; "" is none.
func loadDevices(file string) (*placement.DeviceMap, error) {
	if file == "" {
		return nil, nil
	}
	devices, err := placement.LoadDeviceMap(file)
	if err != nil {
		return nil, fault.Unreadable(err, "")
	}
	return devices, nil
}

func whereOffline(addresses []netip.Addr, service, pins string) ([]api.WhereStatus, error) {
	pattern := service
	if pattern == "" {
		pattern = "*"
	}
	dirs, err := pin.Find(filepath.Join(pins, bpf.ServicePrefix+pattern))
	if err != nil || len(dirs) == 0 {
		if _, err := os.ReadDir(pins); err != nil && !os.IsNotExist(err) {
			return nil, fmt.Errorf("read pins: %w", err)
		}
		what := "a service"
		if service != "" {
			what = "service " + service
		}
		return nil, fault.Usage(fmt.Errorf("%s has no pins of %s", pins, what), "name the agent's directory with --pins")
	}
	keys := make([]bpf.Address, len(addresses))
	for i, addr := range addresses {
		keys[i] = placement.Address(addr)
	}
	unknown := ""
	if fleet, err := pin.Pinned(filepath.Join(pins, bpf.FleetPins)); err != nil {
		return nil, fmt.Errorf("read pins: %w", err)
	} else if fleet {
		unknown = "the host of the fleet cannot be told offline: the slots are those of devices of this host"
	}
	list := []api.WhereStatus{}
	for _, dir := range dirs {
		table, err := bpf.ReadTable(dir)
		if err != nil {
			return nil, err
		}
		ids, err := bpf.ReadDevices(dir, keys)
		if err != nil {
			return nil, err
		}
		for i, addr := range addresses {
			id := ids[i]
			hash, pinned := placement.Hash(keys[i], table.Nonce), id != nil && id.Device&bpf.Pinned != 0
			if id != nil && !pinned {
				hash = id.Hash
			}
			bucket := int(hash % uint32(bpf.Buckets))
			slot := int(table.Bucket[bucket])
			if pinned {
				slot = int(id.Hash)
			}
			list = append(list, api.WhereStatus{
				Service: filepath.Base(dir)[len(bpf.ServicePrefix):], Address: addr.Unmap().WithZone(""),
				Bucket: bucket, Slot: slot, Pinned: pinned, HostUnknown: unknown,
			})
		}
	}
	return list, nil
}
