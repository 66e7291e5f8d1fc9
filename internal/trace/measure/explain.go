// SPDX-License-Identifier: Apache-2.0

package measure

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"sockeye/internal/config"
	"sockeye/internal/format"
)

// Cause is the main cause of a message's latency.
type Cause string

// The causes.
const (
	CauseCwnd           Cause = "congestion window"
	CauseWindow         Cause = "receive window" // window of the peer
	CausePacing         Cause = "pacing"
	CauseSendBuffer     Cause = "send buffer"
	CauseNagle          Cause = "Nagle's algorithm"
	CauseCork           Cause = "cork"
	CauseLocalQueue     Cause = "local queue" // queueing discipline, driver or NIC of this host
	CauseLocalDrop      Cause = "local drop"  // dropped there
	CauseLoss           Cause = "loss"        // loss and retransmission of its own segments, or of earlier ones that delayed its acknowledgement
	CauseLate           Cause = "late acknowledgement"
	CauseDistance       Cause = "distance"
	CauseUnacknowledged Cause = "unacknowledged"
	CauseNothing        Cause = "nothing unusual"
	CauseUnknown        Cause = "unknown"
)

// Explanation explains the latency of a message.
type Explanation struct {
	// Stage is the longest stage. Of the stage network, only the time above the minimum RTT of the connection counts,
	// unless no stage then has a quarter of the total. Total means that the timestamps of the longest part are missing.
	// NIC replaces network, which contains it, if it has half of that time.
	Stage config.Stage `json:"stage"`
	Cause Cause        `json:"cause"`
	// Text is one sentence without a full stop.
	Text string `json:"text"`
	// Details are further sentences: all stages, the state of the connection, other long stages, and evidence for or
	// against the cause.
	Details []string `json:"details"`
}

const (
	// slight is the time below which no cause is given, because normal load of the host explains it.
	slight = time.Millisecond

	// coarse is the longest kernel tick (CONFIG_HZ=100). A time that the kernel counts in ticks is not evidence up to
	// this value, because any short time may count as one tick.
	coarse = 10 * time.Millisecond

	// ackDelay is the maximum delay of an acknowledgement of a single segment: 500 ms (RFC 9293, 3.8.6.3).
	ackDelay = 500 * time.Millisecond
)

var unmeasured = map[Outcome]string{
	Overwritten: "a later message in the same packet replaced its timestamp request before transmission",
	Missed:      "it was acknowledged without timestamps",
	Parted:      "TCP merged and split packets, and its last byte was sent in a packet without its key",
	Full:        "too many messages of the connection were in flight",
	Application: "the application uses timestamps itself",
	Refused:     "the kernel refused the timestamp request",
}

// Explain explains the latency of a message from its stages and from the state of its connection when the message was
// sent. Later events are only known from retransmissions and from the limited times that the kernel counts.
func Explain(s *Sample) Explanation {
	switch s.Outcome {
	case Unacknowledged:
		return s.explainGivenUp()
	case Overwritten, Missed, Parted, Full, Application, Refused:
		return Explanation{Stage: Total, Cause: CauseUnknown, Text: "it was not measured: " + unmeasured[s.Outcome], Details: s.State()}
	}
	legs := s.Legs()
	worst, most := 0, 0
	for i, l := range legs {
		if l.beyond() > legs[worst].beyond() {
			worst = i
		}
		if l.Took > legs[most].Took {
			most = i
		}
	}
	total := s.total()
	if legs[worst].beyond() < total/4 {
		worst = most
	}
	l := legs[worst]
	found := l.why(s, l.Took)
	e := Explanation{
		Stage: l.Stage, Cause: found.cause,
		Text:    fmt.Sprintf("%s of %s %s: %s", FormatDuration(l.Took), FormatDuration(total), l.place, found.text),
		Details: append(s.State(), found.details...),
	}
	if found.nic {
		e.Stage = config.StageNIC
	}
	for i, other := range legs {
		if i != worst && other.Took > slight && other.beyond() >= total/4 {
			e.Details = append(e.Details, fmt.Sprintf("besides, %s %s: %s", FormatDuration(other.Took), other.place, other.why(s, other.Took).text))
		}
	}
	return e
}

// finding is the cause of the latency of a leg.
type finding struct {
	cause   Cause
	text    string
	details []string
	nic     bool // the time was in the NIC
}

// Leg is a part of a message's path.
type Leg struct {
	Stage    config.Stage
	Name     string // name in a list
	place    string // name in a sentence
	Took     time.Duration
	distance time.Duration // propagation time
	why      func(s *Sample, took time.Duration) finding
}

func (l Leg) beyond() time.Duration { return l.Took - l.distance }

// explainGivenUp is Explain for an unacknowledged message.
func (s *Sample) explainGivenUp() Explanation {
	e := Explanation{Cause: CauseUnacknowledged, Details: s.State()}
	total := s.total()
	_, queued := s.Stages[config.StageStack]
	_, driven := s.Stages[config.StageQdisc]
	e.Text = fmt.Sprintf("unacknowledged after %s: the connection closed before the acknowledgement, ", FormatDuration(total))
	switch {
	case driven:
		e.Stage = config.StageNetwork
		e.Text += "after the driver received it"
	case queued:
		e.Stage = Total
		e.Text += "after transmission; no timestamp of the driver"
	default:
		e.Stage = config.StageStack
		e.Text += "before transmission"
		if held := s.whyStack(total - s.Stages[config.StageSend]); held.cause != CauseUnknown && held.cause != CauseNothing {
			e.Text += ": " + held.text
			e.Details = append(e.Details, held.details...)
		}
	}
	if s.Repeats > 0 {
		e.Text += "; its last segment was retransmitted " + times(uint64(s.Repeats))
	} else if s.Retransmits > 0 {
		e.Text += "; segments of the connection were retransmitted " + times(uint64(s.Retransmits))
	}
	return e
}

// total returns the latency of the message, or the known part of it.
func (s *Sample) total() time.Duration {
	if total, ok := s.Stages[Total]; ok {
		return max(total, 0)
	}
	var total time.Duration
	for _, l := range s.Legs() {
		total += l.Took
	}
	return total
}

// otherRetransmits returns the number of retransmissions of segments other than the last one of the message.
func (s *Sample) otherRetransmits() uint64 {
	return uint64(s.Retransmits - min(uint32(s.Repeats), s.Retransmits))
}

// whySend explains time in sendmsg(2), which only waits for memory (of the send buffer or of the host) and for the lock
// of the socket.
func (s *Sample) whySend(took time.Duration) finding {
	const (
		copyRate = 8 // nanoseconds per byte of a slow copy
		least    = 4096
	)
	held := uint64(s.Outstanding) + uint64(s.Unsent)
	switch {
	case took < slight || took < time.Duration(s.Length)*copyRate:
		return finding{cause: CauseNothing, text: fmt.Sprintf("copying %s", formatBytes(uint64(s.Length)))}
	case held < least:
		return finding{cause: CauseUnknown, text: fmt.Sprintf("the send buffer held only %s: the host was short of memory or CPU time, or another thread held the socket lock", formatBytes(held))}
	}
	f := finding{cause: CauseSendBuffer, text: fmt.Sprintf("the application was blocked, most likely by a full send buffer: at the end it held %s, %s of them unsent", formatBytes(held), formatBytes(uint64(s.Unsent)))}
	cwnd, window := s.room()
	switch unsent := uint64(s.Unsent); {
	case window < unsent && window < cwnd:
		f.details = append(f.details, "reason for the full buffer: "+s.windowText())
	case cwnd < unsent:
		f.details = append(f.details, "reason for the full buffer: "+s.cwndText())
	case unsent == 0 || s.Outstanding > s.Unsent:
		f.details = append(f.details, "both windows allowed more, so a larger send buffer would have increased the throughput")
	}
	return f
}

// whyStack explains the time before the last byte reached the queueing discipline. tcp_write_xmit checks in this
// order: pacing, congestion window, peer's window, Nagle and cork, bytes in the queues below (TCP small queues).
func (s *Sample) whyStack(took time.Duration) finding {
	var details []string
	unsent := uint64(s.Unsent)
	cwnd, window := s.room()
	rounds := s.rounds()
	byCwnd, byPacing := duration(rounds*float64(s.SRTT)), s.paced(unsent)
	counted := s.WindowLimited > coarse || s.WindowLimited > 0 && window < unsent
	if counted && s.WindowLimited >= took/2 {
		// The kernel counts this time only while the congestion window is open.
		text := s.windowText()
		if window >= unsent {
			text = "the peer's window closed in the meantime"
		}
		return finding{cause: CauseWindow, text: fmt.Sprintf("%s; it limited the connection for %s", text, FormatDuration(s.WindowLimited)), details: s.windowDetails()}
	}
	windowShort := window < unsent
	if windowShort && took >= 5*coarse && s.WindowLimited < took/10 {
		windowShort = false
		details = append(details, fmt.Sprintf("the peer's window allowed only %s, but limited the connection for %s of the time", formatBytes(window), FormatDuration(s.WindowLimited)))
	}
	if n := s.otherRetransmits(); n > 0 {
		expected := byPacing
		if cwnd < unsent {
			expected = max(expected, byCwnd)
		}
		if took > 2*expected+s.SRTT && (!windowShort || window >= cwnd) {
			if expected > 0 {
				details = append(details, fmt.Sprintf("without loss it would have taken about %s to send", FormatDuration(expected)))
			}
			return finding{cause: CauseLoss, text: "it waited while lost segments of the connection were retransmitted (" + times(n) + " until its acknowledgement)", details: details}
		}
		details = append(details, "segments of the connection were retransmitted "+times(n)+", which reduces the congestion window")
	}
	switch pacing := byPacing >= took/2 && byPacing > 0; {
	case windowShort && window < cwnd:
		return finding{cause: CauseWindow, text: s.windowText(), details: append(s.windowDetails(), details...)}
	case pacing && (cwnd >= unsent || byPacing > byCwnd):
		return finding{cause: CausePacing, text: s.pacingText(unsent, byPacing), details: details}
	case cwnd < unsent:
		if s.SRTT > 0 {
			details = append(details, fmt.Sprintf("that takes about %s of %s", format.Count(uint64(rounds), "round trip", "round trips"), FormatDuration(s.SRTT)))
			if took > 4*byCwnd {
				details = append(details, "it took longer: data in flight was acknowledged late")
			}
		}
		return finding{cause: CauseCwnd, text: s.cwndText(), details: details}
	}
	if f, ok := s.whyHeld(took); ok {
		f.details = append(f.details, details...)
		return f
	}
	if n := s.otherRetransmits(); n > 0 {
		return finding{cause: CauseLoss, text: "segments of the connection were retransmitted " + times(n) + " in the meantime"}
	}
	if took < slight {
		return finding{cause: CauseNothing, text: "both windows allowed it, and the delay is normal on a busy host", details: details}
	}
	return finding{cause: CauseUnknown, text: "both windows allowed it, and nothing was lost", details: append(details,
		"possible causes that the kernel does not report: the next hop's address was being resolved (ARP, neighbour discovery), packet filters queued it, or processors were busy")}
}

// rounds returns the number of round trips that the congestion window needs for the data beyond it.
func (s *Sample) rounds() float64 {
	cwnd, _ := s.room()
	if uint64(s.Unsent) <= cwnd {
		return 0
	}
	return math.Ceil(float64(uint64(s.Unsent)-cwnd) / (float64(s.Cwnd) * float64(s.MSS)))
}

// whyHeld explains time in the stack while the windows were open.
func (s *Sample) whyHeld(took time.Duration) (finding, bool) {
	partial := s.MSS > 0 && s.Unsent%s.MSS != 0
	size := formatBytes(uint64(s.Unsent))
	if s.Cork && partial {
		return finding{cause: CauseCork, text: fmt.Sprintf("the application requested to wait for more data (TCP_CORK or MSG_MORE), and the last segment of %s unsent was not full", size)}, true
	}
	if qdisc := s.Stages[config.StageQdisc]; qdisc >= slight && s.MSS > 0 {
		// TCP small queues allow at least two segments below; each later segment waits for one of them.
		if turns := max(1, float64(s.Unsent)/(2*float64(s.MSS))); 2*turns*float64(qdisc) >= float64(took) {
			return finding{cause: CauseLocalQueue, text: fmt.Sprintf("TCP small queues limit the data of a connection in a slow queueing discipline, where this message spent %s", FormatDuration(qdisc))}, true
		}
	}
	if s.BufferLimited > coarse && s.BufferLimited >= took/2 {
		return finding{cause: CauseSendBuffer, text: fmt.Sprintf("the send buffer was too small to keep the connection busy, for %s", FormatDuration(s.BufferLimited))}, true
	}
	if s.Nagle && partial && s.InFlight > 0 && s.otherRetransmits() == 0 && s.WindowLimited <= coarse && took <= 2*s.SRTT+ackDelay {
		f := finding{cause: CauseNagle, text: fmt.Sprintf("its last segment was not full (%d B, full: %d B), and waited for the acknowledgement of data in flight", s.Unsent%s.MSS, s.MSS)}
		f.details = append(f.details, "TCP_NODELAY sends such segments at once")
		if s.SRTT > 0 && took > 2*s.SRTT {
			f.details = append(f.details, fmt.Sprintf("the RTT is %s: the peer delayed its acknowledgement", FormatDuration(s.SRTT)))
		}
		return f, true
	}
	return finding{}, false
}

func (s *Sample) cwndText() string {
	cwnd, _ := s.room()
	return fmt.Sprintf("the congestion window, %s of %d B with %d in flight, allowed %s", format.Count(s.Cwnd, "packet", "packets"), s.MSS, s.InFlight, s.roomText(cwnd))
}

func (s *Sample) windowText() string {
	if s.Window == 0 {
		return fmt.Sprintf("the peer's window was closed, with %s unsent", formatBytes(uint64(s.Unsent)))
	}
	_, window := s.room()
	return fmt.Sprintf("the peer's window, %s with %s in flight, allowed %s", formatBytes(uint64(s.Window)), formatBytes(uint64(s.Outstanding)), s.roomText(window))
}

// room returns the number of bytes that the congestion window and the peer's window allowed when the message was sent.
// An unknown window is unlimited.
func (s *Sample) room() (cwnd, window uint64) {
	if s.MSS == 0 || s.Cwnd == 0 {
		return math.MaxUint64, math.MaxUint64
	}
	return uint64(s.Cwnd-min(s.InFlight, s.Cwnd)) * uint64(s.MSS), uint64(s.Window - min(s.Outstanding, s.Window))
}

func (s *Sample) roomText(room uint64) string {
	unsent := formatBytes(uint64(s.Unsent))
	if room == 0 {
		return fmt.Sprintf("none of %s unsent", unsent)
	}
	return fmt.Sprintf("%s of %s unsent", formatBytes(room), unsent)
}

func (s *Sample) windowDetails() []string {
	return []string{"the receiving application reads too slowly, or its receive buffer is small for this path"}
}

func (s *Sample) pacingText(bytes uint64, takes time.Duration) string {
	return fmt.Sprintf("pacing at %s takes %s for %s", formatRate(s.PacingRate), FormatDuration(takes), formatBytes(bytes))
}

// whyRequeued explains a segment that was queued again before it reached a driver.
func (s *Sample) whyRequeued(time.Duration) finding {
	return finding{cause: CauseLocalDrop, text: "this host dropped it before a driver, and TCP retransmitted it", details: []string{
		"most likely the queueing discipline was full: see the drops of tc -s qdisc"}}
}

// whyQdisc explains time in the queueing discipline, which also paces if it is fq.
func (s *Sample) whyQdisc(took time.Duration) finding {
	if took < slight {
		return finding{cause: CauseNothing, text: "normal for a busy interface"}
	}
	bytes := uint64(s.Unsent) + min(uint64(s.Outstanding), 2*uint64(s.MSS))
	if takes := s.paced(bytes); takes >= took/2 && takes > 0 {
		return finding{cause: CausePacing, text: s.pacingText(bytes, takes), details: []string{
			"fq delays segments for pacing; in another queueing discipline, this is queueing time"}}
	}
	return finding{cause: CauseLocalQueue, text: "it was queued on this host: a rate limit, or an interface that was busy or stopped"}
}

// paced returns the time that pacing needs for a number of bytes, and 0 without pacing.
func (s *Sample) paced(bytes uint64) time.Duration {
	if s.PacingRate == 0 {
		return 0
	}
	return duration(float64(bytes) / float64(s.PacingRate) * 1e9)
}

// whyNetwork explains the time until the acknowledgement of the last byte. Acknowledgements are cumulative: any earlier
// loss delays them, even if the peer has received the message.
func (s *Sample) whyNetwork(took time.Duration) finding {
	usual := took <= s.MinRTT+s.MinRTT/2+slight/10
	switch n := s.otherRetransmits(); {
	case usual && s.MinRTT > 0:
		f := finding{cause: CauseDistance, text: fmt.Sprintf("the minimum RTT of the connection is %s", FormatDuration(s.MinRTT))}
		if s.Repeats > 0 {
			f.details = append(f.details, "its last segment was retransmitted "+times(uint64(s.Repeats))+" without need")
		}
		return f
	case s.Repeats > 0 || s.Outcome == Retransmitted:
		text := "its last segment, or the acknowledgement, was lost; retransmitted"
		if s.Repeats > 0 {
			text += " " + times(uint64(s.Repeats))
		}
		return finding{cause: CauseLoss, text: text + s.leastText()}
	case n > 0:
		return finding{cause: CauseLoss, text: "earlier segments were lost and retransmitted " + times(n) + ", and the acknowledgement is cumulative" + s.leastText()}
	}
	if nic := s.Stages[config.StageNIC]; nic >= slight && nic >= (took-min(max(s.MinRTT, 0), took))/2 {
		return finding{cause: CauseLocalQueue, nic: true, text: fmt.Sprintf("%s of them until the NIC's timestamp, in the queues of driver and NIC", FormatDuration(nic))}
	}
	if s.MinRTT <= 0 && s.SRTT <= 0 {
		return finding{cause: CauseUnknown, text: "the RTT of the connection is unknown, and nothing was retransmitted"}
	}
	if s.MinRTT <= 0 {
		if took <= s.SRTT+s.SRTT/2 {
			return finding{cause: CauseNothing, text: fmt.Sprintf("the RTT of the connection was %s", FormatDuration(s.SRTT))}
		}
		return finding{cause: CauseLate, text: fmt.Sprintf("the RTT of the connection was %s, and nothing was retransmitted: a queue in the network, or a peer that acknowledges late", FormatDuration(s.SRTT)), details: s.lateDetails(took)}
	}
	if took < slight {
		return finding{cause: CauseNothing, text: fmt.Sprintf("the minimum RTT is %s, and the difference is normal on a busy host", FormatDuration(s.MinRTT))}
	}
	return finding{cause: CauseLate, text: fmt.Sprintf("%s the minimum RTT, %s, and nothing was retransmitted: a queue in the network, or a peer that acknowledges late",
		factor(float64(took)/float64(s.MinRTT)), FormatDuration(s.MinRTT)), details: s.lateDetails(took)}
}

// leastText compares a time with the minimum RTT, if known.
func (s *Sample) leastText() string {
	if s.MinRTT <= 0 {
		return ""
	}
	return "; the minimum RTT is " + FormatDuration(s.MinRTT)
}

// lateDetails returns evidence that distinguishes a queue in the network from a slow peer.
func (s *Sample) lateDetails(took time.Duration) []string {
	const leastDelay = 20 * time.Millisecond // typical delay of acknowledgements
	var details []string
	extra := took - s.MinRTT
	if s.MinRTT > 0 && s.SRTT > 2*s.MinRTT {
		details = append(details, fmt.Sprintf("earlier messages were also late: the smoothed RTT is %s", FormatDuration(s.SRTT)))
	}
	if s.InFlight == 0 && s.Unsent <= s.MSS && extra >= leastDelay && extra <= ackDelay {
		details = append(details, "it was sent as a single segment, which many hosts acknowledge 40 ms to 200 ms late if they have no data to send")
	}
	if ahead := uint64(s.Outstanding) + uint64(s.Unsent) - min(uint64(s.Length), uint64(s.Unsent)); ahead > 0 {
		details = append(details, fmt.Sprintf("%s of earlier data of the connection were in flight or queued", formatBytes(ahead)))
	}
	return details
}

// State returns all stages and the state of the connection.
func (s *Sample) State() []string {
	var parts []string
	for _, l := range s.Legs() {
		parts = append(parts, l.Name+" "+FormatDuration(l.Took))
		if nic, ok := s.Stages[config.StageNIC]; ok && l.Stage == config.StageNetwork {
			parts[len(parts)-1] += " (until the NIC's timestamp " + FormatDuration(nic) + ")"
		}
	}
	details := []string{strings.Join(parts, ", ")}
	if s.MSS == 0 || s.Cwnd == 0 {
		return details
	}
	text := fmt.Sprintf("when it was sent: congestion window %d, in flight %d, unsent %s, peer's window %s with %s in flight",
		s.Cwnd, s.InFlight, formatBytes(uint64(s.Unsent)), formatBytes(uint64(s.Window)), formatBytes(uint64(s.Outstanding)))
	if s.SRTT > 0 {
		text += ", RTT " + FormatDuration(s.SRTT)
	}
	if s.MinRTT > 0 {
		text += ", minimum " + FormatDuration(s.MinRTT)
	}
	if s.PacingRate > 0 {
		text += ", paced at " + formatRate(s.PacingRate)
	}
	return append(details, text)
}

// Legs returns the parts of the path with known times, and the part with missing timestamps. The result is never
// empty.
func (s *Sample) Legs() []Leg {
	var legs []Leg
	rest := s.Stages[Total]
	add := func(l Leg, took time.Duration) {
		l.Took = max(took, 0)
		l.distance = min(max(l.distance, 0), l.Took)
		rest -= l.Took
		legs = append(legs, l)
	}
	send, sent := s.Stages[config.StageSend]
	stack, queued := s.Stages[config.StageStack]
	qdisc, driven := s.Stages[config.StageQdisc]
	network, acked := s.Stages[config.StageNetwork]
	if sent {
		add(Leg{Stage: config.StageSend, Name: "send", place: "in sendmsg", why: (*Sample).whySend}, send)
	}
	if queued {
		add(Leg{Stage: config.StageStack, Name: "stack", place: "before transmission", why: (*Sample).whyStack}, stack)
	}
	if driven {
		// Without the timestamp of the driver, any retransmission appears as a local drop.
		if s.Requeued > 0 {
			add(Leg{Stage: config.StageQdisc, Name: "dropped and retransmitted", place: "until the retransmission", why: (*Sample).whyRequeued}, s.Requeued)
		}
		add(Leg{Stage: config.StageQdisc, Name: "qdisc", place: "in the queueing discipline", why: (*Sample).whyQdisc}, qdisc)
	}
	if acked {
		add(Leg{Stage: config.StageNetwork, Name: "network", place: "from the driver to the acknowledgement", distance: s.MinRTT, why: (*Sample).whyNetwork}, network)
	}
	missing := Leg{Stage: Total, Name: "not stamped", place: "until the acknowledgement", distance: s.MinRTT, why: (*Sample).whyNetwork}
	switch {
	case acked:
		missing.place, missing.distance, missing.why = "before the driver", 0, (*Sample).whyStack
	case queued:
		missing.place = "from the queueing discipline to the acknowledgement"
	}
	if rest > 0 && (!queued || !driven || !acked) || len(legs) == 0 {
		add(missing, rest)
	}
	return legs
}

// FormatDuration formats a duration with three digits and a unit: 12.3 µs, 1.5 s.
func FormatDuration(d time.Duration) string {
	if d < 0 {
		return "-" + FormatDuration(max(-d, 0))
	}
	return scaled(float64(d), "ns", "µs", "ms", "s")
}

func formatBytes(n uint64) string { return scaled(float64(n), "B", "KB", "MB", "GB") }

// formatRate formats bytes per second as bits per second.
func formatRate(bytes uint64) string {
	return scaled(8*float64(bytes), "bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s")
}

// scaled formats a number with three digits and the unit that keeps it below 1000. Each unit is 1000 times the
// previous one.
func scaled(v float64, units ...string) string {
	i := 0
	for ; i < len(units)-1 && v >= 999.5; i++ {
		v /= 1000
	}
	decimals := 0
	switch {
	case i == 0 || v >= 99.95:
	case v >= 9.995:
		decimals = 1
	default:
		decimals = 2
	}
	text := strconv.FormatFloat(v, 'f', decimals, 64)
	if decimals > 0 {
		text = strings.TrimRight(strings.TrimRight(text, "0"), ".")
	}
	return text + " " + units[i]
}

func factor(v float64) string {
	if v < 9.95 {
		return strconv.FormatFloat(v, 'f', 1, 64) + " times"
	}
	return strconv.FormatFloat(v, 'f', 0, 64) + " times"
}

func times(n uint64) string {
	if n == 1 {
		return "once"
	}
	return strconv.FormatUint(n, 10) + " times"
}

// duration converts nanoseconds to a duration of at most 292 years.
func duration(ns float64) time.Duration {
	if ns >= math.MaxInt64 {
		return math.MaxInt64
	}
	return time.Duration(ns)
}
