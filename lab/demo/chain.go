// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"text/tabwriter"
	"time"

	"sockeye/lab"
	"sockeye/lab/kafka"
)

const (
	kafkaTopic = "flows"
	// fetchLimit is the maximum time to fetch the broker from Maven Central.
	fetchLimit = 5 * time.Minute
)

// kafkaAddress is the address of the broker in the network of the routers.
var kafkaAddress = netip.AddrFrom4([4]byte{10, 77, 0, 253})

// chainResult is the content of chain.json.
type chainResult struct {
	Routers []chainRouter `json:"routers"`
	All     periods       `json:"all"`
	Share   share         `json:"correlated_share"` // in the periods KernelHash and Steered
	Upgrade upgraded      `json:"upgrade"`
}

type chainRouter struct {
	Address netip.Addr `json:"address"`
	periods
}

// periods are numbers of flow records in Kafka.
type periods struct {
	KernelHash kafka.Count `json:"kernel_hash"` // without Sockeye
	Steered    kafka.Count `json:"steered"`     // with Sockeye, no change
	SlotAdded  kafka.Count `json:"slot_added"`  // with Sockeye, while a slot is added
	Upgrade    kafka.Count `json:"upgrade"`     // with Sockeye, while a collector is replaced
}

// fetchKafka returns the class path of the broker.
func fetchKafka(ctx context.Context) ([]string, error) {
	dir, err := kafka.CacheDir()
	if err != nil {
		return nil, err
	}
	if _, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) {
		say("Maven fetches Kafka into %s (65 MB, once).", dir)
	}
	bounded, cancel := context.WithTimeoutCause(ctx, fetchLimit, fmt.Errorf("it took more than %v", fetchLimit))
	defer cancel()
	return kafka.Fetch(bounded, dir)
}

// chain is the demonstration of make demo-chain: the flow records are counted where
// their users read them. It writes its results into the directory out, unless out is
// empty.
func (d *demo) chain(ctx context.Context, jars []string, out string) error {
	say("Six routers (FRR: BGP, BMP over TCP; pmacctd: IPFIX over UDP, four line cards each), four unmodified")
	say("nfacctd that all listen on tcp [::]:%d and udp [::]:%d and write flow records into Kafka (one broker,", bmpPort, ipfixPort)
	say("KRaft), and a reader of Kafka that counts the records of each router with and without BGP communities.")
	broker, err := kafka.Start(ctx, d.Lab, kafkaAddress, jars)
	if err != nil {
		return err
	}
	topic, err := broker.OpenTopic(ctx, kafkaTopic)
	if err != nil {
		return err
	}
	d.output = topic

	say("\n== 1. Without Sockeye: the kernel's hash of addresses and ports decides")
	if err := d.startAll(ctx); err != nil {
		return err
	}
	// The kernel's hash selects a collector again for each new socket of a line card.
	before, err := d.outcome(ctx, 3)
	if err != nil {
		return err
	}

	say("\n== 2. With Sockeye: the router decides")
	if err := d.startSockeye(ctx); err != nil {
		return err
	}
	after, err := d.outcome(ctx, 1)
	if err != nil {
		return err
	}

	say("\n== 3. A slot is added: BMP and IPFIX of a router move together")
	steered := topic.Counts()
	added, err := d.addSlot(ctx, after)
	if err != nil {
		return err
	}

	say("\n== 4. An nfacctd is replaced by another one under traffic: no flow record is lost")
	grown := topic.Counts()
	upgrade, err := d.upgrade(ctx, added)
	if err != nil {
		return err
	}
	replaced := topic.Counts()

	r := chainResult{Share: share{Sockeye: after.CorrelatedShare, KernelHash: before.CorrelatedShare}, Upgrade: upgrade}
	for i, hashed := range before.Routers {
		// All exporters of a router have the source address of its BMP session.
		a := hashed.Address
		r.add(a, periods{
			KernelHash: count(hashed), Steered: count(after.Routers[i]),
			SlotAdded: grown[a].Sub(steered[a]), Upgrade: replaced[a].Sub(grown[a]),
		})
	}
	if err := r.show(); err != nil {
		return err
	}
	if out == "" {
		return nil
	}
	return writeJSON(out, "chain.json", r)
}

func count(r lab.RouterOutcome) kafka.Count {
	return kafka.Count{With: r.Correlated, Without: r.Records - r.Correlated}
}

// add adds the numbers of a router to the result.
func (r *chainResult) add(address netip.Addr, p periods) {
	r.Routers = append(r.Routers, chainRouter{address, p})
	r.All = periods{
		KernelHash: r.All.KernelHash.Add(p.KernelHash), Steered: r.All.Steered.Add(p.Steered),
		SlotAdded: r.All.SlotAdded.Add(p.SlotAdded), Upgrade: r.All.Upgrade.Add(p.Upgrade),
	}
}

// show prints the records with and without communities, and what they show.
func (r *chainResult) show() error {
	say("\nFlow records in Kafka with / without BGP communities:")
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "ROUTER\tWITHOUT SOCKEYE\tWITH SOCKEYE\tWHILE A SLOT IS ADDED\tWHILE AN NFACCTD IS REPLACED")
	row := func(name string, p periods, cell func(kafka.Count) string) {
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\n", name, cell(p.KernelHash), cell(p.Steered), cell(p.SlotAdded), cell(p.Upgrade))
	}
	numbers := func(c kafka.Count) string { return fmt.Sprintf("%d / %d", c.With, c.Without) }
	for _, router := range r.Routers {
		row(router.Address.String(), router.periods, numbers)
	}
	row("all", r.All, numbers)
	row("", r.All, func(c kafka.Count) string { return percent(c.Share()) })
	if err := w.Flush(); err != nil {
		return err
	}
	say("\nFlow records in Kafka that carry BGP communities: %s without Sockeye, %s with it; %d of %d lost in the upgrade.",
		percent(r.Share.KernelHash), percent(r.Share.Sockeye), r.Upgrade.Lost, r.Upgrade.Sent)
	return nil
}
