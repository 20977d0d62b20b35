//go:build unix

package gcsemu

import (
	"fmt"
	"os"
	"syscall"
)

// lockFile takes the lock on path, creating the file. The lock ends with the
// process, however that ends.
func lockFile(path string) (unlock func() error, err error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("lock %s: in use by another server: %w", path, err)
	}
	return f.Close, nil
}
