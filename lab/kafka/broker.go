// SPDX-License-Identifier: Apache-2.0

// Package kafka runs an Apache Kafka broker in a lab (one node, KRaft), and reads the flow records that collectors
// write into its topics.
package kafka

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"

	"sockeye/lab"
)

const (
	clientPort     = 9092
	controllerPort = 9093
	// clusterID is a fixed cluster id: each broker of a lab is a cluster of its own with a new directory.
	clusterID = "c29ja2V5ZS1sYWItLS0tLQ"
)

// properties is the configuration of a broker: its address, the ports and its directory.
const properties = `process.roles=broker,controller
node.id=1
controller.quorum.voters=1@%[1]s:%[3]d
listeners=CLIENT://%[1]s:%[2]d,CONTROLLER://%[1]s:%[3]d
advertised.listeners=CLIENT://%[1]s:%[2]d
listener.security.protocol.map=CLIENT:PLAINTEXT,CONTROLLER:PLAINTEXT
inter.broker.listener.name=CLIENT
controller.listener.names=CONTROLLER
log.dirs=%[4]s
auto.create.topics.enable=false
offsets.topic.replication.factor=1
num.network.threads=1
num.io.threads=2
`

// Broker is a running broker.
type Broker struct {
	*lab.Process
	Address netip.AddrPort
	lab     *lab.Lab
	ns      *lab.Namespace
}

// Start formats the storage of a new broker, and starts it in a namespace of its own with an address in the network of
// the routers (10.77.0.201 to .253). jars are the files of Fetch. The lab terminates the broker and removes its files.
// The broker accepts connections after some seconds, see OpenTopic.
func Start(ctx context.Context, l *lab.Lab, address netip.Addr, jars []string) (*Broker, error) {
	java, err := find("java", "default-jre-headless")
	if err != nil {
		return nil, err
	}
	n, err := l.Attach("kafka", netip.PrefixFrom(address, 24))
	if err != nil {
		return nil, err
	}
	dir := filepath.Join(l.Dir(), "kafka")
	if err := os.Mkdir(dir, 0o755); err != nil {
		return nil, fmt.Errorf("start kafka: %w", err)
	}
	config := filepath.Join(dir, "server.properties")
	text := fmt.Sprintf(properties, address, clientPort, controllerPort, filepath.Join(dir, "data"))
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		return nil, fmt.Errorf("start kafka: %w", err)
	}
	run := func(name string, args ...string) (*lab.Process, error) {
		p := n.Command(ctx, append([]string{
			// The lab has two CPUs and a short life: the compiler for long-running programs only delays the start.
			java, "-Xms64m", "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1",
			"-XX:-UsePerfData", "-Djava.io.tmpdir=" + dir, // no files outside of the lab's directory
			"-Dorg.slf4j.simpleLogger.defaultLogLevel=warn", "-Dorg.slf4j.simpleLogger.showDateTime=true",
			"-cp", strings.Join(jars, string(os.PathListSeparator)),
		}, args...)...)
		p.Name = name
		return p, p.Start()
	}
	format, err := run("kafka-format", "kafka.tools.StorageTool", "format", "--cluster-id", clusterID, "--config", config)
	if err != nil {
		return nil, err
	}
	if err := format.Wait(); err != nil {
		if ctx.Err() != nil {
			return nil, fmt.Errorf("start kafka: %w", context.Cause(ctx))
		}
		return nil, fmt.Errorf("start kafka: %w", format.Err())
	}
	p, err := run("kafka", "kafka.Kafka", config)
	if err != nil {
		return nil, err
	}
	return &Broker{Process: p, Address: netip.AddrPortFrom(address, clientPort), lab: l, ns: n}, nil
}
