package commitlog

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/braidlog/braid/pkg/chainhash"
	"github.com/braidlog/braid/pkg/record"
)

// ErrNotSalvaged says that nothing behind a damage can be proven to be the log's.
var ErrNotSalvaged = errors.New("commitlog: nothing behind the damage can be kept")

// maxSalvage bounds the bytes that Salvage takes into memory.
const maxSalvage = 256 << 20

// salvageWrite is about how much of them is written at once.
const salvageWrite = 1 << 20

// Salvage starts a damaged log again at a batch border behind the damage, whose
// chain hash is known to be the one of good bytes held elsewhere, and keeps what
// the log has from there on. That those bytes continue that history is proven by
// the recovery point: its chain hash, noted when everything below it was whole,
// must come out when the bytes from the border on are hashed. Where it does not,
// or the border lies above the recovery point, or there is a second damage in
// between, the log is left as it is and the error is ErrNotSalvaged.
//
// What is not kept is put aside (Cut). now is the wall-clock time. On return the
// log holds [offset, End), durably, and takes appends. A crash in between may
// leave it empty at offset.
func (l *Log) Salvage(offset int64, chain chainhash.Hash, now time.Time) error {
	l.syncing.Lock()
	defer l.syncing.Unlock()
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.writable(); err != nil {
		return err
	}
	v := l.view.Load()
	if v.damage == nil {
		return fmt.Errorf("%w: there is none", ErrNotSalvaged)
	}
	l.checkpointMu.Lock()
	proof := l.saved.recovery
	l.checkpointMu.Unlock()
	if offset <= v.damage.From || offset > proof.offset {
		return fmt.Errorf("%w: offset %d is not above the damage at %d and below the recovery point %d", ErrNotSalvaged, offset, v.damage.From, proof.offset)
	}
	parts, err := damagedFiles(l.fs, l.dir, v.damage)
	if err != nil {
		return err
	}
	tail, err := l.findTail(parts, border{offset: offset, chain: chain}, proof, v.epochs)
	if err != nil {
		return err
	}
	l.cutDamage(v.damage)
	kept := slices.Clone(v.lineage)
	l.generation.Add(1)
	err = l.reset(border{offset: offset, chain: chain}, kept)
	l.generation.Add(1)
	for _, chunk := range tail {
		if err != nil {
			return err
		}
		_, err = l.write(chunk, Position{Offset: l.written.offset}, now)
	}
	if err == nil {
		err = l.flush()
	}
	if err == nil {
		err = l.syncDirty(l.view.Load().segments)
	}
	if err != nil {
		return err
	}
	l.checkpointMu.Lock()
	defer l.checkpointMu.Unlock()
	next := l.saved
	next.recovery = l.written
	return l.saveLocked(next)
}

// findTail looks for a batch that begins at a border and from which the chain
// leads to the proof, and returns the batches from there on.
func (l *Log) findTail(parts []asidePart, from, proof border, epochs record.Epochs) ([][]byte, error) {
	if from == proof {
		// Nothing above the border was synced, or is there to be proven.
		return nil, fmt.Errorf("%w: nothing above offset %d was synced", ErrNotSalvaged, from.offset)
	}
	var pattern [8]byte
	binary.BigEndian.PutUint64(pattern[:], uint64(from.offset))
	for i, p := range parts {
		var found [][]byte
		err := l.eachMatch(p, pattern[:], func(position int64) (bool, error) {
			var err error
			found, err = l.readTail(parts[i:], position, from, proof, epochs)
			return found != nil, err
		})
		if err != nil || found != nil {
			return found, err
		}
	}
	return nil, fmt.Errorf("%w: no batch at offset %d leads to the recovery point", ErrNotSalvaged, from.offset)
}

// eachMatch calls fn with every position of a part that holds the pattern, until
// it says that it is done.
func (l *Log) eachMatch(p asidePart, pattern []byte, fn func(position int64) (bool, error)) error {
	f, err := l.fs.Open(l.fs.PathJoin(l.dir, p.name))
	if err != nil {
		return fmt.Errorf("open %s: %w", p.name, err)
	}
	err = func() error {
		buf := make([]byte, scanBufferSize)
		for position := p.position; position < p.end; {
			part := buf[:min(int64(len(buf)), p.end-position)]
			if err := readFull(f, part, position); err != nil {
				return fmt.Errorf("read %s at %d: %w", p.name, position, err)
			}
			for at := 0; ; at++ {
				i := bytes.Index(part[at:], pattern)
				if i < 0 {
					break
				}
				at += i
				if done, err := fn(position + int64(at)); done || err != nil {
					return err
				}
			}
			if position+int64(len(part)) == p.end {
				break
			}
			position += int64(len(part) - len(pattern) + 1)
		}
		return nil
	}()
	return errors.Join(err, f.Close())
}

// readTail reads batches from a position of the first part on, through the parts
// behind it; nil unless the chain passes through the proof.
func (l *Log) readTail(parts []asidePart, position int64, at, proof border, epochs record.Epochs) ([][]byte, error) {
	var out [][]byte
	var chunk []byte
	total, proven := int64(0), false
	for i, p := range parts {
		if i > 0 && p.offset != at.offset {
			break
		}
		end, err := l.scanPart(p, scanPoint{border: at, position: position}, epochs, func(b record.Batch, here scanPoint) error {
			if here.offset == proof.offset {
				if here.chain != proof.chain {
					return errOtherChain
				}
				proven = true
			}
			if total += int64(len(b)); total > maxSalvage {
				return fmt.Errorf("%w: more than %d bytes", ErrNotSalvaged, maxSalvage)
			}
			if len(chunk) > 0 && len(chunk)+len(b) > salvageWrite {
				out, chunk = append(out, chunk), nil
			}
			chunk = append(chunk, b...)
			return nil
		})
		at, position = end.border, 0
		var corrupt *CorruptionError
		if errors.As(err, &corrupt) {
			break // as far as it goes; whether that is far enough is seen below
		}
		if errors.Is(err, errOtherChain) {
			return nil, nil
		}
		if err != nil {
			return nil, err
		}
	}
	if at == proof {
		proven = true
	}
	if !proven || total == 0 {
		return nil, nil
	}
	return append(out, chunk), nil
}

func (l *Log) scanPart(p asidePart, from scanPoint, epochs record.Epochs, fn func(record.Batch, scanPoint) error) (scanPoint, error) {
	path := l.fs.PathJoin(l.dir, p.name)
	f, err := l.fs.OpenReadWrite(path, vfs.WriteCategoryUnspecified)
	if err != nil {
		return from, fmt.Errorf("open %s: %w", path, err)
	}
	end, err := scanSegment(f, path, min(p.end, maxPosition), from, epochs, fn)
	return end, errors.Join(err, f.Close())
}
