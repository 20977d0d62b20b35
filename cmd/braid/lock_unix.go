//go:build unix

package main

import (
	"errors"
	"os"
	"syscall"
)

// tryLock takes the lock on a file, which ends with the process however that
// ends; false when another holds it.
func tryLock(f *os.File) (bool, error) {
	err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	if errors.Is(err, syscall.EWOULDBLOCK) {
		return false, nil
	}
	return err == nil, err
}
