// SPDX-License-Identifier: Apache-2.0

package testenv

import (
	"os"
	"path/filepath"
	"sync"
	"testing"
)

// Several tests record to one file at the same time.
func TestRecord(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "out")
	t.Setenv("OUT", dir)
	var writers sync.WaitGroup
	for _, key := range []string{"a", "b", "c", "d"} {
		writers.Go(func() {
			for n := range 20 {
				Record(t, "some.json", map[string]any{key: n})
			}
		})
	}
	writers.Wait()
	got, err := os.ReadFile(filepath.Join(dir, "some.json"))
	if want := "{\n  \"a\": 19,\n  \"b\": 19,\n  \"c\": 19,\n  \"d\": 19\n}\n"; err != nil || string(got) != want {
		t.Errorf("%s, %v", got, err)
	}
}
