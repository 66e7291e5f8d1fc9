// SPDX-License-Identifier: Apache-2.0

// Package guest tests Sockeye on the Debian systems that lab/debian boots: installed
// as documented, as a service of systemd, with Debian's nfacctd as members. Its tests
// have the build tag "debian".
package guest
