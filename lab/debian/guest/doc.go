// SPDX-License-Identifier: Apache-2.0

// Package guest tests Sockeye on the Debian that lab/debian boots: as systemd's
// service, installed as a user would, with members that are Debian's nfacctd. It has
// tests only with the build tag "debian".
package guest
