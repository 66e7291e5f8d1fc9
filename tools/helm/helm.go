// SPDX-License-Identifier: Apache-2.0

// Package helm has the tests of deploy/helm/sockeye, in a module of their own: the agent does not depend on Helm.
package helm
