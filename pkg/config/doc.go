// Package config loads a service's configuration: standard flags, a strict
// YAML file and environment variables over one set of names.
//
// A package that needs configuration owns a small struct with RegisterFlags
// and Validate (the [Section] interface); a service composes such structs into
// its own. The struct holds data only, never live objects. A key is registered
// once, as a flag, and every other name of it is mechanical:
//
//	flag         --grpc.listen-address
//	environment  BROKER_GRPC_LISTEN_ADDRESS
//	YAML         grpc: {listen-address: …}   or   grpc.listen-address: …
//
// Precedence is default < file < environment < flag. In the file an unknown or
// repeated key is an error that names the key, its line and the nearest known
// key. Environment variables that match no key are ignored: an orchestrator
// injects variables that happen to start with a service's name.
//
// [Load] adds three keys of its own: --config.file (read this file),
// --config.verify (check everything and exit) and --config.print (write the
// effective configuration as YAML that can be loaded again, secrets starred,
// and exit).
//
// Value types [Duration], [Size], [Strings] and [Secret] read and print the
// way a person writes them, in flags, YAML and JSON alike. [Markdown] writes
// the reference of all keys.
//
// Nothing in this package is safe for concurrent use while loading; a loaded
// configuration is data that the caller must not change afterwards.
package config
