package record

import "iter"

// peekSize is how much of a batch must be there to tell its size and version.
const peekSize = posMagic + 1

// Peek says how many bytes the batch at the start of buf takes, header
// included. It looks only at length and magic.
//
//   - err == nil: the whole batch is in buf, as buf[:size].
//   - [ErrShort] and size > 0: the batch has size bytes, buf holds fewer.
//   - [ErrShort] and size == 0: buf is too short to tell (below 17 bytes).
//   - [ErrCorrupt]: what is there is no batch: a length below [HeaderSize] or
//     above [MaxBatchSize], or another magic than 2. Zeros, as a preallocated
//     file has them, are such.
//
// size never exceeds [MaxBatchSize], whatever buf claims (field report B013);
// a caller with a stricter limit uses [PeekLimit]. ErrShort comes as the bare
// sentinel and without allocation, since it is an everyday answer on a stream.
func Peek(buf []byte) (size int, err error) { return PeekLimit(buf, MaxBatchSize) }

// PeekLimit is [Peek] with a limit for the whole batch in bytes: a larger one,
// up to [MaxBatchSize], is refused with [ErrTooLarge].
func PeekLimit(buf []byte, limit int) (size int, err error) {
	if len(buf) < lengthOverhead {
		return 0, ErrShort
	}
	b := Batch(buf)
	if err := checkSize(b, limit); err != nil {
		return 0, err
	}
	if len(buf) < peekSize {
		return 0, ErrShort
	}
	if m := b.Magic(); m != Magic2 {
		return 0, fail(ErrCorrupt, FieldMagic, "not a batch of version 2", int64(m), int64(Magic2))
	}
	size = b.Length()
	if size > len(buf) {
		return size, ErrShort
	}
	return size, nil
}

// Walk calls fn for each batch of buf in order and stops at the first error,
// fn's or its own. Batches are only peeked at, not validated. The slices given
// to fn alias buf and have no spare capacity.
//
// If buf does not end where a batch does, Walk has called fn for all whole
// batches and returns an *[Error] of kind [ErrShort] whose Pos is where the
// last whole one ended; [Prefix] finds that border beforehand. Damage likewise
// carries its byte position. Walk itself allocates nothing.
func Walk(buf []byte, fn func(Batch) error) error {
	for pos := 0; pos < len(buf); {
		size, err := Peek(buf[pos:])
		if err != nil {
			return walkError(err, buf, pos, size)
		}
		if err := fn(Batch(buf[pos : pos+size : pos+size])); err != nil {
			return err
		}
		pos += size
	}
	return nil
}

// Batches iterates over the batches of buf as [Walk] does. An error comes as
// the last pair, with a nil batch.
func Batches(buf []byte) iter.Seq2[Batch, error] {
	return func(yield func(Batch, error) bool) {
		for pos := 0; pos < len(buf); {
			size, err := Peek(buf[pos:])
			if err != nil {
				yield(nil, walkError(err, buf, pos, size))
				return
			}
			if !yield(Batch(buf[pos:pos+size:pos+size]), nil) {
				return
			}
			pos += size
		}
	}
}

// Prefix says how many bytes at the start of buf are whole batches. The error
// tells why it ends there: nil at the end of buf, [ErrShort] inside a batch
// that buf cuts off, otherwise damage. Like [Walk] it validates nothing.
func Prefix(buf []byte) (n int, err error) {
	for n < len(buf) {
		size, err := Peek(buf[n:])
		if err != nil {
			return n, walkError(err, buf, n, size)
		}
		n += size
	}
	return n, nil
}

// walkError dresses an error of Peek with the position of the batch.
func walkError(err error, buf []byte, pos, size int) error {
	if err == ErrShort { //nolint:errorlint // Peek returns the bare sentinel
		e := fail(ErrShort, FieldLength, "the bytes end inside a batch", int64(len(buf)-pos), int64(max(size, peekSize)))
		e.Pos = pos
		return e
	}
	return at(err, pos)
}
