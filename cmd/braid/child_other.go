//go:build !unix

package main

import "syscall"

// childAttributes are the system's own; a child's end with the parent comes from
// its stdin.
func childAttributes() *syscall.SysProcAttr { return nil }
