// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"sockeye/internal/api"
	"sockeye/internal/fleet/store"
	"sockeye/internal/placement"
)

// wherever are services that have every device in slot 1, and say that host b serves it.
type wherever struct{ services }

func (w *wherever) Where(addresses []netip.Addr) (list []api.WhereStatus) {
	ready := true
	for _, a := range addresses {
		list = append(list, api.WhereStatus{Service: "telemetry", Address: a, Slot: 1, Bucket: 7, Host: "b", Ready: &ready})
	}
	return list
}

// asking is a store in which one host answers.
type asking struct {
	store.Store
	questions []int // numbers of addresses
	answer    func(asked json.RawMessage) json.RawMessage
}

func (a *asking) Ask(_ context.Context, host string, asked json.RawMessage) (json.RawMessage, error) {
	var q question
	if err := json.Unmarshal(asked, &q); err != nil {
		return nil, err
	}
	switch {
	case a.answer == nil:
		return nil, store.ErrNoAnswers
	case host == "c":
		return nil, errors.New("host c is silent")
	}
	a.questions = append(a.questions, len(q.Where))
	return a.answer(asked), nil
}

// TestWhere is that a host asks the hosts of devices for their slots, at most a number of addresses at once, and believes a host only what it
// says about its own devices.
func TestWhere(t *testing.T) {
	at := func(host string) *participation {
		p := &participation{settings: &settings{host: host}, services: new(wherever), table: snapshot(7).Table}
		var err error
		p.mapping, err = placement.NewMapping(1, 0, 7, nil)
		check(t, err)
		return p
	}
	a, b := at("a"), at("b")
	hosts := &asking{answer: b.answer}
	a.store = hosts
	var addresses []netip.Addr
	for i := range 3 * mostAskedAddresses {
		addresses = append(addresses, netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}), netip.MustParseAddr(fmt.Sprintf("2001:db8::%x%%eth0", i)))
	}
	served := make(map[string]int)
	for host, list := range a.elsewhere(addresses) {
		served[host] = len(list)
	}
	if served["a"] > 0 || served["b"] < 50 || served["c"] < 50 {
		t.Fatalf("%v", served)
	}
	told := a.where(t.Context(), addresses)
	if len(told.Slots) != served["b"] || len(told.Silent) != 1 || told.Silent["c"] != "host c is silent" {
		t.Errorf("%d slots, want %d; silent are %v", len(told.Slots), served["b"], told.Silent)
	}
	asked := 0
	for _, n := range hosts.questions {
		asked += n
		if n > mostAskedAddresses {
			t.Errorf("%d addresses in one question", n)
		}
	}
	if asked != served["b"] {
		t.Errorf("%d addresses were asked for, want %d", asked, served["b"])
	}
	for _, slot := range told.Slots {
		if slot.Host != "b" || slot.Slot != 1 || slot.Bucket != 7 || slot.Ready == nil {
			t.Errorf("%+v", slot)
		}
	}

	// A question and an answer of the largest size fit into the store.
	longest := netip.MustParseAddr("1111:2222:3333:4444:5555:6666:7777:8888")
	large, err := json.Marshal(question{Where: make([]netip.Addr, mostAskedAddresses)})
	check(t, err)
	if size := len(large) + mostAskedAddresses*len(longest.String()); size > 4000 {
		t.Errorf("a question has up to %d bytes", size)
	}
	for answer, want := range map[string]string{
		`[{"service":"telemetry","address":"10.0.0.1","host":"c","ready":true}]`: "", // of another host
		`[{"service":"telemetry","address":"10.0.0.1","host":"b"}]`:              "", // not served there
		`[{"service":"telemetry","address":"10.9.9.9","host":"b","ready":true}]`: "", // not asked for
		`null`: "",
		`{}`:   "host b has answered something else",
		`[1]`:  "host b has answered something else",
	} {
		hosts.answer = func(json.RawMessage) json.RawMessage { return json.RawMessage(answer) }
		told := a.where(t.Context(), addresses)
		if len(told.Slots) > 0 || told.Silent["b"] != want {
			t.Errorf("%s: %+v", answer, told)
		}
	}
	// Hosts of a file are not asked, and without a table there is none.
	hosts.answer = nil
	if told := a.where(t.Context(), addresses); len(told.Slots)+len(told.Silent) > 0 {
		t.Errorf("with a file: %+v", told)
	}
	a.table = nil
	if told := a.where(t.Context(), addresses); len(told.Slots)+len(told.Silent) > 0 {
		t.Errorf("without a table: %+v", told)
	}
	for _, asked := range []string{``, `1`, `{"where":["x"]}`, `{"where":[""]}`, `{"where":[` + strings.Repeat(`"10.0.0.1",`, mostAskedAddresses) + `"10.0.0.1"]}`} {
		if answer := b.answer(json.RawMessage(asked)); answer != nil {
			t.Errorf("%s: %s", asked, answer)
		}
	}
	// A host answers for its own devices alone.
	if answer := a.answer(json.RawMessage(`{"where":["10.0.0.1"]}`)); string(answer) != `[]` {
		t.Errorf("%s", answer)
	}
}
