package gcsemu

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
)

// marker is the file in the storage directory that says whose it is. It is
// also the file that is locked.
const marker = ".gcsemu"

// objectMetadataSuffix ends the files in which fake-gcs-server keeps attributes
// where the file system has no extended ones.
const objectMetadataSuffix = ".metadata"

// claim makes root ours: it creates it, refuses a directory that holds other
// things (sweep removes files) and locks it against a second server.
func claim(root string) (unlock func() error, err error) {
	if err := os.MkdirAll(root, 0o700); err != nil {
		return nil, err
	}
	path := filepath.Join(root, marker)
	if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
		entries, err := os.ReadDir(root)
		if err != nil {
			return nil, err
		}
		if len(entries) > 0 {
			return nil, fmt.Errorf("storage directory %s is not empty and has no %s file: it belongs to something else", root, marker)
		}
	}
	return lockFile(path)
}

// sweep removes the files that an upload or a delete left when its process was
// killed: those that readable does not know as objects. It returns their number.
func sweep(root string, readable func(bucket, object string) bool) (removed int, err error) {
	buckets, err := os.ReadDir(root)
	if err != nil {
		return 0, err
	}
	for _, b := range buckets {
		if !b.IsDir() {
			continue
		}
		bucket, err := url.PathUnescape(b.Name())
		if err != nil {
			return removed, fmt.Errorf("bucket directory %q: %w", b.Name(), err)
		}
		dir := filepath.Join(root, b.Name())
		err = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() {
				return err
			}
			if object, ok := strings.CutSuffix(path, objectMetadataSuffix); ok {
				if _, err := os.Stat(object); err == nil {
					return nil // the attributes of a file that is judged itself
				}
			} else {
				name, err := filepath.Rel(dir, path)
				if err != nil {
					return err
				}
				if readable(bucket, filepath.ToSlash(name)) {
					return nil
				}
			}
			removed++
			return os.Remove(path)
		})
		if err != nil {
			return removed, fmt.Errorf("sweep bucket %q: %w", bucket, err)
		}
	}
	return removed, nil
}

// createBucket asks the emulator itself for a bucket, unless it exists.
func createBucket(emulator http.Handler, bucket string) error {
	get := httptest.NewRecorder()
	emulator.ServeHTTP(get, httptest.NewRequest(http.MethodGet, "/storage/v1/b/"+url.PathEscape(bucket), nil))
	if get.Code == http.StatusOK {
		return nil
	}
	body, err := json.Marshal(map[string]string{"name": bucket})
	if err != nil {
		return err
	}
	post := httptest.NewRecorder()
	emulator.ServeHTTP(post, httptest.NewRequest(http.MethodPost, "/storage/v1/b?project=local", strings.NewReader(string(body))))
	if post.Code != http.StatusOK {
		return fmt.Errorf("create bucket %q: status %d: %s", bucket, post.Code, strings.TrimSpace(post.Body.String()))
	}
	return nil
}
