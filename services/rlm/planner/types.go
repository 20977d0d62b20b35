package planner

import (
	"cmp"
	"errors"
	"fmt"
	"time"

	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
)

// Config are the planner's limits.
type Config struct {
	// InFlight is the number of objects in upload at once, 1 or more.
	InFlight int
	// Uncommitted is the number of objects that may be in upload or wait for
	// their turn to be committed. It bounds what a stuck PUT, or a metadata
	// service that is away, lets pile up. 0 = 2 * InFlight.
	Uncommitted int
	// Linger is how long the oldest queued range waits behind an upload before
	// a further one starts.
	Linger time.Duration
	// MaxBytes is the size that an object is cut at; a single larger range
	// still makes an object.
	MaxBytes int64
	// MaxRanges is the largest number of ranges in an object.
	MaxRanges int
	// HedgeMin is the least age of a PUT at which it is hedged; the age is the
	// 95th percentile of the last PUTs when that is more. 0 = never hedge.
	HedgeMin time.Duration
	// HedgeCold is the age while too few PUTs were seen to tell. 0 = 1 s.
	HedgeCold time.Duration
	// RetryMin and RetryMax bound the pause after an object's failed attempts;
	// it doubles with each. 0 = 50 ms and 2 s.
	RetryMin, RetryMax time.Duration
	// MaxAttempt is the largest number of attempts of one object; past it the
	// epoch is given up. 0 = 65,535, what a name has room for.
	MaxAttempt int32
}

func (c Config) withDefaults() Config {
	c.Uncommitted = cmp.Or(c.Uncommitted, 2*c.InFlight)
	c.HedgeCold = cmp.Or(c.HedgeCold, time.Second)
	c.RetryMin = cmp.Or(c.RetryMin, 50*time.Millisecond)
	c.RetryMax = cmp.Or(c.RetryMax, 2*time.Second)
	c.MaxAttempt = cmp.Or(c.MaxAttempt, 0xffff)
	return c
}

// Validate reports all that is wrong with the limits, joined.
func (c Config) Validate() error {
	var errs []error
	check := func(ok bool, format string, args ...any) {
		if !ok {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	check(c.InFlight >= 1, "uploads in flight: %d, must be 1 or more", c.InFlight)
	check(c.Uncommitted == 0 || c.Uncommitted >= c.InFlight, "uncommitted objects: %d, must be at least the %d in flight", c.Uncommitted, c.InFlight)
	check(c.Linger >= 0, "linger: %v is negative", c.Linger)
	check(c.MaxBytes >= 1, "object bytes: %d, must be 1 or more", c.MaxBytes)
	check(c.MaxRanges >= 1, "ranges: %d, must be 1 or more", c.MaxRanges)
	check(c.HedgeMin >= 0 && c.HedgeCold >= 0, "hedge: negative age")
	check(c.RetryMin >= 0 && c.RetryMax >= 0, "retry: negative pause")
	check(c.MaxAttempt >= 0 && c.MaxAttempt <= 0xffff, "attempts: %d, must be within 0..65535", c.MaxAttempt)
	return errors.Join(errs...)
}

// Key identifies a partition. Its order is that of ranges in an object.
type Key struct {
	// TopicCreationOffset tells two lives of a topic id apart.
	TopicCreationOffset int64
	// TopicID is the topic's id.
	TopicID string
	// Partition is the index.
	Partition int32
}

// Compare orders keys as ranges lie in an object.
func (k Key) Compare(o Key) int {
	return cmp.Or(
		cmp.Compare(k.TopicCreationOffset, o.TopicCreationOffset),
		cmp.Compare(k.TopicID, o.TopicID),
		cmp.Compare(k.Partition, o.Partition),
	)
}

// StreamID identifies a sender's stream. The caller never uses one twice.
type StreamID uint64

// Range is a range offered for upload.
type Range struct {
	// Partition is whose it is.
	Partition Key
	// Run is the partition's sending run.
	Run int64
	// Base and End are its offsets, End exclusive.
	Base, End int64
	// Bytes is what it takes in an object, data and footer together.
	Bytes int64
	// Item is the caller's own, handed back unchanged.
	Item any
}

// Object names an object of the plan. Attempts are counted within it.
type Object struct {
	// Epoch is the rlm epoch, Sequence the place in the order of commits, from 1.
	Epoch, Sequence int64
}

// Upload asks for a PUT. The caller answers with Uploaded or UploadFailed, also
// after Cancel.
type Upload struct {
	Object
	// Attempt is from 1; each attempt is an object of its own in the bucket.
	Attempt int32
	// Ranges are in the order in which they must lie. The slice is the same for
	// all attempts and must not be changed.
	Ranges []Range
}

// Attempt names one attempt.
type Attempt struct {
	Object
	// Attempt is from 1.
	Attempt int32
}

// Answer is the verdict on one offered range.
type Answer struct {
	// Stream is where the range came from.
	Stream StreamID
	// Range is the range.
	Range Range
	// Verdict is the metadata service's, or NOT_JUDGED with nothing else set,
	// or the one that the range was offered with. Shared: don't change it.
	Verdict *metadatav1.RangeVerdict
	// Attempt is the object that holds the range, when it was accepted.
	Attempt Attempt
	// MetadataOffset is that of the commit, when the range was accepted.
	MetadataOffset int64
}

// Effects is what the caller has to do, in any order. It, and its slices, are
// valid until the planner's next call.
type Effects struct {
	// Uploads to start.
	Uploads []Upload
	// Cancels are attempts whose outcome does not matter any more.
	Cancels []Attempt
	// Commits to send: the command for that attempt, repeated until there is a
	// verdict. Mostly one at a time; one of a closed epoch may be outstanding
	// beside one of the present epoch.
	Commits []Attempt
	// Answers to give, those of a partition in order.
	Answers []Answer
	// Reregister is set when the epoch can't be used any more although it is
	// open: register again, which closes it, then report that.
	Reregister bool
}

func (e *Effects) reset() {
	clear(e.Uploads)
	clear(e.Answers)
	e.Uploads, e.Cancels, e.Commits, e.Answers, e.Reregister = e.Uploads[:0], e.Cancels[:0], e.Commits[:0], e.Answers[:0], false
}

// Stats is what the planner holds.
type Stats struct {
	// QueuedRanges and QueuedBytes wait for an object.
	QueuedRanges int
	QueuedBytes  int64
	// Uploading objects have no successful attempt yet, Uncommitted ones no
	// verdict; the latter includes the former.
	Uploading, Uncommitted int
	// Lanes is the number of partitions with anything unanswered, counted per
	// stream.
	Lanes int
}
