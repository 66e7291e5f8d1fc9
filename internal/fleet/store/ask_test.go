// SPDX-License-Identifier: Apache-2.0

package store

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"sockeye/internal/testenv"
)

// TestAsk lets hosts ask each other: each answer belongs to its question, a host that does not answer is named, and no key is left.
func TestAsk(t *testing.T) {
	t.Parallel()
	_, endpoints := startCluster(t, 1, 2320)
	var asked atomic.Int32
	answers := func(c *EtcdConfig) {
		c.Answer = func(question json.RawMessage) json.RawMessage {
			asked.Add(1)
			switch string(question) {
			case `"large"`:
				return json.RawMessage(`"` + strings.Repeat("x", mostAnswer) + `"`)
			case `"none"`:
				return nil
			}
			return json.RawMessage(fmt.Sprintf(`{"to":%s,"by":%q}`, question, c.Host.Name))
		}
	}
	a, b := join(t, endpoints, "a"), join(t, endpoints, "b", answers)
	a.awaitAlive("a b")
	for i := range 10 {
		question := fmt.Sprintf(`"question %d"`, i)
		if answer, err := a.Ask(t.Context(), "b", json.RawMessage(question)); err != nil || string(answer) != `{"to":`+question+`,"by":"b"}` {
			t.Errorf("%s, %v", answer, err)
		}
	}
	// A question that was asked of itself, and those that nobody answers.
	if answer, err := b.Ask(t.Context(), "b", json.RawMessage(`1`)); err != nil || string(answer) != `{"to":1,"by":"b"}` {
		t.Errorf("%s, %v", answer, err)
	}
	for _, silent := range []struct{ host, question string }{{"a", `1`}, {"c", `1`}, {"b", `"large"`}, {"b", `"none"`}, {"b", `"` + strings.Repeat("x", mostValue) + `"`}} {
		if answer, err := b.Ask(t.Context(), silent.host, json.RawMessage(silent.question)); err == nil || err.Error() != "host "+silent.host+" has not answered within 2s" {
			t.Errorf("%s, %v", answer, err)
		}
	}
	if _, err := a.Ask(t.Context(), "b/c", json.RawMessage(`1`)); err == nil {
		t.Error("a host with a slash in its name was asked")
	}
	if n := asked.Load(); n != 13 {
		t.Errorf("host b was asked %d times", n)
	}
	// A second host of the name does not answer, and rubbish does no harm.
	second := join(t, endpoints, "b", answers, func(c *EtcdConfig) { c.Instance = "second" })
	second.await("the name to be taken", func(s *Snapshot) bool { return s.Taken })
	client := raw(t, endpoints)
	for key, value := range map[string]string{"b/x": "rubbish", "b": "{}", "": "{}", "b/y": `{"answer":1}`, "b/z": `{"question":{"where":["x"]}}`} {
		if _, err := client.Put(t.Context(), a.prefix+askKeys+key, value); err != nil {
			t.Fatal(err)
		}
	}
	if answer, err := a.Ask(t.Context(), "b", json.RawMessage(`2`)); err != nil || string(answer) != `{"to":2,"by":"b"}` {
		t.Errorf("%s, %v", answer, err)
	}
	if n := asked.Load(); n != 14 {
		t.Errorf("host b was asked %d times", n)
	}
	b.leave()
	second.await("the name", func(s *Snapshot) bool { return !s.Taken })
	if answer, err := a.Ask(t.Context(), "b", json.RawMessage(`3`)); err != nil || string(answer) != `{"to":3,"by":"b"}` {
		t.Errorf("%s, %v", answer, err)
	}
	if _, err := client.Delete(t.Context(), a.prefix+askKeys+"b", clientv3.WithPrefix()); err != nil { // the rubbish
		t.Fatal(err)
	}
	testenv.Within(t, "no question", func() bool {
		left, err := client.Get(t.Context(), a.prefix+askKeys+"b", clientv3.WithPrefix(), clientv3.WithCountOnly())
		return err == nil && left.Count == 0
	})
}

// TestBusyWithQuestions is that a host that answers mostAnswering questions leaves further ones without an answer.
func TestBusyWithQuestions(t *testing.T) {
	t.Parallel()
	_, endpoints := startCluster(t, 1, 2325)
	started, end := make(chan struct{}, 2*mostAnswering), make(chan struct{})
	a := join(t, endpoints, "a")
	join(t, endpoints, "b", func(c *EtcdConfig) {
		c.Answer = func(json.RawMessage) json.RawMessage {
			started <- struct{}{}
			<-end
			return json.RawMessage(`1`)
		}
	})
	a.awaitAlive("a b")
	failed := make(chan error, mostAnswering)
	for range mostAnswering {
		go func() { _, err := a.Ask(t.Context(), "b", json.RawMessage(`1`)); failed <- err }()
	}
	for range mostAnswering {
		<-started
	}
	begun := time.Now()
	if _, err := a.Ask(t.Context(), "b", json.RawMessage(`1`)); err == nil {
		t.Error("a busy host has answered")
	}
	if len(started) > 0 {
		t.Errorf("%d questions more after %v", len(started), time.Since(begun))
	}
	close(end)
	for range mostAnswering {
		if err := <-failed; err != nil {
			t.Logf("a question that waited for the busy host: %v", err)
		}
	}
	if _, err := a.Ask(t.Context(), "b", json.RawMessage(`1`)); err != nil {
		t.Errorf("afterwards: %v", err)
	}
	if _, err := (&File{}).Ask(t.Context(), "b", nil); !errors.Is(err, ErrNoAnswers) {
		t.Errorf("with a file: %v", err)
	}
}
