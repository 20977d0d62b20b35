//go:build unix && !linux

package torture_test

import "syscall"

// childAttributes keep the cluster out of the terminal's signals: the test stops it.
func childAttributes() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }
