// Package gcsemu runs a Google Cloud Storage emulator inside the process, for
// development and for tests: fake-gcs-server with its file backend, behind a
// handler that mends what it gets wrong, injects faults and counts requests.
//
// # What is mended
//
// fake-gcs-server 1.56.1 honours preconditions on uploads and ignores them
// elsewhere. The handler judges ifGenerationMatch, ifGenerationNotMatch and
// their metageneration counterparts on reads, attributes and deletes itself,
// under a lock per object name, so a check and the delete it guards are one
// step. It answers queries of a resumable upload's state itself, which the
// emulator takes for the upload's end, and refuses chunks of another length than
// they claim. What it can't make right it refuses with 501 instead of answering
// wrongly: copy, rewrite, compose, update and patch of objects, batch requests,
// and uploads with a metageneration precondition. A request below a bucket that
// does not exist says so in the service's words. Object names that the file
// backend can't hold safely (empty, "." or ".." segments, control characters,
// names ending in ".metadata") are refused with 400; a name that is another
// object's name plus "/…" can't be stored, as a path is a file or a directory.
//
// Remaining differences to the service: generations are wall-clock microseconds;
// a resumable upload that may overwrite is not excluded from a delete's check;
// there are no noncurrent versions, soft delete, holds or retention; resumable
// uploads do not check a CRC32C sent at their start; listings read all names of
// the bucket for every page; permissions are not modelled.
//
// # Persistence
//
// Objects live as files below Options.StorageRoot, one directory per bucket, and
// are found again, with generation and checksum, by the next server on the same
// directory. An object's file is written to a temporary name, synced and
// renamed into place; its attributes follow as an extended attribute (or a
// second file where the file system has none). A process killed in between
// leaves a file without attributes, which would make fake-gcs-server fail every
// listing of the bucket: [Start] removes such files, their upload was never
// answered. Directories are not synced: the data survives the process, not
// necessarily the machine. The directory is locked while a server uses it.
//
// # Faults
//
// [Rule] describes a fault; [Server.SetRules] switches rules at once for all
// requests that begin afterwards. The same switch can be reached over HTTP, from
// other processes:
//
//	GET    /_braid/faults   {"seed": n, "rules": [...]}, each rule with "hits"
//	PUT    /_braid/faults   replaces all rules with the body's {"rules": [...]}
//	POST   /_braid/faults   appends one rule, the body
//	DELETE /_braid/faults   removes all rules
//	GET    /_braid/stats    the counters, as [Stats]
//	DELETE /_braid/stats    sets the counters to zero
//
// for instance
//
//	curl -X PUT http://127.0.0.1:4443/_braid/faults \
//	  -d '{"rules":[{"op":"create","action":"status","status":503,"count":2}]}'
//
// Only loopback peers may use these paths unless Options.AdminFromAnywhere is
// set. [Admin] is a client for them.
//
// # Concurrency
//
// All methods are safe for concurrent use. [Server.Close] ends the listener,
// all connections and every delayed effect before it returns.
package gcsemu
