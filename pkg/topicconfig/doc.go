// Package topicconfig holds the settings of a topic: their names, defaults,
// allowed values and meaning in one place, so that the metadata service refuses
// exactly what a broker would not understand.
//
// [Parse] turns the names and values of an API call or of the metadata log into
// a [Config]; [Config.Overrides] is the way back, in one canonical spelling and
// without what equals its default. Errors name the setting, the value and what
// is allowed, all of them at once.
//
// Settings whose other values Braid does not implement yet (compaction,
// retention, other commit rules, topics without the write-ahead log) exist with
// the one value that works: asking for another is refused, never ignored.
//
// The package is pure. A Config is a plain value and safe to copy and share.
package topicconfig
