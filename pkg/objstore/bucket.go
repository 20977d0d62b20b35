package objstore

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// BucketSettings are the settings of a bucket that can delete, keep or price
// objects behind Braid's back.
type BucketSettings struct {
	// Name is the bucket's name, Location where it lies ("" if the store does
	// not say).
	Name     string
	Location string
	// StorageClass is the default class of new objects ("" if unknown).
	StorageClass string
	// SoftDelete is how long deleted objects are kept and paid for; 0 is off.
	SoftDelete time.Duration
	// Versioning is true if deleted objects stay as noncurrent generations.
	Versioning bool
	// Retention is the time during which no object can be deleted; 0 is none.
	Retention time.Duration
	// RetentionLocked is true if Retention can't be shortened any more.
	RetentionLocked bool
	// ObjectRetention is true if single objects may carry a retention time.
	ObjectRetention bool
	// DefaultEventBasedHold is true if every new object is born with a hold
	// that forbids its deletion.
	DefaultEventBasedHold bool
	// HierarchicalNamespace is true for buckets with real folders.
	HierarchicalNamespace bool
	// Lifecycle holds the bucket's rules, in the store's order.
	Lifecycle []LifecycleRule
}

// LifecycleRule is one lifecycle rule of a bucket.
type LifecycleRule struct {
	// Action is what the rule does, in the store's words: "Delete",
	// "SetStorageClass", "AbortIncompleteMultipartUpload".
	Action string
	// StorageClass is the target of a "SetStorageClass" action.
	StorageClass string
	// Prefixes and Suffixes restrict the rule to names that match one of each;
	// an empty list matches all names.
	Prefixes, Suffixes []string
	// NoncurrentOnly is true if the rule touches no live object.
	NoncurrentOnly bool
}

// Severity says what a finding about a bucket asks for.
type Severity int

const (
	// Warn: it works, at a price or a risk that an operator should know.
	Warn Severity = iota + 1
	// Refuse: it would delete or keep Braid's objects against its rules; don't
	// start on this bucket.
	Refuse
)

// String returns "warn" or "refuse".
func (s Severity) String() string {
	switch s {
	case Warn:
		return "warn"
	case Refuse:
		return "refuse"
	default:
		return fmt.Sprintf("severity(%d)", int(s))
	}
}

// Finding is one thing that is wrong, or dear, about a bucket.
type Finding struct {
	Severity Severity
	// Setting is a stable key: "lifecycle", "retention", "hold", "soft_delete",
	// "versioning" or "storage_class".
	Setting string
	// Message is one sentence for an operator.
	Message string
}

// Check judges the settings for a store that keeps its objects below prefix
// ("" for the whole bucket). A rule that deletes live objects there and a
// retention or hold that forbids Braid's own deletes are refused; what only
// costs money or time is warned of. The order is stable, refusals first.
func (b BucketSettings) Check(prefix string) []Finding {
	var found []Finding
	add := func(s Severity, setting, format string, args ...any) {
		found = append(found, Finding{Severity: s, Setting: setting, Message: fmt.Sprintf(format, args...)})
	}
	for i, r := range b.Lifecycle {
		if !r.touches(prefix) || r.NoncurrentOnly {
			continue
		}
		switch r.Action {
		case "Delete":
			add(Refuse, "lifecycle", "lifecycle rule %d deletes live objects below %q: only Braid knows which of its objects are needed", i, prefix)
		case "SetStorageClass":
			add(Warn, "storage_class", "lifecycle rule %d moves objects below %q to %s: early deletion and reads may be charged", i, prefix, r.StorageClass)
		}
	}
	if b.Retention > 0 {
		lock := ""
		if b.RetentionLocked {
			lock = ", locked"
		}
		add(Refuse, "retention", "the bucket forbids deletes for %v%s: expired objects could not be removed", b.Retention, lock)
	}
	if b.DefaultEventBasedHold {
		add(Refuse, "hold", "new objects are born with an event-based hold: they could never be removed")
	}
	if b.SoftDelete > 0 {
		add(Warn, "soft_delete", "deleted objects are kept and charged for %v; every short-lived WAL object pays for it", b.SoftDelete)
	}
	if b.Versioning {
		add(Warn, "versioning", "deleted objects stay as noncurrent generations and are charged until a rule removes them")
	}
	switch b.StorageClass {
	case "", "STANDARD", "MULTI_REGIONAL", "REGIONAL":
	default:
		add(Warn, "storage_class", "new objects are of class %s: early deletion and reads are charged", b.StorageClass)
	}
	slices.SortStableFunc(found, func(a, b Finding) int { return int(b.Severity) - int(a.Severity) })
	return found
}

// touches reports whether the rule can match a name that starts with prefix.
// Suffixes are not judged: some name below the prefix may have any suffix.
func (r LifecycleRule) touches(prefix string) bool {
	if len(r.Prefixes) == 0 {
		return true
	}
	return slices.ContainsFunc(r.Prefixes, func(p string) bool {
		return strings.HasPrefix(p, prefix) || strings.HasPrefix(prefix, p)
	})
}
