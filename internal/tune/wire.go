// SPDX-License-Identifier: Apache-2.0

package tune

// Value is a setting of a rule on one connection: what was asked for beside
// what the kernel reports.
type Value struct {
	Option    string `json:"option"`
	Requested string `json:"requested"`
	// Effective is "" if nothing shows it.
	Effective string `json:"effective"`
	// Source is what the kernel was asked: an option of getsockopt(2) or a field
	// of TCP_INFO; "not readable" if nothing shows the value, "" if the option is
	// not for this connection.
	Source string `json:"source"`
	// Note names what the kernel makes of the value, and why it is not set.
	Note string `json:"note,omitempty"`
	// Differs says that the connection does not run with what was asked for. The
	// kernel's units alone are no difference, its bounds are.
	Differs bool `json:"differs"`
}

// LiveFailure counts connections on which an option could not be set.
type LiveFailure struct {
	Rule   string `json:"rule"`
	Option string `json:"option"`
	Error  string `json:"error"`
	Count  uint64 `json:"count"`
}

// Left counts connections on which an option was not taken back.
type Left struct {
	Rule        string `json:"rule"`
	Option      string `json:"option"`
	Reason      string `json:"reason"`
	Connections int    `json:"connections"`
}
