// SPDX-License-Identifier: Apache-2.0

package kafka

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"sockeye/lab"
)

const (
	dialTimeout    = 5 * time.Second
	requestTimeout = 10 * time.Second
	// fetchWait is the maximum time that the broker waits for records before it replies to a fetch.
	fetchWait = 100 * time.Millisecond
)

// Topic is a topic with flow records as JSON, one per message. The key of a message is the name of the collector's
// records. A Topic reads all messages from the first one. It is a lab.Output, and safe for concurrent use.
type Topic struct {
	name   string
	broker netip.AddrPort
	failed func() error // why the broker has exited; nil while it runs
	client *kgo.Client

	mu      sync.Mutex
	records map[string][]lab.Record // by key
	counts  map[netip.Addr]Count
	err     error // of the reader
}

// Count is a number of flow records.
type Count struct {
	With    int `json:"with_communities"`    // records with communities or an AS path from BMP
	Without int `json:"without_communities"` // records that lack them
}

// Add returns the sum of two numbers.
func (c Count) Add(d Count) Count { return Count{c.With + d.With, c.Without + d.Without} }

// Sub returns the records that were counted after d.
func (c Count) Sub(d Count) Count { return Count{c.With - d.With, c.Without - d.Without} }

// Share returns the share of the records with communities, 0 to 1; 0 without records.
func (c Count) Share() float64 {
	if c.With+c.Without == 0 {
		return 0
	}
	return float64(c.With) / float64(c.With+c.Without)
}

// OpenTopic waits until the broker accepts connections, creates a topic with one partition, and starts to read it. The
// lab closes the topic.
func (b *Broker) OpenTopic(ctx context.Context, name string) (*Topic, error) {
	client, err := kgo.NewClient(
		kgo.SeedBrokers(b.Address.String()), kgo.Dialer(b.dial),
		kgo.ConsumeTopics(name), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()), kgo.FetchMaxWait(fetchWait),
	)
	if err != nil {
		return nil, fmt.Errorf("open topic %s: %w", name, err)
	}
	t := newTopic(name, b.Address, b.Err)
	t.client = client
	err = b.lab.WaitFor(ctx, "kafka", func() (bool, error) {
		if err := b.Err(); err != nil {
			return false, err
		}
		bounded, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		return client.Ping(bounded) == nil, nil
	})
	if err == nil {
		err = t.create(ctx)
	}
	if err != nil {
		client.Close()
		return nil, fmt.Errorf("open topic %s: %w", name, err)
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		t.read()
	}()
	b.lab.AtClose(func() error {
		client.Close()
		<-ended
		return nil
	})
	return t, nil
}

func newTopic(name string, broker netip.AddrPort, failed func() error) *Topic {
	return &Topic{
		name: name, broker: broker, failed: failed,
		records: make(map[string][]lab.Record), counts: make(map[netip.Addr]Count),
	}
}

// dial connects from the namespace of the broker.
func (b *Broker) dial(ctx context.Context, network, address string) (c net.Conn, err error) {
	err = b.ns.Do(func() (err error) {
		c, err = (&net.Dialer{Timeout: dialTimeout}).DialContext(ctx, network, address)
		return err
	})
	return c, err
}

// create creates the topic. nfacctd's first records are lost if its own request creates it.
func (t *Topic) create(ctx context.Context) error {
	request := kmsg.NewPtrCreateTopicsRequest()
	request.TimeoutMillis = int32(requestTimeout.Milliseconds())
	topic := kmsg.NewCreateTopicsRequestTopic()
	topic.Topic, topic.NumPartitions, topic.ReplicationFactor = t.name, 1, 1
	request.Topics = append(request.Topics, topic)
	bounded, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	response, err := request.RequestWith(bounded, t.client)
	if err != nil {
		return fmt.Errorf("create: %w", err)
	}
	for _, r := range response.Topics {
		if err := kerr.ErrorForCode(r.ErrorCode); err != nil {
			return fmt.Errorf("create: %w", err)
		}
	}
	return nil
}

// read reads until the client is closed or the broker reports an error.
func (t *Topic) read() {
	for {
		fetches := t.client.PollFetches(context.Background())
		if fetches.IsClientClosed() {
			return
		}
		err := fetches.Err()
		fetches.EachRecord(func(r *kgo.Record) { err = errors.Join(err, t.add(string(r.Key), r.Value)) })
		if err != nil {
			t.mu.Lock()
			t.err = fmt.Errorf("read topic %s: %w", t.name, err)
			t.mu.Unlock()
			return
		}
	}
}

// add counts and keeps a message.
func (t *Topic) add(key string, value []byte) error {
	r, err := lab.ParseRecord(value)
	if err != nil {
		return fmt.Errorf("message of %s: %w", key, err)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.records[key] = append(t.records[key], r)
	c := t.counts[r.Peer]
	if r.Correlated() {
		c.With++
	} else {
		c.Without++
	}
	t.counts[r.Peer] = c
	return nil
}

// Counts returns the numbers of records that were read, by address of the exporting router.
func (t *Topic) Counts() map[netip.Addr]Count {
	t.mu.Lock()
	defer t.mu.Unlock()
	return maps.Clone(t.counts)
}

// Config implements lab.Output by nfacctd's plugin kafka.
func (t *Topic) Config(name string, refresh int) []string {
	return []string{
		"plugins: kafka",
		"kafka_output: json",
		fmt.Sprintf("kafka_broker_host: %s", t.broker.Addr()),
		fmt.Sprintf("kafka_broker_port: %d", t.broker.Port()),
		"kafka_topic: " + t.name,
		"kafka_partition_key: " + name,
		fmt.Sprintf("kafka_refresh_time: %d", refresh),
	}
}

// Records implements lab.Output. It returns an error if the broker has exited.
func (t *Topic) Records(name string, from int64) ([]lab.Record, int64, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	all := t.records[name]
	return all[from:], int64(len(all)), errors.Join(t.err, t.failed())
}

// End implements lab.Output.
func (t *Topic) End(name string) (int64, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return int64(len(t.records[name])), errors.Join(t.err, t.failed())
}
