package main

import "syscall"

// childAttributes keep a child out of the terminal's signals, which are for the
// parent to pass on in order, and end it with the parent.
func childAttributes() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
}
