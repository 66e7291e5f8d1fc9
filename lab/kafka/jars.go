// SPDX-License-Identifier: Apache-2.0

package kafka

import (
	"bytes"
	"context"
	"crypto/sha256"
	_ "embed"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

//go:embed pom.xml
var pom []byte

// sums is a list for sha256sum, relative to a Maven repository. After a change of pom.xml, fetch the files into an
// empty directory with an absolute path, and list them:
//
//	mvn -f lab/kafka/pom.xml -Dmaven.repo.local=$DIR dependency:build-classpath -Dmdep.outputFile=$DIR/classpath
//	(cd $DIR && tr : '\n' <classpath | sed "s|^$DIR/||" | LC_ALL=C sort | xargs sha256sum) >lab/kafka/jars.sha256
//
//go:embed jars.sha256
var sums string

// jar is a file of a Maven repository.
type jar struct{ path, sum string }

// ErrChecksum is returned for a file whose SHA-256 is not the listed one.
var ErrChecksum = errors.New("wrong SHA-256")

// CacheDir returns the Maven repository of the broker in the cache directory of the user.
func CacheDir() (string, error) {
	dir, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("find the cache directory: %w", err)
	}
	return filepath.Join(dir, "sockeye", "kafka"), nil
}

// Fetch returns the paths of the broker's jar files, a class path, in a Maven repository. It has Maven fetch missing
// files, about 65 MB with Maven's own, and compares the SHA-256 of each file with the list of this package. It returns
// ErrChecksum for another file.
func Fetch(ctx context.Context, repository string) ([]string, error) {
	jars, err := parseSums(sums)
	if err != nil {
		return nil, fmt.Errorf("fetch kafka: %w", err)
	}
	err = verify(repository, jars)
	if errors.Is(err, fs.ErrNotExist) {
		if err = maven(ctx, repository); err == nil {
			err = verify(repository, jars)
		}
	}
	if errors.Is(err, ErrChecksum) {
		err = fmt.Errorf("%w\nhint: remove %s to fetch all files again", err, repository)
	}
	if err != nil {
		return nil, fmt.Errorf("fetch kafka: %w", err)
	}
	var paths []string
	for _, j := range jars {
		paths = append(paths, filepath.Join(repository, j.path))
	}
	return paths, nil
}

func parseSums(text string) ([]jar, error) {
	var jars []jar
	for line := range strings.Lines(text) {
		sum, path, ok := strings.Cut(strings.TrimSuffix(line, "\n"), "  ")
		raw, err := hex.DecodeString(sum)
		if !ok || err != nil || len(raw) != sha256.Size || !filepath.IsLocal(path) {
			return nil, fmt.Errorf("bad line in the list of checksums: %q", line)
		}
		jars = append(jars, jar{path, sum})
	}
	return jars, nil
}

// verify returns fs.ErrNotExist for a missing file, and ErrChecksum for another file than the listed one.
func verify(repository string, jars []jar) error {
	for _, j := range jars {
		got, err := sha256File(filepath.Join(repository, j.path))
		if err != nil {
			return err
		}
		if got != j.sum {
			return fmt.Errorf("%s: %w: %s, want %s", filepath.Join(repository, j.path), ErrChecksum, got, j.sum)
		}
	}
	return nil
}

func sha256File(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return "", fmt.Errorf("read %s: %w", path, err)
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// maven fetches the files of pom.xml into a repository.
func maven(ctx context.Context, repository string) error {
	mvn, err := find("mvn", "maven")
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "sockeye-kafka-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "pom.xml")
	if err := os.WriteFile(path, pom, 0o600); err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, mvn, "--batch-mode", "--quiet", "--strict-checksums", "--file", path,
		"-Dmaven.repo.local="+repository, "-Dstyle.color=never", "dependency:resolve")
	cmd.WaitDelay = 5 * time.Second
	out, err := cmd.CombinedOutput()
	if ctx.Err() != nil {
		return fmt.Errorf("run mvn: %w", context.Cause(ctx))
	}
	if err != nil {
		lines := bytes.Split(bytes.TrimSpace(out), []byte("\n"))
		return fmt.Errorf("run mvn: %w; end of its output:\n%s", err, bytes.Join(lines[max(0, len(lines)-10):], []byte("\n")))
	}
	return nil
}

// find finds an executable of a Debian package.
func find(name, pkg string) (string, error) {
	path, err := exec.LookPath(name)
	if err != nil {
		return "", fmt.Errorf("find %s: not installed (Debian package %s: apt-get install %s)", name, pkg, pkg)
	}
	return path, nil
}
