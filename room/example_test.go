// SPDX-License-Identifier: Apache-2.0

package room_test

import (
	"fmt"
	"log"
	"net"

	"sockeye/room"
)

// Example writes no more data than the socket accepts, so that the write does not block.
func Example() {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	defer listener.Close()
	dialed, err := net.Dial("tcp", listener.Addr().String())
	if err != nil {
		log.Fatal(err)
	}
	defer dialed.Close()
	conn := dialed.(*net.TCPConn)

	kernel, err := room.Calibrate() // once per program
	if err != nil {
		log.Fatal(err)
	}
	var tracker room.Tracker // one per connection
	paced, err := room.PacedConn(conn)
	if err != nil {
		log.Fatal(err)
	}
	tracker.Paced(paced)

	data := make([]byte, 1<<20)
	s, err := room.ReadSnapshotConn(conn)
	if err != nil {
		log.Fatal(err)
	}
	e := kernel.Estimate(s, 0, &tracker) // 0: one large write
	offered := min(e.Safe, len(data))
	n, err := conn.Write(data[:offered])
	if err != nil {
		log.Fatal(err)
	}
	tracker.Wrote(n, offered)
	if s.Arming() {
		if _, err := room.ArmConn(conn); err != nil {
			log.Fatal(err)
		}
	}
	fmt.Println(n > 0, n == offered)
	// Output: true true
}
