// Command braid is the one command of the project: it runs a whole cluster for
// development (dev), shows the main job on real input (demo), and is the client
// that people type (topic, produce, consume, segments, explain).
//
// What it prints is for people; with --json it is for programs: one JSON value
// per line, the fields of which are documented beside the types that are written.
// The exit code is 0 only when the thing asked for is true, 1 when it is not, and
// 2 when what was asked for could not be understood.
//
// The commands broker, rlm and metadata run one role in this process, with that
// role's own flags. `braid dev --processes` starts its own binary with them.
package main
