// Package rlmmetadata runs remote-log managers against the real metadata
// service: its judgement, its epochs, its sessions, a change of controller. The
// leader is played by hand, so each step happens when the test says so.
package rlmmetadata
