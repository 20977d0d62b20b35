// Package rlmpool knows which remote-log managers there are to talk to and
// keeps one connection to each address.
//
// A Pool is safe for concurrent use. Connections belong to it.
package rlmpool
