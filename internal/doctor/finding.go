// SPDX-License-Identifier: Apache-2.0

package doctor

// Finding is the result of one check.
type Finding struct {
	Area   string `json:"area"`
	Check  string `json:"check"`
	Result string `json:"result"` // ok, note, warning, failure
	Detail string `json:"detail,omitempty"`
	Hint   string `json:"hint,omitempty"`
	// Code is the exit code of a failure; 0 for other results.
	Code int `json:"code,omitempty"`
}

// The results of findings.
const (
	OK      = "ok"
	Note    = "note"
	Warning = "warning"
	Failure = "failure"
)

// Report collects findings.
type Report struct {
	Findings []Finding
	Known    *Known
}

// Known has what the running agent reports: the sockets of members, and those that bypass a service, by cookie, and the process ids that
// status lists.
type Known struct {
	Sockets   map[uint64]bool
	Processes map[int]bool
}

// Add adds a finding.
func (d *Report) Add(area, check, result, detail, hint string) {
	d.Findings = append(d.Findings, Finding{Area: area, Check: check, Result: result, Detail: detail, Hint: hint})
}

// Fail adds a failure with its exit code.
func (d *Report) Fail(area, check string, code int, detail, hint string) {
	d.Findings = append(d.Findings, Finding{area, check, Failure, detail, hint, code})
}
