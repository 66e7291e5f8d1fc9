// SPDX-License-Identifier: Apache-2.0

package store

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"sockeye/internal/fleet/table"
)

// A host asks another one by the key asks/HOST/ID, where ID is random. All hosts watch the keys of the fleet: the other host replaces the
// question by the answer, and the first one removes the key. A key without an answer ends with its lease.
const (
	askKeys = "asks/"
	// askLease is the lease of a question in seconds. Servers of etcd with the default election timeout grant 2 s at least.
	askLease = 2
	// mostAnswer is the size of the largest answer in bytes; a question has mostValue.
	mostAnswer = 64 << 10
	// mostAnswering is the number of questions that a host answers at the same time. Whoever can write to etcd can ask; further questions
	// are not answered.
	mostAnswering = 4
)

// ErrNoAnswers is the error of a store whose hosts cannot be asked.
var ErrNoAnswers = errors.New("hosts of a fleet with a file cannot be asked")

// asked is the value of asks/HOST/ID.
type asked struct {
	Question json.RawMessage `json:"question,omitempty"`
	Answer   json.RawMessage `json:"answer,omitempty"`
}

// questions are those of this host, and those that it answers.
type questions struct {
	open      map[string]chan json.RawMessage // by ID; guarded by mu of Etcd
	answering chan struct{}                   // a semaphore
	answers   sync.WaitGroup
}

// Ask asks another host, and returns the answer. Whoever can write to etcd can answer.
func (e *Etcd) Ask(ctx context.Context, host string, question json.RawMessage) (json.RawMessage, error) {
	named := table.Host{Name: host, Weight: 1}
	if err := named.Check(); err != nil {
		return nil, err
	}
	value, err := json.Marshal(asked{Question: question})
	if err != nil {
		return nil, err
	}
	client, err := e.connect()
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	id, answer := rand.Text(), make(chan json.RawMessage, 1)
	e.mu.Lock()
	e.questions.open[id] = answer
	e.mu.Unlock()
	defer func() {
		e.mu.Lock()
		defer e.mu.Unlock()
		delete(e.questions.open, id)
	}()
	lease, err := client.Grant(ctx, askLease)
	if err != nil {
		return nil, fmt.Errorf("ask host %s: %w", host, err)
	}
	defer func() { _, _ = client.Revoke(context.WithoutCancel(ctx), lease.ID) }() // otherwise the lease expires
	if _, err := client.Put(ctx, e.prefix+askKeys+host+"/"+id, string(value), clientv3.WithLease(lease.ID)); err != nil {
		return nil, fmt.Errorf("ask host %s: %w", host, err)
	}
	select {
	case a := <-answer:
		return a, nil
	case <-ctx.Done():
		return nil, fmt.Errorf("host %s has not answered within %v", host, requestTimeout)
	}
}

// hear looks at a question or an answer. ask is HOST/ID. With registered, this host has its name for itself, and answers.
func (e *Etcd) hear(ctx context.Context, client *clientv3.Client, ask string, kv *mvccpb.KeyValue, registered bool) {
	var a asked
	if len(kv.Value) > mostAnswer || json.Unmarshal(kv.Value, &a) != nil { // or the key was removed
		return
	}
	host, id, _ := strings.Cut(ask, "/")
	switch {
	case a.Answer != nil:
		e.mu.Lock()
		answer := e.questions.open[id]
		delete(e.questions.open, id)
		e.mu.Unlock()
		if answer != nil {
			answer <- a.Answer
		}
		return
	case a.Question == nil, kv.Lease == 0, host != e.config.Host.Name, !registered, e.config.Answer == nil, len(kv.Value) > mostValue:
		return
	}
	select {
	case e.questions.answering <- struct{}{}:
	default:
		return
	}
	e.questions.answers.Go(func() {
		defer func() { <-e.questions.answering }()
		ctx, cancel := context.WithTimeout(ctx, requestTimeout)
		defer cancel()
		answer := e.config.Answer(a.Question)
		value, err := json.Marshal(asked{Answer: answer})
		if answer == nil || err != nil || len(value) > mostAnswer {
			return
		}
		key := string(kv.Key)
		_, _ = client.Txn(ctx).If(clientv3.Compare(clientv3.ModRevision(key), "=", kv.ModRevision)).
			Then(clientv3.OpPut(key, string(value), clientv3.WithIgnoreLease())).Commit() // without an answer, the other host says so
	})
}
