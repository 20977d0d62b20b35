// Package walfeed sends the fresh ranges of all partitions that a broker leads
// to one remote-log manager at a time, over one stream, and brings the verdicts
// back.
//
// A [Feed] owns the stream. A partition is a [Source]: it says when it has
// something to send ([Feed.Wake]), is asked for its next range when it is its
// turn, gets the verdict on every range, and is told when the stream is gone
// before they all came ([Source.Lost]): it then begins again at the object end.
//
// Guarantees:
//
//   - Sources with something to send take turns, one range each.
//   - Bytes sent and not answered stay within the credits of the stream and of
//     each partition (design review F22). The one exception is a single range
//     when nothing is outstanding.
//   - A range that stays unanswered for the verdict timeout ends the stream
//     (F20); another manager is tried first then.
//   - A manager of the broker's own zone is used where one can be reached;
//     another after the zone's patience; and the own zone again when it is back,
//     after the ranges under way were answered (F24).
//
// One goroutine sends, one receives, both owned by Run. Sources are called
// without any lock of the feed held.
package walfeed
