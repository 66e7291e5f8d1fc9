// SPDX-License-Identifier: Apache-2.0

//go:build !vm

package measure

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"
	"unicode"

	"sockeye/internal/config"
)

func TestLabel(t *testing.T) {
	for want, g := range map[string]Group{
		"replies": {Rule: "replies", Protocol: config.TCP},
		"replies 192.0.2.0/24 :1790 udp service=telemetry cgroup=a.slice/b tune_rule=far arm=control": {
			Rule: "replies", Protocol: config.UDP, Remote: netip.MustParsePrefix("192.0.2.0/24"), Port: 1790,
			Service: "telemetry", Cgroup: "a.slice/b", TuneRule: "far", Arm: "control",
		},
		"/x 2001:db8::/48":              {Rule: "/x", Protocol: config.TCP, Remote: netip.MustParsePrefix("2001:db8::/48")},
		"/x 2001:db8::1":                {Rule: "/x", Protocol: config.TCP, Remote: netip.MustParsePrefix("2001:db8::1/128")},
		"replies other":                 {Rule: "replies", Other: true},
		"other":                         {Other: true},
		"all":                           {},
		`"two words" cgroup="a\u202eb"`: {Rule: "two words", Protocol: config.TCP, Cgroup: "a\u202eb"},
	} {
		if got := g.Label(); got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	}
}

// drawGroup draws from a few groups with confusing names.
func drawGroup(r *rand.Rand) Group {
	name := func(names ...string) string { return names[r.IntN(len(names))] }
	odd := []string{"none", "x", "x arm=control", `x" arm="control`, ":80", "other", "udp", "10.0.0.1", "x\ty", "x\x00", "x\xff"}
	g := Group{Rule: name(odd...)}
	if r.IntN(5) == 0 {
		g.Other = true
		return g
	}
	g.Protocol = config.Protocol(name("tcp", "udp"))
	if r.IntN(2) == 0 {
		g.Remote = netip.MustParsePrefix(name("10.0.0.0/8", "10.0.0.0/24", "10.0.0.1/32", "::/64", "::/128"))
	}
	g.Port = []uint16{0, 80, 443}[r.IntN(3)]
	for _, field := range []*string{&g.Service, &g.Cgroup, &g.TuneRule} {
		if r.IntN(2) == 0 {
			*field = name(odd...)
		}
	}
	g.Arm = name("", "none", "treated", "control")
	return g
}

func TestLabelsDiffer(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	labels := map[string]Group{}
	for range 100000 {
		g := drawGroup(r)
		label := g.Label()
		if other, ok := labels[label]; ok && other != g {
			t.Fatalf("%+v and %+v are both %s", g, other, label)
		}
		labels[label] = g
		if strings.ContainsFunc(label, func(r rune) bool { return r != ' ' && !unicode.IsPrint(r) }) {
			t.Fatalf("%+v is not printable: %q", g, label)
		}
	}
}

func TestMatchGroup(t *testing.T) {
	g := Group{
		Rule: "replies", Protocol: config.TCP, Remote: netip.MustParsePrefix("192.0.2.0/24"), Port: 1790,
		Service: "telemetry", Cgroup: "telemetry.slice/nfacctd", TuneRule: "far", Arm: "treated",
	}
	six := Group{Rule: "six", Protocol: config.UDP, Remote: netip.MustParsePrefix("2001:db8::/48"), Service: "none", Arm: "none"}
	other := Group{Rule: "replies", Other: true}
	for selector, want := range map[string][3]bool{
		"":                                 {true, true, true},
		"rule=replies":                     {true, false, true},
		"rule=reply":                       {false, false, false},
		"protocol=tcp":                     {true, false, false},
		"protocol=udp":                     {false, true, false},
		"remote=192.0.2.0/24":              {true, false, false},
		"remote=192.0.2.9/24":              {true, false, false},
		"remote=192.0.0.0/16":              {true, false, false},
		"remote=192.0.2.77":                {true, false, false},
		"remote=::ffff:192.0.2.77":         {true, false, false},
		"remote=::ffff:192.0.2.0/120":      {true, false, false},
		"remote=192.0.3.1":                 {false, false, false},
		"remote=2001:db8::1":               {false, true, false},
		"remote=0.0.0.0/0":                 {true, false, false},
		"remote=::/0":                      {false, true, false},
		"port=1790":                        {true, false, false},
		"port=179":                         {false, false, false},
		"service=telemetry":                {true, false, false},
		"service=none":                     {false, true, false},
		"service=":                         {false, false, true},
		"cgroup=/telemetry.slice/nfacctd":  {true, false, false},
		"cgroup=telemetry.slice/nfacctd/":  {true, false, false},
		"cgroup=telemetry.slice":           {false, false, false},
		"tune_rule=far":                    {true, false, false},
		"arm=treated":                      {true, false, false},
		"arm=control":                      {false, false, false},
		"arm=none":                         {false, true, false},
		"other=true":                       {false, false, true},
		"other=false":                      {true, true, false},
		"rule=replies,other=false":         {true, false, false},
		"rule=replies, arm=treated,port=1": {false, false, false},
	} {
		for i, group := range []Group{g, six, other} {
			got, err := MatchGroup(selector, group)
			if err != nil || got != want[i] {
				t.Errorf("%q and %s: got %v, %v, want %v", selector, group.Label(), got, err, want[i])
			}
		}
	}
}

func TestSelectorRefusals(t *testing.T) {
	keys := "keys: rule, protocol, remote, port, service, cgroup, tune_rule, arm, other"
	for selector, want := range map[string][2]string{
		"replies":                  {`"replies" is not key=value`, keys},
		"rule=a,":                  {`"" is not key=value`, keys},
		"protoco=tcp":              {`unknown key "protoco"`, "did you mean protocol?"},
		"Rule=a":                   {`unknown key "Rule"`, "did you mean rule?"},
		"destination=192.0.2.1":    {`unknown key "destination"`, keys},
		"protocol=sctp":            {`protocol cannot be "sctp"`, "use one of tcp, udp"},
		"remote=192.0.2.0/33":      {`remote cannot be "192.0.2.0/33"`, "use a prefix such as 192.0.2.0/24, or an address"},
		"remote=":                  {`remote cannot be ""`, "use a prefix such as 192.0.2.0/24, or an address"},
		"remote=fe80::1%eth0":      {`remote cannot be "fe80::1%eth0"`, "use a prefix such as 192.0.2.0/24, or an address"},
		"remote=::ffff:0.0.0.0/90": {`remote cannot be "::ffff:0.0.0.0/90"`, "use IPv4 prefixes such as 192.0.2.0/24"},
		"port=0":                   {`port cannot be "0"`, "use a number from 1 to 65535"},
		"port=65536":               {`port cannot be "65536"`, "use a number from 1 to 65535"},
		"port=http":                {`port cannot be "http"`, "use a number from 1 to 65535"},
		"arm=both":                 {`arm cannot be "both"`, "use one of treated, control, none"},
		"other=yes":                {`other cannot be "yes"`, "use true or false"},
		"arm=treated,arm=control":  {"arm is given twice", "a group must meet all conditions: select groups one by one, or by a shorter prefix"},
	} {
		_, err := MatchGroup(selector, Group{})
		var refused *SelectorError
		if !errors.As(err, &refused) || refused.Message != want[0] || refused.Hint != want[1] {
			t.Errorf("%q: got %v, want %s and %s", selector, err, want[0], want[1])
			continue
		}
		if got, want := err.Error(), fmt.Sprintf("selector %q: %s\n  hint: %s", selector, want[0], want[1]); got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	}
}

func FuzzSelector(f *testing.F) {
	for _, s := range []string{"", "rule=a", "remote=192.0.2.0/24,port=1", "remote=::ffff:1.2.3.4/96", ",", "=", "other=true,arm=", "rule=a=b"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		matches, err := MatchGroup(s, Group{Rule: "a", Remote: netip.MustParsePrefix("192.0.2.0/24"), Port: 1})
		if err != nil && (matches || !strings.HasPrefix(err.Error(), "selector ")) {
			t.Errorf("%q: %v, %v", s, matches, err)
		}
	})
}
