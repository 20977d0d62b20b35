// Package rlmtest starts remote-log managers in the process of a test.
//
// An [Instance] can be stopped as an operator would, or killed: its network and
// its bucket are cut at once and for good, so that nothing it still does reaches
// anybody, as after the death of its process.
package rlmtest
