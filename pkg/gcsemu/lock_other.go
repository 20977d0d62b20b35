//go:build !unix

package gcsemu

import "os"

// lockFile creates the file. There is no lock on this system: the caller sees
// to it that one server at a time uses the directory.
func lockFile(path string) (unlock func() error, err error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	return f.Close, nil
}
