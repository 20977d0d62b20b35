package commitlog

// BytesFrom is the number of bytes of all batches at and above a batch border in
// [first segment, End]. An offset inside of a batch is a NotBorderError.
func (l *Log) BytesFrom(offset int64) (int64, error) {
	var out int64
	err := l.stable(func(v *view, _ uint64, end int64) error {
		out = 0
		if offset == end {
			return nil
		}
		at, err := l.pointAt(v, end, offset)
		if err != nil {
			return err
		}
		_, i := v.segmentFor(offset)
		for _, s := range v.segments[i:] {
			out += s.size.Load()
		}
		out -= at.position
		return nil
	})
	return out, err
}
