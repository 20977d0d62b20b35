//go:build unix && !linux

package main

import "syscall"

// childAttributes keep a child out of the terminal's signals, which are for the
// parent to pass on in order. Its end with the parent comes from its stdin.
func childAttributes() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }
