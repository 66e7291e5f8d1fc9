// SPDX-License-Identifier: Apache-2.0

package isolatecmd

import (
	"testing"

	"sockeye/internal/fault"
	"sockeye/internal/isolate"
)

// TestMemberOfAnotherUser checks that only the user in the policy can start members of the service.
func TestMemberOfAnotherUser(t *testing.T) {
	nobody := &account{User: isolate.User{UID: 65534, GID: 65534}}
	for _, test := range []struct {
		service    string
		who        *account // nil: root, as the tests are
		want, hint string   // "": no error
	}{
		{"", nobody, "", ""},
		{"nobody", nobody, "", ""},
		{"65534", nobody, "", ""},
		{"root", nil, "", ""},
		{"daemon", nobody, "user nobody is not the members' user daemon", "omit --user and --as-root: the program runs as daemon"},
		{"4242", nil, "user root is not the members' user 4242", "omit --user and --as-root: the program runs as 4242"},
		{"root", nobody, "user nobody is not the members' user root", "use --as-root"},
	} {
		err := test.who.IsMember(test.service)
		if test.want == "" {
			if err != nil {
				t.Errorf("%v of %q: %v", test.who, test.service, err)
			}
			continue
		}
		if err == nil || err.Error() != test.want || fault.Hint(err) != test.hint || fault.Code(err) != fault.CodeConflict {
			t.Errorf("%v of %q: %v, hint %q, code %d", test.who, test.service, err, fault.Hint(err), fault.Code(err))
		}
	}
}
