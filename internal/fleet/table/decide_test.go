// SPDX-License-Identifier: Apache-2.0

package table_test

import (
	"fmt"
	"testing"

	"sockeye/internal/fleet/table"
)

// epochs returns the four epochs of a move of bucket 0 from the host "from" to the host "to".
func epochs() []*table.Table {
	const from, to = 0, 2
	base := table.Table{Hosts: []table.Host{{Name: "from", Weight: 1}, {Name: "neither", Weight: 1}, {Name: "to", Weight: 1}}}
	for b := range table.Buckets {
		base.Owner[b], base.Previous[b], base.Next[b] = from, table.None, table.None
	}
	var all []*table.Table
	for epoch := range 4 {
		t := base
		t.Epoch = uint64(epoch + 1)
		switch epoch {
		case 1:
			t.Next[0] = to
		case 2:
			t.Owner[0], t.Previous[0] = to, from
		case 3:
			t.Owner[0] = to
		}
		all = append(all, &t)
	}
	return all
}

// TestDecide follows packets through three hosts, each of which has one of two epochs that follow each other, from each
// host that the routers may choose.
func TestDecide(t *testing.T) {
	hosts := []string{"from", "neither", "to"}
	for before, all := 0, epochs(); before+1 < len(all); before++ {
		for pick := range 1 << len(hosts) {
			tables := make(map[string]*table.Table)
			state := fmt.Sprintf("epoch %d", before+1)
			for i, host := range hosts {
				tables[host] = all[before+pick>>i&1]
				state += fmt.Sprintf(", %s at %d", host, tables[host].Epoch)
			}
			for _, socket := range []string{"", "from", "to"} {
				for _, segment := range []bool{false, true} {
					if !segment && socket != "" || impossible(before, socket) {
						continue
					}
					for _, first := range hosts {
						at, hops, verdict := follow(t, tables, first, segment, socket, "")
						where := fmt.Sprintf("%s, to %s first, segment %v with a socket at %q", state, first, segment, socket)
						switch {
						case segment && socket == "": // reset wherever it ends
							if verdict != table.Serve && verdict != table.Disagree {
								t.Errorf("%s: ends at %s with verdict %v", where, at, verdict)
							}
						case verdict != table.Serve:
							t.Errorf("%s: ends at %s with verdict %v", where, at, verdict)
						case hops > 3:
							t.Errorf("%s: forwarded %d times", where, hops)
						case at == "neither":
							t.Errorf("%s: served by neither owner", where)
						case socket != "" && at != socket:
							t.Errorf("%s: reaches %s", where, at)
						case !segment && at != owner(tables["from"]) && at != owner(tables["to"]):
							t.Errorf("%s: served by %s, which no owner takes for the owner", where, at)
						}
					}
				}
			}
		}
	}
}

// TestDecideLeaving is that a datagram reaches the host of the connection of its device until the former owner has closed the connection. The
// next owner has the table of the flip after that.
func TestDecideLeaving(t *testing.T) {
	all := epochs()
	for pick := range 8 {
		tables := map[string]*table.Table{"from": all[1+pick&1], "neither": all[1+pick>>1&1], "to": all[1]}
		leaving := "from"
		if pick>>2 == 1 {
			leaving = ""
		}
		for _, first := range []string{"from", "neither", "to"} {
			want := "from"
			if leaving == "" && tables["from"] == all[2] {
				want = "to"
			}
			if at, hops, verdict := follow(t, tables, first, false, "", leaving); at != want || verdict != table.Serve || hops > 3 {
				t.Errorf("from at %d, neither at %d, closed: %t, to %s first: ends at %s with verdict %v after %d hops, want %s", tables["from"].Epoch, tables["neither"].Epoch, leaving == "", first, at, verdict, hops, want)
			}
		}
	}
}

// impossible reports whether no host can have a connection yet, or any more: the next owner has none before the move was
// prepared, and the former one none when the move is settled.
func impossible(before int, socket string) bool {
	return before == 0 && socket == "to" || before == 2 && socket == "from"
}

func owner(t *table.Table) string { return t.Hosts[t.Owner[0]].Name }

// follow returns where a packet ends.
func follow(t *testing.T, tables map[string]*table.Table, at string, segment bool, socket, leaving string) (end string, hops int, verdict table.Verdict) {
	from := ""
	for hops = range 10 {
		verdict, to := tables[at].Decide(at, table.Packet{From: from, Segment: segment, Socket: socket == at, Leaving: leaving == at})
		if to == "" {
			return at, hops, verdict
		}
		if to == at {
			t.Fatalf("%s sends a packet to itself", at)
		}
		from, at = at, to
	}
	return at, hops, table.Drop
}

// TestDecideFar is that no packet is forwarded for ever, whatever tables the hosts have.
func TestDecideFar(t *testing.T) {
	all := epochs()
	hosts := []string{"from", "neither", "to"}
	for pick := range 64 {
		tables := make(map[string]*table.Table)
		for i, host := range hosts {
			tables[host] = all[pick>>(2*i)&3]
		}
		for _, first := range hosts {
			for _, segment := range []bool{false, true} {
				if _, hops, verdict := follow(t, tables, first, segment, "", ""); hops > 3 || verdict == table.Drop {
					t.Errorf("hosts at %d, %d and %d: a packet to %s is forwarded %d times", tables["from"].Epoch, tables["neither"].Epoch, tables["to"].Epoch, first, hops)
				}
			}
		}
	}
}

func TestDecideWithoutOwner(t *testing.T) {
	one := *epochs()[0]
	one.Owner[0] = table.None
	if v, to := one.Decide("from", table.Packet{}); v != table.Drop || to != "" {
		t.Errorf("verdict %v to %q, want a drop", v, to)
	}
}
