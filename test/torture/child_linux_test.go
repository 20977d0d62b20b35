package torture_test

import "syscall"

// childAttributes end the cluster with the test, however that ends, and keep it out of
// the terminal's signals: the test stops it.
func childAttributes() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
}
