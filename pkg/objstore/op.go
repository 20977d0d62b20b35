package objstore

// Op names a method of [Store] in errors, metrics and fault rules.
type Op string

// The operations. Their values are stable: they appear in logs and metrics.
const (
	OpCreate     Op = "create"
	OpRead       Op = "read" // ReadRange, ReadSuffix and OpenRange
	OpAttrs      Op = "attrs"
	OpList       Op = "list"
	OpDelete     Op = "delete"
	OpBucketInfo Op = "bucket"
)

// String returns the operation's stable name.
func (o Op) String() string { return string(o) }
