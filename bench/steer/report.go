// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"fmt"
	"math"
	"strings"
	"time"

	"sockeye/bench/harness"
	"sockeye/internal/chart"
)

type armTitle struct{ name, title string }

type report struct {
	Options options `json:"options"`
	harness.Run

	arms                            []armTitle
	placement, rate, plain, nfacctd *part
	examined                        []armTitle // of traits
	traits                          map[string]traits
	storms                          stormSet
	series                          seriesSet
	guest                           *guest // nil if not measured
	programs                        programSet
}

func receivedRate(m, _ *measurement) float64 { return float64(m.Datagrams) / m.Sent.Elapsed.Seconds() }

func membersCPU(m, _ *measurement) float64 { return m.Members.Seconds() / m.million() }

// balancingCPU returns the CPU time of the processes between routers and members, plus the kernel's CPU time for
// delivery in excess of the plain arm. This excess may be negative. On loopback the kernel delivers packets, and runs
// BPF programs, in the sender's CPU time: the cost of delivery is the difference of the senders' CPU times in the two
// arms.
func balancingCPU(m, plain *measurement) float64 {
	return m.Balance.Seconds()/m.million() + deliveryCPU(m, plain)
}

func deliveryCPU(m, plain *measurement) float64 {
	return perSent(m) - perSent(plain)
}

func perSent(m *measurement) float64 {
	return m.Generator.Seconds() / (float64(m.Sent.Records+m.Sent.Updates) / 1e6)
}

// usage returns a figure of the CPU seconds per million records of the processes of a role: all, or a part of them.
func usage(role string, part func(harness.Usage) time.Duration) func(m, _ *measurement) float64 {
	return func(m, _ *measurement) float64 { return part(m.Usage[role]).Seconds() / m.million() }
}

func user(u harness.Usage) time.Duration   { return u.User }
func system(u harness.Usage) time.Duration { return u.System }

// memory returns a figure of the memory of a role in MB.
func memory(role string) func(m, _ *measurement) float64 {
	return func(m, _ *measurement) float64 { return m.Memory[role] }
}

func collectorsCPU(m, plain *measurement) float64 {
	return membersCPU(m, plain) + balancingCPU(m, plain)
}

// Print implements harness.Report.
func (r *report) Print(p harness.Printf) {
	p("\n%d routers, four members, %d rounds, arms in rotating order; medians [min .. max], ratios computed within each round.\n", r.Options.Routers, r.Options.Rounds)
	p("The rate: %d rounds. The rate and the CPU time with nfacctd of plain sockets and Sockeye: %d rounds.\n", 2*r.Options.Rounds, r.Options.judgedRounds())
	p("Linux %s, %d CPUs for routers, balancing and members together.\n", r.Kernel, r.CPUs)

	printRate(p, r.arms, r.rate, r.placement.together)
	printJudged(p, r.rate, receivedRate)
	printCPU(p, r.arms, r.nfacctd, "four nfacctd", r.Options.Nfacctd, r.Options.Records)
	printJudged(p, r.nfacctd, collectorsCPU)
	printCPU(p, r.arms, r.plain, "four plain receivers", r.Options.Plain, r.Options.Records)
	printUsage(p, r.arms, r.nfacctd, "four nfacctd")
	printUsage(p, r.arms, r.plain, "four plain receivers")
	p("The kernel delivers packets, and runs BPF programs and rules of nftables, in the system time of the senders. Memory excludes socket buffers.\n")
	p("\nBalancing: CPU time of the processes between routers and members, plus the kernel's CPU time for delivery in excess of the plain arm\n")
	p("(measured in the sender, where BPF programs also run; may be negative). CPU time is per cgroup and includes softirqs that interrupt a process.\n")
	printTraits(p, r.examined, r.traits, r.Options.TraitRouters)
	r.storms.print(p, r.arms)
	r.series.print(p, r.arms, &r.Options)
	r.programs.print(p, r.Options.Rounds)
	r.guest.print(p)
	p("\nDuration %s. Other processes used %.0f %% of the consumed CPU time; more than a few percent make the figures uncertain.\n", r.Took, 100*r.others())
}

func printRate(p harness.Printf, arms []armTitle, rate *part, together map[string]float64) {
	p("\nDatagrams per second, four sockets, one flow record per datagram, one sender at full speed\n")
	p("\treceived\tratio to plain\tlost\trouters with both streams at one member\n")
	for _, a := range arms {
		if len(rate.by(a.name, receivedRate)) == 0 {
			continue
		}
		p("%s\t%s\t%s\t%.2f %%\t%.0f %%\n", a.title, harness.SpreadOf(rate.by(a.name, receivedRate)).Format("%.0f"),
			rate.ratio(a.name, "plain", receivedRate).Format("%.3f"), 100*rate.lost[a.name], 100*together[a.name])
	}
}

// printJudged prints the ratios to plain sockets that goals compare.
func printJudged(p harness.Printf, c *part, figure func(m, plain *measurement) float64) {
	for _, g := range goals {
		if n := len(c.by(g.mode, figure)); n > 0 {
			d := c.distribution(g.mode, figure)
			p("Ratio of %s to plain: %.3f, with a confidence of 95 %% %.3f .. %.3f (%d rounds)\n", g.mode, d.Median, d.Low, d.High, n)
		}
	}
}

// printCPU prints the CPU time of the arms for one kind of members.
func printCPU(p harness.Printf, arms []armTitle, c *part, members string, total rates, records int) {
	p("\nCPU seconds per million records, %s: %.0f datagrams of %d flow records and %.0f BMP route updates per second\n", members, total.Datagrams, records, total.Updates)
	p("\tmembers\tbalancing\ttotal\tratio to plain\tratio to proxy\tlost")
	if len(c.routed) > 0 {
		p("\tflow records with BMP communities")
	}
	p("\n")
	for _, a := range arms {
		if len(c.by(a.name, membersCPU)) == 0 {
			continue
		}
		p("%s\t%.3f\t%.3f\t%s\t%s\t%s\t%.2f %%", a.title,
			harness.SpreadOf(c.by(a.name, membersCPU)).Median, harness.SpreadOf(c.by(a.name, balancingCPU)).Median,
			harness.SpreadOf(c.by(a.name, collectorsCPU)).Format("%.3f"),
			c.ratio(a.name, "plain", collectorsCPU).Format("%.2f"), c.ratio(a.name, "proxy", collectorsCPU).Format("%.2f"), 100*c.lost[a.name])
		if len(c.routed) > 0 {
			p("\t%.0f %%", 100*c.routed[a.name])
		}
		p("\n")
	}
}

// roles are the cgroups of an arm, with their names in the report.
var roles = []struct{ group, title string }{{membersGroup, "members"}, {balanceGroup, "balancing"}, {generatorGroup, "senders"}}

// printUsage prints the division of the CPU time into user and system, and the memory.
func printUsage(p harness.Printf, arms []armTitle, c *part, members string) {
	p("\nUser and system CPU seconds per million records, and memory, %s: medians\n\t", members)
	for _, role := range roles {
		p("%s user\tsystem\t", role.title)
	}
	p("members MB\tbalancing MB\tBPF MB\n")
	for _, a := range arms {
		if len(c.by(a.name, membersCPU)) == 0 {
			continue
		}
		p("%s", a.title)
		for _, role := range roles {
			p("\t%.3f\t%.3f", harness.SpreadOf(c.by(a.name, usage(role.group, user))).Median,
				harness.SpreadOf(c.by(a.name, usage(role.group, system))).Median)
		}
		for _, role := range []string{membersGroup, balanceGroup, bpfMemory} {
			p("\t%.1f", harness.SpreadOf(c.by(a.name, memory(role))).Median)
		}
		p("\n")
	}
}

// Figures implements harness.Report.
func (r *report) Figures() any {
	figures := func(p *part) map[string]any {
		out := map[string]any{}
		for _, a := range r.arms {
			if len(p.by(a.name, receivedRate)) == 0 {
				continue
			}
			m := map[string]any{"lost": harness.Number(p.lost[a.name])}
			add := func(key string, s harness.Spread) {
				if !math.IsNaN(s.Median) {
					m[key] = s
				}
			}
			if p == r.rate {
				add("received_per_second", harness.SpreadOf(p.by(a.name, receivedRate)))
				add("received_of_plain", p.ratio(a.name, "plain", receivedRate))
			} else {
				for key, f := range map[string]func(m, plain *measurement) float64{
					"members": membersCPU, "balancing": balancingCPU, "delivery": deliveryCPU, "together": collectorsCPU,
				} {
					add(key+"_cpu_s_per_million", harness.SpreadOf(p.by(a.name, f)))
				}
				for _, role := range roles {
					add(role.title+"_user_cpu_s_per_million", harness.SpreadOf(p.by(a.name, usage(role.group, user))))
					add(role.title+"_system_cpu_s_per_million", harness.SpreadOf(p.by(a.name, usage(role.group, system))))
				}
				add("of_plain", p.ratio(a.name, "plain", collectorsCPU))
				add("of_proxy", p.ratio(a.name, "proxy", collectorsCPU))
				add("of_proxy_buffered", p.ratio(a.name, "proxy-buffered", collectorsCPU))
			}
			if p == r.nfacctd {
				m["share_with_routes"] = harness.Number(p.routed[a.name])
			}
			out[a.name] = m
		}
		return map[string]any{"arms": out, "runs": p.runs}
	}
	ns := map[string]*float64{}
	for _, name := range steered {
		ns[name] = harness.Number(float64(r.programs.find(name).distribution("cold").Median))
	}
	against := func(to string) map[string]*float64 {
		return map[string]*float64{
			"nfacctd": harness.Number(r.nfacctd.ratio("reuseport", to, collectorsCPU).Median),
			"plain":   harness.Number(r.plain.ratio("reuseport", to, collectorsCPU).Median),
		}
	}
	return map[string]any{
		"ns_per_datagram": ns,
		"memory_mb":       r.memoryByArm(),
		"ns_above_empty":  r.programs.aboveEmpty(),
		"rate_vs_plain": map[string]*float64{
			"reuseport": harness.Number(r.rate.ratio("reuseport", "plain", receivedRate).Median),
			"lookup":    harness.Number(r.rate.ratio("lookup", "plain", receivedRate).Median),
		},
		"storm":        r.storms.figures(),
		"peers":        r.peers(),
		"cpu_vs_proxy": against("proxy"),
		"cpu_vs_plain": against("plain"),
		"detail": map[string]any{
			"run": r, "share_of_cpu_of_others": harness.Number(r.others()), "programs_ns": r.programs.figures(), "both_streams_in_one_member": r.placement.together,
			"virtual_machine": r.guest, "series": r.series, "rate": figures(r.rate), "cpu_nfacctd": figures(r.nfacctd), "cpu_plain": figures(r.plain),
		},
	}
}

// others returns the share of other processes in the machine's CPU time during the measurements.
func (r *report) others() float64 {
	var all, ours time.Duration
	for _, p := range []*part{r.rate, r.plain, r.nfacctd} {
		for _, m := range p.runs {
			all += m.Machine
			ours += m.Members + m.Balance + m.Generator
		}
	}
	return max(0, 1-ours.Seconds()/all.Seconds())
}

// peers returns the figures of all peers. Those of IPVS are from the virtual machine if this kernel has no IPVS; its other
// arms are in detail.
func (r *report) peers() map[string]any {
	out := peerFigures(r.examined, r.traits, r.rate, r.nfacctd, r.plain)
	if r.guest != nil {
		for name, figures := range r.guest.Peers {
			if strings.HasPrefix(name, "ipvs") {
				out[name] = map[string]any{"kernel": r.guest.Run.Kernel, "emulated": true, "figures": figures}
			}
		}
	}
	return out
}

// memoryByArm returns the medians of the memory with nfacctd as members.
func (r *report) memoryByArm() map[string]map[string]*float64 {
	out := map[string]map[string]*float64{}
	for _, a := range r.arms {
		out[a.name] = map[string]*float64{}
		for key, role := range map[string]string{"members": membersGroup, "balancing": balanceGroup, "bpf": bpfMemory} {
			out[a.name][key] = harness.Number(harness.SpreadOf(r.nfacctd.by(a.name, memory(role))).Median)
		}
	}
	return out
}

// Charts implements harness.Report.
func (r *report) Charts() map[string]chart.Chart {
	charts := map[string]chart.Chart{"": r.chart()}
	if len(r.series) > 0 {
		charts["-series"] = r.series.chart(r.arms, &r.Options)
	}
	return charts
}

// chart draws the CPU comparison: a panel for each kind of members, a bar for each arm.
func (r *report) chart() chart.Chart {
	drawing := chart.Chart{
		Title:  "CPU seconds per million records",
		Legend: []string{"members", "balancing: processes and kernel delivery"},
	}
	for _, panel := range []struct {
		title string
		part  *part
	}{{"four nfacctd", r.nfacctd}, {"four plain receivers", r.plain}} {
		p := chart.Panel{Title: panel.title}
		for _, a := range r.arms {
			rounds := panel.part.by(a.name, collectorsCPU)
			if len(rounds) == 0 { // an arm of the storm alone
				continue
			}
			total := harness.SpreadOf(rounds).Median
			members := min(total, harness.SpreadOf(panel.part.by(a.name, membersCPU)).Median)
			note := fmt.Sprintf("%.3f", total)
			if of := panel.part.ratio(a.name, "proxy", collectorsCPU).Median; !math.IsNaN(of) && a.name != "proxy" {
				note += fmt.Sprintf(" (%.2f times proxy)", of)
			}
			p.Bars = append(p.Bars, chart.Bar{Label: a.title, Note: note, Parts: []float64{members, total - members}})
		}
		drawing.Panels = append(drawing.Panels, p)
	}
	return drawing
}

// ratio returns the spread of the ratio of two arms, computed within each round.
func (p *part) ratio(arm, to string, figure func(m, plain *measurement) float64) harness.Spread {
	a, b := p.by(arm, figure), p.by(to, figure)
	var out []float64
	for i := range min(len(a), len(b)) {
		out = append(out, a[i]/b[i])
	}
	return harness.SpreadOf(out)
}

// by returns a figure of an arm for each round.
func (p *part) by(arm string, figure func(m, plain *measurement) float64) (out []float64) {
	for i := range p.runs {
		m := &p.runs[i]
		if m.Arm != arm {
			continue
		}
		for j := range p.runs {
			if plain := &p.runs[j]; plain.Arm == "plain" && plain.Round == m.Round {
				out = append(out, figure(m, plain))
			}
		}
	}
	return out
}
